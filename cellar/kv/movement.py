"""Movement: which chunks are copied between tiers, and what has come of it. Orders leave as CopyBatches.

Outwards, chunks of least value are copied ahead of time while fewer than a quarter of a tier's slots could be reclaimed
without loss (Pensieve §3.4.3.2); their slots are reclaimed lazily. Inwards, a request's chunks are loaded into slots
that are its own already. A slot that a copy reads or writes is pinned until its result comes, whoever ends meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import CopyBatch, CopyResult
from cellar.kv.pool import Chunks, Slots
from cellar.kv.shelves import Shelves
from cellar.kv.states import LOADING, PRIVATE, RESIDENT, SAVING

RECLAIMABLE_SHARE = 0.25
"""Of a tier's slots: below it, chunks are copied to the next tier (Pensieve §3.4.3.2)."""


@dataclass(frozen=True, slots=True)
class Moving:
    """A batch under way: tiers by their place on the shelves; chunk -1 for a copy into a slot that is one row's own."""

    batch: CopyBatch
    source: int
    target: int
    chunks: Chunks


@dataclass(slots=True)
class Moved:
    """What has come from a tier, and gone to it: chunks, and the seconds that took."""

    loaded: int = 0
    saved: int = 0
    failed: int = 0
    load_seconds: float = 0.0
    save_seconds: float = 0.0


class Movement:
    """`max_batch` chunks at most leave a tier with one order, so that a load never waits behind a long one."""

    def __init__(self, shelves: Shelves, max_batch: int = 64) -> None:
        self._shelves = shelves
        self._max_batch = max_batch
        self._orders: list[CopyBatch] = []
        self._moving: dict[int, Moving] = {}
        self._loading: dict[int, int] = {}  # slot of the device -> batch that fills it
        self._numbers = 0
        self.moved = [Moved() for _ in shelves.tiers]

    @property
    def num_moving(self) -> int:
        """Batches whose result has not come."""
        return len(self._moving)

    @property
    def num_returning(self) -> int:
        """Slots of the device that nobody but a copy uses."""
        device = self._shelves.device
        return sum(
            int(np.count_nonzero(device.references[slots] == 0))
            for moving in self._moving.values()
            for tier, slots in ((moving.source, moving.batch.source_slots), (moving.target, moving.batch.target_slots))
            if tier == 0
        )

    def orders(self) -> Sequence[CopyBatch]:
        """What was decided since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def fills(self, slot: int) -> int:
        """The batch that fills a slot of the device, or -1."""
        return self._loading.get(slot, -1)

    def load(self, source: int, source_slots: Slots, target_slots: Slots, chunks: Chunks) -> int:
        """Fill slots of the device, which are LOADING, from any tier; -> the batch."""
        number = self._order(source, source_slots, 0, target_slots, chunks)
        for slot in target_slots.tolist():
            self._loading[slot] = number
        held = self._shelves.pools[source].chunk[source_slots]
        self._shelves.classify(held[held >= 0])
        return number

    # -- outwards ---------------------------------------------------------------------------------

    def balance(self, now: float) -> None:
        """Copy ahead of time what will have to leave soon."""
        for tier in range(len(self._shelves.tiers) - 1):
            pool, only = self._shelves.pools[tier], self._shelves.only[tier]
            safe = pool.num_free + len(self._shelves.spare[tier])
            missing = int(RECLAIMABLE_SHARE * pool.num_slots) - safe
            if missing > 0:
                missing -= self._num_leaving(tier)
            if missing > 0 and len(only):
                # Some more than are missing, if the tier is large, so that not every step has to decide.
                count = max(missing, min(self._max_batch, pool.num_slots // 64))
                self._save(tier, only.lowest(min(count, len(only), self._max_batch), now), now)

    def _num_leaving(self, tier: int) -> int:
        """Chunks on their way out whose slots could be reclaimed then."""
        pool = self._shelves.pools[tier]
        return sum(
            int(np.count_nonzero(pool.references[moving.batch.source_slots] == 0))
            for moving in self._moving.values()
            if moving.source == tier < moving.target
        )

    def save(self, slots: Slots, now: float) -> None:
        """Copy chunks of the device that nothing else holds to the next tier at once, as far as there is room."""
        shelves = self._shelves
        chunks = shelves.device.chunk[slots]
        chunks = chunks[chunks >= 0]
        chunks = chunks[shelves.only[0].has(chunks)]
        if len(shelves.tiers) > 1 and len(chunks):
            shelves.only[0].discard(chunks)
            self._save(0, [(np.inf, chunk) for chunk in chunks.tolist()], now)

    def _save(self, tier: int, leaving: list[tuple[float, int]], now: float) -> None:
        """Copy chunks, least value first, that were just taken from those which may leave.

        The most valuable get a slot first. A chunk that is worth less than all that it could displace is not copied:
        it stays where it is until its slot is needed.
        """
        shelves, below = self._shelves, tier + 1
        pool = shelves.pools[below]
        easy = min(len(leaving), pool.num_free + len(shelves.spare[below]))
        rest = leaving[: len(leaving) - easy]
        displaced = shelves.only[below].lowest(min(len(rest), len(shelves.only[below])), now)
        won = 0
        while won < len(displaced) and displaced[won][0] < rest[len(rest) - 1 - won][0]:
            won += 1
        lost = np.array([chunk for _, chunk in displaced], np.int32)
        shelves.only[below].add(lost)
        shelves.clear(below, lost[:won])
        saved = np.array([chunk for _, chunk in leaving[len(rest) - won :]], np.int32)
        shelves.only[tier].add(np.array([chunk for _, chunk in leaving], np.int32))
        if not len(saved):
            return
        targets = shelves.take(below, len(saved), LOADING, now)
        if targets is None:
            raise IntegrityError(f"{len(saved)} slots of tier {pool.tier.name} were counted, but could not be taken")
        sources = shelves.directory.slot[tier, saved]
        shelves.pools[below].chunk[targets] = saved
        shelves.directory.slot[below, saved] = targets
        shelves.pools[tier].move(sources, SAVING)
        self._order(tier, sources, below, targets, saved)
        shelves.classify(saved)

    # -- results ----------------------------------------------------------------------------------

    def commit(self, result: CopyResult) -> Slots:
        """Take in a result; -> slots of the device that sequences wait for and that hold nothing."""
        moving = self._moving.pop(result.number, None)
        if moving is None or len(result.ok) != len(moving.batch):
            raise IntegrityError(f"the result of batch {result.number} came, which is not under way")
        shelves, batch = self._shelves, moving.batch
        source, target = shelves.pools[moving.source], shelves.pools[moving.target]
        self._count(moving, result)
        source.pins[batch.source_slots] -= 1
        target.pins[batch.target_slots] -= 1
        ok, chunks = np.asarray(result.ok, np.bool_), moving.chunks
        if moving.target == 0:
            for slot in batch.target_slots.tolist():
                del self._loading[slot]
        else:
            saving = batch.source_slots[source.state[batch.source_slots] == SAVING]
            source.move(saving, RESIDENT)
        failed = self._arrive(moving, ok)
        if moving.target == 0 and moving.source > 0:
            # What could not be read is not there.
            lost = source.chunk[batch.source_slots[~ok]]
            shelves.clear(moving.source, lost[lost >= 0])
        shelves.let_go(moving.source, batch.source_slots)
        shelves.let_go(moving.target, batch.target_slots)
        left = chunks[chunks >= 0]
        shelves.classify(left[(shelves.directory.slot[:, left] >= 0).any(0)])
        return failed

    def _count(self, moving: Moving, result: CopyResult) -> None:
        arrived = int(np.count_nonzero(result.ok))
        if moving.target == 0:
            moved = self.moved[moving.source]
            moved.loaded += arrived
            moved.load_seconds += result.seconds
        else:
            moved = self.moved[moving.target]
            moved.saved += arrived
            moved.save_seconds += result.seconds
        moved.failed += len(result.ok) - arrived

    def _arrive(self, moving: Moving, ok: NDArray[np.bool_]) -> Slots:
        """Settle the slots that a batch has written; -> those that somebody waits for in vain."""
        shelves, slots = self._shelves, moving.batch.target_slots
        pool = shelves.pools[moving.target]
        mine = (moving.chunks >= 0) & (pool.chunk[slots] == moving.chunks)  # not forgotten meanwhile
        pool.move(slots[mine & ok], RESIDENT)
        shelves.clear(moving.target, moving.chunks[mine & ~ok])
        private = slots[~mine]
        private = private[pool.state[private] == LOADING]
        pool.move(private[pool.references[private] > 0], PRIVATE)
        pool.give_back(private[pool.references[private] == 0])
        # Nothing was written to a slot that was forgotten while somebody waited for it: it has no chunk, but its bytes.
        failed = slots[~ok & (pool.references[slots] > 0)]
        shelves.classify(moving.chunks[mine & ok])
        return failed

    def _order(self, source: int, source_slots: Slots, target: int, target_slots: Slots, chunks: Chunks) -> int:
        shelves = self._shelves
        number = self._numbers
        self._numbers += 1
        shelves.pools[source].pins[source_slots] += 1
        shelves.pools[target].pins[target_slots] += 1
        batch = CopyBatch(number, shelves.tiers[source], source_slots, shelves.tiers[target], target_slots)
        self._orders.append(batch)
        self._moving[number] = Moving(batch, source, target, chunks)
        return number

    def pins(self) -> list[NDArray[np.int32]]:
        """How many copies use each slot of each tier, counted anew."""
        counted = [np.zeros(pool.num_slots, np.int32) for pool in self._shelves.pools]
        for moving in self._moving.values():
            np.add.at(counted[moving.source], moving.batch.source_slots, 1)
            np.add.at(counted[moving.target], moving.batch.target_slots, 1)
        return counted
