"""Engine: receive, plan, submit, poll, commit. One for transformers and cells, every scheduler and every runtime."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, Protocol, TypeVar

from cellar.core.errors import CellarError, IntegrityError
from cellar.core.messages import CopyResult, EventKind, FinishReason
from cellar.engine.client import Message
from cellar.runtime.protocol import Workers
from cellar.schedule.protocol import Scheduler

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
Resume = Callable[[Exception | None], None]


class Identified(Protocol):
    """A request."""

    @property
    def id(self) -> str:
        """No two of them that run have the same."""


RequestT = TypeVar("RequestT", bound=Identified)
RequestT_contra = TypeVar("RequestT_contra", bound=Identified, contravariant=True)
PlanT = TypeVar("PlanT")
PlanT_contra = TypeVar("PlanT_contra", contravariant=True)
ResultT = TypeVar("ResultT")
ResultT_contra = TypeVar("ResultT_contra", contravariant=True)
OutputT = TypeVar("OutputT")
StatsT = TypeVar("StatsT")


class Mailbox:
    """Messages from any thread to one; `wake` ends its waiting."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._messages: deque[Message] = deque()
        self._wake = wake

    def __len__(self) -> int:
        return len(self._messages)

    def post(self, message: Message) -> None:
        """Leave a message."""
        self._messages.append(message)
        self._wake()

    def read(self) -> int:
        """Do what the messages say that are there now -> how many; those that arrive meanwhile wait."""
        count = len(self._messages)
        for _ in range(count):
            self._messages.popleft()()
        return count


class Companion(Protocol[RequestT_contra, PlanT_contra, ResultT_contra]):
    """What goes with requests beside the scheduler; see `structured.py`. It belongs to the engine's thread."""

    def holds(self, request: RequestT_contra, resume: Resume) -> bool:
        """True if a request cannot start yet and is kept here; `resume` may then be called in any thread.

        None: it can start now; an exception: it never can. May raise what `resume` might be given.
        """

    def has_work(self) -> bool:
        """True while a request is kept here."""

    def release(self, request: RequestT_contra) -> bool:
        """Keep a request no longer -> whether it was kept, and not dropped meanwhile."""

    def drop(self, request_id: str) -> None:
        """A request is dropped; ids of requests that are not kept are ignored."""

    def submitted(self, plan: PlanT_contra) -> None:
        """A plan was handed to its worker."""

    def committed(self, result: ResultT_contra) -> None:
        """A result was committed; what it delivers has not gone out yet."""

    def close(self) -> None:
        """The engine ends."""


class Engine(Generic[RequestT, PlanT, ResultT, OutputT, StatsT]):
    """Joins one that decides (`scheduler`) and one that does (`runtime`). Implements `EngineClient`.

    One thread owns it; only `post`, `wake` and `stats` are for others. `run_ahead` plans are on their way to each
    worker at any time, so that the device never waits for Python. `refusal` makes an output of requests that could
    not run, and why. `clock` gives seconds; with a clock of the caller's, every decision can be repeated. When work
    ends the books are checked, but not more often than every `check_seconds`. Closing may take `persist_seconds` to
    bring what would be lost to tiers that outlive the process.

    Whatever a request causes when it is added, planned, opened, delivered, finished or dropped ends that request alone,
    as long as the books balance without it. What `turn` raises has broken the engine.
    """

    def __init__(
        self,
        scheduler: Scheduler[RequestT, PlanT, ResultT, OutputT, StatsT],
        runtime: Workers[PlanT, ResultT],
        refusal: Callable[[Mapping[str, str]], OutputT],
        *,
        run_ahead: int = 2,
        clock: Clock = time.monotonic,
        check_seconds: float = 60.0,
        persist_seconds: float = 30.0,
        companion: Companion[RequestT, PlanT, ResultT] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runtime = runtime
        self.run_ahead = run_ahead
        self.clock = clock
        self.companion = companion
        self._workers = runtime.workers
        self._refusal = refusal
        self._mailbox = Mailbox(runtime.wake)
        self._refused: dict[str, str] = {}
        self._outputs: list[OutputT] = []  # what came to light between turns
        self._check_seconds = check_seconds
        self._checked = -math.inf
        self._persist_seconds = persist_seconds
        self._dirty = False

    # -- for any thread ---------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Have something done by the engine's thread at its next turn; ends a waiting one."""
        self._mailbox.post(message)

    def wake(self) -> None:
        """End a waiting `turn`."""
        self.runtime.wake()

    def stats(self) -> StatsT:
        """A snapshot of queues and memory; may be a step old."""
        return self.scheduler.stats()

    def has_work(self) -> bool:
        """True while a request waits or runs, or a message or a refusal is not read yet."""
        held = self.companion is not None and self.companion.has_work()
        return bool(len(self._mailbox) or self._refused or self._outputs) or held or self.scheduler.has_work()

    # -- for the engine's thread ------------------------------------------------------------------

    def read(self) -> None:
        """Do what was posted, and plan nothing."""
        if self._mailbox.read():
            self.mark_dirty()

    def add(self, *requests: RequestT) -> None:
        """Queue requests; one that could never run comes back from `turn`, as `refusal` says it."""
        self.mark_dirty()
        add, companion, now = self.scheduler.add, self.companion, self.clock()
        for request in requests:
            try:
                if companion is None or not companion.holds(request, partial(self._resume, request)):
                    add(request, now)
            except IntegrityError:
                raise
            except Exception as error:
                self._refuse(request.id, error)

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
        """End a request after `num_tokens` output tokens; later ones are void. Unknown ids are ignored.

        Where that cannot be (it has not so many), it is dropped.
        """
        self.mark_dirty()
        try:
            output = self.scheduler.finish(request_id, num_tokens, reason)
        except Exception as error:
            logger.error("request %s could not be finished", request_id, exc_info=error)
            self.abort(request_id)
            return
        if output is not None:
            self._outputs.append(output)

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown ids are ignored."""
        self.mark_dirty()
        self._refused.pop(request_id, None)
        if self.companion is not None:
            self.companion.drop(request_id)
        output = self.scheduler.abort(request_id)
        if output is not None:
            self._outputs.append(output)

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request with an error; unknown ids are ignored."""
        self.abort(request_id)
        self._refuse(request_id, error)

    def refused(self) -> Mapping[str, str]:
        """Requests that could never run and of which no turn has told yet, and why."""
        return self._refused

    def turn(self, timeout: float | None = None) -> list[OutputT]:
        """One turn of the loop; waits up to `timeout` seconds (None: for ever) for a result, or for a message.

        Raises IntegrityError if the bookkeeping is broken, or requests wait for nothing: a defect.
        """
        self.read()
        scheduler, runtime, companion = self.scheduler, self.runtime, self.companion
        outputs, self._outputs = self._outputs, []
        if self._refused:
            outputs.append(self._refusal(self._refused))
            self._refused = {}
        now = self.clock()
        flying = 0
        for k, worker in enumerate(self._workers):
            count = worker.in_flight
            while count < self.run_ahead:
                plan = scheduler.plan(k, now)
                for batch in scheduler.copies(now):
                    runtime.copy(batch)
                if plan is None:
                    break
                worker.submit(plan)
                count += 1
                if companion is not None:
                    companion.submitted(plan)
            flying += count
        if failed := scheduler.failed():
            outputs.append(self._refusal(failed))
            if companion is not None:
                for request_id in failed:
                    companion.drop(request_id)
        elif not flying:
            timeout = self._idle(timeout, now)
        for result in runtime.poll(0.0 if outputs else timeout):
            if isinstance(result, CopyResult):
                scheduler.commit_copy(result, self.clock())
                continue
            outputs.append(scheduler.commit(result, self.clock()))
            flying -= 1  # or less, where a plan has several results
            if companion is not None:
                companion.committed(result)
        if self._dirty and flying <= 0 and not scheduler.has_work():
            self._rest()
        return outputs

    def mark_dirty(self) -> None:
        """Something has come in: the books are to be checked when work ends."""
        self._dirty = True

    def persist(self, timeout: float) -> None:
        """Copy what would be lost with this process to tiers that outlive it, for `timeout` seconds at most.

        Requests must have ended; what still comes of them is not delivered.
        """
        scheduler, runtime = self.scheduler, self.runtime
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            now = self.clock()
            for batch in scheduler.persist(now):
                runtime.copy(batch)
            event = scheduler.next_event(now)
            if event is None or event.kind is not EventKind.COPY:
                return
            for result in runtime.poll(left):
                if isinstance(result, CopyResult):
                    scheduler.commit_copy(result, self.clock())
                else:
                    scheduler.commit(result, self.clock())
        logger.warning("not all KV has reached the disk within %.0f s; the rest will be computed again", timeout)

    def close(self) -> None:
        """Stop the workers and free the device's memory, after `persist`."""
        if self.companion is not None:
            self.companion.close()
        try:
            if self._persist_seconds > 0:
                self.persist(self._persist_seconds)
        except Exception as error:  # after a defect, say; what is lost can be computed again
            logger.error("KV could not be kept for the next start", exc_info=error)
        self._persist_seconds = 0.0
        self.runtime.close()

    # -- how --------------------------------------------------------------------------------------

    def _idle(self, timeout: float | None, now: float) -> float | None:
        """Nothing runs -> how long to wait at most. Raises IntegrityError if requests wait for nothing."""
        event, works = self.scheduler.next_event(now), self.scheduler.has_work()
        if event is None and works:
            raise IntegrityError("requests wait, but nothing runs and nothing is awaited; please report this defect.")
        if self._dirty and not works:
            return 0.0  # work that a message has ended is news, too, though no result will say so
        if event is None or event.at is None:
            return timeout
        left = max(0.0, event.at - now)
        return left if timeout is None else min(timeout, left)

    def _rest(self) -> None:
        """Between work and idleness the books must balance."""
        now = self.clock()
        if now >= self._checked + self._check_seconds:
            self.scheduler.check_integrity()
            self._checked = now
        self._dirty = False

    def _resume(self, request: RequestT, error: Exception | None) -> None:
        """In any thread: what kept a request has been done, or cannot be."""
        self.post(lambda: self._resumed(request, error))

    def _resumed(self, request: RequestT, error: Exception | None) -> None:
        if self.companion is None or not self.companion.release(request):
            return  # it was dropped meanwhile; its id may be another's by now
        if error is None:
            self.add(request)
        else:
            self._refuse(request.id, error)

    def _refuse(self, request_id: str, error: Exception) -> None:
        if isinstance(error, CellarError):
            self._refused[request_id] = str(error)
        else:
            logger.error("request %s has failed", request_id, exc_info=error)
            self._refused[request_id] = f"the request has failed ({type(error).__name__}: {error})."
