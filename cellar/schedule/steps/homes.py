"""HomesScheduler: rows that have homes (attention cut by batch), as one scheduler for each home whose plans are joined.

A request gets a home when it comes and keeps it: its chunks lie there, prefixes are shared there, and who is suspended
comes back there. So every home has queue, rows and chunks of its own, and what all compute in one step is one plan:

    row      home * rows of a home + row there           slot     of the home's own arena
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cellar.core.config import ScheduleConfig
from cellar.core.errors import ConfigError, IntegrityError
from cellar.core.messages import (
    CopyResult,
    Emit,
    Event,
    EventKind,
    FinishReason,
    KeptChunk,
    Logprobs,
    MemoryAnswer,
    MemoryQuestion,
    Outlook,
    Request,
    SchedulerStats,
    Spans,
    StepOutput,
    StepPlan,
    StepResult,
    TableUpdate,
    Tier,
    TierOrder,
    TierStats,
)
from cellar.kv.departure import Departure
from cellar.kv.foreign import Foreign
from cellar.schedule.steps.scheduler import StepScheduler

T = TypeVar("T")


class HomesScheduler:
    """Implements `Scheduler` for transformer steps of one worker whose rows have homes; `num_rows` are each home's.

    A request goes where the fewest tokens are to be kept and computed, with what is cached of its prompt taken off.
    """

    def __init__(self, homes: Sequence[StepScheduler], num_rows: int) -> None:
        self._homes = homes
        self._num_rows = num_rows
        self._home: dict[str, int] = {}  # of each request
        self._size: dict[str, int] = {}  # tokens that it may come to
        self._load = [0] * len(homes)
        self._in_flight: deque[tuple[int, list[tuple[int, int, int]]]] = deque()  # step: (home, its step, results)
        self._steps = 0
        self.foreign: Foreign = homes[0].foreign
        self.departure: Departure = homes[0].departure

    # -- the protocol -----------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request at a home. Raises what `StepScheduler.add` does."""
        if request.id in self._home:
            home = self._home[request.id]
        else:
            tokens = np.ascontiguousarray(request.prompt, np.int32)
            costs = [
                load - scheduler.num_cached(tokens, request.salt)
                for load, scheduler in zip(self._load, self._homes, strict=True)
            ]
            home = costs.index(min(costs))
        self._homes[home].add(request, now)
        size = len(request.prompt) + request.max_tokens
        self._home[request.id], self._size[request.id] = home, size
        self._load[home] += size

    def plan(self, worker: int, now: float) -> StepPlan | None:
        """What all homes compute next, or None if none has anything."""
        parts = [(home, plan) for home, one in enumerate(self._homes) if (plan := one.plan(worker, now)) is not None]
        if not parts:
            return None
        self._in_flight.append((self._steps, [(home, plan.step, _num_results(plan)) for home, plan in parts]))
        plan = _joined(self._steps, [(home * self._num_rows, plan) for home, plan in parts])
        self._steps += 1
        return plan

    def commit(self, result: StepResult, now: float) -> StepOutput:
        """Take in the result of the oldest plan in flight, each home its part."""
        step, parts = self._in_flight.popleft() if self._in_flight else (-1, [])
        if step != result.step:
            raise IntegrityError(f"the result of step {result.step} came out of turn")
        output = StepOutput()
        first = 0
        for home, number, count in parts:
            part = _part(result, number, first, count, home * self._num_rows, self._num_rows)
            _add(output, self._homes[home].commit(part, now))
            first += count
        for id in output.finished:
            self._gone(id)
        return output

    def failed(self) -> Mapping[str, str]:
        """Requests that have failed by themselves in `plan` since the last call, and why: they have ended."""
        found: dict[str, str] = {}
        for one in self._homes:
            found.update(one.failed())
        for id in found:
            self._gone(id)
        return found

    def copies(self, now: float) -> Sequence[TierOrder]:
        """None: homes have no slower tiers."""
        return ()

    def persist(self, now: float) -> Sequence[TierOrder]:
        """None."""
        return ()

    def restore(self, kept: Mapping[Tier, Sequence[KeptChunk]], now: float) -> None:
        """Nothing is kept from before this process. Raises IntegrityError if something is."""
        if any(kept.values()):
            raise IntegrityError("chunks from before this process have no home")

    def commit_copy(self, result: CopyResult, now: float) -> None:
        """Raises IntegrityError: nothing is copied."""
        raise IntegrityError(f"copies {result.number} were not ordered")

    def next_event(self, now: float) -> Event | None:
        """The first thing that any home awaits."""
        events = [event for one in self._homes if (event := one.next_event(now)) is not None]
        timers = [event for event in events if event.kind is EventKind.TIMER]
        others = [event for event in events if event.kind is not EventKind.TIMER]
        return min(timers, key=lambda event: event.at or 0.0) if timers else others[0] if others else None

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason) -> None:
        """End a request after `num_tokens` output tokens; later ones are void. Unknown ids are ignored."""
        if (home := self._home.get(request_id)) is not None:
            self._homes[home].finish(request_id, num_tokens, reason)
            self._gone(request_id)

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown and ended ids are ignored."""
        if (home := self._home.get(request_id)) is not None:
            self._homes[home].abort(request_id)
            self._gone(request_id)

    def resume(self, request_id: str) -> None:
        """What a parked request waited for has come."""
        if (home := self._home.get(request_id)) is not None:
            self._homes[home].resume(request_id)

    def memory(self, question: MemoryQuestion, now: float | None = None) -> MemoryAnswer:
        """Where the conversations' tokens lie, at all homes together; see `StepScheduler`."""
        answers = [one.memory(question, now) for one in self._homes]
        found = []
        for each in zip(*answers, strict=True):
            total: dict[Tier, int] = {}
            for tokens in each:
                for tier, count in tokens.items():
                    total[tier] = total.get(tier, 0) + count
            found.append(total)
        return tuple(found)

    @property
    def num_erasing(self) -> int:
        """None: homes have no tier that outlives the process."""
        return sum(one.num_erasing for one in self._homes)

    def has_work(self) -> bool:
        """True while any request waits, runs, or has a plan in flight."""
        return bool(self._in_flight) or any(one.has_work() for one in self._homes)

    def stats(self) -> SchedulerStats:
        """Of all homes together; `steps` counts the parts that homes have of them."""
        found = [one.stats() for one in self._homes]
        tiers = tuple(_summed(each) for each in zip(*(stats.tiers for stats in found), strict=True))
        steps = tuple(sum(counts) for counts in zip_longest(*(stats.steps for stats in found), fillvalue=0))
        plain = {
            f.name: sum(getattr(stats, f.name) for stats in found)
            for f in fields(SchedulerStats)
            if f.name not in ("tiers", "steps")
        }
        return SchedulerStats(**plain, tiers=tiers, steps=steps)

    def outlook(self) -> Outlook:
        """What routers are told, of all homes together."""
        found = [one.outlook() for one in self._homes]
        keys: dict[Tier, NDArray[np.uint64]] = {}
        for tier in {tier for one in found for tier in one.keys}:
            keys[tier] = np.unique(np.concatenate([one.keys[tier] for one in found if tier in one.keys]))
        return Outlook(
            pending=np.concatenate([one.pending for one in found]),
            requests=sum(one.requests for one in found),
            context_tokens=sum(one.context_tokens for one in found),
            free_tokens=sum(one.free_tokens for one in found),
            cached_tokens=sum(one.cached_tokens for one in found),
            total_tokens=sum(one.total_tokens for one in found),
            keys=keys,
            rates=found[0].rates,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the books of every home, and who is where, are true."""
        for one in self._homes:
            one.check_integrity()
        for home in range(len(self._homes)):
            held = [id for id, at in self._home.items() if at == home]
            if self._load[home] != sum(self._size[id] for id in held):
                raise IntegrityError(f"the tokens of home {home} are miscounted")
        if self._home and not any(one.has_work() for one in self._homes):
            raise IntegrityError(f"requests {sorted(self._home)} have ended, but still have a home")

    def _gone(self, request_id: str) -> None:
        home = self._home.pop(request_id, None)
        if home is not None:
            self._load[home] -= self._size.pop(request_id)


def shares(config: ScheduleConfig, homes: int) -> list[ScheduleConfig]:
    """What each home may have at once of rows and of a step's tokens. Raises ConfigError if some would have none."""
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if rows < homes:
        raise ConfigError(
            f"max_num_seqs is {rows}, but attention is cut by batch over {homes} homes; set it to at least {homes}."
        )

    def share(whole: int, home: int) -> int:
        return whole // homes + (home < whole % homes)

    return [
        replace(
            config,
            max_num_seqs=share(rows, home),
            max_num_batched_tokens=None if tokens is None else share(tokens, home),
        )
        for home in range(homes)
    ]


def _num_results(plan: StepPlan) -> int:
    """Spans of a plan that are sampled."""
    spans = plan.spans
    count = int(np.count_nonzero(spans.emit == Emit.LAST))
    if plan.targets is not None:
        ends = np.cumsum((spans.stop - spans.start)[spans.emit == Emit.ALL]) - 1
        count += int(np.count_nonzero(plan.targets[ends] < 0))
    return count


def _joined(step: int, parts: Sequence[tuple[int, StepPlan]]) -> StepPlan:
    """The homes' plans as one; each comes with the number of its home's first row."""
    spans = [plan.spans for _, plan in parts]
    targets = [plan.targets for _, plan in parts if plan.targets is not None]
    return StepPlan(
        step=step,
        spans=Spans(
            row=np.concatenate([plan.spans.row + np.int32(first) for first, plan in parts]),
            start=np.concatenate([one.start for one in spans]),
            stop=np.concatenate([one.stop for one in spans]),
            source=np.concatenate([one.source for one in spans]),
            emit=np.concatenate([one.emit for one in spans]),
        ),
        tokens=np.concatenate([plan.tokens for _, plan in parts]),
        table=TableUpdate(
            row=np.concatenate([plan.table.row + np.int32(first) for first, plan in parts]),
            column=np.concatenate([plan.table.column for _, plan in parts]),
            slot=np.concatenate([plan.table.slot for _, plan in parts]),
        ),
        opens=tuple(replace(opened, row=first + opened.row) for first, plan in parts for opened in plan.opens),
        closes=tuple(first + row for first, plan in parts for row in plan.closes),
        targets=np.concatenate(targets) if targets else None,
        masked_rows=tuple(first + row for first, plan in parts for row in plan.masked_rows),
    )


def _part(result: StepResult, step: int, first: int, count: int, first_row: int, num_rows: int) -> StepResult:
    """What a home has of a result: `count` results from `first` on, and rows from `first_row` on."""

    def own(rows: Mapping[int, T]) -> dict[int, T]:
        return {row - first_row: found for row, found in rows.items() if 0 <= row - first_row < num_rows}

    if result.error is not None:
        return replace(result, step=step)
    at = slice(first, first + count)
    return replace(
        result,
        step=step,
        tokens=result.tokens[at],
        num_tokens=result.num_tokens[at],
        flags=result.flags[at],
        logprobs=None if result.logprobs is None else _logprobs(result.logprobs, first, count),
        prompt_logprobs=own(result.prompt_logprobs),
        hidden=own(result.hidden),
        failed=own(result.failed),
    )


def _logprobs(found: Logprobs, first: int, count: int) -> Logprobs | None:
    mine = (found.index >= first) & (found.index < first + count)
    if not mine.any():
        return None
    rest = {f.name: getattr(found, f.name)[mine] for f in fields(Logprobs) if f.name != "index"}
    return Logprobs(index=found.index[mine] - np.int32(first), **rest)


def _add(output: StepOutput, other: StepOutput) -> None:
    """What another home delivers as well."""
    output.ids += other.ids
    output.tokens += other.tokens
    for name in ("finished", "logprobs", "prompt_logprobs", "num_cached_tokens", "queue_seconds", "pooled"):
        getattr(output, name).update(getattr(other, name))


def _summed(each: Sequence[TierStats]) -> TierStats:
    counts = {f.name: sum(getattr(one, f.name) for one in each) for f in fields(TierStats) if f.name != "tier"}
    return TierStats(tier=each[0].tier, **counts)
