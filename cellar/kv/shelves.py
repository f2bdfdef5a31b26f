"""Shelves: which chunk lies in which tier, for whom, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import ChunkLabel, Tier
from cellar.kv.conversations import Conversations
from cellar.kv.costs import Floats
from cellar.kv.directory import Directory
from cellar.kv.leaving import Leaving, resident
from cellar.kv.policy import Policy
from cellar.kv.pool import Chunks, SlotPool, Slots
from cellar.kv.states import LOADING, PRIVATE, RESIDENT, State

NO_SLOTS: Slots = np.empty(0, np.int32)

AT_ONCE = 16
"""Slots that are reclaimed beyond those needed now, where nothing is lost by it, or they would be lost soon."""


class Shelves:
    """Tiers from the fastest to the slowest; `num_slots` says how many chunks each holds. Tier 0 is the device."""

    def __init__(self, num_slots: Mapping[Tier, int], policy: Policy) -> None:
        self.tiers = tuple(sorted(num_slots))
        self.pools = [SlotPool(tier, num_slots[tier]) for tier in self.tiers]
        self.device = self.pools[0]  # where chunks are computed and read
        capacity = sum(num_slots.values())
        self.directory = Directory(capacity, len(self.tiers))
        self.conversations = Conversations(policy.next_turns)

        self.leaving = Leaving(self.pools, self.directory, self.conversations, policy, capacity)
        self._policy = policy
        # The first tier that outlives the process; past the last one if there is none.
        self.persistent = next((k for k, tier in enumerate(self.tiers) if tier.persistent), len(self.tiers))

    def num_available(self, tier: int) -> int:
        """Slots that `take` could hand out."""
        return self.pools[tier].num_free + len(self.leaving.spare[tier]) + len(self.leaving.only[tier])

    def num_without_loss(self, slots: Slots) -> int:
        """Slots of the device that could be taken so that no chunk is lost by it, beside `slots`, which somebody uses
        from now on.
        """
        chunks, spare = self.device.chunk[slots], self.leaving.spare[0]
        return self.device.num_free + len(spare) - int(np.count_nonzero(spare.has(chunks[chunks >= 0])))

    # -- slots ------------------------------------------------------------------------------------

    def take(self, tier: int, count: int, state: int, now: float) -> Slots | None:
        """`count` slots, or None (and no change) if fewer are available. Free ones go first, then by value."""
        if count > self.num_available(tier):
            return None
        missing = count - self.pools[tier].num_free
        if missing > 0:
            self.reclaim(tier, missing + self._more(tier, missing), now)
        return self.pools[tier].take(count, state)

    def _more(self, tier: int, missing: int) -> int:
        """Slots that are reclaimed with those needed now: a choice costs much the same for one or for many.

        What a slower tier may yet get stays; and in a tier that outlives the process all, since what is cleared there
        lies there until it is written over, and nobody could erase it then.
        """
        if self.tiers[tier].persistent:
            return 0
        last = tier + 1 == len(self.tiers)
        rest = len(self.leaving.spare[tier]) + (len(self.leaving.only[tier]) if last else 0) - missing
        return max(0, min(rest, AT_ONCE, self.pools[tier].num_slots // 64))

    def reclaim(self, tier: int, count: int, now: float) -> None:
        """`count` slots become free: of spare chunks, then of others, which are lost there."""
        self.clear(tier, self.leaving.take(tier, count, now))

    def clear(self, tier: int, chunks: Chunks, erase: bool = False) -> None:
        """Chunks lose their slots in a tier; those without any other are gone. Slots that nobody uses are free.

        With `erase` a tier that outlives the process must first say that it has nothing left of them; without it the
        slots are about to be written anew.
        """
        if not len(chunks):
            return
        pool, directory = self.pools[tier], self.directory
        self.leaving.keep(tier, chunks)
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
        self.leaving.classify(chunks[~gone])

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

    def hold(self, slots: Slots) -> None:
        """A sequence uses slots of the device that hold chunks."""
        if len(slots):
            self.device.hold(slots)
            self.leaving.classify(self.device.chunk[slots])

    def drop(self, slots: Slots) -> None:
        """A sequence uses slots of the device no more."""
        self.device.drop(slots)
        self.leaving.classify(self.vacated(0, slots))

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
        return resident(self.directory, self.pools, tier, chunks)

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
            self.leaving.keep(tier, chunks)
        self.directory.audience[chunks] = audience
        self.conversations.count(audience, len(chunks))
        self.conversations.count(before, -len(chunks))
        self.leaving.classify(chunks)

    # -- checks -----------------------------------------------------------------------------------

    def check(self, references: NDArray[np.int32] | None, pins: list[NDArray[np.int32]]) -> None:
        """Raise IntegrityError unless slots, chunks, classes and audiences agree, and (if given) `references` of the
        device's slots and `pins` of each tier's are true.
        """
        directory = self.directory
        directory.check()
        there = np.flatnonzero((directory.slot >= 0).any(0)).astype(np.int32)
        self.conversations.check(directory.audience[there])
        for tier, pool in enumerate(self.pools):
            pool.check(references if tier == 0 else np.zeros(pool.num_slots, np.int32), pins[tier])
            held = np.flatnonzero(pool.chunk >= 0)
            if not np.array_equal(directory.slot[tier, pool.chunk[held]], held) or len(held) != int(
                (directory.slot[tier] >= 0).sum()
            ):
                raise IntegrityError(f"chunks and slots of tier {pool.tier.name} do not map one to one")
        self.leaving.check(there)
