"""Few tokens times a plain matrix of 16 bits on this processor: by the kernel that reads it as it lies, beside others.

    python -m benchmarks.linear_plain --rows 14336 --columns 4096 --threads 1,2

GB/s of the matrix, the best of five times over matrices that together exceed every cache: the kernel's
(`ops/cpu/plain.py`), those of what multiplied such matrices before it and does so for more tokens, and those of a
matrix that is packed once (`ops/linear/pack.py`). All take turns. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from cellar.ops.cpu.launch import use_threads
from cellar.ops.linear.dense import MOST_FEW, DenseWeight, widened
from cellar.ops.linear.onednn import onednn_packs
from cellar.ops.linear.pack import pack

TOKENS = (1, 2, 4, 5, 8, 12, 16)
ROUNDS = 5
Product = Callable[[Tensor], Tensor]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=14336)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--matrices", type=int, default=6)
    parser.add_argument("--threads", default=str(torch.get_num_threads()))
    options = parser.parse_args(arguments)
    found = []
    for threads in map(int, options.threads.split(",")):
        use_threads(threads)
        for dtype in (torch.float16, torch.bfloat16):
            shape = (options.rows, options.columns)
            for tokens, rates in measured(shape, options.matrices, dtype).items():
                found.append({"threads": threads, "dtype": str(dtype), "tokens": tokens, **rates})
                said = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
                print(f"{threads} threads, {dtype}, {tokens} tokens, GB/s: {said}", flush=True)
    print(json.dumps(found))


def measured(shape: tuple[int, int], count: int, dtype: torch.dtype) -> dict[int, dict[str, float]]:
    """GB/s by name, for each number of tokens."""
    matrices = [torch.randn(shape).mul_(0.02).to(dtype) for _ in range(count)]
    packed = [pack(matrix) for matrix in matrices]
    ways: dict[str, list[Product]] = {
        "kernel": [DenseWeight(matrix).multiply for matrix in matrices],
        "before": [before(matrix) for matrix in matrices],
        "packed": [weight.multiply for weight in packed],
    }
    nbytes, found = matrices[0].nbytes, dict[int, dict[str, float]]()
    for tokens in TOKENS:
        assert tokens <= MOST_FEW, "the kernel takes no more"
        x = torch.randn(tokens, shape[1]).to(dtype)
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):
            for name, products in ways.items():
                begin = time.perf_counter()
                for product in products:
                    product(x)
                best[name] = min(best[name], (time.perf_counter() - begin) / count)
        found[tokens] = {name: nbytes / seconds / 1e9 for name, seconds in best.items()}
    return found


def before(matrix: Tensor) -> Product:
    """What multiplied such a matrix as it lies."""

    def multiply(x: Tensor) -> Tensor:
        if matrix.dtype == torch.bfloat16 and (len(x) < 5 or onednn_packs(torch.bfloat16)):
            return functional.linear(x, matrix)
        return widened(x, matrix, None)

    return multiply


if __name__ == "__main__":
    main()
