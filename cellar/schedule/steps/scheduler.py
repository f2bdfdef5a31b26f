"""StepScheduler: unified iteration-level batching of transformer steps (Pensieve §3.4.2, §3.4.3.5).

Each plan is one batch of requests in whatever phase they are: first one token of every running decode, then
waiting requests with short prompts, if long ones stand before them, then prompt chunks of running requests, then
requests from the waiting queue, in the order of turns, until the token budget is spent. Long prompts have a share of it
beside decodes, which wait for them. Memory for a prompt is reserved when its request is admitted; decodes take a
chunk when they need one. When there is none, the latest arrival is suspended.

Plans run ahead of their commits; `holders.py` has the rule that makes that safe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from cellar.core.config import ScheduleConfig
from cellar.core.errors import IntegrityError, RequestError
from cellar.core.messages import (
    CopyResult,
    Event,
    EventKind,
    FinishReason,
    IntArray,
    KeptChunk,
    MemoryAnswer,
    MemoryQuestion,
    Outlook,
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
from cellar.kv.store import KVStore
from cellar.schedule.steps.batch import InFlight, StepBatch
from cellar.schedule.steps.delivery import Ending, deliver, late_rows
from cellar.schedule.steps.failures import Failures
from cellar.schedule.steps.holders import Holders
from cellar.schedule.steps.limits import limit_of
from cellar.schedule.steps.outlook import outlook
from cellar.schedule.steps.pace import Pace
from cellar.schedule.steps.plans import Plans
from cellar.schedule.steps.prompts import Prompts
from cellar.schedule.steps.queue import WaitingQueue
from cellar.schedule.steps.request import Phase, RequestState
from cellar.schedule.steps.rows import NEVER, Rows
from cellar.schedule.steps.stagger import Stagger
from cellar.schedule.steps.tally import Tally

MAX_NAMED_PER_COMMIT = 256
"""Chunks that get their identity in one commit. More may wait for the next: an identity can, a step cannot."""


class StepScheduler:
    """Implements `Scheduler` for transformer steps of one worker.

    `num_slots` chunks of `chunk_size` tokens and `num_rows` rows are what the runtime has. Of `stages` of
    a pipeline each has another plan: they share the tokens of a step and the rows that decode (`teams.py`). `root` is
    what the identities of chunks begin with: see `kv/identity.py`. `tiers` says how many chunks slower tiers hold,
    `policy` which chunks leave a tier first, `recovery` which are loaded and which computed again (default: all are
    loaded). `diagonal` lets requests begin evenly spread over the steps (`stagger.py`). `phases_apart` computes prompts
    first, by themselves: the schedulers that the unified one is compared with do (Pensieve §3.6.7).
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
        root: bytes = b"",
        tiers: Mapping[Tier, int] | None = None,
        policy: Policy | None = None,
        recovery: Recovery | None = None,
        diagonal: bool = False,
        phases_apart: bool = False,
        stages: int = 1,
    ) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._caching = enable_prefix_caching
        self._store = KVStore(num_slots, chunk_size, root, tiers, policy, recovery)
        self.foreign = self._store.foreign  # what other engines have written
        self.departure = self._store.departure  # what is written at the end
        self._rows = Rows(min(num_rows, config.max_num_seqs), max_model_len, chunk_size)
        self._queue = WaitingQueue()
        self._requests: dict[str, RequestState] = {}
        self._failures = Failures(self.check_integrity)
        self._tally = Tally(1 + len(tiers or {}))
        self._holders = Holders(self._rows, self._store, self._queue, self._failures, self._tally)
        keep_free = math.ceil(config.decode_reserve * num_slots)
        pace = Pace(config.max_mixed_seconds)
        self._stagger = Stagger(num_slots - keep_free, self._rows.num_free, chunk_size) if diagonal else None
        # Pieces of a prompt wait for no token: one may be at each stage.
        pieces = config.run_ahead + stages - 1
        self._prompts = Prompts(
            self._holders, pace, keep_free, num_slots, pieces, self._caching, self._fail, self._stagger
        )
        budget = -(-(config.max_num_batched_tokens or self._rows.tokens.size) // stages)
        self._plans = Plans(
            self._holders, self._prompts, self._tally, budget, config.run_ahead, self._stagger, phases_apart, stages
        )

    # -- the protocol -----------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request.

        Raises RequestError for an empty prompt, one that leaves no room for a token or for another one behind its
        output, or an id in use;
        CapacityError if prompt and max_tokens need more chunks than there are.
        """
        if request.id in self._requests:
            raise RequestError(f"A request with the id {request.id!r} is running; use another id.", "request_id")
        limit = limit_of(request, self._max_model_len, self._store.chunk_size, self._store.stats().total)
        key = (
            request.priority if self._config.scheduling_policy == "priority" else 0,
            self._queue.turn(request.tenant),
        )
        self._holders.now = now
        known = np.ascontiguousarray(request.prompt, np.int32)
        if request.output is not None:
            known = np.concatenate([known, request.output], dtype=np.int32)
        state = RequestState(request, key, limit, self._store.chain(request.salt), known, arrived=now)
        state.forgotten = not self._caching
        self._requests[request.id] = state
        self._queue.add(state)

    def plan(self, worker: int, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed before the next commit or add."""
        self._holders.now = now
        plan = self._plans.make()
        self._failures.settle()
        return plan

    def commit(self, result: StepResult, now: float) -> StepOutput:
        """Take in the result of the oldest plan in flight: deliver tokens, name chunks, give back memory."""
        output = self._commit(result, now)
        self._failures.settle()
        return output

    def failed(self) -> Mapping[str, str]:
        """Requests that have failed by themselves in `plan` since the last call, and why: they have ended."""
        return self._failures.take()

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
        self._holders.now = now
        failed = self._store.commit_copy(result, now)
        for state in tuple(self._holders.loading):
            state.awaits.discard(result.number)
            assert state.reservation is not None
            if len(failed) and np.isin(state.reservation.slots, failed).any():
                self._holders.unload(state)
                state.phase = Phase.WAITING
                self._queue.push(state)

    def next_event(self, now: float) -> Event | None:
        """A copy while any is under way: it brings chunks that are waited for, or gives back memory, for which nobody
        waits long. Else the moment when chunks have rested long enough to be copied, or a mask.
        """
        if self._store.num_moving:
            return Event(EventKind.COPY, self._prompts.waits_until(now))
        moment = self._store.next_moment()
        if moment is not None:
            return Event(EventKind.TIMER, moment)
        return Event(EventKind.GRAMMAR) if self._holders.num_parked else None

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
        self._tally.generation_tokens -= length - count
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
        now = self._holders.now = self._holders.now if now is None else now
        named = [self._store.named(name) for name in question.conversations]
        answer = tuple(self._store.memory(numbers) for numbers in named)
        if question.flush is not None:
            there = any(stats.tier is question.flush for stats in self._store.tier_stats())
            answer += ({question.flush: self._store.flush(question.flush)} if there else {},)
        if question.pin_seconds is not None:
            for numbers in named:
                self._store.pin(numbers, now + question.pin_seconds)
        if question.forget:
            names, gone = set(question.conversations), {number for numbers in named for number in numbers}
            for state in (*self._requests.values(), *filter(None, self._rows.states)):
                if state.request.conversation in names or state.conversation in gone:
                    state.forgotten = True
                    if state.row >= 0:
                        self._holders.hide(state.row)
            self._store.forget_conversations(sorted(gone), self._store.holding(question.keep))
        return answer

    def resume(self, request_id: str) -> None:
        """What a parked request waited for has come; it goes back to its place. Others are left as they are."""
        state = self._requests.get(request_id)
        if state is not None:
            self._holders.resume(state)

    @property
    def num_erasing(self) -> int:
        """Chunks of which something is left, though they were forgotten: tiers that outlive the process erase them."""
        return self._store.num_erasing

    def num_cached(self, tokens: IntArray, salt: bytes) -> int:
        """How many tokens of a prompt that comes now need not be computed."""
        return self._store.find(self._store.chain(salt), tokens).num_tokens if self._caching and len(tokens) else 0

    def has_work(self) -> bool:
        """True while any request waits, runs, or has a plan in flight."""
        return bool(self._requests or self._plans.in_flight)

    def stats(self) -> SchedulerStats:
        """A snapshot; O(1). Prefix queries and hits count prompt tokens of first admissions."""
        holders = self._holders
        waiting = len(self._queue) + len(holders.loading) + holders.num_parked
        return self._tally.stats(self._store, holders.running, waiting)

    def outlook(self) -> Outlook:
        """What routers are told; O(requests and chunks)."""
        return outlook(self._requests.values(), self._store)

    # -- results ----------------------------------------------------------------------------------

    def _commit(self, result: StepResult, now: float) -> StepOutput:
        self._holders.now = now
        record = self._plans.commit(result)
        output = StepOutput()
        if result.error is None:
            self._store.measured(record.prompts, result.seconds)
            if len(record.prompts):
                self._prompts.pace.measured(record.cost, result.seconds, len(record.rows))
            elif record.num_decodes:
                self._prompts.pace.decoded(record.num_decodes, result.seconds)
            self._take_in(record, result, output)
        else:
            # Who has been dropped meanwhile has no KV of this step either, though later ones may have computed.
            self._rows.next_named[record.rows] = NEVER
            for row in record.rows[self._rows.accepts[record.rows]].tolist():
                self._end(Ending(row, FinishReason.ERROR, result.error), output)
        self._holders.committed(record.rows)
        return output

    def _take_in(self, record: InFlight, result: StepResult, output: StepOutput) -> None:
        rows, holders = self._rows, self._holders
        rows.computed[record.rows] = record.stops
        late = late_rows(rows, record, result)
        endings = deliver(rows, record, result, output, self._failures.said)
        for row in late:
            holders.park(row)
        self._tally.generation_tokens += len(output.ids)
        for ending in endings:
            if ending.reason is FinishReason.ERROR:  # its KV may be wrong: nobody is to find it again
                holders.hide(ending.row)
                self._store.forget(rows.slots(ending.row))
        done = rows.completed(record.rows)
        for row in done[:MAX_NAMED_PER_COMMIT].tolist():
            error = holders.try_name(row)
            if error is not None and rows.accepts[row]:
                endings = [ending for ending in endings if ending.row != row]
                endings.append(Ending(row, FinishReason.ERROR, error))
        for ending in endings:
            self._end(ending, output)

    # -- endings ----------------------------------------------------------------------------------

    def _end(self, ending: Ending, output: StepOutput) -> None:
        """A running or suspending request ends by a result."""
        state = self._rows.state(ending.row)
        output.finished[state.request.id] = (ending.reason, ending.detail)
        state.stopped = ending.reason is FinishReason.STOP
        if ending.reason is FinishReason.ERROR:
            self._holders.hide(ending.row)
        self._drop(state)

    def _fail(self, state: RequestState, error: Exception, batch: StepBatch) -> None:
        """A request has failed while `batch` was made: it ends, and leaves nothing. Raises an IntegrityError."""
        self._failures.note(state.request.id, error)
        row = state.row
        if row >= 0:
            batch.withdraw(row)
            self._holders.hide(row)
        self._drop(state)
        if row >= 0 and not self._rows.planned[row]:
            self._holders.closes.discard(row)  # no plan has opened it

    def _drop(self, state: RequestState) -> None:
        del self._requests[state.request.id]
        if self._stagger is not None and state.num_cached >= 0:
            length = len(state.known) if state.row < 0 else int(self._rows.length[state.row])
            self._stagger.ended(length, state.limit)
        self._holders.end(state)

    # -- checks -----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise IntegrityError unless rows, queue, plans in flight and chunks agree; for tests, or when idle."""
        self._holders.check(self._plans.in_flight, self._requests)
