"""Foreign: chunks that other engines have written to a shared tier get places on the shelves when they are found.

    missing(tokens) -> what a sequence needs and no tier of ours has -> somebody asks the tier -> adopt(what is there)

A chunk that was found counts as the asking conversation's own: it is forgotten with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import ChunkLabel, Tier
from cellar.kv.identity import Chain, owner_identity
from cellar.kv.pool import Slots
from cellar.kv.restored import enter
from cellar.kv.shelves import NO_SLOTS, Shelves
from cellar.kv.states import LOADING, RESIDENT

_SHARE = 2
"""Of a tier's slots, one in so many at most are given to what one sequence has found."""


@dataclass(frozen=True, slots=True)
class Missing:
    """What to ask a shared tier for: whole chunks, leading first, and `parents` after which there may be a tail."""

    labels: tuple[ChunkLabel, ...] = ()
    parents: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.labels or self.parents)


class Foreign:
    """What a sequence lacks, and what a shared tier has of it. `chain` makes an empty chain for a salt."""

    def __init__(self, shelves: Shelves, chunk_size: int, chain: Callable[[bytes], Chain]) -> None:
        self._shelves = shelves
        self._chunk_size = chunk_size
        self._chain = chain

    def missing(self, tokens: NDArray[np.int32], salt: bytes, name: str | None) -> Missing:
        """Of a sequence of `tokens` [n] of the conversation `name`, what lies nowhere; its last token is to be computed
        anyhow.
        """
        directory, size, chain = self._shelves.directory, self._chunk_size, self._chain(salt)
        owner = b"" if name is None else owner_identity(salt, name)
        end = len(tokens) - 1
        identities = chain.grow(tokens, max(0, end // size))
        nowhere = np.flatnonzero(directory.find(identities) < 0).tolist()
        labels = tuple(ChunkLabel(identities[k], chain.parent(k), (k + 1) * size, owner) for k in nowhere)
        parents = []
        for k in nowhere + ([end // size] if end > 0 and end % size else []):
            held = tokens[k * size : min((k + 1) * size, end)].tobytes()
            if directory.find_tail(chain.parent(k), held)[0] < 0:
                parents.append(chain.parent(k))
        return Missing(labels, tuple(parents))

    def adopt(self, tier: Tier, labels: Sequence[ChunkLabel], now: float) -> tuple[Slots, tuple[ChunkLabel, ...]]:
        """Give chunks that a tier has its slots; -> both. What is known, or has no room, is left out."""
        shelves, number = self._shelves, self._shelves.tiers.index(tier)
        directory, pool = shelves.directory, shelves.pools[number]
        room = min(shelves.num_available(number), max(1, pool.num_slots // _SHARE))
        unknown = {label.identity: label for label in labels if directory.get(label.identity) < 0}
        taken = dict(list(unknown.items())[:room])
        slots = shelves.take(number, len(taken), LOADING, now) if taken else None
        if slots is None:
            return NO_SLOTS, ()
        numbers = enter(shelves, taken, dict.fromkeys(taken, 0.0), now)
        chunks = np.array([numbers[identity] for identity in taken], np.int32)
        pool.chunk[slots] = chunks
        directory.slot[number, chunks] = slots
        pool.move(slots, RESIDENT)
        for label in taken.values():
            before = directory.get(label.parent)
            if before >= 0 and not label.tokens:
                directory.grown[before] = True
        shelves.leaving.classify(chunks)
        return slots, tuple(taken.values())
