"""Products of 17 to 256 tokens with matrices in int4 and int8 on Hopper: our kernel in several sizes beside bfloat16.

    python -m benchmarks.mixed --tokens 32,64,128,256 --json mixed.json

First every group, with zero points and without, and int8, at many numbers of tokens and shapes against float64 (norm),
and each last token alone: the same bits. Then each line is one shape, format and number of tokens: microseconds of the
library's product in bfloat16, of what the format's choice runs without this kernel,
and of this kernel by sizes (tokens/teams/parts/stages/resident), the fastest first. Matrices take turns so that no
cache holds them, launches of a replay are one graph. What fails is reported as such. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.cuda.compiler import compile_cuda
from cellar.ops.linear.mixed import Codes, Mixed, mixed_kind, mixed_linear, mixed_source
from cellar.ops.linear.nibbles import nibbles_source, writer_source
from cellar.quant.choice import default_choice, default_nibbles
from cellar.quant.fragments import fragments
from cellar.quant.matrix import Quantized, dequantized, quantized
from cellar.quant.nibbles import multiply_nibbles
from cellar.quant.packed import packed
from cellar.quant.spans import spans
from cellar.quant.triton import multiply_packed
from cellar.runtime.device import resolve_device
from cellar.runtime.probes.quantized import mixed_for
from cellar.runtime.probes.rotation import Rotation

SHAPES = "28672x4096,4096x14336,6144x4096,4096x4096"
FORMATS = {"int4": Format("int4", 64, zero_points=True), "int8": Format("int8")}
BF16, F16 = torch.bfloat16, torch.float16
CHECKED_TOKENS = (1, 17, 32, 33, 64, 100, 128, 129, 256, 300)
CHECKED_SHAPES = ((512, 512), (264, 1088), (1048, 4096), (72, 14336))
TOLERANCE = 2.8e-3
ROUNDS = 5


def short(sizes: Mixed) -> str:
    """A name for a table."""
    return "/".join(str(getattr(sizes, name)) for name in Mixed.__slots__)


def form_of(matrix: Quantized) -> Codes:
    """As the kernel reads it."""
    if matrix.format.name == "int4":
        return fragments(matrix)
    return spans(packed(matrix))


def compile_all(sources: Sequence[tuple[str, dict[str, int]]]) -> None:
    """Side by side; what goes wrong here goes wrong again where it runs."""
    begin = time.perf_counter()
    different = {str(source[1]): source for source in sources}
    with ThreadPoolExecutor(16) as threads:
        for source in different.values():
            threads.submit(compile_cuda, *source)
    print(f"  {len(different)} sources compiled in {time.perf_counter() - begin:.1f} s", flush=True)


def check(device: torch.device, seconds: float) -> bool:
    """Every format and group against float64."""
    cases = [(Format("int8"), n, k, dtype, F16) for n, k in CHECKED_SHAPES for dtype in (BF16, F16)]
    for group in (32, 64, 128):
        for zeros in (True, False):
            kinds = zip(CHECKED_SHAPES, (BF16, BF16, F16, BF16), (F16, BF16, F16, F16), strict=True)
            for (n, k), dtype, scales in kinds:
                if k % group == 0:
                    cases.append((Format("int4", group, zero_points=zeros), n, k, dtype, scales))
    made, sources = [], []
    for format, n, k, dtype, scales in cases:
        matrix = quantized(torch.randn((n, k), device=device) / k**0.5, format)
        if format.group:
            matrix = Quantized(format, matrix.codes, matrix.scales.to(scales), matrix.zeros)
        form = form_of(matrix)
        tried = [s for m in (32, 64, 128, 256) for s in mixed_for(m, n, k, mixed_kind(form))[:: 4 if n == 1048 else 9]]
        made.append((matrix, form, dtype, tried))
        sources += [mixed_source(sizes, mixed_kind(form), False, dtype) for sizes in tried]
    compile_all(sources)
    begin, wrong, right = time.perf_counter(), 0, 0
    for matrix, form, dtype, tried in made:
        if time.perf_counter() - begin > seconds:
            print("no time left for more checks", flush=True)
            break
        exact, (n, k) = dequantized(matrix).double(), matrix.shape
        for m in CHECKED_TOKENS:
            x = torch.randn((m, k), device=device).to(dtype)
            wanted = x.double() @ exact.t()
            for sizes in tried:
                name = f"{matrix.format} {n}x{k} m={m} {dtype} {short(sizes)}"
                try:
                    found = mixed_linear(x, form, None, sizes)
                    alone = mixed_linear(x[-1:].clone(), form, None, sizes)
                    error = float((found.double() - wanted).norm() / wanted.norm())
                except Exception as failure:
                    print(f"FAILED {name}: {str(failure)[:200]}", flush=True)
                    wrong += 1
                    if "CUDA" in str(failure):
                        return False
                    continue
                same = torch.equal(alone[0], found[-1])
                if error < TOLERANCE and same:
                    right += 1
                else:
                    wrong += 1
                    if wrong < 40:
                        print(f"WRONG {name}: {error:.2e}{'' if same else ', alone other bits'}", flush=True)
    print(f"checked: {right} right, {wrong} wrong, {time.perf_counter() - begin:.1f} s", flush=True)
    return not wrong


def products(
    n: int, k: int, tokens: Sequence[int], device: torch.device, nbytes: int, deadline: float
) -> list[dict[str, Any]]:
    """All ways of one shape."""
    plain: Rotation[Tensor] = Rotation(n, k, BF16, device, nbytes=nbytes, change=lambda w: w)
    found: list[dict[str, Any]] = []
    for name, format in FORMATS.items():
        matrices = [quantized(w, format) for w in plain.plain]
        exact = dequantized(matrices[0]).double()
        forms = [form_of(matrix) for matrix in matrices]
        kind = mixed_kind(forms[0])
        sources = [mixed_source(s, kind, False, BF16) for m in tokens for s in mixed_for(m, n, k, kind)]
        if name == "int4":
            theirs: list[Any] = forms
            for m in tokens:
                kernel = default_nibbles(n, k).at(m)
                if kernel is not None and m <= 64:
                    sources.append(nibbles_source(kernel, k, 64, -(-m // 32) * 32, True, False, BF16, F16))  # type: ignore[arg-type]
            sources.append(writer_source(k, 64, True, BF16, F16))
        else:
            theirs = [packed(matrix) for matrix in matrices]
        del matrices
        compile_all(sources)
        for m in tokens:
            if time.perf_counter() > deadline:
                print(f"no time left for {name} {n}x{k} m={m}", flush=True)
                continue
            x = torch.randn((m, k), device=device, dtype=BF16)
            exact_out = x.double() @ exact.t()
            line: dict[str, Any] = {"format": name, "n": n, "k": k, "m": m}

            def timed(call: Any, weights: Sequence[Any], compared: bool) -> object:
                try:
                    out = call(weights[0])
                    error = float((out.double() - exact_out).norm() / exact_out.norm())  # noqa: B023
                    if compared and not error < 1e-2:
                        return f"WRONG {error:.1e}"
                    return round(1e6 * plain.by_turns([plain.replay_over(call, weights)], ROUNDS)[0], 2)
                except Exception as failure:
                    return f"{type(failure).__name__} {str(failure)[:60]}"

            line["bf16"] = timed(partial(torch.nn.functional.linear, x), plain.plain, False)
            line["before"] = timed(partial(_before, x, name, n, k), theirs, True)
            ways = {short(s): timed(partial(_ours, x, s), forms, True) for s in mixed_for(m, n, k, kind)}
            times = {way: time for way, time in ways.items() if isinstance(time, float)}
            line["ours"] = dict(sorted(times.items(), key=lambda one: one[1]))
            line["failed"] = {way: time for way, time in ways.items() if way not in times}
            limit = 1e6 * max(format.nbytes((n, k)) / 4.0e12, 2 * m * n * k / 700e12)
            best = min(times.values(), default=float("inf"))
            print(
                f"{name} {n}x{k} m={m} bf16 {line['bf16']} before {line['before']} | limit {limit:.1f} "
                f"({100 * limit / best:.0f} %) | "
                + " ".join(f"{way} {time}" for way, time in list(line["ours"].items())[:8])
                + (f" ... {max(times.values(), default=0.0)}")
                + (f" | FAILED {line['failed']}" if line["failed"] else ""),
                flush=True,
            )
            found.append(line)
    return found


def _ours(x: Tensor, sizes: Mixed, weight: Codes) -> Tensor:
    return mixed_linear(x, weight, None, sizes)


def _before(x: Tensor, name: str, n: int, k: int, weight: Any) -> Tensor:
    if name == "int4":
        return multiply_nibbles(x, weight, None, default_nibbles(n, k).at(len(x)))
    return multiply_packed(x, weight, None, default_choice(FORMATS[name], n, k).at(len(x)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default="32,64,128,256")
    parser.add_argument("--seconds", type=float, default=600.0, help="measure nothing after so long")
    parser.add_argument("--check-seconds", type=float, default=60.0, help="check nothing after so long")
    parser.add_argument("--megabytes", type=int, default=512, help="rotate over so much, in bfloat16")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    device = resolve_device("auto")
    tokens = [int(m) for m in options.tokens.split(",")]
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        right = options.no_check or check(device, options.check_seconds)
        for shape in options.shapes.split(","):
            n, k = map(int, shape.split("x"))
            found += products(n, k, tokens, device, options.megabytes << 20, started + options.seconds)
            print(f"  {time.perf_counter() - started:.1f} s", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"right": right, "lines": len(found), "seconds": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
