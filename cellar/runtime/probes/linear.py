"""Linear layers: the fastest kernel for each [N, K] of a model at each number of tokens (FlashDecoding++ §5).

    python -m cellar.runtime.probes.linear --models llama-2-7b,llama-3-8b --base h200 --output h200.json

adds the shapes of some models to a profile; `cellar profile --model NAME` does it for one model. Every kernel's result
is compared with the library's first: one that differs, or that the device refuses, is out of the race.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from cellar.core.hardware import Profile
from cellar.core.specs import ModelSpec
from cellar.models.quantization import is_linear
from cellar.ops.activation import gated
from cellar.ops.linear.choice import (
    MAX_FUSED_COLUMNS,
    Flat,
    Fused,
    FusedTiming,
    Gemv,
    Kernel,
    LinearChoice,
    Shape,
    Timing,
    Wide,
    WideTiming,
    inflections,
    linear_choices,
    tables_with,
    timings_of,
)
from cellar.ops.linear.device import DeviceWeight, prepare
from cellar.ops.linear.hopper import wide, wide_takes
from cellar.ops.linear.interpolate import interpolated
from cellar.ops.linear.triton import multiply, norm_gemv
from cellar.ops.norm import add_rms_norm
from cellar.runtime.probes.context import ProbeContext, synchronize
from cellar.runtime.probes.linear_wide import TOKENS as WIDE_TOKENS
from cellar.runtime.probes.linear_wide import wides_for
from cellar.runtime.probes.rotation import Rotation

TOKENS = (1, 2, 4, 8, 16, 32, 64)
DTYPE = torch.bfloat16
EPS = 1e-5
# Largest difference from the library's result, as a part of its largest element: bfloat16 has 8 bits.
TOLERANCE = 2e-2

GEMVS = (
    *(Gemv(1, 2048, ahead, 4) for ahead in (0, 1, 2, 4)),
    *(Gemv(2, 2048, ahead, 4) for ahead in (0, 1, 2)),
    Gemv(1, 2048, 0, 8),
    Gemv(1, 1024, 2, 4),
    Gemv(1, 4096, 1, 8),
    Gemv(2, 1024, 1, 4),
    Gemv(4, 1024, 1, 4),
    Gemv(4, 2048, 1, 8),
)
FLATS = (
    Flat(32, 256, 4, 1),
    Flat(32, 256, 4, 2),
    Flat(32, 128, 6, 1),
    Flat(64, 64, 6, 1),
    Flat(64, 128, 4, 1),
    Flat(64, 128, 5, 1),
    Flat(64, 128, 4, 2),
    Flat(64, 128, 5, 2),
    Flat(64, 128, 4, 4),
    Flat(64, 256, 3, 1),
    Flat(128, 64, 4, 1),
    Flat(128, 128, 3, 1),
    Flat(128, 128, 3, 2),
)
FUSEDS = (Fused(1, 4), Fused(1, 8), Fused(2, 4), Fused(2, 8), Fused(4, 8))


K = TypeVar("K")

Call = Callable[[DeviceWeight], object]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer of a model: its name in the specs, [n, k], and how many there are of it."""

    name: str
    n: int
    k: int
    count: int


def matrices_of(spec: ModelSpec) -> list[Matrix]:
    """The linear layers in the order in which a forward pass meets them, as they are after fusion."""
    found: dict[tuple[str, int, int], int] = {}
    for tensor in spec.tensors():
        if is_linear(tensor):
            n, k = tensor.shape
            found[tensor.name, n, k] = found.get((tensor.name, n, k), 0) + 1
    return [Matrix(name, n, k, count) for (name, n, k), count in found.items()]


def choices_of(profiles: Sequence[Profile]) -> dict[Shape, LinearChoice]:
    """What these profiles choose for each shape that they know; the first one that has measured a shape decides."""
    found: dict[Shape, LinearChoice] = {}
    for profile in reversed(profiles):
        found |= linear_choices(profile.tables)
    return found


def chooser_of(profiles: Sequence[Profile]) -> Callable[[Shape], LinearChoice | None]:
    """What runs a shape: as `choices_of`, and for shapes that no profile has what those that it has suggest.

    None where they suggest nothing.
    """
    known = choices_of(profiles)
    measured: dict[Shape, list[Timing]] = {}
    for profile in reversed(profiles):
        measured |= timings_of(profile.tables)
    return lambda shape: known.get(shape) or interpolated(measured, shape)


class LinearTimer(Protocol):
    """Seconds of one [n, k] on a machine; None where a kernel cannot run, or is wrong."""

    def product(self, m: int, kernels: Sequence[Kernel]) -> list[float | None]:
        """`m` tokens by each kernel."""

    def fused(self, sizes: Sequence[Fused], gated: bool) -> list[float | None]:
        """One token through add, norm, matrix (and gate) in one launch, in each of these sizes."""

    def apart(self, kernel: Kernel, gated: bool) -> float:
        """The same one after another, the matrix by this kernel."""

    def wide(self, m: int, sizes: Sequence[Wide], kernel: Kernel, gated: bool) -> list[float | None]:
        """`m` tokens through add, norm, matrix (and gate): by this kernel, then by the wide product in these sizes.

        The norm is in front because wide products ask for weights while it runs.
        """

    def multiprocessors(self) -> int:
        """Of a device that has the wide product; 0 for others."""


def probe(context: ProbeContext, profile: Profile) -> Profile:
    """Adds the tables `linear` and `linear.fused` with the shapes of the context's model; on an accelerator only."""
    if context.accelerator is None or context.spec is None:
        return profile
    return with_shapes(profile, matrices_of(context.spec), context.accelerator)


def with_shapes(
    profile: Profile,
    matrices: Iterable[Matrix],
    device: torch.device,
    report: Callable[[str], None] = lambda line: None,
    keep: Callable[[Profile], None] = lambda profile: None,
    *,
    missing: bool = False,
) -> Profile:
    """The profile with all these shapes measured; `keep` gets it after each, so that a cut-off run has something.

    `missing`: of shapes that the profile has, only the wide product is measured, against what it says of the others.
    """
    known = timings_of(profile.tables) if missing else {}
    for shape, gate in shapes_of(matrices).items():
        started = time.perf_counter()
        timer = DeviceTimer(shape.n, shape.k, device)
        timings, fused = known.get(shape, []), dict[Shape, FusedTiming]()
        if not timings:
            timer.compile_all(gate)
            timings = timings_with(shape, timer, TOKENS)
            fused = {} if gate is None else fused_timings_with(shape, gate, timings[0].kernel, timer)
        wide = wide_timings_with(shape, gate is True, timings, timer)
        profile = profile.merged(tables=tables_with(profile.tables, {shape: timings}, fused, {shape: wide}))
        keep(profile)
        del timer
        report(f"{_line(shape, timings, fused, wide)}; {time.perf_counter() - started:.1f} s")
    return profile


def shapes_of(matrices: Iterable[Matrix]) -> dict[Shape, bool | None]:
    """Shape -> whether a gate follows a norm and this matrix (q, k, v: only the norm); None: no norm before it."""
    gates = {"qkv": False, "gate_up": True}
    found: dict[Shape, bool | None] = {}
    for matrix in matrices:
        gate = gates.get(matrix.name) if matrix.k <= MAX_FUSED_COLUMNS else None
        if found.get(shape := Shape(matrix.n, matrix.k)) is None:
            found[shape] = gate
    return found


def timings_with(shape: Shape, timer: LinearTimer, tokens: Sequence[int] = TOKENS) -> list[Timing]:
    """The fastest kernel of a shape at each number of tokens.

    The flat product computes 8, 16, 32 or 64 tokens whatever there are, so it is timed at these only.
    """
    n, k, *_ = shape
    flats = [flat for flat in FLATS if flat.depth * flat.splits <= k and flat.rows <= n]
    gemvs = [gemv for gemv in GEMVS if gemv.block < 2 * k and gemv.ahead * gemv.block < k + gemv.block]
    by_padded: dict[int, list[float | None]] = {}
    found = []
    for m in tokens:
        padded = max(8, 1 << (m - 1).bit_length())
        if padded not in by_padded:
            by_padded[padded] = timer.product(padded, flats)
        (library,) = timer.product(m, [None])
        assert library is not None, "the library multiplies everything"
        flat = _best(flats, by_padded[padded])
        gemv = _best(gemvs, timer.product(1, gemvs)) if m == 1 else None
        ways: list[tuple[float, Kernel]] = [(library, None)]
        ways += [] if flat is None else [(flat[1], flat[0])]
        ways += [] if gemv is None else [(gemv[1], gemv[0])]
        fastest = min(ways, key=lambda way: way[0])[1]
        found.append(Timing(m, fastest, gemv and gemv[1], flat and flat[1], library))
    return found


def fused_timings_with(shape: Shape, gate: bool, kernel: Kernel, timer: LinearTimer) -> dict[Shape, FusedTiming]:
    """The fused GEMV against its parts with the best kernel of one token; nothing if it cannot run."""
    best = _best(FUSEDS, timer.fused(FUSEDS, gate))
    return {} if best is None else {shape: FusedTiming(gate, *best, timer.apart(kernel, gate))}


def wide_timings_with(shape: Shape, gate: bool, timings: Sequence[Timing], timer: LinearTimer) -> list[WideTiming]:
    """The wide product at each number of tokens against the best of the others; nothing where it cannot run."""
    multiprocessors = timer.multiprocessors()
    others = LinearChoice(tuple(t.m for t in timings), tuple(t.kernel for t in timings))
    found = []
    for m in WIDE_TOKENS if multiprocessors else ():
        sizes = wides_for(m, shape, gate, multiprocessors)
        other, *seconds = timer.wide(m, sizes, others.at(m), gate)
        best = _best(sizes, seconds)
        if best is not None and other is not None:
            found.append(WideTiming(m, gate, *best, other))
    return found


def _best(kernels: Sequence[K], seconds: Sequence[float | None]) -> tuple[K, float] | None:
    ran = [(kernel, s) for kernel, s in zip(kernels, seconds, strict=True) if s is not None]
    return min(ran, key=lambda pair: pair[1], default=None)


class DeviceTimer:
    """A `LinearTimer` of an accelerator."""

    def __init__(self, n: int, k: int, device: torch.device) -> None:
        self._device = device
        self._rotation = Rotation(n, k, DTYPE, device, change=prepare)
        self._x = torch.randn((max(*TOKENS, *WIDE_TOKENS), k), device=device, dtype=DTYPE)
        self._norm = torch.randn(k, device=device, dtype=DTYPE)
        self._deltas = torch.randn(self._x.shape, device=device, dtype=DTYPE)

    def compile_all(self, gate: bool | None) -> None:
        """Compile every kernel in threads of their own, without a look at what comes out."""
        sizes = sorted({max(8, m) for m in TOKENS})
        calls = [self._product(1, gemv) for gemv in GEMVS]
        calls += [self._product(m, flat) for m in sizes for flat in FLATS]
        calls += [] if gate is None else [self._fused(fused, gate) for fused in FUSEDS]
        self._compile(calls)

    def _compile(self, calls: Sequence[Call]) -> None:
        # Not the prepared matrix: its counters serve one launch at a time.
        weight = DeviceWeight(self._rotation.plain[0])

        def compiled(call: Call) -> None:
            # What goes wrong here goes wrong again where it is timed.
            with suppress(Exception), torch.inference_mode(), torch.cuda.device(self._device):
                call(weight)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(compiled, calls))
        synchronize(self._device)

    def product(self, m: int, kernels: Sequence[Kernel]) -> list[float | None]:
        """As `LinearTimer` says."""
        reference = self._product(m, None)
        return [self._seconds(self._product(m, kernel), reference) for kernel in kernels]

    def fused(self, sizes: Sequence[Fused], gated: bool) -> list[float | None]:
        """As `LinearTimer` says."""
        reference = self._apart(None, gated)
        return [self._seconds(self._fused(size, gated), reference) for size in sizes]

    def apart(self, kernel: Kernel, gated: bool) -> float:
        """As `LinearTimer` says."""
        return self._rotation.seconds([self._apart(kernel, gated)])[0]

    def wide(self, m: int, sizes: Sequence[Wide], kernel: Kernel, gated: bool) -> list[float | None]:
        """As `LinearTimer` says."""
        calls = [self._behind_norm(m, partial(_wide, size, gated)) for size in sizes]
        self._compile(calls)
        reference, other = (self._behind_norm(m, self._gated(by, gated)) for by in (None, kernel))
        return [self._seconds(call, reference) for call in (other, *calls)]

    def multiprocessors(self) -> int:
        """As `LinearTimer` says."""
        if not wide_takes(self._x, self._rotation.plain[0]):
            return 0
        return int(torch.cuda.get_device_properties(self._device).multi_processor_count)

    def _seconds(self, call: Call, reference: Call) -> float | None:
        weight = self._rotation.weights[0]
        got = self._tried(call, weight)
        expected = reference(weight)
        assert isinstance(expected, Tensor)
        if got is None or float((got - expected).abs().max()) > TOLERANCE * float(expected.abs().max()):
            return None
        return self._rotation.seconds([call])[0]

    def _tried(self, call: Call, weight: DeviceWeight) -> Tensor | None:
        from triton.runtime.errors import TritonError

        try:
            got = call(weight)
        except TritonError:
            # Too much shared memory, or too many registers, for this device.
            return None
        assert isinstance(got, Tensor)
        return got

    def _product(self, m: int, kernel: Kernel) -> Call:
        x = self._x[:m]
        return lambda weight: multiply(x, weight.matrix, None, kernel, weight.arrivals)

    def _gated(self, kernel: Kernel, gate: bool) -> Callable[[Tensor, DeviceWeight], Tensor]:
        def product(x: Tensor, weight: DeviceWeight) -> Tensor:
            out = multiply(x, weight.matrix, None, kernel, weight.arrivals)
            return gated(out, "silu") if gate else out

        return product

    def _behind_norm(self, m: int, product: Callable[[Tensor, DeviceWeight], Tensor]) -> Call:
        x, delta = self._x[:m], self._deltas[:m]
        return lambda weight: product(add_rms_norm(x, delta, self._norm, EPS)[0], weight)

    def _fused(self, sizes: Fused, gate: bool) -> Call:
        x = self._x[:1]
        return lambda weight: norm_gemv(x, self._deltas[:1], self._norm, EPS, weight.matrix, None, sizes, gate=gate)[0]

    def _apart(self, kernel: Kernel, gate: bool) -> Call:
        return self._behind_norm(1, self._gated(kernel, gate))


def _wide(sizes: Wide, gate: bool, x: Tensor, weight: DeviceWeight) -> Tensor:
    return wide(x, weight.matrix, None, sizes, gate=gate)


def _line(
    shape: Shape, timings: Sequence[Timing], fused: Mapping[Shape, FusedTiming], wide: Sequence[WideTiming]
) -> str:
    m1, m2 = inflections(timings)
    ratios = " ".join(f"{t.m}:{t.library / min(s for s in (t.gemv, t.flat, t.library) if s):.2f}" for t in timings)
    inside = "".join(f", fused {t.fused * 1e6:.1f} us, apart {t.apart * 1e6:.1f}" for t in fused.values())
    wides = " ".join(f"{t.m}:{t.other / t.wide:.2f}" for t in wide)
    wides = wides and f", wide over the others {wides}"
    return f"{shape}: M1 {m1}, M2 {m2}, over the library {ratios}{inside}{wides}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    from cellar.models.registry import open_model, shipped_config
    from cellar.models.sharding import shard
    from cellar.runtime.device import resolve_device
    from cellar.runtime.probes.registry import shipped

    parser = argparse.ArgumentParser(description="Add linear layers of models to a profile.")
    parser.add_argument("--models", required=True, help="names of shipped configs, comma-separated")
    parser.add_argument("--ranks", default="1", help="the shapes of shares by heads of so many, comma-separated")
    parser.add_argument("--base", required=True, help="profile to add to: a file, or the name of a shipped one")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--missing", action="store_true", help="measure only what the base lacks of its shapes")
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    if device.type == "cpu":
        sys.exit("linear kernels are for accelerators, and this machine has none; run it where one is.")
    matrices: list[Matrix] = []
    for name in options.models.split(","):
        config = shipped_config(name)
        if config is None:
            sys.exit(f"no config {name!r} comes with the package; `cellar inspect` takes those that do.")
        spec = open_model(config, "bfloat16").spec
        matrices += (m for ranks in options.ranks.split(",") for m in matrices_of(shard(spec, 0, int(ranks))))
    base = Path(options.base)
    profile = Profile.load(base) if base.is_file() else shipped(options.base)
    with torch.inference_mode(), torch.cuda.device(device):
        with_shapes(
            profile,
            matrices,
            device,
            report=lambda line: print(line, flush=True),
            keep=lambda found: found.save(options.output),
            missing=options.missing,
        )


if __name__ == "__main__":
    main()
