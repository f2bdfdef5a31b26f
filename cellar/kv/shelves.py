"""Shelves: which chunk lies in which tier, and which may leave.

A slot of a tier that nobody uses is in one of three classes:

    spare   it may go first: the next tier has the chunk, or the device is using its own copy of it
    only    it may go after those; what is lost by that is the chunk, or the faster way to it
    kept    it stays, because a cached chunk of a faster tier relies on it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import ChunkLabel, Tier
from cellar.kv.candidates import Candidates
from cellar.kv.conversations import Conversations
from cellar.kv.costs import Floats
from cellar.kv.directory import Directory
from cellar.kv.policy import Policy
from cellar.kv.pool import Chunks, SlotPool, Slots
from cellar.kv.states import LOADING, PRIVATE, RESIDENT, SAVING, State

NO_SLOTS: Slots = np.empty(0, np.int32)

AT_ONCE = 16
"""Slots that are reclaimed beyond those needed now, if nothing is lost by it."""

_KEPT, _SPARE, _ONLY = 0, 1, 2


class Shelves:
    """Tiers from the fastest to the slowest; `num_slots` says how many chunks each holds. Tier 0 is the device."""

    def __init__(self, num_slots: Mapping[Tier, int], policy: Policy) -> None:
        self.tiers = tuple(sorted(num_slots))
        self.pools = [SlotPool(tier, num_slots[tier]) for tier in self.tiers]
        self.device = self.pools[0]  # where chunks are computed and read
        capacity = sum(num_slots.values())
        self.directory = Directory(capacity, len(self.tiers))
        self.conversations = Conversations(policy.next_turns)

        def candidates() -> Candidates:
            return Candidates(capacity, self.directory, self.conversations, policy)

        self._spare = [candidates() for _ in self.tiers]
        self._only = [candidates() for _ in self.tiers]
        self._policy = policy
        self._class = np.zeros((len(self.tiers), capacity), np.int8)
        self._doubtful: list[Chunks] = []  # whose classes are to be found out before somebody asks for them
        # The first tier that outlives the process; past the last one if there is none.
        self.persistent = next((k for k, tier in enumerate(self.tiers) if tier.persistent), len(self.tiers))

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

    def num_available(self, tier: int) -> int:
        """Slots that `take` could hand out."""
        return self.pools[tier].num_free + len(self.spare[tier]) + len(self.only[tier])

    def num_without_loss(self, slots: Slots) -> int:
        """Slots of the device that could be taken so that no chunk is lost by it, beside `slots`, which somebody uses
        from now on.
        """
        chunks, spare = self.device.chunk[slots], self.spare[0]
        used = int(np.count_nonzero(self._class[0, chunks[chunks >= 0]] == _SPARE))
        return self.device.num_free + len(spare) - used

    # -- slots ------------------------------------------------------------------------------------

    def take(self, tier: int, count: int, state: int, now: float) -> Slots | None:
        """`count` slots, or None (and no change) if fewer are available. Free ones go first, then by value."""
        if count > self.num_available(tier):
            return None
        missing = count - self.pools[tier].num_free
        if missing > 0:
            # Of those that a slower tier has, too, some more at once: a choice costs much the same for one or for many.
            more = min(len(self.spare[tier]) - missing, AT_ONCE, self.pools[tier].num_slots // 64)
            self.reclaim(tier, missing + max(0, more), now)
        return self.pools[tier].take(count, state)

    def reclaim(self, tier: int, count: int, now: float) -> None:
        """`count` slots become free: of spare chunks, then of others, which are lost there."""
        spare = min(count, len(self.spare[tier]))
        leaving = self.spare[tier].lowest(spare, now)
        leaving += self.only[tier].lowest(count - spare, now)
        chunks = np.array([chunk for _, chunk in leaving], np.int32)
        self._class[tier, chunks] = _KEPT
        self.clear(tier, chunks)

    def clear(self, tier: int, chunks: Chunks, erase: bool = False) -> None:
        """Chunks lose their slots in a tier; those without any other are gone. Slots that nobody uses are free.

        With `erase` a tier that outlives the process must first say that it has nothing left of them; without it the
        slots are about to be written anew.
        """
        if not len(chunks):
            return
        pool, directory = self.pools[tier], self.directory
        self._declassify(tier, chunks)
        slots = directory.slot[tier, chunks]
        directory.slot[tier, chunks] = -1
        pool.chunk[slots] = -1
        unused = pool.unused(slots)
        if erase:
            pool.vacate(slots[unused])
        else:
            pool.give_back(slots[unused])
        # A slot that a copy is writing stays LOADING until the copy ends, unless a sequence waits for it.
        kept = slots[~unused]
        loading = (pool.state[kept] == LOADING) & (pool.references[kept] == 0)
        pool.move(kept[~loading & (pool.state[kept] != PRIVATE)], PRIVATE)
        gone = (directory.slot[:, chunks] < 0).all(0)
        for chunk in chunks[gone].tolist():
            self.conversations.count(int(directory.audience[chunk]), -1)
            directory.remove(chunk)
        self.classify(chunks[~gone])

    def settle(self, slots: Slots, chunks: Chunks) -> None:
        """Private slots of the device hold these chunks from now on."""
        device = self.device
        if (wrong := slots[device.state[slots] != PRIVATE]).size:
            name = State(device.state[wrong[0]]).name
            raise IntegrityError(f"slot {wrong[0]} gets an identity, but is {name}")
        device.state[slots] = RESIDENT
        device.chunk[slots] = chunks
        self.directory.slot[0, chunks] = slots

    def expect(self, slots: Slots, chunks: Chunks) -> None:
        """Loading slots of the device are going to hold these chunks."""
        self.device.chunk[slots] = chunks
        self.directory.slot[0, chunks] = slots

    def may_leave(self, tier: int, slots: Slots) -> NDArray[np.bool_]:
        """Which slots could be reclaimed now."""
        self.find_out()
        chunks = self.pools[tier].chunk[slots]
        found: NDArray[np.bool_] = (chunks >= 0) & (self._class[tier, chunks] != _KEPT)
        return found

    def hold(self, slots: Slots) -> None:
        """A sequence uses slots of the device that hold chunks."""
        if len(slots):
            self.device.hold(slots)
            self.classify(self.device.chunk[slots])

    def drop(self, slots: Slots) -> None:
        """A sequence uses slots of the device no more."""
        self.device.drop(slots)
        self.classify(self.vacated(0, slots))

    def remove(self, chunks: Chunks) -> None:
        """Chunks are gone from every tier."""
        for tier in range(len(self.tiers)):
            self.clear(tier, chunks[self.directory.slot[tier, chunks] >= 0], erase=True)

    def vacated(self, tier: int, slots: Slots) -> Chunks:
        """A use of `slots` has ended: those that hold no chunk and have no other user are free. -> what the others
        hold, which is to be classified.
        """
        pool = self.pools[tier]
        pool.vacate(slots[pool.unused(slots) & (pool.state[slots] == PRIVATE)])
        chunks: Chunks = pool.chunk[slots]
        return chunks[chunks >= 0]

    # -- chunks -----------------------------------------------------------------------------------

    def resident(self, tier: int, chunks: Chunks) -> NDArray[np.bool_]:
        """Which of `chunks` a tier has, whole."""
        slots = self.directory.slot[tier].take(chunks)
        state = self.pools[tier].state.take(slots)
        found: NDArray[np.bool_] = (slots >= 0) & ((state == RESIDENT) | (state == SAVING))
        return found

    def values(self, chunks: Chunks, now: float) -> Floats:
        """What it is worth to keep each chunk, by the policy."""
        found: Floats = self._policy.cost(self.directory.end[chunks]) * self.weights(chunks, now)
        return found

    def weights(self, chunks: Chunks, now: float) -> Floats:
        """How soon whoever each chunk belongs to is likely to go on, by the policy."""
        audiences = self.directory.audience[chunks].astype(np.intp)
        talks = self.conversations
        found: Floats = self._policy.weight(talks.idle(audiences, now), talks.turns(audiences))
        return found * talks.scale(audiences, now)

    def labels(self, chunks: Chunks) -> tuple[ChunkLabel, ...]:
        """What chunks are, for those who come after this process."""
        directory, conversations = self.directory, self.conversations
        owners = {a: conversations.owner(a) for a in np.unique(directory.audience[chunks]).tolist()}
        return tuple(
            ChunkLabel(
                identity=directory.identity(chunk),
                parent=directory.parent(chunk),
                end=int(directory.end[chunk]),
                owner=owners[int(directory.audience[chunk])],
                tokens=directory.tail_tokens(chunk),
            )
            for chunk in chunks.tolist()
        )

    def share(self, chunks: Chunks, conversation: int, now: float) -> None:
        """Chunks belong to a conversation as well."""
        audiences = self.directory.audience[chunks]
        for audience in np.unique(audiences).tolist():
            wider = self.conversations.widened(audience, conversation, now)
            if wider != audience:
                self._belong(chunks[audiences == audience], audience, wider)

    def held_by(self, conversation: int) -> Chunks:
        """Chunks of a conversation, shared ones too."""
        audiences = self.conversations.shared_by(conversation)
        return np.flatnonzero(np.isin(self.directory.audience, audiences)).astype(np.int32)

    def withdraw(self, conversation: int, keep: Chunks = NO_SLOTS) -> None:
        """A conversation has no chunks any more but those to `keep`: what no other shares is gone from every tier."""
        for audience in self.conversations.shared_by(conversation):
            chunks = np.flatnonzero(self.directory.audience == audience).astype(np.int32)
            chunks = chunks[~np.isin(chunks, keep)]
            rest = self.conversations.narrowed(audience, conversation)
            if rest < 0:
                self.remove(chunks)
            else:
                self._belong(chunks, audience, rest)

    def _belong(self, chunks: Chunks, before: int, audience: int) -> None:
        """Chunks of one audience are another's from now on."""
        for tier in range(len(self.tiers)):
            self._declassify(tier, chunks)
        self.directory.audience[chunks] = audience
        self.conversations.count(audience, len(chunks))
        self.conversations.count(before, -len(chunks))
        self.classify(chunks)

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
        directory, pools = self.directory, self.pools
        for tier, pool in enumerate(pools):
            slots = directory.slot[tier].take(chunks)
            idle = (slots >= 0) & (pool.state.take(slots) == RESIDENT) & pool.unused(slots)
            kind = np.where(idle, np.int8(_ONLY), np.int8(_KEPT))
            if len(pools) > 1 and idle.any():
                kind[idle] = self._classes(tier, chunks[idle])
            changed = self._class[tier].take(chunks) != kind
            if changed.any():
                chunks_, kind = (chunks, kind) if changed.all() else (chunks[changed], kind[changed])
                self._declassify(tier, chunks_)
                for number, candidates in ((_SPARE, self._spare[tier]), (_ONLY, self._only[tier])):
                    part = chunks_[kind == number]
                    if len(part):
                        candidates.add(part)
                self._class[tier, chunks_] = kind

    def _classes(self, tier: int, chunks: Chunks) -> NDArray[np.int8]:
        """Of chunks that a tier holds and nobody uses there."""
        below = tier + 1
        slower = self.resident(below, chunks) if below < len(self.tiers) else np.zeros(len(chunks), np.bool_)
        if tier == 0:
            return np.where(slower, np.int8(_SPARE), np.int8(_ONLY))
        above = self.directory.slot[0].take(chunks)
        in_use = (above >= 0) & (self.device.references.take(above) > 0)
        relied_on = (self.directory.slot[:tier, chunks] >= 0).any(0)
        # What a faster tier relies on stays, though a slower one has it: else it would be copied here again at once.
        rest = np.where(relied_on, np.int8(_KEPT), np.where(slower, np.int8(_SPARE), np.int8(_ONLY)))
        return np.where(in_use, np.int8(_SPARE), rest)

    def _declassify(self, tier: int, chunks: Chunks) -> None:
        kind = self._class[tier].take(chunks)
        if not kind.any():
            return  # all are kept
        for number, candidates in ((_SPARE, self._spare[tier]), (_ONLY, self._only[tier])):
            part = chunks[kind == number]
            if len(part):
                candidates.discard(part)
        self._class[tier, chunks] = _KEPT

    # -- checks -----------------------------------------------------------------------------------

    def check(self, references: NDArray[np.int32] | None, pins: list[NDArray[np.int32]]) -> None:
        """Raise IntegrityError unless slots, chunks, classes and audiences agree, and (if given) `references` of the
        device's slots and `pins` of each tier's are true.
        """
        directory = self.directory
        directory.check()
        self.find_out()
        there = np.flatnonzero((directory.slot >= 0).any(0)).astype(np.int32)
        self.conversations.check(directory.audience[there])
        for tier, pool in enumerate(self.pools):
            pool.check(references if tier == 0 else np.zeros(pool.num_slots, np.int32), pins[tier])
            held = np.flatnonzero(pool.chunk >= 0)
            if not np.array_equal(directory.slot[tier, pool.chunk[held]], held) or len(held) != int(
                (directory.slot[tier] >= 0).sum()
            ):
                raise IntegrityError(f"chunks and slots of tier {pool.tier.name} do not map one to one")
            kind = np.zeros(directory.slot.shape[1], np.int8)
            idle = there[
                (directory.slot[tier, there] >= 0)
                & (pool.state[directory.slot[tier, there]] == RESIDENT)
                & pool.unused(directory.slot[tier, there])
            ]
            kind[idle] = self._classes(tier, idle)
            if not np.array_equal(kind, self._class[tier]):
                raise IntegrityError(f"chunks of tier {pool.tier.name} are in the wrong class")
            self.spare[tier].check(kind == _SPARE)
            self.only[tier].check(kind == _ONLY)
