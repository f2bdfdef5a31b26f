"""Movement: which chunks are copied between tiers, and what has come of it. Orders leave as CopyBatches.

Outwards, chunks of least value are copied ahead of time while fewer than a quarter of a tier's slots could be reclaimed
without loss (Pensieve §3.4.3.2); their slots are reclaimed lazily. To a tier that outlives the process go, besides, all
chunks that have come to rest. Inwards, a request's chunks are loaded into slots that are its own already. A slot that a
copy reads or writes is pinned until its result comes, whoever ends meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import ChunkLabel, CopyBatch, CopyResult, EraseBatch, TierOrder
from cellar.kv.behind import WriteBehind, sources
from cellar.kv.links import Link
from cellar.kv.pool import Chunks, Slots
from cellar.kv.shelves import NO_SLOTS, Shelves
from cellar.kv.states import ERASING, LOADING, PRIVATE, RESIDENT, SAVING

RECLAIMABLE_SHARE = 0.25
"""Of a tier's slots: below it, chunks are copied to the next tier (Pensieve §3.4.3.2)."""

_WAITING_SHARE = 16
"""One in so many slots of the device may wait for a tier that is not memory, which may be slow, or behind loads, which
go first: less than is kept free for decodes (§3.4.3.5), which get no slot that a copy reads."""

_PAUSE_SECONDS = (1.0, 60.0)
"""A tier that could keep nothing of a batch is given no other for so long, at first and at most."""


@dataclass(frozen=True, slots=True)
class Moving:
    """A batch under way: tiers by their place on the shelves; chunk -1 for a copy into a slot that is one row's own."""

    batch: CopyBatch
    source: int
    target: int
    chunks: Chunks


@dataclass(slots=True)
class Moved:
    """What has come from a tier, and gone to it: chunks, bytes, and the seconds that took."""

    loaded: int = 0
    saved: int = 0
    failed: int = 0
    load_nbytes: int = 0
    save_nbytes: int = 0
    load_seconds: float = 0.0
    save_seconds: float = 0.0


class Movement:
    """`max_batch` chunks at most leave a tier with one order, so that a load never waits behind a long one."""

    def __init__(self, shelves: Shelves, max_batch: int = 64) -> None:
        self._shelves = shelves
        self._max_batch = max_batch
        self.behind = WriteBehind(shelves)
        self._orders: list[TierOrder] = []
        self._moving: dict[int, Moving] = {}
        self._loading: dict[int, int] = {}  # slot of the device -> batch that fills it
        self._erasing: dict[int, EraseBatch] = {}
        self._behind: set[int] = set()  # batches of chunks that have come to rest
        self._numbers = 0
        self._now = 0.0  # of the last decision
        self._closed_until = [0.0 for _ in shelves.tiers]
        self._pause = [0.0 for _ in shelves.tiers]
        self.moved = [Moved() for _ in shelves.tiers]
        self.links = [Link() for _ in shelves.tiers]  # of loads from each tier
        self.outwards = [Link() for _ in shelves.tiers]  # of copies to each tier

    @property
    def num_moving(self) -> int:
        """Batches whose result has not come."""
        return len(self._moving) + len(self._erasing)

    @property
    def num_erasing(self) -> int:
        """Slots of tiers that outlive the process with something left of a chunk that was forgotten."""
        return sum(
            int(np.count_nonzero((p.state == ERASING) | (p.state == PRIVATE) | ((p.state == LOADING) & (p.chunk < 0))))
            for p in self._shelves.pools
            if p.tier.persistent
        )

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

    def orders(self) -> Sequence[TierOrder]:
        """What was decided since the last call, with what is to be erased."""
        for tier, pool in enumerate(self._shelves.pools):
            if pool.to_erase and self._now >= self._closed_until[tier]:
                batch = EraseBatch(self._numbers, pool.tier, np.array(pool.to_erase, np.int32))
                self._numbers += 1
                pool.to_erase.clear()
                self._erasing[batch.number] = batch
                self._orders.append(batch)
        orders, self._orders = self._orders, []
        return orders

    def fills(self, slot: int) -> int:
        """The batch that fills a slot of the device, or -1."""
        return self._loading.get(slot, -1)

    def seconds_until(self, batch: int, now: float) -> float:
        """How long it will be until a load has come; 0 if it is not under way."""
        moving = self._moving.get(batch)
        return 0.0 if moving is None else self.links[moving.source].wait(now, batch)

    def load(
        self, source: int, source_slots: Slots, target_slots: Slots, chunks: Chunks, now: float, lead: float = 0.0
    ) -> int:
        """Fill slots of the device, which are LOADING, from any tier; -> the batch. `lead`: see CopyBatch."""
        number = self._order(source, source_slots, 0, target_slots, chunks, lead)
        self.links[source].ordered(number, len(source_slots), now)
        for slot in target_slots.tolist():
            self._loading[slot] = number
        held = self._shelves.pools[source].chunk[source_slots]
        self._shelves.leaving.classify(held[held >= 0])
        return number

    # -- outwards ---------------------------------------------------------------------------------

    def balance(self, now: float) -> None:
        """Copy ahead of time what will have to leave soon, and what has come to rest."""
        self._now = now
        for tier in range(len(self._shelves.tiers) - 1):
            pool, only = self._shelves.pools[tier], self._shelves.leaving.only[tier]
            safe = pool.num_free + len(self._shelves.leaving.spare[tier])
            missing = int(RECLAIMABLE_SHARE * pool.num_slots) - safe
            if missing > 0:
                missing -= self._num_leaving(tier)
            if missing > 0 and len(only) and now >= self._closed_until[tier + 1]:
                # Some more than are missing, if the tier is large, so that not every step has to decide.
                wanted = max(missing, min(self._max_batch, pool.num_slots // 64))
                leaving = only.lowest(min(wanted, len(only), self._room(tier, tier + 1)), now)
                only.add(np.array([chunk for _, chunk in leaving], np.int32))
                self._save(tier, tier + 1, leaving, now)
        self.persist(now, lambda room: self.behind.take(room, now))

    def _write(self, take: Callable[[int], Chunks], now: float) -> None:
        """Copy chunks to the first tier that outlives the process, the most valuable if there is not room for all."""
        shelves, target = self._shelves, self._shelves.persistent
        if target == len(shelves.tiers) or now < self._closed_until[target]:
            return
        chunks = take(self._room(0, target))
        if not len(chunks):
            return
        values, source = shelves.values(chunks, now), sources(shelves, chunks)
        order = np.argsort(values, kind="stable")
        for tier in np.unique(source).tolist():
            part = order[source[order] == tier]
            leaving = list(zip(values[part].tolist(), chunks[part].tolist(), strict=True))
            number = self._save(tier, target, leaving, now)
            if number >= 0:
                self._behind.add(number)

    def persist(self, now: float, take: Callable[[int], Chunks]) -> None:
        """Copy what `take` says, of at most so many chunks, to the first tier that outlives the process, unless such
        copies are under way.
        """
        self._now = now
        if not self._behind & self._moving.keys():
            self._behind.clear()
            self._write(take, now)

    def next_moment(self) -> float | None:
        """When something is to be decided, though nothing else happens; None: never."""
        moments = []
        due, target = self.behind.due_at(), self._shelves.persistent
        if due is not None:
            moments.append(max(due, self._closed_until[target]))
        moments += [self._closed_until[k] for k, pool in enumerate(self._shelves.pools) if pool.to_erase]
        return min(moments) if moments else None

    def puts_off(self, missing: int, most: int, again: float, loads: bool, now: float) -> bool:
        """Whether to take `missing` slots of the device later, when what they hold has been copied out, which has been
        ordered then, at most `most` chunks at once: what is copied is nobody's meanwhile, and decodes may need some.

        What would be lost is computed again in `again` seconds if its user comes back; whoever needs the slots waits.
        """
        if missing <= 0 or self._seconds_out(missing, loads, now) > again:
            return False
        leaving, only = self._num_leaving(0), self._shelves.leaving.only[0]
        count = min(missing - leaving, most, len(only), self._room(0, 1))
        if count > 0:
            lowest = only.lowest(count, now)
            only.add(np.array([chunk for _, chunk in lowest], np.int32))
            self._save(0, 1, lowest, now)
        return self._num_leaving(0) > 0

    def _seconds_out(self, missing: int, loads: bool, now: float) -> float:
        """How much longer somebody would wait until `missing` more slots of the device could be reclaimed without loss:
        until what is on its way out is there, and the rest. Loads go first; who `loads`, too, waits for them anyhow.

        inf: nobody can say, or the next tier is no memory, which may be slow, or takes nothing.
        """
        shelves = self._shelves
        if len(shelves.tiers) < 2 or shelves.tiers[1].persistent or now < self._closed_until[1]:
            return math.inf
        before, link = self.links[1], self.outwards[1]
        if not link.known or (before.is_busy and not before.known and not loads):
            return math.inf
        more = max(0, missing - self._num_leaving(0))
        return (0.0 if loads else before.wait(now)) + link.wait(now) + (link.seconds(more) if more else 0.0)

    def _room(self, tier: int, target: int) -> int:
        """Most chunks that may leave a tier with one order: those of the device do not wait in numbers."""
        shelves = self._shelves
        if tier > 0 or not (shelves.tiers[target].persistent or self._loading):
            return self._max_batch
        most = max(2, shelves.pools[tier].num_slots // _WAITING_SHARE)
        waiting = sum(len(m.batch) for m in self._moving.values() if m.source == 0 and m.target > 0)
        return max(0, min(self._max_batch, most - waiting))

    def _num_leaving(self, tier: int) -> int:
        """Chunks on their way out whose slots could be reclaimed then."""
        pool = self._shelves.pools[tier]
        return sum(
            int(np.count_nonzero(pool.references[moving.batch.source_slots] == 0))
            for moving in self._moving.values()
            if moving.source == tier and moving.target == tier + 1
        )

    def save(self, slots: Slots, now: float) -> None:
        """Copy chunks of the device that nothing else holds to the next tier at once, as far as there is room.

        Only to memory: to compute a chunk again is better than to wait for the device's slot until a disk has it.
        """
        shelves = self._shelves
        chunks = shelves.device.chunk[slots]
        chunks = chunks[chunks >= 0]
        chunks = chunks[shelves.leaving.only[0].has(chunks)]
        if len(shelves.tiers) > 1 and not shelves.tiers[1].persistent and len(chunks):
            self._save(0, 1, [(np.inf, chunk) for chunk in chunks.tolist()], now)

    def _save(self, tier: int, below: int, leaving: list[tuple[float, int]], now: float) -> int:
        """Copy chunks, least value first, to a slower tier; -> the batch, or -1.

        The most valuable get a slot first. A chunk that is worth less than all that it could displace is not copied:
        it stays where it is until its slot is needed.
        """
        shelves = self._shelves
        pool = shelves.pools[below]
        easy = min(len(leaving), pool.num_free + len(shelves.leaving.spare[below]))
        rest = leaving[: len(leaving) - easy]
        displaced = shelves.leaving.only[below].lowest(min(len(rest), len(shelves.leaving.only[below])), now)
        won = 0
        while won < len(displaced) and displaced[won][0] < rest[len(rest) - 1 - won][0]:
            won += 1
        lost = np.array([chunk for _, chunk in displaced], np.int32)
        shelves.leaving.only[below].add(lost)
        shelves.clear(below, lost[:won])
        saved = np.array([chunk for _, chunk in leaving[len(rest) - won :]], np.int32)
        if not len(saved):
            return -1
        targets = shelves.take(below, len(saved), LOADING, now)
        if targets is None:
            raise IntegrityError(f"{len(saved)} slots of tier {pool.tier.name} were counted, but could not be taken")
        slots = shelves.directory.slot[tier, saved]
        shelves.pools[below].chunk[targets] = saved
        shelves.directory.slot[below, saved] = targets
        shelves.pools[tier].move(slots, SAVING)
        number = self._order(tier, slots, below, targets, saved)
        self.outwards[below].ordered(number, len(saved), now)
        shelves.leaving.classify(saved)
        return number

    # -- results ----------------------------------------------------------------------------------

    def commit(self, result: CopyResult, now: float | None = None) -> Slots:
        """Take in a result; -> slots of the device that sequences wait for and that hold nothing.

        `now`: the moment, if it is not that of the last decision.
        """
        if (erased := self._erasing.pop(result.number, None)) is not None:
            self._erased(erased, result)
            return NO_SLOTS
        moving = self._moving.pop(result.number, None)
        if moving is None or len(result.ok) != len(moving.batch):
            raise IntegrityError(f"the result of batch {result.number} came, which is not under way")
        shelves, batch = self._shelves, moving.batch
        source, target = shelves.pools[moving.source], shelves.pools[moving.target]
        self._count(moving, result)
        link = self.links[moving.source] if moving.target == 0 else self.outwards[moving.target]
        copied = result.seconds or math.inf  # 0: not told
        link.came(result.number, bool(result.ok.any()), self._now if now is None else now, copied)
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
            shelves.clear(moving.source, lost[lost >= 0], erase=True)
        left = chunks[chunks >= 0]
        held = (
            shelves.vacated(moving.source, batch.source_slots),
            shelves.vacated(moving.target, batch.target_slots),
            left[(shelves.directory.slot[:, left] >= 0).any(0)],
        )
        shelves.leaving.classify(np.unique(np.concatenate(held)))
        shelves.leaving.find_out()
        return failed

    def _count(self, moving: Moving, result: CopyResult) -> None:
        arrived = int(np.count_nonzero(result.ok))
        if moving.target == 0:
            moved = self.moved[moving.source]
            moved.loaded += arrived
            moved.load_nbytes += result.nbytes
            moved.load_seconds += result.seconds
        else:
            moved = self.moved[moving.target]
            moved.saved += arrived
            moved.save_nbytes += result.nbytes
            moved.save_seconds += result.seconds
            self._close_or_open(moving.target, arrived > 0)
        moved.failed += len(result.ok) - arrived

    def _close_or_open(self, tier: int, works: bool) -> None:
        """A tier that has kept something, or nothing of a whole batch: a full disk is not asked again at once."""
        first, most = _PAUSE_SECONDS
        self._pause[tier] = 0.0 if works else min(max(2 * self._pause[tier], first), most)
        self._closed_until[tier] = self._now + self._pause[tier] if not works else 0.0

    def _erased(self, batch: EraseBatch, result: CopyResult) -> None:
        """Slots whose tier has nothing left of them are free; the others are tried again later."""
        tier = self._shelves.tiers.index(batch.tier)
        pool, ok = self._shelves.pools[tier], np.asarray(result.ok, np.bool_)
        pool.give_back(batch.slots[ok])
        pool.to_erase += batch.slots[~ok].tolist()
        self._close_or_open(tier, bool(ok.any()))

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
        pool.vacate(private[pool.references[private] == 0])
        # Nothing was written to a slot that was forgotten while somebody waited for it: it has no chunk, but its bytes.
        failed: Slots = slots[~ok & (pool.references[slots] > 0)]
        return failed

    def _order(
        self, source: int, source_slots: Slots, target: int, target_slots: Slots, chunks: Chunks, lead: float = 0.0
    ) -> int:
        shelves = self._shelves
        number = self._numbers
        self._numbers += 1
        labels: tuple[ChunkLabel, ...] = ()
        if shelves.tiers[max(source, target)].persistent:
            labels = shelves.labels(shelves.pools[source].chunk[source_slots])
        shelves.pools[source].pins[source_slots] += 1
        shelves.pools[target].pins[target_slots] += 1
        tiers = shelves.tiers
        batch = CopyBatch(number, tiers[source], source_slots, tiers[target], target_slots, lead=lead, labels=labels)
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
