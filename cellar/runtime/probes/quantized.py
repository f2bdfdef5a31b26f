"""Quantized matrices: the fastest kernel for each shape and format of a model at each number of tokens.

    python -m cellar.runtime.probes.quantized --models llama-3-8b --base h200 --output h200.json

adds those of some models to a profile; `cellar profile --model NAME` does it for a checkpoint that is quantized. Every
kernel's result is compared with the dequantized matrix's first: one that differs, or that the device refuses, is out of
the race.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.core.hardware import Profile
from cellar.core.specs import ModelSpec
from cellar.models.quantization import is_linear
from cellar.ops.linear.bytes import tokens_of
from cellar.ops.linear.choice import Shape
from cellar.ops.linear.mixed import Kind, Mixed, mixed_kind, mixed_linear, mixed_takes
from cellar.ops.linear.nibbles import Fragments, Nibbles
from cellar.quant.choice import (
    Kernel,
    QuantizedChoice,
    QuantizedTiming,
    Tiles,
    quantized_choices,
    tables_with,
)
from cellar.quant.fragments import fragments
from cellar.quant.matrix import Quantized, dequantized, quantized
from cellar.quant.nibbles import multiplies_nibbles, multiply_nibbles
from cellar.quant.packed import Packed, packed, parts_of, span_of
from cellar.quant.spans import multiplies_spans, spans
from cellar.quant.triton import multiply_packed
from cellar.runtime.probes.context import ProbeContext, synchronize
from cellar.runtime.probes.rotation import Rotation

Form: TypeAlias = Packed | Fragments

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512)
DTYPE = torch.bfloat16
# In bfloat16: codes of a fourth of that do not fit a cache either.
NBYTES = 1 << 30
ROUNDS = 5
# Error, as a part of the result's norm, that rounding to bfloat16 may make.
TOLERANCE = 1e-2

# (rows, stages, warps) from so many tokens on.
TILES: Mapping[int, Sequence[tuple[int, int, int]]] = {
    1: ((64, 4, 4), (128, 4, 8), (128, 3, 4), (128, 4, 4)),
    32: ((64, 4, 4), (128, 4, 8), (128, 3, 8), (128, 4, 4)),
    64: ((64, 3, 4), (64, 4, 4), (128, 3, 8), (128, 4, 8)),
    128: ((64, 3, 4), (128, 3, 8), (128, 4, 8)),
}


# (pieces, warps, sharers, loads, depth, resident) from so many tokens on.
NIBBLES: Mapping[int, Sequence[tuple[int, int, int, int, int, int]]] = {
    1: ((2, 8, 1, 2, 2, 2), (2, 8, 2, 2, 2, 2), (1, 8, 1, 2, 2, 3), (2, 16, 1, 1, 4, 1), (2, 16, 1, 2, 2, 1)),
    9: ((2, 8, 1, 1, 4, 2), (2, 8, 2, 1, 2, 2), (2, 16, 1, 1, 2, 1), (1, 8, 1, 2, 2, 2), (2, 8, 1, 1, 2, 2)),
    17: ((4, 8, 1, 1, 2, 1), (2, 8, 2, 1, 2, 2), (4, 8, 2, 1, 2, 1), (2, 16, 1, 1, 1, 1), (2, 8, 1, 1, 2, 2)),
    33: ((2, 4, 2, 1, 2, 2), (2, 8, 1, 1, 2, 1), (2, 8, 2, 1, 2, 1), (1, 8, 1, 1, 2, 2)),
}
MOST_NIBBLES = 64

# (tokens, teams, resident) from so many tokens on.
MIXED: Mapping[int, Sequence[tuple[int, int, int]]] = {
    16: ((16, 4, 1), (16, 2, 2), (16, 1, 3)),
    17: ((32, 4, 1), (32, 2, 2), (32, 1, 3)),
    33: ((64, 4, 1), (64, 2, 2), (64, 2, 1), (64, 1, 3)),
    65: ((128, 4, 1), (128, 2, 1), (128, 1, 2), (64, 4, 1), (64, 2, 2)),
    129: ((256, 2, 1), (256, 1, 1), (128, 4, 1), (128, 2, 1), (192, 2, 1)),
}
LEAST_MIXED = 16


def quantized_chooser_of(profiles: Sequence[Profile]) -> Callable[[Shape], QuantizedChoice | None]:
    """What runs a shape: the first profile that has measured it decides; None where none has."""
    found: dict[Shape, QuantizedChoice] = {}
    for profile in reversed(profiles):
        found |= quantized_choices(profile.tables)
    return found.get


def quantized_shapes_of(spec: ModelSpec) -> dict[Shape, Format]:
    """The quantized matrices of a model; of parts in unequal formats each one."""
    found: dict[Shape, Format] = {}
    for tensor in spec.tensors():
        if not is_linear(tensor) or not tensor.formats:
            continue
        if len(set(tensor.formats)) == 1:
            matrices = [(tensor.shape[0], tensor.formats[0])]
        else:
            matrices = [(len(region.rows), tensor.formats[region.part]) for region in tensor.regions()]
        for n, format in matrices:
            if format.is_quantized:
                found[Shape(n, tensor.shape[1], format.name, format.group)] = format
    return found


def nibbles_for(m: int) -> list[Kernel]:
    """Sizes of the kernel for int4 on Hopper that are worth a try; from 64 tokens on the library, too."""
    tokens = min(m, MOST_NIBBLES)
    of = NIBBLES[max(t for t in NIBBLES if t <= tokens)]
    found: list[Kernel] = [sizes for sizes in (Nibbles(*given) for given in of) if sizes.fits(tokens_of(tokens))]
    return [*found, None] if m >= MOST_NIBBLES else found


def mixed_for(m: int, n: int, k: int, kind: Kind) -> list[Mixed]:
    """Sizes of the kernel for many tokens on Hopper that are worth a try: as many stages as there is room for."""
    found: list[Mixed] = []
    if m < LEAST_MIXED:
        return found
    for tokens, teams, resident in MIXED[max(t for t in MIXED if t <= m)]:
        for parts in (1, 2, 4):
            tiles = -(-n // (64 * teams)) * -(-m // tokens)
            # One round of blocks, or two where they are not split; each with some turns.
            if parts > 1 and (tiles * parts > 140 * resident or k // 128 < 8 * parts):
                continue
            of = (Mixed(tokens, teams, parts, stages, resident) for stages in range(6, 1, -1))
            fitting = next((sizes for sizes in of if sizes.fits(kind)), None)
            if fitting is not None:
                found.append(fitting)
    return found


def kernels_for(m: int, n: int, k: int, format: Format) -> list[Kernel]:
    """Kernels in tiles that are worth a try, with their sizes."""
    if m > 512:
        return [None]
    blocks = -(-k // (parts_of(format) * span_of(format)))
    found: list[Kernel] = []
    tokens = min(128, max(8, m))
    for rows, stages, warps in TILES[max(t for t in TILES if t <= m)]:
        for splits in (1, 2, 4, 8) if n < 12_000 else (1, 2):
            if 100 <= n * splits // rows * -(-m // 128) <= 1024 and splits <= blocks // 2:
                found.append(Tiles(rows, tokens, stages, splits, warps))
    found = found or [Tiles(32, tokens, 3, 1)]
    if m >= 128:
        found += [Tiles(128, 64, 3, 1, 8), Tiles(128, 64, 4, 1, 8), Tiles(64, 64, 4, 1), None]
    return found


class QuantizedTimer(Protocol):
    """Seconds of one matrix on a machine."""

    def kernels(self, m: int) -> list[Kernel]:
        """Those that are worth a try for `m` tokens."""

    def seconds(self, m: int, kernels: Sequence[Kernel]) -> list[float | None]:
        """`m` tokens by each kernel; None where it cannot run, or is wrong."""


def probe(context: ProbeContext, profile: Profile) -> Profile:
    """Adds the table `linear.quantized` with the quantized shapes of the context's model; on an accelerator only."""
    if context.accelerator is None or context.spec is None:
        return profile
    return with_quantized_shapes(profile, quantized_shapes_of(context.spec), context.accelerator)


def with_quantized_shapes(
    profile: Profile,
    shapes: Mapping[Shape, Format],
    device: torch.device,
    report: Callable[[str], None] = lambda line: None,
    keep: Callable[[Profile], None] = lambda profile: None,
) -> Profile:
    """The profile with all these measured; `keep` gets it after each, so that a cut-off run has something."""
    for shape, format in shapes.items():
        started = time.perf_counter()
        timer = DeviceTimer(shape.n, shape.k, format, device)
        timer.compile_all(TOKENS)
        timings = timings_with(timer)
        profile = profile.merged(tables=tables_with(profile.tables, {shape: timings}))
        keep(profile)
        del timer
        ratios = " ".join(f"{t.m}:{t.library / t.seconds:.2f}" for t in timings)
        report(f"{shape}: over the expanded matrix {ratios}; {time.perf_counter() - started:.1f} s")
    return profile


def timings_with(timer: QuantizedTimer, tokens: Sequence[int] = TOKENS) -> list[QuantizedTiming]:
    """The fastest kernel of a matrix at each number of tokens."""
    found = []
    for m in tokens:
        kernels = [kernel for kernel in timer.kernels(m) if kernel is not None]
        *seconds, library = timer.seconds(m, [*kernels, None])
        assert library is not None, "the library multiplies everything"
        ways: list[tuple[float, Kernel]] = [(library, None)]
        ways += [(s, kernel) for s, kernel in zip(seconds, kernels, strict=True) if s is not None]
        best, kernel = min(ways, key=lambda way: way[0])
        found.append(QuantizedTiming(m, kernel, best, library))
    return found


class DeviceTimer:
    """A `QuantizedTimer` of an accelerator, over matrices that take turns."""

    def __init__(self, n: int, k: int, format: Format, device: torch.device, nbytes: int = NBYTES) -> None:
        self._device = device
        self._shape, self._format = (n, k), format
        self.rotation: Rotation[Form] = Rotation(
            n, k, DTYPE, device, nbytes=nbytes, change=lambda matrix: form_of(quantized(matrix, format))
        )
        self.exact = dequantized(quantized(self.rotation.plain[0], format))
        self.rotation.plain.clear()

    def compile_all(self, tokens: Iterable[int]) -> None:
        """All kernels for these numbers of tokens, in threads of their own, without a look at what comes out."""

        def compiled(m: int, kernel: Kernel) -> None:
            # What goes wrong here goes wrong again where it is timed.
            with suppress(Exception), torch.inference_mode():
                product(self.tokens(m), kernel, self.rotation.weights[0])

        with ThreadPoolExecutor(16) as threads:
            for m in tokens:
                for kernel in self.kernels(m):
                    threads.submit(compiled, m, kernel)
        synchronize(self._device)

    def kernels(self, m: int) -> list[Kernel]:
        """As `QuantizedTimer` says."""
        weight = self.rotation.weights[0]
        if isinstance(weight, Fragments):
            mixed = mixed_for(m, *self._shape, mixed_kind(weight)) if mixed_takes(*self._shape) else []
            return [*nibbles_for(m), *mixed]
        mixed = mixed_for(m, *self._shape, mixed_kind(spans(weight))) if multiplies_spans(weight) else []
        return [*kernels_for(m, *self._shape, self._format), *mixed]

    def tokens(self, m: int) -> Tensor:
        """Random ones."""
        return torch.randn((m, self._shape[1]), device=self._device, dtype=DTYPE)

    def seconds(self, m: int, kernels: Sequence[Kernel]) -> list[float | None]:
        """As `QuantizedTimer` says."""
        x = self.tokens(m)
        expected = x.float() @ self.exact.T
        return [self._seconds(partial(product, x, kernel), expected) for kernel in kernels]

    def _seconds(self, call: Callable[[Form], Tensor], expected: Tensor) -> float | None:
        from triton.runtime.errors import TritonError

        try:
            got = call(self.rotation.weights[0])
        except TritonError:
            # Too much shared memory, or too many registers, for this device.
            return None
        if not float((got - expected).norm()) <= TOLERANCE * float(expected.norm()):
            return None
        return self.rotation.seconds([call], ROUNDS)[0]


def form_of(matrix: Quantized) -> Form:
    """As a weight on this device has it (`quant/device.py`)."""
    return fragments(matrix) if multiplies_nibbles(matrix) else packed(matrix)


def product(x: Tensor, kernel: Kernel, weight: Form) -> Tensor:
    """x W^T by one kernel."""
    if isinstance(weight, Fragments):
        return multiply_nibbles(x, weight, None, kernel)
    if isinstance(kernel, Mixed):
        return mixed_linear(x, spans(weight), None, kernel)
    return multiply_packed(x, weight, None, kernel)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    from cellar.models.registry import open_model, shipped_config
    from cellar.runtime.device import resolve_device
    from cellar.runtime.probes.registry import shipped

    parser = argparse.ArgumentParser(description="Add quantized matrices of models to a profile.")
    parser.add_argument("--models", required=True, help="names of shipped configs, comma-separated")
    parser.add_argument("--quantization", default="int4,int8,fp8", help="as models are quantized on loading")
    parser.add_argument("--base", required=True, help="profile to add to: a file, or the name of a shipped one")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    if device.type == "cpu":
        sys.exit("these kernels are for accelerators, and this machine has none; run it where one is.")
    shapes: dict[Shape, Format] = {}
    for name in options.models.split(","):
        config = shipped_config(name)
        if config is None:
            sys.exit(f"no config {name!r} comes with the package; `cellar inspect` takes those that do.")
        for quantization in options.quantization.split(","):
            shapes |= quantized_shapes_of(open_model(config, "bfloat16", quantization=quantization).spec)
    base = Path(options.base)
    profile = Profile.load(base) if base.is_file() else shipped(options.base)
    with torch.inference_mode(), torch.cuda.device(device):
        with_quantized_shapes(
            profile,
            shapes,
            device,
            report=lambda line: print(line, flush=True),
            keep=lambda found: found.save(options.output),
        )


if __name__ == "__main__":
    main()
