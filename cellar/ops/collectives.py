"""Collectives as what they mean: what chip `at` of a group holds afterwards, from what all of them held.

Parts are in the order of the group, and so are sums: the same numbers in the same order give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def shares(length: int, size: int, sizes: Sequence[int] | None = None) -> list[int]:
    """How much of a dimension each chip of a group has: `sizes` if given, else equal shares.

    Raises ValueError if these are not whole, or do not add up.
    """
    found = [length // size] * size if sizes is None else list(sizes)
    if len(found) != size or sum(found) != length:
        raise ValueError(f"a dimension of {length} has no shares {found} for {size} chips.")
    return found


def all_reduce(parts: Sequence[Tensor]) -> Tensor:
    """The sum of all parts, which have one shape."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def reduce_scatter(parts: Sequence[Tensor], at: int, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """A share along `dim` of the sum of all parts."""
    each = shares(parts[0].shape[dim], len(parts), sizes)
    start = sum(each[:at])
    return all_reduce([part.narrow(dim, start, each[at]) for part in parts])


def all_gather(parts: Sequence[Tensor], dim: int) -> Tensor:
    """All parts behind one another along `dim`, where they may be of unequal length."""
    return torch.cat(list(parts), dim)


def all_to_all(parts: Sequence[Tensor], at: int, split: int, join: int, sizes: Sequence[int] | None = None) -> Tensor:
    """A share along `split` of every part, behind one another along `join`."""
    each = shares(parts[0].shape[split], len(parts), sizes)
    start = sum(each[:at])
    return torch.cat([part.narrow(split, start, each[at]) for part in parts], join)
