"""Rows of an embedding table."""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.ops.registry import Case, Op


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """table[tokens]: tokens: int64 [t]; table: [vocab, d] -> [t, d].

    The same call on every device: a gather of whole rows that torch does at the speed of memory, so there is no
    kernel of our own.
    """
    return table.index_select(0, tokens)


def _example(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    table = torch.arange(5 * 3, dtype=torch.float32).view(5, 3).to(dtype).to(device)
    return {"tokens": torch.tensor([4, 0, 4, 2], device=device), "table": table}


OPS = (Op("embedding", embedding, (), (Case("repeated tokens", _example),)),)
