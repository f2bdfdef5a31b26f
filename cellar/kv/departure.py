"""Departure: what an engine that ends still writes to the tier that outlives it, and in which order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cellar.core.messages import EngineRates, Resting, Tier
from cellar.kv.movement import Movement
from cellar.kv.pool import Chunks
from cellar.kv.shelves import Shelves

MANY = 64
"""Chunks of a batch by which the seconds of one are told."""


class Departure:
    """All that only this process has is written, the most valuable first, unless somebody chooses."""

    def __init__(self, shelves: Shelves, movement: Movement, rates: Callable[[], EngineRates]) -> None:
        self._shelves = shelves
        self._movement = movement
        self._rates = rates
        self._chosen: Chunks | None = None

    def resting(self, now: float) -> Resting | None:
        """What only this process has, if that is written to a tier that others read; None: it is written nowhere, or to
        one that only the next process at this place reads.
        """
        shelves = self._shelves
        if shelves.persistent == len(shelves.tiers) or shelves.tiers[shelves.persistent] is not Tier.REMOTE:
            return None
        chunks, directory = self._movement.behind.alone(), shelves.directory
        return Resting(
            chunks,
            directory.end[chunks],
            directory.audience[chunks],
            shelves.weights(chunks, now),
            self._movement.outwards[shelves.persistent].seconds(MANY) / MANY,
            self._rates(),
        )

    def choose(self, chunks: Chunks) -> None:
        """These alone are written from now on, in this order."""
        self._chosen = chunks

    def persist(self, now: float) -> None:
        """Copy a batch, unless one is under way."""
        self._movement.persist(now, lambda room: self._next(room, now))

    def _next(self, room: int, now: float) -> Chunks:
        behind = self._movement.behind
        if self._chosen is not None:
            return behind.ready(self._chosen)[:room]
        chunks = behind.all()
        return chunks[np.argsort(-self._shelves.values(chunks, now), kind="stable")[:room]]
