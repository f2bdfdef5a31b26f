"""How often attention without a maximum computes a tile once more: counted from the definition, on any device.

The kernel has no counter, which every launch would pay for; what it does follows from the scores alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from cellar.ops.attention import AttentionWork
from cellar.ops.attention.plan import FIRST, KV_FIRST, KV_LAST, LAST, ROW, START, TOKEN
from cellar.ops.attention.triton import UNIFIED_RANGE


@dataclass
class Recount:
    """Tiles of a plan, one for each KV head, and those to compute again; rows that see something, and those outside."""

    tiles: int = 0
    again: int = 0
    rows: int = 0
    outside: int = 0

    def add(self, other: Recount) -> None:
        """Count both together."""
        self.tiles += other.tiles
        self.again += other.again
        self.rows += other.rows
        self.outside += other.outside


def recount(
    q: Tensor,
    k_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    shifts: Sequence[float] = (0.0,),
    newest_apart: bool = False,
) -> list[Recount]:
    """What the unified kernel computes again, by its definition: for each shift of all scores.

    A tile is computed again if a row that sees any of its positions has a sum of e^x outside 2^+-UNIFIED_RANGE.
    `newest_apart`: as in `decode_attention`, whose newest position is no part of the sum. Arguments as of `attention`.
    """
    shape, bound = work.shape, UNIFIED_RANGE * log(2.0)
    counts = [(q.new_zeros(4, dtype=torch.int64)) for _ in shifts]
    for item in work.items.table.tolist():
        first, last, start = item[FIRST], item[LAST], item[START]
        low, stop = item[KV_FIRST], min(item[KV_LAST], start) if newest_apart else item[KV_LAST]
        if stop <= low:
            continue
        n = torch.arange(low, stop, device=q.device)
        slots = table[item[ROW], n // shape.chunk_size].long()
        keys = k_cache[slots, :, n % shape.chunk_size].float()
        packed = torch.arange(first, last, device=q.device)
        head = torch.arange(shape.kv_heads, device=q.device)[:, None] * shape.group + packed % shape.group
        queries = q[item[TOKEN] + packed // shape.group, head].float()
        position = (start + packed // shape.group)[:, None]
        seen = n[None, :] <= position
        if shape.window is not None:
            seen &= n[None, :] > position - shape.window
        scores = torch.einsum("hrd,nhd->hrn", queries, keys) * scale
        sums = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
        sees = seen.any(-1)
        for count, by in zip(counts, shifts, strict=True):
            outside = ((sums + by).abs() >= bound) & sees
            tiles = torch.tensor(shape.kv_heads, device=q.device)
            count += torch.stack((tiles, outside.any(-1).sum(), sees.sum() * shape.kv_heads, outside.sum()))
    return [Recount(*count.tolist()) for count in counts]
