"""Products with quantized matrices on a GPU, every format with several kernels and sizes, beside the library's.

    python -m benchmarks.quantized --formats int4,int8,fp8 --tokens 1,8,32,128,512,4096 --json quantized.json

Each line is one format, shape and number of tokens: microseconds of the fastest, TB/s of the bytes that the format has,
TFLOP/s, the share of the limit (bytes or FLOPs, whichever takes longer), the error against float64, and peers in the
same run: the library's bfloat16 product, `torch._scaled_mm` (e4m3, activations quantized by token beforehand) and
`torch._weight_int4pack_mm`. Matrices take turns so that no cache holds them, launches of a replay are one graph. What
fails is reported as such and does not end the run; after `--seconds` the rest is left out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.reports.limits import describe, limits_of
from cellar.runtime.device import resolve_device
from cellar.runtime.probes.quantized import ROUNDS, TOLERANCE, DeviceTimer, product
from cellar.runtime.probes.rotation import Rotation

FORMATS: Mapping[str, Format] = {
    "int4": Format("int4", 64, zero_points=True),
    "int8": Format("int8"),
    "fp8": Format("fp8"),
    "mxfp4": Format("mxfp4", 32),
    "fp8/128": Format("fp8", 128, rows=128),
    "int4/128": Format("int4", 128),
    "int4/32": Format("int4", 32),
}
SHAPES = "6144x4096,4096x4096,28672x4096,4096x14336,128256x4096"
MEGABYTES = 1536


@dataclass(frozen=True)
class Line:
    """The fastest of one format, shape and number of tokens, and what else was tried (name: microseconds)."""

    format: str
    n: int
    k: int
    m: int
    best: str
    seconds: float
    terabytes: float
    teraflops: float
    share: float
    error: float
    tried: dict[str, float]


class Bench:
    """One format of one shape, over matrices that take turns."""

    def __init__(self, format: Format, n: int, k: int, device: torch.device, nbytes: int) -> None:
        self._timer = DeviceTimer(n, k, format, device, nbytes)
        self._n, self._k = n, k
        self._exact = self._timer.exact.double()

    def compile_all(self, tokens: Sequence[int]) -> None:
        """All kernels, in threads."""
        self._timer.compile_all(tokens)

    def line(self, name: str, m: int, bandwidth: float, flops: float) -> Line:
        """Check and time every kernel."""
        x = self._timer.tokens(m)
        expected = x[:64].double() @ self._exact.T
        tried: dict[str, float] = {}
        best: tuple[float, str, float] = (float("inf"), "none", 0.0)
        weight = self._timer.rotation.weights[0]
        for kernel in self._timer.kernels(m):
            call = partial(product, x, kernel)
            label = "expanded" if kernel is None else str(kernel)
            try:
                error = float((call(weight)[:64].double() - expected).norm() / expected.norm())
                if not error < TOLERANCE:
                    tried[f"{label} WRONG {error:.1e}"] = 0.0
                    continue
                seconds = self._timer.rotation.seconds([call], ROUNDS)[0]
            except Exception as failure:
                tried[f"{label} {type(failure).__name__}: {str(failure)[:80]}"] = 0.0
                continue
            tried[label] = round(1e6 * seconds, 2)
            best = min(best, (seconds, label, error))
        seconds, label, error = best
        nbytes = weight.nbytes + 2 * m * (self._n + self._k)
        operations = 2 * m * self._n * self._k
        return Line(
            format=name,
            n=self._n,
            k=self._k,
            m=m,
            best=label,
            seconds=seconds,
            terabytes=nbytes / seconds / 1e12,
            teraflops=operations / seconds / 1e12,
            share=max(nbytes / bandwidth, operations / flops) / seconds,
            error=error,
            tried=tried,
        )


def peers(n: int, k: int, tokens: Sequence[int], device: torch.device, nbytes: int) -> list[dict[str, object]]:
    """Microseconds of the library's products; a string where one fails."""
    rotation: Rotation[Tensor] = Rotation(n, k, torch.bfloat16, device, nbytes=nbytes // 3, change=lambda w: w)
    eight: list[Tensor] = []
    four: list[tuple[Tensor, Tensor]] = []
    with suppress(Exception):
        eight = [w.clamp(-1, 1).to(torch.float8_e4m3fn) for w in rotation.plain]
    with suppress(Exception):
        for _ in rotation.plain:
            codes = torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device=device)
            scales = torch.rand((k // 64, n, 2), device=device).bfloat16()
            four.append((torch.ops.aten._convert_weight_to_int4pack(codes, 8), scales))
    found: list[dict[str, object]] = []
    for m in tokens:
        x = torch.randn((m, k), device=device, dtype=torch.bfloat16)
        x8, by_token = x.to(torch.float8_e4m3fn), torch.ones((m, 1), device=device)
        by_row = torch.ones((1, n), device=device)

        def scaled(w: Tensor) -> Tensor:
            return torch._scaled_mm(x8, w.t(), by_token, by_row, out_dtype=torch.bfloat16)  # noqa: B023

        def packed_4(w: tuple[Tensor, Tensor]) -> Tensor:
            out: Tensor = torch.ops.aten._weight_int4pack_mm(x, w[0], 64, w[1])  # noqa: B023
            return out

        line: dict[str, object] = {"n": n, "k": k, "m": m}
        ways: tuple[tuple[str, Callable[[], Callable[[], None]]], ...] = (
            ("bfloat16", lambda: rotation.replay(lambda w: torch.nn.functional.linear(x, w))),  # noqa: B023
            ("scaled_mm", lambda: rotation.replay_over(scaled, eight)),
            ("int4pack_mm", lambda: rotation.replay_over(packed_4, four)),
        )
        for name, replay in ways:
            try:
                line[name] = round(1e6 * rotation.by_turns([replay()], ROUNDS)[0], 2)
            except Exception as failure:
                line[name] = f"{type(failure).__name__}: {str(failure)[:60]}"
        found.append(line)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--formats", default="int4,int8,fp8,mxfp4,fp8/128", help=", ".join(FORMATS))
    parser.add_argument("--shapes", default=SHAPES, help="rows x columns, comma-separated")
    parser.add_argument("--tokens", default="1,8,32,128,512,4096")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin nothing more after so long")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="rotate over so much, in bfloat16")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    device = resolve_device(options.device)
    limits = limits_of(str(device), "bfloat16", None)
    tokens = [int(m) for m in options.tokens.split(",")]
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    print(f"{describe(device)}: limits {limits.bandwidth / 1e12:.2f} TB/s, {limits.flops / 1e12:.0f} TFLOP/s")
    lines: list[Line] = []
    others: list[dict[str, object]] = []
    with torch.inference_mode():
        for n, k in shapes:
            if not options.no_peers and time.perf_counter() - started < options.seconds:
                others += peers(n, k, tokens, device, options.megabytes << 20)
                for other in others[-len(tokens) :]:
                    print(json.dumps(other), flush=True)
            for name in options.formats.split(","):
                if time.perf_counter() - started > options.seconds:
                    print(f"no time left for {n} x {k} {name}", flush=True)
                    continue
                begin = time.perf_counter()
                bench = Bench(FORMATS[name], n, k, device, options.megabytes << 20)
                bench.compile_all(tokens)
                compiled = time.perf_counter()
                for m in tokens:
                    lines.append(bench.line(name, m, limits.bandwidth, limits.flops))
                    print(formatted(lines[-1]), flush=True)
                print(
                    f"  {compiled - begin:.1f} s to compile, {time.perf_counter() - compiled:.1f} to time", flush=True
                )
                del bench
                if options.json is not None:
                    report = {"lines": [asdict(line) for line in lines], "peers": others}
                    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps([[x.format, x.n, x.k, x.m, x.best, round(1e6 * x.seconds, 2), round(x.share, 3)] for x in lines]))


def formatted(line: Line) -> str:
    """One row of the table, with the three fastest and what went wrong."""
    ran = sorted((s, name) for name, s in line.tried.items() if s)
    rest = "; ".join(f"{name} {s}" for s, name in ran[:4])
    wrong = [name for name, s in line.tried.items() if not s]
    return (
        f"{line.format:>8} {line.n}x{line.k} m={line.m:<4} {1e6 * line.seconds:8.2f} us {line.terabytes:5.2f} TB/s "
        f"{line.teraflops:6.1f} TF share {line.share:.2f} err {line.error:.1e} | {rest}"
        + (f" | FAILED {len(wrong)}: {wrong[0]}" if wrong else "")
    )


if __name__ == "__main__":
    main()
