"""Random attention steps and an oracle for them: float64 NumPy, one query of one head at a time, no chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.ops.attention import AttentionWork, plan_attention

Span = tuple[int, int, int]


@dataclass
class Example:
    """One step: tensors for `attention`, and each row's keys and values [positions, kv_heads, dim] as written."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    spans: list[Span]
    keys: dict[int, NDArray[np.float64]]
    values: dict[int, NDArray[np.float64]]
    heads: int
    window: int | None
    scale: float

    def work(self, device: str = "cpu", programs: int = 8, split: int | None = None) -> AttentionWork:
        row, start, stop = (list(column) for column in zip(*self.spans, strict=True))
        _, kv_heads, chunk_size, dim = self.k_cache.shape
        return plan_attention(
            row, start, stop, self.heads, kv_heads, dim, chunk_size, self.window, device, programs, split
        )

    def oracle(self) -> NDArray[np.float64]:
        """[tokens, heads, dim]."""
        out = np.zeros(self.q.shape)
        group = self.heads // self.k_cache.shape[1]
        token = 0
        for row, start, stop in self.spans:
            for position in range(start, stop):
                low = 0 if self.window is None else max(0, position - self.window + 1)
                for head in range(self.heads):
                    keys = self.keys[row][low : position + 1, head // group]
                    scores = self.scale * (keys @ self.q[token, head].double().numpy())
                    weights = np.exp(scores - scores.max())
                    values = self.values[row][low : position + 1, head // group]
                    out[token, head] = weights @ values / weights.sum()
                token += 1
        return out


def example(
    spans: list[Span],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    chunk_size: int = 32,
    window: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    garbage: float | None = float("nan"),
    layout: str = "together",
    scattered: bool = True,
    loud: float = 1.0,
) -> Example:
    """A step whose cache holds `garbage` (None: random numbers) wherever no row has written.

    `layout`: `apart` (K and V each in memory of its own) or `together` (a slot's K and V side by side).
    """
    noise = torch.Generator().manual_seed(seed)
    length: dict[int, int] = {}
    for row, _, stop in spans:
        length[row] = max(length.get(row, 0), stop)
    needed = {row: -(-n // chunk_size) for row, n in length.items()}
    slots = sum(needed.values()) + 3
    shape = (slots, kv_heads, chunk_size, dim)
    if layout == "apart":
        k_cache, v_cache = torch.empty(shape), torch.empty(shape)
    else:
        k_cache, v_cache = torch.empty((slots, 2, *shape[1:])).unbind(1)
    for cache in (k_cache, v_cache):
        cache.normal_(generator=noise) if garbage is None else cache.fill_(garbage)
    k_cache, v_cache = k_cache.to(dtype), v_cache.to(dtype)
    order = torch.randperm(slots, generator=noise).tolist() if scattered else list(range(slots))
    table = torch.full((max(length) + 1, max(needed.values())), -1, dtype=torch.int32)
    keys, values = {}, {}
    for row, positions in length.items():
        k, v = (torch.randn(positions, kv_heads, dim, generator=noise).to(dtype) for _ in range(2))
        keys[row], values[row] = k.double().numpy(), v.double().numpy()
        for j in range(needed[row]):
            slot = order.pop(0)
            table[row, j] = slot
            piece = slice(j * chunk_size, (j + 1) * chunk_size)
            k_cache[slot, :, : len(k[piece])] = k[piece].transpose(0, 1)
            v_cache[slot, :, : len(v[piece])] = v[piece].transpose(0, 1)
    tokens = sum(stop - start for _, start, stop in spans)
    q = (loud * torch.randn(tokens, heads + 2 * kv_heads, dim, generator=noise)).to(dtype)[:, :heads]
    return Example(q, k_cache, v_cache, table, spans, keys, values, heads, window, dim**-0.5)


def shifted(e: Example, by: float) -> Example:
    """The same example with `by` added to (about) all scores: one dimension of queries and keys is made constant."""
    loud = 8.0
    e.q[:, :, 0] = loud
    key = by / (loud * e.scale)
    e.k_cache[..., 0] = key
    for keys in e.keys.values():
        keys[:, :, 0] = key
    return e
