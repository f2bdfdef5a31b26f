"""Holders: the requests that hold memory, from their admission until the last plan that names their row has committed.

A row and its slots are given back only when no plan in flight names the row, be it after an end, an abort or a
suspension (Pensieve §3.4.3.5).
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping

import numpy as np

from cellar.core.errors import IntegrityError
from cellar.kv.store import KVStore, Reservation
from cellar.schedule.steps.batch import InFlight
from cellar.schedule.steps.failures import Failures
from cellar.schedule.steps.integrity import check_requests, check_rows
from cellar.schedule.steps.queue import WaitingQueue
from cellar.schedule.steps.request import Phase, RequestState
from cellar.schedule.steps.rows import NEVER, Index, Rows
from cellar.schedule.steps.tally import Tally

FEW_ROWS = 4
"""An answer, or a few to choose from: who has never had more waits for single tokens."""

RETURN_SECONDS = 1.0
"""Who waits for tokens may be back so soon: with the next question, say."""


class Holders:
    """Who is suspended or parked goes back to `queue`, and its chunks to `store`.

    `prompts` run and have known tokens left to plan, `loading` wait for chunks from slower tiers; both in order of key.
    `shares` and `tenants` count the running rows by owner and by tenant. `closes` are the rows that the next plan is to
    clear. `now` is the moment of the call under way.
    """

    def __init__(self, rows: Rows, store: KVStore, queue: WaitingQueue, failures: Failures, tally: Tally) -> None:
        self.rows = rows
        self.store = store
        self.queue = queue
        self.prompts: list[RequestState] = []
        self.loading: list[RequestState] = []
        self.closes: set[int] = set()
        self.running = 0
        self.shares: Counter[str] = Counter()
        self.tenants: Counter[str] = Counter()
        self._most: dict[str, int] = {}  # by owner, of those with rows: how many it has had at once
        self._few_left = -math.inf  # the last moment in which one of few rows had none any more
        self.suspending = 0  # rows that are kept by plans in flight, and whose requests will wait again
        self.num_parked = 0  # requests that wait for a mask, and for nothing else
        self.now = 0.0
        self._releasing = 0  # rows that ended or are suspending or parking, kept by plans in flight
        self._failures = failures
        self._tally = tally

    @property
    def is_memory_coming(self) -> bool:
        """True if slots will come back without another suspension."""
        return bool(self._releasing or self.store.num_returning) or self.rows.any_draining()

    @property
    def are_arriving(self) -> bool:
        """True while somebody waits for a row, and there is one."""
        return len(self.queue) > 0 and self.rows.num_free > 0

    @property
    def few_may_return(self) -> bool:
        """True while an owner of few rows has been gone for a moment only: its next tokens would stand behind all that
        is planned until then.
        """
        return self.now < self._few_left + RETURN_SECONDS

    # -- who comes --------------------------------------------------------------------------------

    def load(self, state: RequestState, reservation: Reservation) -> None:
        """A request owns its memory, and waits until all of it has come."""
        state.phase, state.reservation, state.awaits = Phase.LOADING, reservation, set(reservation.awaits)
        insort(self.loading, state, key=lambda other: other.key)

    def open(self, state: RequestState, reservation: Reservation) -> None:
        """A request gets a row for its memory."""
        row = self.rows.open(state, reservation.slots, reservation.compute[0][0] // self.store.chunk_size)
        if state.forgotten:
            self.rows.next_named[row] = NEVER
        state.row, state.phase = row, Phase.RUNNING
        state.todo = deque(reservation.compute)
        state.total = None  # who was suspended is computed anew
        self.closes.discard(row)  # the open clears the row as well
        self.running += 1
        self.shares[state.owner] += 1
        self.tenants[state.tenant] += 1
        self._most[state.owner] = max(self._most.get(state.owner, 0), self.shares[state.owner])
        self._tally.admitted(state, reservation, self.now)

    # -- memory is short (§3.4.3.5) ---------------------------------------------------------------

    def make_room(self, ready: Index, need: Index) -> tuple[Index, Index]:
        """Fewer decodes: those of `ready` that go on, and those of `need` that get a chunk.

        The latest arrival is suspended, and the next, until the rest has room. While memory is on its way
        back anyhow (by an end, a suspension, a copy, or a row whose last token is planned), rows wait instead.
        """
        rows = self.rows
        while len(need) > self.store.num_available and not self.is_memory_coming:
            victim = int(rows.in_order(rows.owned(Phase.RUNNING))[-1])
            self.suspend(victim)
            ready, need = ready[ready != victim], need[need != victim]
        need = rows.in_order(need)
        fed, starved = need[: self.store.num_available], need[self.store.num_available :]
        return ready[~np.isin(ready, starved)], fed

    def suspend(self, row: int) -> None:
        """Plan a running request no more; it waits again once its plans in flight have committed."""
        state = self.rows.state(row)
        state.phase = Phase.SUSPENDING
        self._tally.preemptions += 1
        self.suspending += 1
        self.retire(state)

    def park(self, row: int) -> None:
        """A row's mask is late: what its plans in flight bring is void, and it waits for `resume` without a row."""
        state = self.rows.state(row)
        self.rows.accepts[row] = False
        state.late = True
        if state.phase is Phase.RUNNING:
            state.phase, state.resumed = Phase.PARKING, False
            self.retire(state)

    def resume(self, state: RequestState) -> None:
        """What a parked request waited for has come; it goes back to its place. Others are left as they are."""
        if state.phase is Phase.PARKED:
            self.num_parked -= 1
            state.phase = Phase.WAITING
            self.queue.push(state)
        elif state.phase is Phase.PARKING:
            state.resumed = True

    # -- chunks -----------------------------------------------------------------------------------

    def hide(self, row: int) -> None:
        """None of a row's chunks is found by others from now on; those that have a name keep it."""
        self.rows.next_named[row] = NEVER

    def try_name(self, row: int) -> str | None:
        """Name a row's complete chunks; -> why that could not be done, and then none of them is found again."""
        try:
            self.name(row)
        except Exception as error:
            self.hide(row)
            self.store.forget(self.rows.slots(row))
            return self._failures.said(self.rows.state(row).request.id, error)
        return None

    def name(self, row: int) -> None:
        """Give a row's complete chunks their identity: KV computed, tokens committed and counted."""
        rows, size = self.rows, self.store.chunk_size
        first = int(rows.next_named[row]) // size - 1
        last = int(min(rows.computed[row], rows.length[row])) // size
        state = rows.state(row)
        state.chain.grow(rows.tokens[row], last)
        self.store.names.commit(rows.table[row, first:last], state.chain, first, state.conversation)
        rows.next_named[row] = (last + 1) * size

    # -- who goes ---------------------------------------------------------------------------------

    def end(self, state: RequestState) -> None:
        """A request ends, wherever it stands; it gives back what it holds as soon as no plan needs it."""
        before, state.phase = state.phase, Phase.ENDED
        if before is Phase.WAITING:
            self.queue.remove(state)
        elif before is Phase.LOADING:
            self.unload(state)
        elif before is Phase.PARKED:
            self.num_parked -= 1
        else:
            self.rows.accepts[state.row] = False
            if before is Phase.RUNNING:
                self.retire(state)
            elif before is Phase.SUSPENDING:
                self.suspending -= 1

    def retire(self, state: RequestState) -> None:
        """A row is planned no more; it is given back now, or when the last plan that names it commits."""
        row = state.row
        self.rows.decodes[row] = False
        self.running -= 1
        for count, name in ((self.shares, state.owner), (self.tenants, state.tenant)):
            count[name] -= 1
            if not count[name]:
                del count[name]
        if state.owner not in self.shares and self._most.pop(state.owner) <= FEW_ROWS:
            self._few_left = self.now
        if state.todo:
            self.prompts = [other for other in self.prompts if other is not state]
        if self.rows.in_flight[row]:
            self._releasing += 1
        else:
            self.release(row)

    def committed(self, rows: Index) -> None:
        """A plan that named `rows` has committed: those that it kept are given back."""
        if self._releasing:
            for row in rows[self.rows.in_flight[rows] == 0].tolist():
                state = self.rows.states[row]
                if state is not None and state.phase is not Phase.RUNNING:
                    self._releasing -= 1
                    self.release(row)

    def unload(self, state: RequestState) -> None:
        """Give back the memory of a request that loads; slots that are being filled are kept by the copies."""
        assert state.reservation is not None
        self.loading.remove(state)
        self.store.release(state.reservation.slots, state.conversation, self.now)
        state.reservation, state.conversation = None, -1
        state.awaits.clear()

    def release(self, row: int) -> None:
        """Give back row and slots; the suspended go to their place in the queue, their chunks to a slower tier."""
        rows, store = self.rows, self.store
        state, slots = rows.state(row), rows.slots(row)
        if len(rows.completed(np.array([row]))):
            self.try_name(row)
        if rows.next_named[row] != NEVER:
            count = int(min(rows.computed[row], rows.length[row] - state.stopped))
            whole = count // store.chunk_size
            if whole < len(slots):
                state.chain.grow(rows.tokens[row], whole)
                store.names.keep_tail(int(slots[whole]), state.chain, rows.tokens[row, :count], state.conversation)
        store.release(slots, state.conversation, self.now)
        state.conversation = -1
        if state.phase in (Phase.SUSPENDING, Phase.PARKING):
            store.save(slots, self.now)
            state.known = rows.tokens[row, : rows.length[row]].copy()
            if state.phase is Phase.PARKING and not state.resumed:
                state.phase = Phase.PARKED
                self.num_parked += 1
            else:
                self.suspending -= state.phase is Phase.SUSPENDING
                state.phase = Phase.WAITING
                self.queue.push(state)
        state.row = -1
        state.todo = deque()
        self.closes.add(row)
        rows.free(row)

    # -- checks -----------------------------------------------------------------------------------

    def check(self, in_flight: Iterable[InFlight], requests: Mapping[str, RequestState]) -> None:
        """Raise IntegrityError unless rows, queue, plans in flight and chunks agree; for tests, or when idle."""
        rows = self.rows
        references = check_rows(rows, in_flight, self.store.stats().total)
        for state in self.loading:
            if state.reservation is not None:
                np.add.at(references, state.reservation.slots, 1)
        self.store.check_integrity(references)
        check_requests(rows, self.queue, self.loading, self.num_parked, requests)
        owned = [state for state in rows.states if state is not None]
        running = [state for state in owned if state.phase is Phase.RUNNING]
        suspending = sum(state.phase is Phase.SUSPENDING for state in owned)
        counted = self.running, self.suspending, self._releasing
        if counted != (len(running), suspending, len(owned) - len(running)):
            raise IntegrityError("the counts of running, suspending and ended rows are not true")
        if (Counter(s.owner for s in running), Counter(s.tenant for s in running)) != (self.shares, self.tenants):
            raise IntegrityError("the counts of rows by owner are not true")
        if self._most.keys() != self.shares.keys():
            raise IntegrityError("owners are kept in mind that have no rows, or some that have are not")
