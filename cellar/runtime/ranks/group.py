"""RankGroup: several ranks as one runtime. The same plan goes to each, in the same order; one rank answers for all."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import BuffersError, ConfigError, DeviceError, IntegrityError
from cellar.core.messages import CopyResult, Flag, StepPlan, StepResult, TierOrder
from cellar.runtime.protocol import Capacity
from cellar.runtime.ranks.lines import Answer
from cellar.runtime.ranks.pace import Pace
from cellar.runtime.ranks.rank import (
    CLOSE_SECONDS,
    Died,
    Masks,
    News,
    Opened,
    Opener,
    Order,
    Packed,
    Rank,
    ThreadRank,
)

MakeRank = Callable[[int, Opener, "SimpleQueue[News]"], Rank]
Result = StepResult | CopyResult

GRACE_SECONDS = 0.5
"""After a rank has died, others may say why."""

HURRY_SECONDS = 1.0
"""How long ranks may take to end by themselves after one has failed: they may wait for it for ever."""


OPENING_SECONDS = 120.0
"""How long a rank's process may say nothing while it opens: a library may keep the interpreter to itself."""

WATCH_SECONDS = 2.0
"""Between two looks at the pulses."""


@dataclass(slots=True)
class _Awaited:
    """A plan or a batch, and what the ranks have answered so far."""

    number: int
    answers: dict[int, Result] = field(default_factory=dict)
    since: float = 0.0  # when the first answer came


class RankGroup:
    """Implements `Runtime[StepPlan]` by the runtimes of several ranks, each with a shard of the model and of its KV.

    Rank 0 samples: masks go to it alone, and the ranks hand its tokens on among themselves. All answer, and must say
    the same; of several `stages`, equal runs of ranks, this holds for the last one, and the others answer without
    tokens, as early as they can. A rank that answers otherwise or out of turn raises IntegrityError from `poll`; one
    that has died, or has not answered `patience` seconds (each stage has as many) after another did, or whose process
    has not said for `silence` seconds that it lives (it is stopped; a long step is none), DeviceError, and then all are
    ended. Every later call raises the same. A step that failed on any rank has failed. Capacity is the least of all
    ranks. `memory` is what each takes, where they say it, and `offload` where the weights lie of those that
    stream them. There is no tier to be looked up (`lookup`).

    Raises what a user can mend of what kept a rank from opening, else DeviceError.
    """

    def __init__(
        self,
        openers: Sequence[Opener],
        make: MakeRank = ThreadRank,
        *,
        patience: float = 60.0,
        silence: float = 30.0,
        stages: int = 1,
    ) -> None:
        self._news: SimpleQueue[News] = SimpleQueue()
        self._sampler = len(openers) - len(openers) // stages
        self._patience = patience * stages
        self._silence = silence
        self._steps: deque[_Awaited] = deque()
        self._copies: dict[int, _Awaited] = {}
        self._failed: Exception | None = None
        self._closed = False
        self._watch = _Watch()
        self._pace = Pace()
        self._ranks: list[Rank] = []
        try:
            for number, opener in enumerate(openers):
                self._ranks.append(make(number, opener, self._news))
            opened = self._opened()
            self.capacity = least([one.capacity for one in opened])
            self.memory = [one.memory for one in opened]
            self.offload = [one.offload for one in opened if one.offload is not None]
        except BaseException as error:
            self._failed = error if isinstance(error, Exception) else None
            self.close()
            raise
        self.workers = (RankedWorker(self),)
        self.lookup: None = None

    @property
    def in_flight(self) -> int:
        """Plans submitted whose result no `poll` has returned yet."""
        return len(self._steps)

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to every rank."""
        self._check()
        self._steps.append(_Awaited(plan.step))
        self._send(plan)

    def copy(self, batch: TierOrder) -> None:
        """Each rank copies its shard of the chunks."""
        self._check()
        self._copies[batch.number] = _Awaited(batch.number)
        self._send(batch)

    def supply(self, step: int, masks: Mapping[int, NDArray[np.int32] | None]) -> None:
        """Masks go to the rank that samples."""
        order = Masks(step, masks)
        self._ranks[self._sampler].send(order, Packed(order))

    def masking(self, threads: int) -> None:
        """Ranks hear nothing of it: their own laps say how many threads suit them."""

    def poll(self, timeout: float | None) -> list[StepResult | CopyResult]:
        """Results that all ranks have answered, in order; waits for a first one, or for a wake."""
        self._check()
        end = None if timeout is None else time.monotonic() + timeout
        found: list[Result] = []
        try:
            while not found:
                try:
                    news = self._news.get(timeout=self._left(end))
                except Empty:
                    if end is not None and time.monotonic() >= end:
                        return found
                    continue
                if news is None:
                    return found
                self._take(news, found)
            while True:  # what else is there
                try:
                    news = self._news.get_nowait()
                except Empty:
                    return found
                if news is not None:
                    self._take(news, found)
        except (DeviceError, IntegrityError) as error:
            self._failed = error
            self.close()
            raise

    def wake(self) -> None:
        """End a waiting `poll` from another thread."""
        self._news.put(None)

    def close(self) -> None:
        """End all ranks, within seconds even if one hangs, at once if one has failed; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for rank in self._ranks:
            rank.stop()
        end = time.monotonic() + (CLOSE_SECONDS if self._failed is None else HURRY_SECONDS)
        for rank in self._ranks:
            rank.join(end - time.monotonic())
        self._news.put(None)

    def _opened(self) -> list[Opened]:
        """What all ranks have opened, in order. Raises CellarError if one cannot."""
        found: dict[int, Opened] = {}
        while len(found) < len(self._ranks):
            self._watch.look(self._ranks, OPENING_SECONDS)
            try:
                news = self._news.get(timeout=WATCH_SECONDS)
            except Empty:
                continue
            if isinstance(news, Opened):
                found[news.rank] = news
            elif isinstance(news, Died):
                deaths = self._deaths(news)
                first = deaths[0]
                kind = DeviceError if first.error is None else type(first.error)
                said = f"rank {first.rank} could not be opened: {str(first.error or first.reason).rstrip('.')}."
                if first.error is not None and len({str(death.error) for death in deaths}) == 1 < len(deaths):
                    said = str(first.error)
                if missing := [death.error.missing for death in deaths if isinstance(death.error, BuffersError)]:
                    raise BuffersError(said, max(missing))
                raise kind(said)
        return [found[rank] for rank in range(len(self._ranks))]

    def _deaths(self, first: Died) -> list[Died]:
        """All ranks that have died, after a moment for others; the causes stand before those that went with them."""
        found, end = {first.rank: first}, time.monotonic() + GRACE_SECONDS
        while len(found) < len(self._ranks) and (left := end - time.monotonic()) > 0:
            try:
                news = self._news.get(timeout=left)
            except Empty:
                break
            if isinstance(news, Died):
                found.setdefault(news.rank, news)  # what it said itself comes before how its process ended
        return sorted(found.values(), key=lambda death: (death.follows, death.error is not None, death.rank))

    def _send(self, order: Order) -> None:
        packed = Packed(order)
        for rank in self._ranks:
            rank.send(order, packed)

    def _take(self, news: News, found: list[Result]) -> None:
        assert news is not None
        if isinstance(news, Died):
            first = self._deaths(news)[0]
            raise DeviceError(f"rank {first.rank} has ended ({first.reason.rstrip('.')}); start again.")
        assert isinstance(news, Answer), "ranks open once"
        rank, result = news.rank, news.result
        awaited = self._awaited(rank, result)
        awaited.answers[rank] = result
        awaited.since = awaited.since or time.monotonic()
        if len(awaited.answers) < len(self._ranks):
            return
        answers = [awaited.answers[k] for k in range(len(self._ranks))]
        if isinstance(result, StepResult):
            self._steps.popleft()
            found.append(joined([one for one in answers if isinstance(one, StepResult)], self._sampler))
        else:
            del self._copies[result.number]
            found.append(copied([answer for answer in answers if isinstance(answer, CopyResult)]))

    def _awaited(self, rank: int, result: Result) -> _Awaited:
        """What a rank's answer belongs to. Raises IntegrityError if that is not its turn."""
        if isinstance(result, CopyResult):
            awaited = self._copies.get(result.number)
            if awaited is None or rank in awaited.answers:
                raise IntegrityError(f"rank {rank} answered copies {result.number}, which it was not to make.")
            return awaited
        due = next((awaited for awaited in self._steps if rank not in awaited.answers), None)
        if due is None or due.number != result.step:
            turn = "none" if due is None else f"step {due.number}"
            raise IntegrityError(f"rank {rank} answered step {result.step}, but its next was {turn}.")
        return due

    def _left(self, end: float | None) -> float | None:
        """Seconds until `end`, or until ranks that are waited for have to be looked after. Raises DeviceError for one
        that is given up.
        """
        now = time.monotonic()
        left = None if end is None else max(0.0, end - now)
        if self._steps or self._copies:
            self._watch.look(self._ranks, self._silence)
            self._pace.look(self._ranks)
            left = WATCH_SECONDS if left is None else min(left, WATCH_SECONDS)
        behind = next((a for a in (*self._steps, *self._copies.values()) if a.since), None)
        if behind is None:
            return left
        rest = behind.since + self._patience - now
        if rest <= 0:
            silent = [k for k in range(len(self._ranks)) if k not in behind.answers]
            raise DeviceError(
                f"rank {silent[0]} has not answered for {self._patience:g} s, though others have; start again."
            )
        return rest if left is None else min(left, rest)

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._closed:
            raise DeviceError("the runtime is closed and takes no plans; open a new one.")


class _Watch:
    """Looks at the pulses of ranks. What passed while nobody looked does not count: this process may have been stopped
    itself.
    """

    def __init__(self) -> None:
        self._looked = -math.inf
        self._since = 0.0

    def look(self, ranks: Sequence[Rank], silence: float) -> None:
        """Raises DeviceError for a rank that has been silent for so many seconds."""
        now = time.monotonic()
        if now > self._looked + 2 * WATCH_SECONDS:
            self._since = now
        self._looked = now
        for number, rank in enumerate(ranks):
            heard = rank.heard
            if heard is not None and now - max(heard, self._since) > silence:
                raise DeviceError(
                    f"rank {number} has given no sign of life for {silence:g} s: its process is stopped or "
                    "starved; start again."
                )


@dataclass(frozen=True, slots=True)
class RankedWorker:
    """The one queue of a group."""

    group: RankGroup
    id: int = 0

    @property
    def in_flight(self) -> int:
        """Plans submitted whose result no `poll` has returned yet."""
        return self.group.in_flight

    def submit(self, plan: StepPlan) -> None:
        """Hand over a plan; never blocks."""
        self.group.submit(plan)


def least(capacities: Sequence[Capacity]) -> Capacity:
    """What all ranks have room for. Raises ConfigError if their chunks differ."""
    sizes = {capacity.chunk_size for capacity in capacities}
    if len(sizes) != 1:
        raise ConfigError(f"the ranks have chunks of {sorted(sizes)} tokens; give all the same block_size.")
    return Capacity(
        min(capacity.num_slots for capacity in capacities),
        min(capacity.num_rows for capacity in capacities),
        sizes.pop(),
        min(capacity.max_model_len for capacity in capacities),
        {tier: min(capacity.tiers[tier] for capacity in capacities) for tier in capacities[0].tiers},
        homes=capacities[0].homes,
    )


def joined(results: Sequence[StepResult], sampler: int = 0) -> StepResult:
    """The sampling rank's result of a step, once all after it say the same; an error if any rank has one. Raises
    IntegrityError otherwise.
    """
    first = results[sampler]
    errors = {k: result.error for k, result in enumerate(results) if result.error is not None}
    if errors:
        said = "; ".join(f"rank {k}: {error}" for k, error in errors.items())
        alike = len(errors) == len(results) and len(set(errors.values())) == 1
        none = np.empty(0, np.int32)
        return StepResult(first.step, none.reshape(0, 1), none, none, error=errors[sampler] if alike else said)
    counts = first.flags != Flag.LATE  # masks come to the sampling rank alone
    for k, result in enumerate(results[sampler + 1 :], sampler + 1):
        for name in ("tokens", "num_tokens", "flags"):
            if not np.array_equal(getattr(first, name)[counts], getattr(result, name)[counts]):
                raise IntegrityError(
                    f"rank {k} has other {name} of step {first.step} than rank {sampler}; please report this."
                )
    return first


def copied(results: Sequence[CopyResult]) -> CopyResult:
    """A chunk has arrived if every rank has its shard."""
    first = results[0]
    return CopyResult(
        first.number,
        np.logical_and.reduce([result.ok for result in results]),
        sum(result.nbytes for result in results),
        max(result.seconds for result in results),
        next((f"rank {k}: {result.error}" for k, result in enumerate(results) if result.error is not None), None),
    )
