"""The loop: receive, plan, submit, poll, commit. One for transformers and cells, every scheduler and every runtime."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from cellar.core.errors import IntegrityError
from cellar.runtime.protocol import Worker

PlanT = TypeVar("PlanT")
PlanT_co = TypeVar("PlanT_co", covariant=True)
PlanT_contra = TypeVar("PlanT_contra", contravariant=True)
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)
ResultT_contra = TypeVar("ResultT_contra", contravariant=True)
OutputT = TypeVar("OutputT")
LetterT = TypeVar("LetterT")


class Plans(Protocol[PlanT_co]):
    """What the loop asks of a scheduler."""

    def plan(self, worker: int, now: float) -> PlanT_co | None:
        """The next plan for a worker, or None."""

    def has_work(self) -> bool:
        """True while any request waits, runs, or has a plan in flight."""

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the bookkeeping is sound."""


class Works(Protocol[PlanT_contra, ResultT_co]):
    """What the loop asks of a runtime."""

    @property
    def workers(self) -> Sequence[Worker[PlanT_contra]]:
        """The queues of the runtime."""

    def poll(self, timeout: float | None) -> Sequence[ResultT_co]:
        """Results so far; waits for a first one, or for a wake."""


class Host(Protocol[PlanT_contra, ResultT_contra, OutputT]):
    """Who runs the loop: an engine."""

    def received(self) -> list[OutputT]:
        """Read the mailbox; -> what is to be delivered already."""

    def submitted(self, plan: PlanT_contra) -> None:
        """A plan was handed to its worker."""

    def committed(self, result: ResultT_contra) -> OutputT | None:
        """Commit a result; -> what it delivers."""


class Loop(Generic[PlanT, ResultT, OutputT]):
    """Joins one that decides and one that does.

    `run_ahead` plans are on their way to each worker at any time. When work ends the books are checked, but not more
    often than every `check_seconds`.
    """

    def __init__(
        self,
        scheduler: Plans[PlanT],
        runtime: Works[PlanT, ResultT],
        host: Host[PlanT, ResultT, OutputT],
        clock: Callable[[], float],
        check_seconds: float,
    ) -> None:
        self._scheduler = scheduler
        self._runtime = runtime
        self._host = host
        self._clock = clock
        self.check_seconds = check_seconds
        self._checked = -math.inf
        self._rested = True

    def turn(self, timeout: float | None, run_ahead: int) -> list[OutputT]:
        """One turn; waits up to `timeout` seconds (None: for ever) for a result, or for a `wake`.

        Raises IntegrityError if the bookkeeping is broken, or requests wait and nothing can be planned: a defect.
        """
        outputs = self._host.received()
        now = self._clock()
        for worker in self._runtime.workers:
            while worker.in_flight < run_ahead and (plan := self._scheduler.plan(worker.id, now)) is not None:
                worker.submit(plan)
                self._host.submitted(plan)
        if self._scheduler.has_work() and not any(worker.in_flight for worker in self._runtime.workers):
            raise IntegrityError("requests wait, but nothing runs and nothing is planned; please report this defect.")
        # Work that a message has ended is news, too, though no result will say so.
        ended = not self._rested and not self._scheduler.has_work()
        for result in self._runtime.poll(0.0 if outputs or ended else timeout):
            output = self._host.committed(result)
            if output is not None:
                outputs.append(output)
        if not self._scheduler.has_work():
            self._rest()
        return outputs

    def stir(self) -> None:
        """A message was read: the books are to be checked when work ends."""
        self._rested = False

    def _rest(self) -> None:
        """Between work and idleness the books must balance."""
        if not self._rested and self._clock() >= self._checked + self.check_seconds:
            self._scheduler.check_integrity()
            self._checked = self._clock()
        self._rested = True


class Mailbox(Generic[LetterT]):
    """Letters from any thread to the one that runs the loop."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._letters: deque[LetterT] = deque()
        self._wake = wake

    def __len__(self) -> int:
        return len(self._letters)

    def post(self, letter: LetterT) -> None:
        """Leave a letter and end a waiting turn."""
        self._letters.append(letter)
        self._wake()

    def read(self) -> Iterator[LetterT]:
        """The letters that are there now; those that arrive meanwhile wait for the next time."""
        for _ in range(len(self._letters)):
            yield self._letters.popleft()
