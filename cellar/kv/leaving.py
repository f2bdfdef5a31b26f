"""Leaving: which chunks may leave which tier.

A slot of a tier that nobody uses is in one of three classes:

    spare   it may go first: the next tier has the chunk, or the device is using its own copy of it
    only    it may go after those; what is lost by that is the chunk, or the faster way to it
    kept    it stays, because a cached chunk of a faster tier relies on it
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.kv.candidates import Candidates
from cellar.kv.conversations import Conversations
from cellar.kv.directory import Directory
from cellar.kv.policy import Policy
from cellar.kv.pool import Chunks, SlotPool, Slots
from cellar.kv.states import RESIDENT, SAVING

_KEPT, _SPARE, _ONLY = 0, 1, 2


def resident(directory: Directory, pools: Sequence[SlotPool], tier: int, chunks: Chunks) -> NDArray[np.bool_]:
    """Which of `chunks` a tier has, whole."""
    slots = directory.slot[tier].take(chunks)
    state = pools[tier].state.take(slots)
    found: NDArray[np.bool_] = (slots >= 0) & ((state == RESIDENT) | (state == SAVING))
    return found


class Leaving:
    """Of the chunks of a directory of `capacity` in the slots of `pools`, one for each tier."""

    def __init__(
        self,
        pools: Sequence[SlotPool],
        directory: Directory,
        conversations: Conversations,
        policy: Policy,
        capacity: int,
    ) -> None:
        self._pools = pools
        self._directory = directory
        self._spare, self._only = (
            [Candidates(capacity, directory, conversations, policy) for _ in pools] for _ in range(2)
        )
        self._class = np.zeros((len(pools), capacity), np.int8)
        self._doubtful: list[Chunks] = []  # whose classes are to be found out before somebody asks for them

    @property
    def spare(self) -> Sequence[Candidates]:
        """By tier, what may go first."""
        self.find_out()
        return self._spare

    @property
    def only(self) -> Sequence[Candidates]:
        """By tier, what may go after those."""
        self.find_out()
        return self._only

    def may(self, tier: int, slots: Slots) -> NDArray[np.bool_]:
        """Which slots could be reclaimed now."""
        self.find_out()
        chunks = self._pools[tier].chunk[slots]
        found: NDArray[np.bool_] = (chunks >= 0) & (self._class[tier, chunks] != _KEPT)
        return found

    def take(self, tier: int, count: int, now: float) -> Chunks:
        """The `count` chunks that go next: spare ones, then others. They are to lose their slots."""
        spare = min(count, len(self.spare[tier]))
        leaving = self._spare[tier].lowest(spare, now)
        leaving += self._only[tier].lowest(count - spare, now)
        chunks = np.array([chunk for _, chunk in leaving], np.int32)
        self._class[tier, chunks] = _KEPT
        return chunks

    def keep(self, tier: int, chunks: Chunks) -> None:
        """None of `chunks` may leave a tier, until they are classified."""
        kind = self._class[tier].take(chunks)
        if not kind.any():
            return
        for number, candidates in ((_SPARE, self._spare[tier]), (_ONLY, self._only[tier])):
            part = chunks[kind == number]
            if len(part):
                candidates.discard(part)
        self._class[tier, chunks] = _KEPT

    def classify(self, chunks: Chunks) -> None:
        """Which of `chunks` (distinct) may leave which tier is to be found out anew, by whoever asks next."""
        if len(chunks):
            self._doubtful.append(chunks)

    def find_out(self) -> None:
        """Do that: for all at once, as one change after another touches the same chunks. What is called first pays for
        those before it, so whoever has the time does it.
        """
        if not self._doubtful:
            return
        doubtful, self._doubtful = self._doubtful, []
        chunks = doubtful[0] if len(doubtful) == 1 else np.unique(np.concatenate(doubtful))
        for tier, pool in enumerate(self._pools):
            kind = self._kinds(tier, pool, chunks)
            changed = self._class[tier].take(chunks) != kind
            if changed.any():
                other, kind = chunks[changed], kind[changed]
                self.keep(tier, other)
                for number, candidates in ((_SPARE, self._spare[tier]), (_ONLY, self._only[tier])):
                    part = other[kind == number]
                    if len(part):
                        candidates.add(part)
                self._class[tier, other] = kind

    def _kinds(self, tier: int, pool: SlotPool, chunks: Chunks) -> NDArray[np.int8]:
        slots = self._directory.slot[tier].take(chunks)
        idle = (slots >= 0) & (pool.state.take(slots) == RESIDENT) & pool.unused(slots)
        kind = np.where(idle, np.int8(_ONLY), np.int8(_KEPT))
        if len(self._pools) > 1 and idle.any():
            kind[idle] = self._of_idle(tier, chunks[idle])
        return kind

    def _of_idle(self, tier: int, chunks: Chunks) -> NDArray[np.int8]:
        """Of chunks that a tier holds and nobody uses there."""
        directory, pools, below = self._directory, self._pools, tier + 1
        slower = resident(directory, pools, below, chunks) if below < len(pools) else np.zeros(len(chunks), np.bool_)
        if tier == 0:
            return np.where(slower, np.int8(_SPARE), np.int8(_ONLY))
        above = directory.slot[0].take(chunks)
        in_use = (above >= 0) & (pools[0].references.take(above) > 0)
        relied_on = (directory.slot[:tier, chunks] >= 0).any(0)
        # What a faster tier relies on stays, though a slower one has it: else it would be copied here again at once.
        rest = np.where(relied_on, np.int8(_KEPT), np.where(slower, np.int8(_SPARE), np.int8(_ONLY)))
        return np.where(in_use, np.int8(_SPARE), rest)

    def check(self, there: Chunks) -> None:
        """Raise IntegrityError unless the classes are those of all chunks that are `there`."""
        self.find_out()
        for tier, pool in enumerate(self._pools):
            kind = np.zeros(self._class.shape[1], np.int8)
            kind[there] = self._kinds(tier, pool, there)
            if not np.array_equal(kind, self._class[tier]):
                raise IntegrityError(f"chunks of tier {pool.tier.name} are in the wrong class")
            self._spare[tier].check(kind == _SPARE)
            self._only[tier].check(kind == _ONLY)
