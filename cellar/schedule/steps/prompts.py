"""Prompts: whose prompt tokens a batch takes, those of requests that run and then of those that wait.

Who waits comes in the order of turns. Memory for a whole prompt is reserved when its request is admitted.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Mapping

import numpy as np

from cellar.kv.store import Reservation
from cellar.schedule.steps.batch import StepBatch
from cellar.schedule.steps.holders import RETURN_SECONDS, Holders
from cellar.schedule.steps.limits import chunks_of
from cellar.schedule.steps.pace import Pace
from cellar.schedule.steps.request import Phase, RequestState
from cellar.schedule.steps.stagger import Stagger

LEAST_JOINING = 16
"""Rows that may be opened in a step in which others decode, for owners who have some already."""

LATE_JOINING = 4
"""Rows as many of which one counts whose mask was late: it gets one token, and then its mask is late again, mostly."""

JOINING_SHARE = 4
"""Or as many as a quarter of those that decode in it, where that is more: rows multiply by 5/4 a step."""

ALONE_PATIENCE = 0.25
"""Where nothing runs, the device stands still while copies are waited for: so many of the seconds are worth it in which
what would be lost is computed again, as not everybody comes back.
"""

PUT_OFF_SECONDS = 1.0
"""Nobody waits longer so that what their memory holds can be copied out, whatever is expected of that."""

Fail = Callable[[RequestState, Exception, StepBatch], None]


class Prompts:
    """`pace` says what long prompts may take beside decodes. A chunk for each request that runs stays free, and at most
    `keep_free` chunks, unless all who run have room among `num_chunks` however long they get. `row_depth` is how many
    plans in flight may name one row. A request that fails by itself is handed to `fail`, and others may come. With a
    `stagger` requests begin when it says so.
    """

    def __init__(
        self,
        holders: Holders,
        pace: Pace,
        keep_free: int,
        num_chunks: int,
        row_depth: int,
        caching: bool,
        fail: Fail,
        stagger: Stagger | None = None,
    ) -> None:
        self._stagger = stagger
        self._holders = holders
        self._queue = holders.queue
        self.pace = pace
        self._keep_free = keep_free
        self._num_chunks = num_chunks
        self._row_depth = row_depth
        self._caching = caching
        self._fail = fail
        self._crowded = False  # somebody could not be admitted to the batch being made
        self._was_crowded = False  # nor to the last one
        self._put_off = False  # somebody waits until memory has been copied out; whoever needs little passes
        self._joining = 0  # in the batch being made: rows opened for owners who have some, by what they count
        self._favoured: RequestState | None = None  # whom a suspension makes room for
        self._decoded = -math.inf  # the last moment in which somebody did

    def waits_until(self, now: float) -> float | None:
        """The moment from which whoever is first waits for no more copies; None: they wait for none."""
        first = self._queue.first()
        return first.put_off_until if first is not None and now < first.put_off_until < math.inf else None

    def plan(self, batch: StepBatch) -> None:
        """Spend what is left of the batch's budget."""
        if batch.num_decodes:
            self._decoded = self._holders.now
        if not (self._holders.prompts or self._holders.loading or len(self._queue) or self._favoured):
            return  # decodes alone, as most steps are
        self._share(batch)
        self._admit_short(batch)
        self.plan_running(batch)
        self.plan_waiting(batch)

    def plan_short_of_memory(self, batch: StepBatch) -> None:
        """As `plan`, but nobody new, unless all who ran had to give their memory back."""
        self._share(batch)
        self.plan_running(batch)
        if not self._holders.running:
            self.plan_waiting(batch)

    def plan_running(self, batch: StepBatch) -> None:
        """Chunks of prompts that were admitted in an earlier step."""
        holders = self._holders
        for state in holders.prompts:
            if batch.room(state) > 0 and holders.rows.in_flight[state.row] < self._row_depth:
                self._plan_prompt(batch, state)
        if holders.prompts:
            holders.prompts = [state for state in holders.prompts if state.todo]

    def plan_waiting(self, batch: StepBatch) -> None:
        """Requests whose chunks have come, then those from the queue, strictly in the order of turns, while budget,
        rows and memory last.
        """
        for state in tuple(self._holders.loading):
            if batch.room(state) > 0 and not state.awaits:
                assert state.reservation is not None
                self._holders.loading.remove(state)
                self._start(batch, state, state.reservation)
        while batch.budget > 0 and not self._crowded and self._may_admit():
            favoured = self._favoured
            following = favoured if favoured is not None and favoured in self._queue else self._queue.first()
            if following is not None and not batch.room(following):
                return  # the next step has room again
            if following is not None and not self._may_join(batch, following):
                self._admit_new(batch, following.key[0])
                return
            if following is not None and following is not favoured and not self._may_begin(following):
                return
            self._favoured = None
            if following is None or not self._admit(batch, following):
                return

    def _share(self, batch: StepBatch) -> None:
        """Rows that decode wait for the prompts beside them, and so do short prompts that come now. Who has decoded
        lately may come while a step runs.
        """
        self._joining = 0
        room = self.pace.room(batch.num_decodes)
        if room is None:
            return
        short = self._queue.in_line(lambda one: batch.cost(one) <= self.pace.short) if not self._was_crowded else []
        if short or self._holders.rows.any_decoding():
            owners = {*self._holders.shares, *(state.owner for state in short)}
            batch.limit_long(room, next(iter(owners)) if len(owners) == 1 else None)
        elif self._holders.now < self._decoded + RETURN_SECONDS and (whole := self.pace.whole()) is not None:
            batch.limit(whole)

    def _admit_short(self, batch: StepBatch) -> None:
        """Requests with short prompts do not wait for longer ones that run or stand before them, of the same priority.

        Half of the budget is kept for these. Nobody passes while memory or rows are short: who is passed might get
        none.
        """
        first, busy = self._queue.first(), bool(self._holders.prompts) or self._put_off
        self._put_off = False
        if first is None or not busy or self._was_crowded or self._favoured or not self._may_admit():
            return
        kept, priority = batch.budget - batch.budget // 2, first.key[0]
        for state in self._queue.in_line(lambda one: one.key[0] == priority and batch.cost(one) <= self.pace.short):
            if batch.cost(state) > min(batch.budget - kept, batch.room(state)) or not self._may_begin(state):
                return
            if self._may_join(batch, state) and not self._admit(batch, state):
                return

    def _admit_new(self, batch: StepBatch, priority: int) -> None:
        """Owners without a row, of this priority, while budget, rows and memory last: those who wait before them have
        some already, and as many more as this step opens.
        """
        shares = self._holders.shares
        for state in self._queue.in_line(lambda one: one.key[0] == priority and one.owner not in shares):
            if state.owner in shares:
                continue
            if not batch.room(state) or not self._may_begin(state) or not self._admit(batch, state):
                return

    def _may_admit(self) -> bool:
        """None while a suspension is pending: the suspended came before all who wait."""
        return not self._holders.suspending and len(self._queue) > 0

    def _may_begin(self, state: RequestState) -> bool:
        """False if its start is to be later; who was suspended has begun."""
        holders = self._holders
        if self._stagger is None or state.num_cached >= 0:
            return True
        return self._stagger.may_begin(bool(holders.running or holders.loading or holders.suspending))

    def _may_join(self, batch: StepBatch, state: RequestState) -> bool:
        """False if the row is one of too many that owners get beside others' decodes, which would wait until all of
        them are open. Who is new has at most one row of each owner before it.
        """
        shares, others = self._holders.shares, self._holders.few_may_return
        if not self.pace.is_limited or not batch.num_decodes or state.owner not in shares:
            return True
        if len(shares) + others < 2:
            return True
        self._joining += LATE_JOINING if state.late else 1
        return self._joining <= max(LEAST_JOINING, batch.num_decodes // JOINING_SHARE)

    def _admit(self, batch: StepBatch, state: RequestState) -> bool:
        """Give a waiting request its memory, and a row if nothing is to be loaded; False if there is none."""
        holders = self._holders
        has_row = holders.rows.num_free > len(holders.loading)
        try:
            reservation = self._reserve(state, batch.room(state)) if has_row else None
        except Exception as error:
            self._fail(state, error, batch)
            return True
        if reservation is None:
            self._put_off = has_row and holders.store.put_off
            self._crowded = not self._put_off
            if self._put_off:
                state.put_off_until = min(state.put_off_until, holders.now + PUT_OFF_SECONDS)
            return False
        if self._stagger is not None and state.num_cached < 0:
            self._stagger.began(state.num_prompt, state.limit)
        self._queue.remove(state)
        state.conversation = reservation.conversation
        if reservation.awaits:
            holders.load(state, reservation)
        else:
            self._start(batch, state, reservation)
        return True

    def _reserve(self, state: RequestState, step_tokens: int) -> Reservation | None:
        """Memory for all known tokens, `step_tokens` of which the next step may compute. Decodes that run have a chunk
        each to grow into, up to a share of all (§3.4.3.5), if they might not find one otherwise. Copies are waited for,
        sooner while something runs.
        """
        holders, request, found = self._holders, state.request, None
        patience = 1.0 if holders.running else ALONE_PATIENCE
        if self._caching and not state.needs_all:
            found = holders.store.find(state.chain, state.known)
        name = None if request.conversation is None else (request.salt, request.conversation)
        return holders.store.reserve(
            found,
            len(state.known),
            self._kept(state),
            name=name,
            tenant=request.tenant,
            now=holders.now,
            before=[span for other in holders.prompts for span in other.todo],
            step_tokens=step_tokens,
            patience=patience if holders.now < state.put_off_until else 0.0,
        )

    def _kept(self, state: RequestState) -> int:
        """Chunks that stay free beside a request: none if it and all others may get as long as they may. What they
        share counts for each of them.
        """
        if not self._keep_free:
            return 0
        holders, size = self._holders, self._holders.rows.chunk_size
        grown = sum(chunks_of(len(one.known), one.limit, size) for one in (state, *holders.loading))
        if grown + holders.rows.most_chunks <= self._num_chunks:
            return 0
        return min(self._keep_free, holders.running + len(holders.loading))

    def _start(self, batch: StepBatch, state: RequestState, reservation: Reservation) -> None:
        """Give an admitted request its row, and plan as much of it as the budget allows."""
        holders = self._holders
        try:
            holders.open(state, reservation)
            batch.open(state)
        except Exception as error:
            if state.row < 0:  # it has its memory alone, as one that loads
                state.phase, state.reservation = Phase.LOADING, reservation
                holders.loading.append(state)
            self._fail(state, error, batch)
            return
        state.reservation = None
        self._plan_prompt(batch, state)
        if state.todo:
            insort(holders.prompts, state, key=lambda other: other.key)

    def _plan_prompt(self, batch: StepBatch, state: RequestState) -> None:
        try:
            batch.prompt(state)
        except Exception as error:
            self._fail(state, error, batch)
            return
        if not state.todo:
            self._holders.rows.decodes[state.row] = True

    def make_way(self) -> None:
        """If somebody was not admitted to the last batch: who waits for its first row is given that of a tenant, or
        else of an owner, that has many: the latest of those that no plan in flight names, which is free at once, else
        the latest it has.

        Many are twice its share or more; and where somebody waits for single tokens, more rows than there are owners,
        too: four that have 64 each may hold them for minutes. Where there are more owners than that, turns will do.
        One suspension at a time, and none while a row or memory is about to come back. No batch is being made.
        """
        self._was_crowded, self._crowded = self._crowded, False
        holders = self._holders
        if not self._was_crowded or holders.is_memory_coming:
            return
        if self._queue.tenants - holders.tenants.keys() and self._make_way(holders.tenants, lambda s: s.tenant):
            return
        self._make_way(holders.shares, lambda state: state.owner)

    def _make_way(self, shares: Mapping[str, int], name: Callable[[RequestState], str]) -> bool:
        """Somebody without a share, if somebody has many; -> whether a row is suspended."""
        largest, count = max(shares.items(), key=lambda share: share[1], default=("", 0))
        sharing = len(shares) + 1  # with who waits
        many = count * sharing >= 2 * self._holders.running or (self.pace.is_limited and count > sharing)
        if count < 2 or not many:
            return False
        state = self._queue.first(shares, name)
        if state is None:
            return False
        rows = self._holders.rows
        running = rows.owned(Phase.RUNNING)
        theirs = np.array([row for row in running.tolist() if name(rows.state(row)) == largest], np.intp)
        idle = theirs[rows.in_flight[theirs] == 0]
        victim = int(rows.in_order(idle if len(idle) else theirs)[-1])
        loser = rows.state(victim)
        if loser.key[0] < state.key[0]:  # it has a better priority
            return False
        self._holders.suspend(victim)
        loser.key = loser.key[0], self._queue.turn(loser.tenant)
        self._favoured = state
        return True
