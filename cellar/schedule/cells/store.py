"""Flat arrays in which every running request, or every graph, owns a few entries side by side."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellar.core.cell_graphs import GraphPart
from cellar.core.tasks import IntArray, Values
from cellar.schedule.cells.queue import IndexArray


class Places:
    """Gives out runs of places. Runs come in sizes that are powers of two, and are used again for runs of that size."""

    def __init__(self) -> None:
        self.top = 0
        self.num_used = 0
        self._free: dict[int, list[int]] = {}

    def take(self, count: int) -> int:
        """-> the first of `count` places."""
        size = 1 << (count - 1).bit_length()
        self.num_used += size
        free = self._free.get(size)
        if free:
            return free.pop()
        start = self.top
        self.top += size
        return start

    def give(self, start: int, count: int) -> None:
        """Places that nobody needs any more."""
        size = 1 << (count - 1).bit_length()
        self.num_used -= size
        free = self._free.get(size)
        if free is None:
            self._free[size] = [start]
        else:
            free.append(start)


class RunStore:
    """A flat array in which running requests own runs of entries."""

    def __init__(self, data: Values) -> None:
        self.data = data
        self.places = Places()

    def take(self, count: int) -> int:
        """-> where a run of `count` entries begins."""
        start = self.places.take(count)
        if self.places.top > len(self.data):
            self.data = np.concatenate([self.data, np.zeros((self.places.top, *self.data.shape[1:]), self.data.dtype)])
        return start


_ROOM = 1 << 15
"""Rows of a new table: thousands of trees of 20 nodes, so that new ones seldom move the others."""


class GraphTable:
    """The rows of all graph parts of one cell that running requests use, column by column: int32 [columns, room].

    Equal graphs share. When the table is full, parts that nobody uses are forgotten.
    """

    def __init__(self, columns: int, live: Callable[[], set[GraphPart]], subgraphs: Callable[[], IndexArray]) -> None:
        self.rows: IntArray = np.zeros((columns, _ROOM), np.int32)
        self._live = live
        self._subgraphs = subgraphs
        self.num_moves = 0
        self._top = 0
        self._starts: dict[GraphPart, int] = {}

    def start_of(self, part: GraphPart, at: IndexArray, end: IndexArray) -> int:
        """-> the part's first row; adds the part if it is new, and may then move all others (`at`, `end` follow)."""
        start = self._starts.get(part)
        if start is not None:
            return start
        if self._top + len(part.table) > self.rows.shape[1]:
            self._compact(len(part.table), at, end)
        start = self._starts[part] = self._top
        self.rows[:, start : start + len(part.table)] = part.table.T
        self._top += len(part.table)
        return start

    def _compact(self, more: int, at: IndexArray, end: IndexArray) -> None:
        self.num_moves += 1
        live = self._live()
        kept = [(part, start) for part, start in self._starts.items() if part in live]
        counts = [len(part.table) for part, _ in kept]
        fresh = list(accumulate(counts, initial=0))
        columns, room = self.rows.shape
        while room < 8 * (fresh[-1] + more):
            room *= 2
        rows = np.zeros((columns, room), np.int32)
        for (part, _), start in zip(kept, fresh, strict=False):
            rows[:, start : start + len(part.table)] = part.table.T
        slots = self._subgraphs()
        if kept and len(slots):
            starts: NDArray[Any] = np.array([start for _, start in kept])
            moved = (np.array(fresh[:-1]) - starts)[np.searchsorted(starts, end[slots] - 1, side="right") - 1]
            at[slots] += moved
            end[slots] += moved
        self.rows, self._top = rows, fresh[-1]
        self._starts = {part: start for (part, _), start in zip(kept, fresh, strict=False)}
