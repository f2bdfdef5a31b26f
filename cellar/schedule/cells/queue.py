"""CellQueue: subgraphs of one cell type that have nodes to submit, first in first out, as an array of their slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IndexArray = NDArray[np.int64]


class CellQueue:
    """Subgraphs stay where they are until their last node is submitted; `keep` drops them from the front."""

    def __init__(self) -> None:
        self._slots: IndexArray = np.empty(1024, np.int64)
        self._head = 0
        self._tail = 0

    def __len__(self) -> int:
        return self._tail - self._head

    def append(self, slots: IndexArray) -> None:
        """Subgraphs join at the end."""
        count = len(slots)
        if self._tail + count > len(self._slots):
            held = self._slots[self._head : self._tail]
            room = len(self._slots)
            while room < 2 * (len(held) + count):
                room *= 2
            fresh = np.empty(room, np.int64)
            fresh[: len(held)] = held
            self._slots, self._head, self._tail = fresh, 0, len(held)
        self._slots[self._tail : self._tail + count] = slots
        self._tail += count

    def front(self, count: int, skip: int = 0) -> IndexArray:
        """A view of up to `count` subgraphs behind the first `skip`; valid until the queue changes."""
        begin = min(self._head + skip, self._tail)
        return self._slots[begin : min(begin + count, self._tail)]

    def keep(self, count: int, mask: NDArray[np.bool_]) -> None:
        """Of the first `count` subgraphs only those of the mask stay, in their order."""
        kept = self._slots[self._head : self._head + count][mask]
        self._head += count - len(kept)
        self._slots[self._head : self._head + len(kept)] = kept
