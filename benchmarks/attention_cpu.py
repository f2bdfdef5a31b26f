"""Decodes by the CPU over K and V in each format: GB/s of what is read, beside an accelerator and in its own engine.

    python -m benchmarks.attention_cpu --threads 1,2 --heads 56x56,32x8,64x8 --context 528

Sixteen sequences of bfloat16 over caches that take turns, so that none of it is in the processor's. "alone" is what
decodes do whose prompts are attended to elsewhere (`AttentionWork.alone`). Best of five rounds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import product

import numpy as np
import torch

from cellar.core.kv_formats import KVFormat, row_nbytes
from cellar.ops.attention import decode_attention, plan_attention
from cellar.ops.kv_format import quantized_cache

ROWS, DIM, CHUNK, ROUNDS = 16, 128, 32, 5
FORMATS: tuple[KVFormat, ...] = ("plain", "fp8", "int4")


def rate(heads: int, kv_heads: int, context: int, kv_format: KVFormat, alone: bool, nbytes: int) -> float:
    """Bytes/s of K and V that decodes of one layer after another read, which are `nbytes` in all."""
    row, columns = row_nbytes(kv_format, DIM) if kv_format != "plain" else 2 * DIM, -(-context // CHUNK)
    numbers = torch.randn(ROWS * columns, kv_heads, CHUNK, DIM).bfloat16()
    made = quantized_cache(numbers, kv_format)
    count = max(1, nbytes // (2 * made.nbytes))
    caches = [made.clone() for _ in range(2 * count)]
    table = torch.arange(ROWS * columns, dtype=torch.int32).view(ROWS, columns)
    own, ends = np.arange(ROWS, dtype=np.int32), np.full(ROWS, context, np.int32)
    work = plan_attention(own, ends - 1, ends, heads, kv_heads, DIM, CHUNK, kv_format=kv_format)
    work.alone = alone
    q, new = torch.randn(ROWS, heads, DIM).bfloat16(), torch.randn(ROWS, kv_heads, DIM).bfloat16()

    def attend(k: int) -> None:
        decode_attention(q, new, new, None, caches[2 * k], caches[2 * k + 1], table, work, DIM**-0.5)

    attend(0)
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for k in range(count):
            attend(k)
        best = min(best, (time.perf_counter() - begin) / count)
    return 2 * ROWS * context * kv_heads * row / best


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=str(torch.get_num_threads()), help="comma-separated")
    parser.add_argument("--heads", default="56x56,32x8,64x8", help="query heads x KV heads, comma-separated")
    parser.add_argument("--context", type=int, default=528)
    parser.add_argument("--megabytes", type=int, default=512, help="of K and V in all: more than caches hold")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, float]] = {}
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        for shape in options.heads.split(","):
            heads, kv_heads = map(int, shape.split("x"))
            row = found[f"{threads} threads, {shape}"] = {}
            for kv_format, alone in product(FORMATS, (False, True)):
                name = f"{kv_format} alone" if alone else kv_format
                nbytes = options.megabytes << 20
                row[name] = rate(heads, kv_heads, options.context, kv_format, alone, nbytes) / 1e9
            print(f"{threads} threads, {shape}:", *(f"{name} {gb:.2f}" for name, gb in row.items()), "GB/s", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
