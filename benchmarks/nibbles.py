"""Products with matrices in int4 on Hopper: our kernel in several sizes beside bfloat16, Triton's and torch's.

    python -m benchmarks.nibbles --tokens 1,8,16,32,64,128 --json nibbles.json

First every group, with zero points and without, at many numbers of tokens and shapes against float64 (norm). Then each
line is one shape and number of tokens: microseconds of the library's bfloat16 product, of Triton's kernel for int4, of
`torch._weight_int4pack_mm`, and of ours by sizes (pieces/warps/sharers/loads/depth/resident), the fastest first;
`written`: the matrix is written out for the library. Matrices take turns so that no cache holds them, launches of a
replay are one graph. What fails is reported as such. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.cuda.compiler import compile_cuda
from cellar.ops.linear.bytes import tokens_of
from cellar.ops.linear.nibbles import Fragments, Nibbles, nibbles_source, writer_source
from cellar.quant.choice import Kernel, default_choice, default_nibbles
from cellar.quant.fragments import fragments, unfragmented
from cellar.quant.matrix import dequantized, quantized
from cellar.quant.nibbles import multiply_nibbles
from cellar.quant.packed import Packed, packed
from cellar.quant.triton import multiply_packed
from cellar.runtime.device import resolve_device
from cellar.runtime.probes.quantized import nibbles_for
from cellar.runtime.probes.rotation import Rotation

SHAPES = "28672x4096,4096x14336,6144x4096,4096x4096"
FOUR = Format("int4", 64, zero_points=True)
BF16, F16 = torch.bfloat16, torch.float16
CHECKED_TOKENS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 130, 300)
CHECKED_SHAPES = ((512, 512), (264, 1088), (1040, 4096))
TOLERANCE = 2.6e-3
ROUNDS = 5


def short(sizes: Kernel) -> str:
    """A name for a table."""
    if sizes is None:
        return "written"
    return "/".join(str(getattr(sizes, name)) for name in Nibbles.__slots__)


def compile_all(sources: Sequence[tuple[str, dict[str, int]]]) -> None:
    """Side by side; what goes wrong here goes wrong again where it runs."""
    with ThreadPoolExecutor(16) as threads:
        for source in {str(source[1]): source for source in sources}.values():
            threads.submit(compile_cuda, *source)


def check(device: torch.device) -> bool:
    """Every group against float64."""
    cases = []
    for group in (32, 64, 128):
        for zeros in (True, False):
            for (n, k), dtype, scales in zip(CHECKED_SHAPES, (BF16, BF16, F16), (F16, BF16, F16), strict=True):
                if k % group == 0:
                    cases.append((Format("int4", group, zero_points=zeros), n, k, dtype, scales))
    sources = []
    for format, _, k, dtype, scales in cases:
        for m in (1, 9, 17, 33):
            for sizes in nibbles_for(m)[:3]:
                if isinstance(sizes, Nibbles):
                    zeros = format.zero_points
                    sources.append(nibbles_source(sizes, k, format.group, tokens_of(m), zeros, False, dtype, scales))
        sources.append(writer_source(k, format.group, format.zero_points, dtype, scales))
    begin = time.perf_counter()
    compile_all(sources)
    print(f"{len(sources)} sources compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    wrong = right = 0
    for format, n, k, dtype, scales in cases:
        matrix = quantized(torch.randn((n, k), device=device) / k**0.5, format)
        matrix = type(matrix)(format, matrix.codes, matrix.scales.to(scales), matrix.zeros)
        weight, exact = fragments(matrix), dequantized(matrix).double()
        if not torch.equal(dequantized(unfragmented(weight, format)), dequantized(matrix)):
            print(f"WRONG {format} {n}x{k}: not a bijection", flush=True)
        for m in CHECKED_TOKENS:
            x = torch.randn((m, k), device=device).to(dtype)
            wanted = x.double() @ exact.t()
            for sizes in [*[s for s in nibbles_for(min(m, 64))[:3] if isinstance(s, Nibbles)], None]:
                try:
                    found = multiply_nibbles(x, weight, None, sizes).double()
                    error = float((found - wanted).norm() / wanted.norm())
                except Exception as failure:
                    print(f"FAILED {format} {n}x{k} m={m} {short(sizes)}: {str(failure)[:200]}", flush=True)
                    wrong += 1
                    continue
                if error < TOLERANCE:
                    right += 1
                else:
                    wrong += 1
                    print(f"WRONG {format} {n}x{k} m={m} {dtype} {short(sizes)}: {error:.2e}", flush=True)
    print(f"checked: {right} right, {wrong} wrong", flush=True)
    return not wrong


def products(n: int, k: int, tokens: Sequence[int], device: torch.device, nbytes: int) -> list[dict[str, Any]]:
    """All ways of one shape."""
    compile_all(
        [
            nibbles_source(sizes, k, FOUR.group, tokens_of(min(m, 64)), True, False, BF16, F16)
            for m in tokens
            for sizes in nibbles_for(m)
            if isinstance(sizes, Nibbles)
        ]
        + [writer_source(k, FOUR.group, True, BF16, F16)]
    )
    plain: Rotation[Tensor] = Rotation(n, k, BF16, device, nbytes=nbytes, change=lambda w: w)
    matrices = [quantized(w, FOUR) for w in plain.plain]
    ours, theirs = [fragments(matrix) for matrix in matrices], [packed(matrix) for matrix in matrices]
    exact = dequantized(matrices[0]).double()
    del matrices
    peers: list[tuple[Tensor, Tensor]] = []
    with suppress(Exception):
        for _ in plain.plain:
            codes = torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device=device)
            scales = torch.rand((k // 64, n, 2), device=device).bfloat16()
            peers.append((torch.ops.aten._convert_weight_to_int4pack(codes, 8), scales))
    xs = {m: torch.randn((m, k), device=device, dtype=BF16) for m in tokens}
    choice = default_choice(FOUR, n, k)
    with ThreadPoolExecutor(8) as threads:
        for m, x in xs.items():
            threads.submit(torch.inference_mode()(multiply_packed), x, theirs[0], None, choice.at(m))
    found: list[dict[str, Any]] = []
    for m, x in xs.items():
        exact_out = x[:64].double() @ exact.t()
        line: dict[str, Any] = {"n": n, "k": k, "m": m}

        def timed(call: Any, forms: Sequence[Any], compared: bool) -> object:
            try:
                out = call(forms[0])
                error = float((out[:64].double() - exact_out).norm() / exact_out.norm())  # noqa: B023
                if compared and not error < 1e-2:
                    return f"WRONG {error:.1e}"
                return round(1e6 * plain.by_turns([plain.replay_over(call, forms)], ROUNDS)[0], 2)
            except Exception as failure:
                return f"{type(failure).__name__} {str(failure)[:60]}"

        line["bf16"] = timed(partial(torch.nn.functional.linear, x), plain.plain, False)
        line["triton"] = timed(partial(_triton, x, choice.at(m)), theirs, True)
        line["int4pack"] = timed(partial(_peer, x), peers, False) if m <= 64 else None
        ways = {short(s): timed(partial(_ours, x, s), ours, True) for s in nibbles_for(m)}
        times = {name: time for name, time in ways.items() if isinstance(time, float)}
        line["ours"] = dict(sorted(times.items(), key=lambda one: one[1]))
        line["failed"] = {name: way for name, way in ways.items() if name not in times}
        limit = 1e6 * FOUR.nbytes((n, k)) / 4.65e12
        best = min(times.values(), default=float("inf"))
        print(
            f"{n}x{k} m={m} bf16 {line['bf16']} triton {line['triton']} int4pack {line['int4pack']} | "
            f"limit {limit:.1f} "
            f"({100 * limit / best:.0f} %) default {short(default_nibbles(n, k).at(m))} | "
            + " ".join(f"{name} {time}" for name, time in line["ours"].items())
            + (f" | FAILED {line['failed']}" if line["failed"] else ""),
            flush=True,
        )
        found.append(line)
    return found


def _ours(x: Tensor, sizes: Kernel, weight: Fragments) -> Tensor:
    return multiply_nibbles(x, weight, None, sizes)


def _triton(x: Tensor, kernel: Any, weight: Packed) -> Tensor:
    return multiply_packed(x, weight, None, kernel)


def _peer(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    out: Tensor = torch.ops.aten._weight_int4pack_mm(x, weight[0], 64, weight[1])
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default="1,8,16,32,64,128")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no shape after so long")
    parser.add_argument("--megabytes", type=int, default=768, help="rotate over so much, in bfloat16")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    device = resolve_device("auto")
    tokens = [int(m) for m in options.tokens.split(",")]
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        right = options.no_check or check(device)
        for shape in options.shapes.split(","):
            if time.perf_counter() - started > options.seconds:
                print(f"no time left for {shape}", flush=True)
                continue
            begin = time.perf_counter()
            n, k = map(int, shape.split("x"))
            found += products(n, k, tokens, device, options.megabytes << 20)
            print(f"  {time.perf_counter() - begin:.1f} s", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"right": right, "lines": len(found), "seconds": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
