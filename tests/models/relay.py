"""K and V of rows from where one layout has them to where another wants them, as the planner prices that move.

Engines refuse plans whose caches move. With this, tests show that a move sends what the planner counts, and that no
token changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.layouts import Layout, relay
from cellar.models.collectives import Collectives


def relaid(
    held: Tensor,
    homes: Mapping[int, int],
    lengths: Mapping[int, int],
    source: Layout,
    target: Layout,
    kv_heads: int,
    collectives: Collectives,
) -> Tensor:
    """A rank's cache of all rows in `source` -> in `target`: [tokens, heads, width].

    Tokens are those of the rows that the rank has, in ascending order of row; `width` is what a head has of a token.
    `homes` (ranks) and `lengths` are of all rows, on every rank. Raises ConfigError for a cache that is repeated in
    parts: several heads of K and V, which the layout's axes do not divide.
    """
    for layout in (source, target):
        here = kv_heads // layout.mesh.count(layout.kv_axes(kv_heads))
        if here > 1 and layout.kv_copies(kv_heads) > 1:
            raise ConfigError(
                f"{layout.name} {layout.attention} repeats {here} heads of K and V; a cache is moved only where they "
                "are cut, or one is repeated. Take the same layout for prompts and decodes, or another mesh."
            )
    mesh, rank, x = source.mesh, collectives.rank, held

    def along(row: int, axes: str) -> int:
        return mesh.index(homes[row], axes)

    def rows_of(axes: str) -> list[int]:
        return [row for row in sorted(homes) if along(row, axes) == mesh.index(rank, axes)]

    batch = source.batch_axes
    for step in relay(source, target, kv_heads):
        axis, count, at = step.axis, mesh.count(step.axis), mesh.index(rank, step.axis)
        without = batch.replace(axis, "")
        rows = rows_of(without)
        by_place = sorted(rows, key=lambda row: along(row, axis))
        sizes = [sum(lengths[row] for row in rows if along(row, axis) == place) for place in range(count)]
        match step.before, step.after:
            case before, "B":
                x = _ordered(x, rows, by_place, lengths)
                if before == "K":
                    x = collectives.all_to_all(x, 0, 1, axis, "kv", split_sizes=sizes)
                else:
                    x = x.narrow(0, sum(sizes[:at]), sizes[at])
                batch = without + axis
            case "B", after:
                if after == "K":
                    x = collectives.all_to_all(x, 1, 0, axis, "kv", join_sizes=sizes)
                else:
                    x = collectives.all_gather(x, 0, axis, "kv", sizes)
                x = _ordered(x, by_place, rows, lengths)
                batch = without
            case "K", _:
                x = collectives.all_gather(x, 1, axis, "kv")
            case _:
                x = x.chunk(count, 1)[at]
    return x


def _ordered(x: Tensor, now: Sequence[int], then: Sequence[int], lengths: Mapping[int, int]) -> Tensor:
    """The same rows in another order."""
    if list(now) == list(then):
        return x
    parts = dict(zip(now, x.split_with_sizes([lengths[row] for row in now]), strict=True))
    return torch.cat([parts[row] for row in then])
