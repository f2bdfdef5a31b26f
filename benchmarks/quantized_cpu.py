"""Products with quantized matrices on the CPU beside bfloat16 and torch's own, ms and GB/s by number of tokens.

`int8 both`: activations are rounded to int8, too.

    python -m benchmarks.quantized_cpu --threads 1

Eight matrices in turn, more than a cache holds; the best of fifteen rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.linear.pack import pack
from cellar.ops.linear.weight import LinearWeight
from cellar.quant.matrix import quantized
from cellar.quant.weight import QuantizedWeight, on_cpu

FORMATS = {
    "int8": Format("int8"),
    "int4": Format("int4", 64, zero_points=True),
    "fp8": Format("fp8"),
    "mxfp4": Format("mxfp4", 32),
    "int8 both": Format("int8", activations="int8"),
}
ROUNDS = 15


def seconds(product: Callable[[], object]) -> float:
    product()
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        product()
        found.append(time.perf_counter() - start)
    return min(found)


def torch_int4(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Any codes, as torch packs them: only the time counts."""
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.int32)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), torch.rand(columns // 64, rows, 2).bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--matrices", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = (options.rows, options.columns)
    plain = [torch.randn(shape).bfloat16() / options.columns**0.5 for _ in range(options.matrices)]
    kept = {name: [on_cpu(QuantizedWeight(quantized(w, f))) for w in plain] for name, f in FORMATS.items()}
    rows = [quantized(w, FORMATS["int8"]) for w in plain]
    eights = [(matrix.codes, matrix.scales[:, 0].bfloat16()) for matrix in rows]
    fours = [torch_int4(*shape) for _ in plain]
    weights: dict[str, Sequence[LinearWeight]] = {"bfloat16": [pack(w) for w in plain], **kept}
    for tokens in (1, 4, 16, 128):
        print(json.dumps(measured(tokens, options.columns, weights, eights, fours)), flush=True)


Packed: TypeAlias = Sequence[tuple[Tensor, Tensor]]


def measured(
    tokens: int, columns: int, weights: Mapping[str, Sequence[LinearWeight]], eights: Packed, fours: Packed
) -> dict[str, float]:
    """One line of figures."""
    x = torch.randn(tokens, columns).bfloat16()
    found: dict[str, float] = {"tokens": tokens}
    for name, ways in weights.items():
        taken = seconds(partial(each, ways, x))
        found[f"{name} ms"] = round(1e3 * taken / len(ways), 2)
        found[f"{name} GB/s"] = round(sum(way.nbytes for way in ways) / taken / 1e9, 1)
    own8 = seconds(lambda: [torch.ops.aten._weight_int8pack_mm(x, c, s) for c, s in eights])
    own4 = seconds(lambda: [torch.ops.aten._weight_int4pack_mm_for_cpu(x, c, 64, s) for c, s in fours])
    found["torch int8 ms"], found["torch int4 ms"] = (round(1e3 * t / len(eights), 2) for t in (own8, own4))
    return found


def each(ways: Sequence[LinearWeight], x: Tensor) -> None:
    for way in ways:
        way.multiply(x)


if __name__ == "__main__":
    main()
