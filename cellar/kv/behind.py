"""WriteBehind: chunks that have come to rest and are to reach a tier that outlives the process within seconds."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from cellar.kv.pool import Chunks
from cellar.kv.shelves import NO_SLOTS, Shelves
from cellar.kv.states import RESIDENT

LINGER_SECONDS = 2.0
"""A chunk rests so long before it is written: a tail that the next turn goes on from at once is not worth it."""


class WriteBehind:
    """Chunks in the order in which their sequences ended. One that cannot be copied at the moment waits again.

    Nothing is kept of a chunk but its number: one that is gone by then is passed over, and another that has got the
    number is written a little earlier than it had to be.
    """

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves
        self._queue: deque[tuple[float, Chunks]] = deque()

    def add(self, chunks: Chunks, now: float) -> None:
        """Sequences have ended that used these chunks."""
        shelves = self._shelves
        if shelves.persistent < len(shelves.tiers):
            chunks = chunks[shelves.directory.slot[shelves.persistent, chunks] < 0]
            if len(chunks):
                self._queue.append((now + LINGER_SECONDS, chunks))

    def due_at(self) -> float | None:
        """When there will be something to write; None: nothing waits."""
        return self._queue[0][0] if self._queue else None

    def take(self, count: int, now: float) -> Chunks:
        """At most `count` chunks (distinct) whose time has come and that can be copied now."""
        found: list[Chunks] = []
        later: list[Chunks] = []
        while self._queue and self._queue[0][0] <= now and count > 0:
            due, waiting = self._queue.popleft()
            part, rest = waiting[:count], waiting[count:]
            if len(rest):
                self._queue.appendleft((due, rest))
            part = self._missing(np.unique(part))
            source = sources(self._shelves, part)
            part, moving = part[source >= 0], part[source < 0]
            moving = moving[~_used(self._shelves, moving)]  # used ones come again when they rest
            if len(moving):
                later.append(moving)
            if len(part):
                found.append(part)
                count -= len(part)
        if later:
            self._queue.append((now + LINGER_SECONDS, np.concatenate(later)))
        return np.unique(np.concatenate(found)) if found else NO_SLOTS

    def alone(self) -> Chunks:
        """All chunks that only this process has, whether they can be copied now or not."""
        return self._missing(np.flatnonzero((self._shelves.directory.slot >= 0).any(0)).astype(np.int32))

    def all(self) -> Chunks:
        """All chunks that only this process has and that can be copied now."""
        return self.ready(self.alone())

    def ready(self, chunks: Chunks) -> Chunks:
        """Those that only this process has and that can be copied now, in the same order."""
        chunks = self._missing(chunks)
        found: Chunks = chunks[sources(self._shelves, chunks) >= 0]
        return found

    def _missing(self, chunks: Chunks) -> Chunks:
        """Those that are still in memory, and not in the persistent tier."""
        slot, persistent = self._shelves.directory.slot, self._shelves.persistent
        found: Chunks = chunks[(slot[:persistent, chunks] >= 0).any(0) & (slot[persistent, chunks] < 0)]
        return found


def sources(shelves: Shelves, chunks: Chunks) -> Chunks:
    """From which tier each chunk is copied to the persistent one: the slowest that has it at rest; -1: none now."""
    found = np.full(len(chunks), -1, np.int32)
    for tier in range(shelves.persistent):
        slots = shelves.directory.slot[tier, chunks]
        at_rest = (slots >= 0) & (shelves.pools[tier].state[slots] == RESIDENT)
        found[at_rest & ~_used(shelves, chunks) if tier == 0 else at_rest] = tier
    return found


def _used(shelves: Shelves, chunks: Chunks) -> NDArray[np.bool_]:
    """Which chunks sequences use on the device."""
    slots = shelves.directory.slot[0, chunks]
    found: NDArray[np.bool_] = (slots >= 0) & (shelves.device.references[slots] > 0)
    return found
