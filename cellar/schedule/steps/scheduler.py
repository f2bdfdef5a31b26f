"""StepScheduler: unified iteration-level batching of transformer steps (Pensieve §3.4.2, §3.4.3.5).

Each plan is one batch of requests in whatever phase they are: first one token of every running decode, then
waiting requests with short prompts, if long ones stand before them, then prompt chunks of running requests, then
requests from the waiting queue, in the order of turns, until the token budget is spent. Long prompts have a share of it
beside decodes, which wait for them. Memory for a prompt is reserved when its request is admitted; decodes take a
chunk when they need one. When there is none, the latest arrival is suspended.

Plans run ahead of their commits. One rule makes that safe: a row and its slots are given back only when no
plan in flight names the row, be it after an end, an abort or a suspension.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cellar.core.config import ScheduleConfig
from cellar.core.errors import CapacityError, IntegrityError, RequestError
from cellar.core.messages import (
    CopyResult,
    Event,
    EventKind,
    FinishReason,
    Flag,
    KeptChunk,
    MemoryAnswer,
    MemoryQuestion,
    Request,
    SchedulerStats,
    StepOutput,
    StepPlan,
    StepResult,
    Tier,
    TierOrder,
)
from cellar.kv.policy import Policy
from cellar.kv.recovery import Recovery
from cellar.kv.store import KVStore, Reservation
from cellar.schedule.steps.batch import InFlight, StepBatch
from cellar.schedule.steps.delivery import Ending, deliver
from cellar.schedule.steps.failures import Failures
from cellar.schedule.steps.integrity import check_requests, check_rows
from cellar.schedule.steps.pace import Pace
from cellar.schedule.steps.queue import WaitingQueue
from cellar.schedule.steps.request import Phase, RequestState
from cellar.schedule.steps.rows import NEVER, Index, Rows

MAX_NAMED_PER_COMMIT = 256
"""Chunks that get their identity in one commit. More may wait for the next: an identity can, a step cannot."""


class StepScheduler:
    """Implements `Scheduler` for transformer steps of one worker.

    `num_slots` chunks of `chunk_size` tokens and `num_rows` rows are what the runtime has. `row_depth` is
    how many plans in flight may name one row (default: `config.run_ahead`). `root` is what the
    identities of chunks begin with: see `kv/identity.py`. `tiers` says how many chunks slower tiers hold,
    `policy` which chunks leave a tier first, `recovery` which are loaded and which computed again (default: all are
    loaded). `phases_apart` computes prompts first, by themselves: the schedulers that
    the unified one is compared with do (Pensieve §3.6.7).
    """

    def __init__(
        self,
        num_slots: int,
        num_rows: int,
        chunk_size: int,
        max_model_len: int,
        config: ScheduleConfig,
        enable_prefix_caching: bool = True,
        *,
        row_depth: int | None = None,
        root: bytes = b"",
        tiers: Mapping[Tier, int] | None = None,
        policy: Policy | None = None,
        recovery: Recovery | None = None,
        phases_apart: bool = False,
    ) -> None:
        self._phases_apart = phases_apart
        self._config = config
        self._max_model_len = max_model_len
        self._row_depth = row_depth or config.run_ahead
        self._caching = enable_prefix_caching
        self._keep_free = math.ceil(config.decode_reserve * num_slots)
        self._store = KVStore(num_slots, chunk_size, root, tiers, policy, recovery)
        self.foreign = self._store.foreign  # what other engines have written
        self._rows = Rows(min(num_rows, config.max_num_seqs), max_model_len, chunk_size)
        self._queue = WaitingQueue()
        self._requests: dict[str, RequestState] = {}
        self._failures = Failures(self.check_integrity)
        self._prompts: list[RequestState] = []  # running, with known tokens left to plan; in order of key
        self._loading: list[RequestState] = []  # their chunks are on the way; in order of key
        self._in_flight: deque[InFlight] = deque()
        self._closes: set[int] = set()
        self._running = 0
        self._shares: Counter[str] = Counter()  # running rows by owner
        self._tenants: Counter[str] = Counter()  # and by tenant
        self._crowded = False  # somebody could not be admitted to the plan being made
        self._was_crowded = False  # nor to the last one
        self._pace = Pace(config.max_mixed_seconds)
        self._favoured: RequestState | None = None  # whom a suspension makes room for
        self._releasing = 0  # rows that ended or are suspending, kept by plans in flight
        self._suspending = 0  # those of them that are suspending
        self._num_parked = 0  # requests that wait for a mask, and for nothing else
        self._steps = 0
        self._now = 0.0  # of the plan being made
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._hits = np.zeros(1 + len(tiers or {}), np.int64)  # of the prefix hits, by place on the shelves
        self._recomputed = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._step_sizes = [0] * 32  # see SchedulerStats.steps
        self._step_tokens = 0

    # -- the protocol -----------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request.

        Raises RequestError for an empty prompt, one that leaves no room for a token, or an id in use;
        CapacityError if prompt and max_tokens need more chunks than there are.
        """
        limit = self._check(request)
        key = (
            request.priority if self._config.scheduling_policy == "priority" else 0,
            self._queue.turn(request.tenant),
        )
        self._now = now
        prompt = np.ascontiguousarray(request.prompt, np.int32)
        state = RequestState(request, key, limit, self._store.chain(request.salt), prompt, arrived=now)
        self._requests[request.id] = state
        self._queue.add(state)

    def plan(self, worker: int, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed before the next commit or add."""
        with self._failures.checked():
            return self._plan(now)

    def _plan(self, now: float) -> StepPlan | None:
        self._now = now
        budget = self._config.max_num_batched_tokens or self._rows.tokens.size
        batch = StepBatch(self._rows, budget, self._pace.short)
        if self._phases_apart:
            self._plan_apart(batch)
        elif self._plan_decodes(batch):
            self._share(batch)
            self._admit_short(batch)
            self._plan_prompts(batch)
            self._start_loaded(batch)
            self._admit(batch)
        else:
            self._share(batch)
            self._plan_prompts(batch)  # memory is short: nobody new,
            if not self._running:  # unless all who ran had to give theirs back
                self._start_loaded(batch)
                self._admit(batch)
        built = batch.build(self._steps, tuple(self._closes))
        if built is not None:
            self._closes.clear()
            self._in_flight.append(built[1])
            self._steps += 1
            count = built[1].num_decodes + len(built[0].tokens)
            self._step_sizes[(count - 1).bit_length()] += 1
            self._step_tokens += count
        self._was_crowded = self._crowded
        if self._crowded:
            self._make_way()
        return None if built is None else built[0]

    def commit(self, result: StepResult, now: float) -> StepOutput:
        """Take in the result of the oldest plan in flight: deliver tokens, name chunks, give back memory."""
        with self._failures.checked():
            return self._commit(result, now)

    def failed(self) -> Mapping[str, str]:
        """Requests that have failed by themselves in `plan` since the last call, and why: they have ended."""
        return self._failures.take()

    def _commit(self, result: StepResult, now: float) -> StepOutput:
        self._now = now
        record = self._in_flight.popleft() if self._in_flight else None
        if record is None or record.step != result.step:
            raise IntegrityError(f"the result of step {result.step} came out of turn")
        output = StepOutput()
        self._rows.in_flight[record.rows] -= 1
        if result.error is None:
            self._store.measured(record.prompts, result.seconds)
            if len(record.prompts):
                self._pace.measured(record.cost, result.seconds)
            self._take_in(record, result, output)
        else:
            # Who has been dropped meanwhile has no KV of this step either, though later ones may have computed.
            self._rows.next_named[record.rows] = NEVER
            for row in record.rows[self._rows.accepts[record.rows]].tolist():
                self._end(Ending(row, FinishReason.ERROR, result.error), output)
        if self._releasing:
            for row in record.rows[self._rows.in_flight[record.rows] == 0].tolist():
                state = self._rows.states[row]
                if state is not None and state.phase is not Phase.RUNNING:
                    self._releasing -= 1
                    self._release(row)
        return output

    def copies(self, now: float) -> Sequence[TierOrder]:
        """Copies decided since the last call, with those that memory pressure and rest ask for."""
        return self._store.copies(now)

    def restore(self, kept: Mapping[Tier, Sequence[KeptChunk]], now: float) -> None:
        """Chunks that tiers have from before this process are found from now on; to be called first of all."""
        self._store.restore(kept, now)

    def persist(self, now: float) -> Sequence[TierOrder]:
        """Copies of what would be lost with this process."""
        return self._store.persist(now)

    def commit_copy(self, result: CopyResult, now: float) -> None:
        """Take in the result of a CopyBatch: who waits for it may start, or, if a load failed, waits to be admitted
        anew, when the hole will be computed.
        """
        self._now = now
        failed = self._store.commit_copy(result, now)
        for state in tuple(self._loading):
            state.awaits.discard(result.number)
            assert state.reservation is not None
            if len(failed) and np.isin(state.reservation.slots, failed).any():
                self._unload(state)
                state.phase = Phase.WAITING
                self._queue.push(state)

    def next_event(self, now: float) -> Event | None:
        """A copy while any is under way: it brings chunks that are waited for, or gives back memory. Else the moment
        when chunks have rested long enough to be copied, or a mask.
        """
        if self._store.num_moving:
            return Event(EventKind.COPY)
        moment = self._store.next_moment()
        if moment is not None:
            return Event(EventKind.TIMER, moment)
        return Event(EventKind.GRAMMAR) if self._num_parked else None

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason) -> None:
        """End a request after `num_tokens` output tokens; later ones are void. Unknown ids are ignored.

        Chunks that hold later tokens lose their identity, and the count of generated tokens is put right.
        """
        state = self._requests.get(request_id)
        if state is None:
            return
        row, count = state.row, state.num_prompt + num_tokens
        length = len(state.known) if row < 0 else int(self._rows.length[row])
        if not state.num_prompt <= count <= length:
            raise IntegrityError(f"{request_id} has {length - state.num_prompt} output tokens, not {num_tokens}")
        self._generation_tokens -= length - count
        if row >= 0 and count < length:
            self._rows.length[row] = count
            self._store.forget(self._rows.slots(row)[count // self._store.chunk_size :])
        self._drop(state)

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown and ended ids are ignored."""
        state = self._requests.get(request_id)
        if state is not None:
            self._drop(state)

    def memory(self, question: MemoryQuestion, now: float | None = None) -> MemoryAnswer:
        """Where the conversations' tokens lie. What is forgotten is found no more from now on; requests of such a
        conversation that are under way go on, and leave nothing. `now`: the moment, if it is not that of the last plan.
        """
        self._now = self._now if now is None else now
        named = [self._store.named(name) for name in question.conversations]
        answer = tuple(self._store.memory(numbers) for numbers in named)
        if question.flush is not None:
            there = any(stats.tier is question.flush for stats in self._store.tier_stats())
            answer += ({question.flush: self._store.flush(question.flush)} if there else {},)
        if question.pin_seconds is not None:
            for numbers in named:
                self._store.pin(numbers, self._now + question.pin_seconds)
        if question.forget:
            names, gone = set(question.conversations), {number for numbers in named for number in numbers}
            for state in (*self._requests.values(), *filter(None, self._rows.states)):
                if state.request.conversation in names or state.conversation in gone:
                    state.forgotten = True
                    if state.row >= 0:
                        self._rows.next_named[state.row] = NEVER
            self._store.forget_conversations(sorted(gone), self._store.holding(question.keep))
        return answer

    def resume(self, request_id: str) -> None:
        """What a parked request waited for has come; it goes back to its place. Others are left as they are."""
        state = self._requests.get(request_id)
        if state is not None and state.phase is Phase.PARKED:
            self._num_parked -= 1
            state.phase = Phase.WAITING
            self._queue.push(state)
        elif state is not None and state.phase is Phase.PARKING:
            state.resumed = True

    @property
    def num_erasing(self) -> int:
        """Chunks of which something is left, though they were forgotten: tiers that outlive the process erase them."""
        return self._store.num_erasing

    def has_work(self) -> bool:
        """True while any request waits, runs, or has a plan in flight."""
        return bool(self._requests or self._in_flight)

    def stats(self) -> SchedulerStats:
        """A snapshot; O(1). Prefix queries and hits count prompt tokens of first admissions."""
        kv = self._store.stats()
        return SchedulerStats(
            running=self._running,
            waiting=len(self._queue) + len(self._loading) + self._num_parked,
            total_chunks=kv.total,
            free_chunks=kv.free,
            cached_chunks=kv.cached,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            tiers=tuple(
                replace(stats, hit_tokens=hits)
                for stats, hits in zip(self._store.tier_stats(), self._hits.tolist(), strict=True)
            ),
            recomputed_tokens=self._recomputed,
            steps=tuple(self._step_sizes),
            step_tokens=self._step_tokens,
        )

    # -- planning (§3.4.2) ------------------------------------------------------------------------

    def _plan_apart(self, batch: StepBatch) -> None:
        """Prompts as long as there are any, else decodes."""
        self._plan_prompts(batch)
        self._start_loaded(batch)
        self._admit(batch)
        if not batch.has_prompts:
            self._plan_decodes(batch)

    def _plan_decodes(self, batch: StepBatch) -> bool:
        """One token of every running decode, as budget and memory allow. False if memory is short."""
        rows = self._rows
        ready = rows.ready(self._row_depth)
        if len(ready) > batch.budget:
            ready = rows.in_order(ready)[: batch.budget]
        need = ready[rows.planned[ready] >= rows.capacity[ready]]
        enough = True
        if len(need):
            if len(need) > self._store.num_available:
                ready, need = self._make_room(ready, need)
                enough = False
            slots = self._store.extend(len(need), self._now)
            if slots is None:
                raise IntegrityError(f"{len(need)} chunks were counted as available, but could not be taken")
            batch.place(need, rows.grow(need, slots), slots)
        batch.decode(ready)
        return enough

    def _share(self, batch: StepBatch) -> None:
        """Rows that decode wait for the prompts beside them."""
        room = self._pace.room(batch.num_decodes)
        if room is not None and self._rows.any_decoding():
            batch.limit_long(room, next(iter(self._shares)) if len(self._shares) == 1 else None)

    def _plan_prompts(self, batch: StepBatch) -> None:
        """Prompt chunks of requests that were admitted in an earlier step."""
        for state in self._prompts:
            if batch.room(state) > 0 and self._rows.in_flight[state.row] < self._row_depth:
                self._plan_prompt(batch, state)
        if self._prompts:
            self._prompts = [state for state in self._prompts if state.todo]

    def _plan_prompt(self, batch: StepBatch, state: RequestState) -> None:
        try:
            batch.prompt(state)
        except Exception as error:
            self._fail(state, error, batch)
            return
        if not state.todo:
            self._rows.decodes[state.row] = True

    def _admit_short(self, batch: StepBatch) -> None:
        """Requests with short prompts do not wait for longer ones that run or stand before them, of the same priority.

        Half of the budget is kept for these. Nobody passes while memory or rows are short: who is passed might get
        none.
        """
        first = self._queue.first()
        if first is None or not self._prompts or self._was_crowded or self._favoured or not self._may_admit():
            return
        kept, priority = batch.budget - batch.budget // 2, first.key[0]
        for state in self._queue.in_line(lambda one: one.key[0] == priority and batch.cost(one) <= self._pace.short):
            if batch.cost(state) > min(batch.budget - kept, batch.room(state)) or not self._admit_one(batch, state):
                return

    def _admit(self, batch: StepBatch) -> None:
        """Requests from the waiting queue, strictly in the order of turns, while budget, rows and memory last."""
        while batch.budget > 0 and not self._crowded and self._may_admit():
            favoured = self._favoured
            state = favoured if favoured is not None and favoured in self._queue else self._queue.first()
            if state is not None and not batch.room(state):
                return  # the next step has room again
            self._favoured = None
            if state is None or not self._admit_one(batch, state):
                return

    def _may_admit(self) -> bool:
        """None while a suspension is pending: the suspended came before all who wait."""
        return not self._suspending and len(self._requests) > self._running

    def _admit_one(self, batch: StepBatch, state: RequestState) -> bool:
        """Give a waiting request its memory, and a row if nothing is to be loaded; False if there is none.

        What fails for this request ends it alone, and others may come.
        """
        has_row = self._rows.num_free > len(self._loading)
        try:
            reservation = self._reserve(state) if has_row else None
        except Exception as error:
            self._fail(state, error, batch)
            return True
        if reservation is None:
            self._crowded = True
            return False
        self._queue.remove(state)
        state.conversation = reservation.conversation
        if reservation.awaits:
            state.phase, state.reservation, state.awaits = Phase.LOADING, reservation, set(reservation.awaits)
            insort(self._loading, state, key=lambda other: other.key)
        else:
            self._start(batch, state, reservation)
        return True

    def _make_way(self) -> None:
        """Who waits for its first row is given that of a tenant, or else of an owner, with twice its share or more: the
        latest it has.

        One suspension at a time, and none while a row or memory is about to come back. No batch is being made.
        """
        self._crowded = False
        if self._is_memory_coming():
            return
        if self._queue.tenants - self._tenants.keys() and self._make_way_for(self._tenants, lambda s: s.tenant):
            return
        self._make_way_for(self._shares, lambda state: state.owner)

    def _make_way_for(self, shares: Mapping[str, int], name: Callable[[RequestState], str]) -> bool:
        """Somebody without a share, if somebody has twice its own; -> whether a row is suspended."""
        largest, count = max(shares.items(), key=lambda share: share[1], default=("", 0))
        if count < 2 or count * (len(shares) + 1) < 2 * self._running:
            return False
        state = self._queue.first(shares, name)
        if state is None:
            return False
        rows = self._rows.owned(Phase.RUNNING)
        theirs = np.array([row for row in rows.tolist() if name(self._rows.state(row)) == largest], np.intp)
        victim = int(self._rows.in_order(theirs)[-1])
        loser = self._rows.state(victim)
        if loser.key[0] < state.key[0]:  # it has a better priority
            return False
        self._suspend(victim)
        loser.key = loser.key[0], self._queue.turn(loser.tenant)
        self._favoured = state
        return True

    def _start_loaded(self, batch: StepBatch) -> None:
        """Requests whose chunks have come."""
        for state in tuple(self._loading):
            if batch.room(state) > 0 and not state.awaits:
                assert state.reservation is not None
                self._loading.remove(state)
                self._start(batch, state, state.reservation)

    def _start(self, batch: StepBatch, state: RequestState, reservation: Reservation) -> None:
        """Give an admitted request its row, and plan as much of it as the budget allows."""
        try:
            self._open(state, reservation)
            batch.open(state)
        except Exception as error:
            if state.row < 0:  # it has its memory alone, as one that loads
                state.phase, state.reservation = Phase.LOADING, reservation
                self._loading.append(state)
            self._fail(state, error, batch)
            return
        state.reservation = None
        self._plan_prompt(batch, state)
        if state.todo:
            insort(self._prompts, state, key=lambda other: other.key)

    def _reserve(self, state: RequestState) -> Reservation | None:
        """Memory for all known tokens. 10 % stay free for running decodes, unless nothing runs (§3.4.3.5)."""
        found = None
        if self._caching and not state.needs_all:
            found = self._store.find(state.chain, state.known)
        request, busy = state.request, self._running or self._loading
        name = None if request.conversation is None else (request.salt, request.conversation)
        return self._store.reserve(
            found,
            len(state.known),
            self._keep_free if busy else 0,
            name=name,
            now=self._now,
            before=[span for other in self._prompts for span in other.todo],
        )

    def _open(self, state: RequestState, reservation: Reservation) -> None:
        row = self._rows.open(state, reservation.slots)
        if not self._caching or state.forgotten:
            self._rows.next_named[row] = NEVER
        state.row, state.phase = row, Phase.RUNNING
        state.todo = deque(reservation.compute)
        state.total = None  # who was suspended is computed anew
        self._closes.discard(row)  # the open clears the row as well
        self._running += 1
        self._shares[state.owner] += 1
        self._tenants[state.tenant] += 1
        if state.num_cached < 0:
            state.num_cached = reservation.num_cached_tokens
            state.queue_seconds = self._now - state.arrived
            self._prompt_tokens += state.num_prompt
            self._prefix_queries += state.num_prompt
            self._prefix_hits += state.num_cached
            self._hits += reservation.hits
            self._recomputed += reservation.num_recomputed
        else:  # it has been suspended; only the KV of its last token was not computed then
            self._recomputed += len(state.known) - 1 - reservation.num_cached_tokens

    # -- memory (§3.4.3.5) ------------------------------------------------------------------------

    def _make_room(self, ready: Index, need: Index) -> tuple[Index, Index]:
        """Fewer decodes: those of `ready` that go on, and those of `need` that get a chunk.

        The latest arrival is suspended, and the next, until the rest has room. While memory is on its way
        back anyhow (by an end, a suspension, a copy, or a row whose last token is planned), rows wait instead.
        """
        rows = self._rows
        while len(need) > self._store.num_available and not self._is_memory_coming():
            victim = int(rows.in_order(rows.owned(Phase.RUNNING))[-1])
            self._suspend(victim)
            ready, need = ready[ready != victim], need[need != victim]
        need = rows.in_order(need)
        fed, starved = need[: self._store.num_available], need[self._store.num_available :]
        return ready[~np.isin(ready, starved)], fed

    def _is_memory_coming(self) -> bool:
        """True if slots will come back without another suspension."""
        return bool(self._releasing or self._store.num_returning) or self._rows.any_draining()

    def _suspend(self, row: int) -> None:
        """Plan a running request no more; it waits again once its plans in flight have committed."""
        state = self._rows.state(row)
        state.phase = Phase.SUSPENDING
        self._preemptions += 1
        self._suspending += 1
        self._retire(state)

    def _park(self, row: int) -> None:
        """A row's mask is late: what its plans in flight bring is void, and it waits for `resume` without a row."""
        state = self._rows.state(row)
        self._rows.accepts[row] = False
        if state.phase is Phase.RUNNING:
            state.phase, state.resumed = Phase.PARKING, False
            self._retire(state)

    # -- results ----------------------------------------------------------------------------------

    def _take_in(self, record: InFlight, result: StepResult, output: StepOutput) -> None:
        rows = self._rows
        rows.computed[record.rows] = record.stops
        late = record.sampled[(result.flags == Flag.LATE) & rows.accepts[record.sampled]]
        late = late[~np.isin(late, list(result.failed))] if result.failed else late
        endings = deliver(rows, record, result, output, self._failures.said)
        for row in late.tolist():
            self._park(row)
        self._generation_tokens += len(output.ids)
        for ending in endings:
            if ending.reason is FinishReason.ERROR:  # its KV may be wrong: nobody is to find it again
                rows.next_named[ending.row] = NEVER
                self._store.forget(rows.slots(ending.row))
        done = rows.completed(record.rows)
        for row in done[:MAX_NAMED_PER_COMMIT].tolist():
            error = self._named(row)
            if error is not None and rows.accepts[row]:
                endings = [ending for ending in endings if ending.row != row]
                endings.append(Ending(row, FinishReason.ERROR, error))
        for ending in endings:
            self._end(ending, output)

    def _named(self, row: int) -> str | None:
        """Name a row's chunks; -> why that could not be done, and then none of them is found again."""
        try:
            self._name(row)
        except Exception as error:
            self._rows.next_named[row] = NEVER
            self._store.forget(self._rows.slots(row))
            return self._failures.said(self._rows.state(row).request.id, error)
        return None

    def _name(self, row: int) -> None:
        """Give a row's complete chunks their identity: KV computed, tokens committed and counted."""
        rows, size = self._rows, self._store.chunk_size
        first = int(rows.next_named[row]) // size - 1
        last = int(min(rows.computed[row], rows.length[row])) // size
        state = rows.state(row)
        state.chain.grow(rows.tokens[row], last)
        self._store.commit(rows.table[row, first:last].tolist(), state.chain, first, state.conversation)
        rows.next_named[row] = (last + 1) * size

    # -- endings ----------------------------------------------------------------------------------

    def _end(self, ending: Ending, output: StepOutput) -> None:
        """A running or suspending request ends by a result."""
        state = self._rows.state(ending.row)
        output.finished[state.request.id] = (ending.reason, ending.detail)
        state.stopped = ending.reason is FinishReason.STOP
        if ending.reason is FinishReason.ERROR:
            self._rows.next_named[ending.row] = NEVER
        self._drop(state)

    def _fail(self, state: RequestState, error: Exception, batch: StepBatch) -> None:
        """A request has failed while `batch` was made: it ends, and leaves nothing. Raises an IntegrityError."""
        self._failures.note(state.request.id, error)
        row = state.row
        if row >= 0:
            batch.withdraw(row)
            self._rows.next_named[row] = NEVER
        self._drop(state)
        if row >= 0 and not self._rows.planned[row]:
            self._closes.discard(row)  # no plan has opened it

    def _drop(self, state: RequestState) -> None:
        """A request ends, wherever it stands."""
        before, state.phase = state.phase, Phase.ENDED
        del self._requests[state.request.id]
        if before is Phase.WAITING:
            self._queue.remove(state)
            return
        if before is Phase.LOADING:
            self._unload(state)
            return
        if before is Phase.PARKED:
            self._num_parked -= 1
            return
        self._rows.accepts[state.row] = False
        if before is Phase.RUNNING:
            self._retire(state)
        elif before is Phase.SUSPENDING:
            self._suspending -= 1

    def _retire(self, state: RequestState) -> None:
        """A row is planned no more; it is given back now, or when the last plan that names it commits."""
        row = state.row
        self._rows.decodes[row] = False
        self._running -= 1
        self._shares[state.owner] -= 1
        if not self._shares[state.owner]:
            del self._shares[state.owner]
        self._tenants[state.tenant] -= 1
        if not self._tenants[state.tenant]:
            del self._tenants[state.tenant]
        if state.todo:
            self._prompts = [other for other in self._prompts if other is not state]
        if self._rows.in_flight[row]:
            self._releasing += 1
        else:
            self._release(row)

    def _unload(self, state: RequestState) -> None:
        """Give back the memory of a request that loads; slots that are being filled are kept by the copies."""
        assert state.reservation is not None
        self._loading.remove(state)
        self._store.release(state.reservation.slots, state.conversation, self._now)
        state.reservation, state.conversation = None, -1
        state.awaits.clear()

    def _release(self, row: int) -> None:
        """Give back row and slots; the suspended return to their place in the queue, their chunks go to a slower ti"""
        rows = self._rows
        state, slots = rows.state(row), rows.slots(row)
        if len(rows.completed(np.array([row]))):
            self._named(row)
        if rows.next_named[row] != NEVER:
            count = int(min(rows.computed[row], rows.length[row] - state.stopped))
            whole = count // self._store.chunk_size
            if whole < len(slots):
                state.chain.grow(rows.tokens[row], whole)
                self._store.keep_tail(int(slots[whole]), state.chain, rows.tokens[row, :count], state.conversation)
        self._store.release(slots, state.conversation, self._now)
        state.conversation = -1
        if state.phase in (Phase.SUSPENDING, Phase.PARKING):
            self._store.save(slots, self._now)
            state.known = rows.tokens[row, : rows.length[row]].copy()
            if state.phase is Phase.PARKING and not state.resumed:
                state.phase = Phase.PARKED
                self._num_parked += 1
            else:
                self._suspending -= state.phase is Phase.SUSPENDING
                state.phase = Phase.WAITING
                self._queue.push(state)
        state.row = -1
        state.todo = deque()
        self._closes.add(row)
        rows.free(row)

    # -- checks -----------------------------------------------------------------------------------

    def _check(self, request: Request) -> int:
        """Longest that prompt and output may become, in tokens. Raises RequestError or CapacityError."""
        count, room = len(request.prompt), 0 if request.params.pooling is not None else 1
        if request.id in self._requests:
            raise RequestError(f"A request with the id {request.id!r} is running; use another id.", "request_id")
        if count == 0:
            raise RequestError("The prompt is empty; it must have at least one token.", "prompt")
        if count + room > self._max_model_len:
            raise RequestError(
                f"The prompt has {count} tokens, but prompt and output together may have {self._max_model_len}; "
                f"shorten it to {self._max_model_len - room} tokens or raise max_model_len.",
                "prompt",
            )
        limit = min(count + request.max_tokens, self._max_model_len)
        size, total = self._store.chunk_size, self._store.stats().total
        needed = -(-max(limit - 1, count) // size)
        if needed > total:
            raise CapacityError(
                f"A prompt of {count} tokens with max_tokens {request.max_tokens} needs {needed} chunks of KV cache, "
                f"but there are {total}; shorten the prompt, lower max_tokens or raise kv_cache_memory_bytes."
            )
        return limit

    def check_integrity(self) -> None:
        """Raise IntegrityError unless rows, queue, plans in flight and chunks agree; for tests, or when idle."""
        references = check_rows(self._rows, self._in_flight, self._store.stats().total)
        for state in self._loading:
            if state.reservation is not None:
                np.add.at(references, state.reservation.slots, 1)
        self._store.check_integrity(references)
        check_requests(self._rows, self._queue, self._loading, self._num_parked, self._requests)
        owned = [state.phase for state in self._rows.states if state is not None]
        suspending, running = owned.count(Phase.SUSPENDING), owned.count(Phase.RUNNING)
        if (running, suspending, len(owned) - running) != (self._running, self._suspending, self._releasing):
            raise IntegrityError("the counts of running, suspending and ended rows are not true")
        states = [s for s in self._rows.states if s is not None and s.phase is Phase.RUNNING]
        if Counter(s.owner for s in states) != self._shares or Counter(s.tenant for s in states) != self._tenants:
            raise IntegrityError("the counts of rows by owner are not true")
