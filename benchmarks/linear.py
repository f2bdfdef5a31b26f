"""Linear layers by themselves, ours against the library's, for the matrices that models really have.

    python -m benchmarks.linear --models llama-2-7b,llama-3-8b --tokens 1,8 --json linear.json

Ours is what the runtime would run: the kernel that the machine's profile chooses for the shape, or the default. The
library is `torch.nn.functional.linear` (cuBLAS, or oneDNN) over the same matrices. Both are replayed by turns in the
same run, over matrices that together exceed every cache; on an accelerator the launches of a replay are one graph.
Every result is compared with the definition in float32 first. At one token the layers that follow a norm are also
measured as the model runs them: add, norm and matrix (and gate) against a norm, the library's product and a gate. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from cellar.core.hardware import Profile
from cellar.ops.activation import gated
from cellar.ops.linear.choice import LinearChoice, Shape
from cellar.ops.linear.definition import linear, linear_definition
from cellar.ops.linear.device import DeviceWeight, prepare
from cellar.ops.linear.fused import norm_gated_linear, norm_linear
from cellar.ops.linear.pack import pack
from cellar.ops.linear.weight import LinearWeight, Weight
from cellar.ops.norm import add_rms_norm
from cellar.reports.limits import describe, limits_of
from cellar.reports.models import model_spec
from cellar.runtime.device import resolve_device
from cellar.runtime.probes.linear import EPS, Matrix, choices_of, matrices_of, shapes_of
from cellar.runtime.probes.registry import profiles_of, shipped
from cellar.runtime.probes.rotation import LEAST_NBYTES, Rotation

# Largest difference from the definition, as a part of its largest element.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
HEADS = ("lm_head", "embed")

Products: TypeAlias = tuple[Callable[[Weight], Tensor], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""Ours, the library's, and the definition."""


@dataclass(frozen=True)
class Line:
    """One matrix at one number of tokens. Times in seconds, rates in bytes of the matrix per second.

    `layers` are the models' layers of this shape; `fused` names what stands before and behind, if it was measured
    along. `ratio` is the library's time over ours, `share` ours of the limit: bytes or FLOPs, whichever takes longer.
    """

    layers: tuple[str, ...]
    n: int
    k: int
    m: int
    fused: str
    kernel: str
    seconds: float
    library_seconds: float
    bytes_per_second: float
    library_bytes_per_second: float
    ratio: float
    share: float
    error: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 if all results were right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="llama-2-7b,llama-3-8b", help="comma-separated, as `cellar inspect` takes")
    parser.add_argument("--tokens", default="1,8", help="numbers of tokens, comma-separated")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="default: bfloat16 on an accelerator, float32 on the CPU")
    parser.add_argument(
        "--machine-profile", default="auto", help="auto, none, a file, or the name of a shipped profile"
    )
    parser.add_argument("--megabytes", type=int, default=LEAST_NBYTES >> 20, help="rotate over at least so much")
    parser.add_argument("--no-head", action="store_true", help="leave out the last layer of each model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    on_cpu = device.type == "cpu"
    dtype = ("float32" if on_cpu else "bfloat16") if options.dtype == "auto" else options.dtype
    named = layers_of(options.models.split(","), dtype, head=not options.no_head)
    choices = {} if on_cpu else choices_of(profiles_of(options.machine_profile, device))
    limits = limits_of(str(device), dtype, None if on_cpu else _rates(options.machine_profile))
    print(f"{describe(device)}: limits {limits.bandwidth / 1e12:.2f} TB/s, {limits.flops / 1e12:.0f} TFLOP/s")
    print(_HEADING)
    lines: list[Line] = []
    with torch.inference_mode():
        for shape, layers in named.items():
            bench = ShapeBench(shape.n, shape.k, dtype, device, choices.get(shape), options.megabytes << 20)
            for m in map(int, options.tokens.split(",")):
                for fused in ("", *bench.fusions(layers, m)):
                    lines.append(bench.line(layers, m, fused, limits.bandwidth, limits.flops))
                    print(formatted(lines[-1]), flush=True)
            del bench
    for sentence in verdicts(lines):
        print(sentence)
    wrong = [f"{line.n}x{line.k} at {line.m}" for line in lines if not line.error <= TOLERANCE[getattr(torch, dtype)]]
    report = {
        "machine": describe(device),
        "torch": torch.__version__,
        "dtype": dtype,
        "megabytes": options.megabytes,
        "limits": asdict(limits),
        "lines": [asdict(line) for line in lines],
        "wrong": wrong,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return 1 if wrong else 0


def layers_of(models: Iterable[str], dtype: str, *, head: bool = True) -> dict[Shape, tuple[str, ...]]:
    """Shape -> the layers of these models that have it, `model: name` each."""
    found: dict[Shape, tuple[str, ...]] = {}
    for model in models:
        for matrix in matrices_of(model_spec(model, "cpu", dtype)):
            if head or matrix.name not in HEADS:
                shape = Shape(matrix.n, matrix.k)
                found[shape] = (*found.get(shape, ()), f"{model}: {matrix.name}")
    return found


class ShapeBench:
    """All products with one [n, k]."""

    def __init__(
        self, n: int, k: int, dtype: str, device: torch.device, choice: LinearChoice | None, nbytes: int
    ) -> None:
        on_cpu = device.type == "cpu"
        self._kind: torch.dtype = getattr(torch, dtype)
        self._device = device

        def change(matrix: Tensor) -> LinearWeight:
            return pack(matrix) if on_cpu else prepare(matrix, choice)

        self._rotation = Rotation(n, k, self._kind, device, nbytes=nbytes, change=change)
        self._n, self._k = n, k
        self._norm = torch.randn(k, device=device, dtype=self._kind)
        self._residual, self._delta = torch.randn((2, 1, k), device=device, dtype=self._kind)

    def fusions(self, layers: Sequence[str], m: int) -> tuple[str, ...]:
        """What is fused with such layers at `m` tokens."""
        if m != 1 or self._device.type == "cpu":
            return ()
        matrices = (Matrix(name.rpartition(" ")[2], self._n, self._k, 1) for name in layers)
        gate = shapes_of(matrices)[Shape(self._n, self._k)]
        return () if gate is None else ("add, norm, gate",) if gate else ("add, norm",)

    def line(self, layers: tuple[str, ...], m: int, fused: str, bandwidth: float, flops: float) -> Line:
        """Check and time one product. `fused` as `fusions` gives it, or empty."""
        ours, library, definition = self._fused(fused) if fused else self._plain(m)
        rotation = self._rotation
        expected = definition(rotation.plain[0]).float()
        error = float((ours(rotation.weights[0]).float() - expected).abs().max() / expected.abs().max())
        replays = [rotation.replay(ours), rotation.replay_plain(library)]
        seconds, library_seconds = rotation.by_turns(replays)
        nbytes = rotation.nbytes
        return Line(
            layers=layers,
            n=self._n,
            k=self._k,
            m=m,
            fused=fused,
            kernel=self._kernel(m, fused),
            seconds=seconds,
            library_seconds=library_seconds,
            bytes_per_second=nbytes / seconds,
            library_bytes_per_second=nbytes / library_seconds,
            ratio=library_seconds / seconds,
            share=max(nbytes / bandwidth, 2 * m * self._n * self._k / flops) / seconds,
            error=error,
        )

    def _kernel(self, m: int, fused: str) -> str:
        weight = self._rotation.weights[0]
        if not isinstance(weight, DeviceWeight):
            return type(weight).__name__
        x = torch.empty((m, self._k), device=self._device, dtype=self._kind)
        return str((fused and m == 1 and weight.choice.fused) or weight.kernel(x) or "library")

    def _plain(
        self, m: int
    ) -> tuple[Callable[[Weight], Tensor], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        x = torch.randn((m, self._k), device=self._device, dtype=self._kind)
        return (
            lambda weight: linear(x, weight, None),
            lambda weight: functional.linear(x, weight),
            lambda weight: linear_definition(x, weight),
        )

    def _fused(self, fused: str) -> Products:
        residual, delta, norm = self._residual, self._delta, self._norm
        gate = "gate" in fused

        def ours(weight: Weight) -> Tensor:
            if gate:
                return norm_gated_linear(residual, delta, norm, EPS, weight, None, "silu")[0]
            return norm_linear(residual, delta, norm, EPS, weight)[0]

        def library(weight: Tensor) -> Tensor:
            product = functional.linear(add_rms_norm(residual, delta, norm, EPS)[0], weight)
            return gated(product, "silu") if gate else product

        return ours, library, library


def verdicts(lines: Iterable[Line]) -> list[str]:
    """Of the layers of the models (each counts once per model), on how many ours is so much faster; heads apart."""
    found = []
    layers = [(line, name) for line in lines if not line.fused for name in line.layers]
    layers = [(line, name) for line, name in layers if name.rpartition(" ")[2] not in HEADS]
    for m in sorted({line.m for line, _ in layers}):
        ratios = [line.ratio for line, _ in layers if line.m == m]
        ahead, even = sum(r >= 1.1 for r in ratios), sum(r >= 1.0 for r in ratios)
        found.append(f"M = {m}: of {len(ratios)} layers {ahead} at least 1.1x the library, {even} at least even")
    return found


_COLUMNS = (("N x K", 14), ("M", 4), ("us", 8), ("library", 8), ("TB/s", 6), ("library", 8), ("ratio", 6), ("share", 6))
_HEADING = " ".join(f"{name:>{width}}" for name, width in (*_COLUMNS, ("error", 8))) + "  kernel"


def formatted(line: Line) -> str:
    """One row of the table."""
    return (
        f"{f'{line.n} x {line.k}':>14} {line.m:>4} {line.seconds * 1e6:>8.2f} {line.library_seconds * 1e6:>8.2f} "
        f"{line.bytes_per_second / 1e12:>6.2f} {line.library_bytes_per_second / 1e12:>8.2f} {line.ratio:>6.2f} "
        f"{line.share:>6.2f} {line.error:>8.1e}  {line.kernel}{f' with {line.fused}' if line.fused else ''}"
    )


def _rates(machine_profile: str) -> Profile | None:
    """The named profile's rates; None: those of the machine."""
    if machine_profile in ("auto", "none"):
        return None
    path = Path(machine_profile)
    return Profile.load(path) if path.is_file() else shipped(machine_profile)


if __name__ == "__main__":
    raise SystemExit(main())
