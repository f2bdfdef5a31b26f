"""Products of e4m3 by e4m3 on Hopper: our kernel in several sizes, and the library's, beside its bfloat16 product.

    python -m benchmarks.fp8 --tokens 1,8,16,32,64,128,4096 --json fp8.json

Each line is one shape and number of tokens: microseconds of the library's bfloat16, of `torch._scaled_mm` with scales
by token and row and by blocks of 128, and of the fastest sizes of ours; behind each the error against float64 (norm).
Tokens are e4m3 beforehand; `--rounding` times what makes them so: alone, behind a norm, behind a gate. Matrices take
turns so that no cache holds them, launches of a replay are one graph. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.activation import gated
from cellar.ops.cuda.compiler import compile_cuda
from cellar.ops.linear.bytes import Bytes, bytes_source, tokens_of
from cellar.ops.norm import add_rms_norm
from cellar.quant.byte_choice import Product
from cellar.quant.bytes import ByteWeight, byte_product
from cellar.quant.matrix import quantized
from cellar.quant.tokens import byte_tokens, gated_byte_tokens, norm_byte_tokens
from cellar.runtime.device import resolve_device
from cellar.runtime.probes.rotation import Rotation

FORMATS = {
    "rows": Format("fp8", activations="fp8"),
    "blocks": Format("fp8", 128, 128, activations="fp8"),
    "int8": Format("int8", activations="int8"),
}
SHAPES = "28672x4096,4096x14336,6144x4096,4096x4096,128256x4096"
ROUNDS = 5
BF16 = torch.bfloat16
FEW = 64


def sizes_for(m: int) -> list[Product]:
    """Sizes that are worth a try, and the library."""
    if m <= 8:
        ours = [(1, 8, 2, 3), (1, 8, 4, 2), (1, 4, 2, 6), (1, 16, 2, 1), (2, 8, 2, 2), (1, 4, 4, 4), (1, 8, 1, 4)]
    elif m <= 16:
        ours = [(1, 8, 2, 2), (1, 8, 2, 3), (2, 8, 2, 2), (1, 4, 2, 4), (2, 4, 2, 3), (1, 16, 2, 1)]
    elif m <= 32:
        ours = [(2, 8, 2, 1), (1, 8, 2, 2), (2, 4, 2, 2), (1, 4, 2, 4), (2, 8, 1, 1), (1, 16, 1, 1)]
    else:
        ours = [(2, 8, 1, 1), (1, 8, 1, 1), (1, 4, 1, 3), (2, 4, 1, 2)] if m <= FEW else []
    return [*(Bytes(*sizes) for sizes in ours), None]


def short(product: Product) -> str:
    """A name for a table."""
    return "library" if product is None else f"{product.pieces}/{product.warps}/{product.depth}/{product.resident}"


def compile_all(k: int, tokens: Sequence[int]) -> None:
    """All of ours, side by side."""
    sources = {
        str(source[1]): source
        for m in tokens
        for product in sizes_for(m)
        for grouped, whole in ((False, False), (True, False), (False, True))
        if product is not None and (source := bytes_source(product, k, tokens_of(m), grouped, whole, False, BF16))
    }
    with ThreadPoolExecutor(16) as threads:
        for source in sources.values():
            threads.submit(compile_cuda, *source)


def products(n: int, k: int, tokens: Sequence[int], device: torch.device, nbytes: int) -> list[dict[str, Any]]:
    """All ways of one shape."""
    compile_all(k, tokens)
    found: list[dict[str, Any]] = []
    plain: Rotation[Tensor] = Rotation(n, k, torch.bfloat16, device, nbytes=nbytes, change=lambda w: w)
    forms = {name: [ByteWeight(quantized(w, format)) for w in plain.plain] for name, format in FORMATS.items()}
    dense = {name: weights[0].dense().double() for name, weights in forms.items()}
    for m in tokens:
        x = torch.randn((m, k), device=device, dtype=torch.bfloat16)
        line: dict[str, Any] = {"n": n, "k": k, "m": m}
        line["bf16"] = round(1e6 * plain.seconds([lambda w: torch.nn.functional.linear(x, w)], ROUNDS)[0], 1)  # noqa: B023
        for name, format in FORMATS.items():
            codes, scales = byte_tokens(x, format.activations, format.group)
            groups = format.group or k
            meant = codes[:FEW].double().view(-1, k // groups, groups) * scales[:FEW].double()[:, :, None]
            exact = meant.view(-1, k) @ dense[name].t()
            tried: dict[str, tuple[float, float]] = {}
            for product in sizes_for(m):
                way = partial(_product, codes, scales, product)
                try:
                    error = float((way(forms[name][0])[:FEW].double() - exact).norm() / exact.norm())
                    seconds = plain.by_turns([plain.replay_over(way, forms[name])], ROUNDS)[0]
                    tried[short(product)] = round(1e6 * seconds, 2), round(error, 5)
                except Exception as failure:
                    tried[f"{short(product)} {str(failure)[:90]}"] = float("inf"), 0.0
            line[name] = dict(sorted(tried.items(), key=lambda one: one[1][0]))
        found.append(line)
        best = " | ".join(
            f"{name} "
            + " ".join(f"{k} {s} ({e})" for k, (s, e) in list(line[name].items())[:4])
            + ("" if "library" in list(line[name])[:4] else f" library {line[name].get('library')}")
            for name in FORMATS
        )
        print(f"{n}x{k} m={m} bf16 {line['bf16']} | {best}", flush=True)
    return found


def _product(codes: Tensor, scales: Tensor, product: Product, weight: ByteWeight) -> Tensor:
    return byte_product(codes, scales, weight._codes, weight._scales, None, product)


def roundings(k: int, tokens: Sequence[int], device: torch.device) -> list[dict[str, Any]]:
    """Of tokens of k numbers, beside what they replace."""
    found = []
    for m in tokens:
        turns = max(2, min(64, (1 << 28) // (m * k * 6)))
        xs = [torch.randn((m, 2 * k), device=device, dtype=torch.bfloat16) for _ in range(turns)]
        halves = [x[:, :k].contiguous() for x in xs]
        norm = torch.ones(k, device=device, dtype=torch.bfloat16)
        rotation: Rotation[Tensor] = Rotation(16, 16, torch.bfloat16, device, nbytes=0, change=lambda w: w)
        rotation.launches = max(64, turns)
        ways: dict[str, tuple[Callable[[Tensor], object], list[Tensor]]] = {
            "rounded": (lambda x: byte_tokens(x, "fp8", 0), halves),
            "norm": (lambda x: add_rms_norm(x, halves[0], norm, 1e-5), halves),  # noqa: B023
            "norm, rounded": (lambda x: norm_byte_tokens(x, halves[0], norm, 1e-5, "fp8", 0), halves),  # noqa: B023
            "gate": (lambda x: gated(x, "silu"), xs),
            "gate, rounded": (lambda x: gated_byte_tokens(x, "silu", "fp8", 0), xs),
            "gate, rounded by 128": (lambda x: gated_byte_tokens(x, "silu", "fp8", 128), xs),
        }
        line: dict[str, Any] = {"k": k, "m": m}
        for name, (call, given) in ways.items():
            line[name] = round(1e6 * rotation.by_turns([rotation.replay_over(call, given)], ROUNDS)[0], 2)
        found.append(line)
        print(json.dumps(line), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", default=SHAPES, help="rows x columns, comma-separated")
    parser.add_argument("--tokens", default="1,8,16,32,64,128,4096")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no shape after so long")
    parser.add_argument("--megabytes", type=int, default=768, help="rotate over so much, in bfloat16")
    parser.add_argument("--rounding", action="store_true", help="time the rounding of tokens, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    device = resolve_device("auto")
    tokens = [int(m) for m in options.tokens.split(",")]
    report: dict[str, list[dict[str, Any]]] = {"products": [], "roundings": []}
    with torch.inference_mode():
        for shape in options.shapes.split(","):
            if time.perf_counter() - started > options.seconds:
                print(f"no time left for {shape}", flush=True)
                continue
            n, k = map(int, shape.split("x"))
            report["products"] += products(n, k, tokens, device, options.megabytes << 20)
        if options.rounding:
            for k in (4096, 14336):
                report["roundings"] += roundings(k, [1, 8, 32, 128, 4096], device)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: len(lines) for name, lines in report.items()}))


if __name__ == "__main__":
    main()
