"""The engine of transformers: the loop of `loop.py`, with masks of structured output."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from cellar.core.errors import CellarError, IntegrityError, RequestError
from cellar.core.messages import CopyResult, FinishReason, Request, SchedulerStats, StepOutput, StepResult
from cellar.core.sampling import StructuredOutputsParams
from cellar.loop import Loop, Mailbox
from cellar.runtime.protocol import Runtime
from cellar.schedule.scheduler import Scheduler
from cellar.text.masker import StepMasks

PlanT = TypeVar("PlanT")
PlanT_contra = TypeVar("PlanT_contra", contravariant=True)
Clock = Callable[[], float]


class Masking(Protocol[PlanT_contra]):
    """Computes the masks of structured output; see `text/masker.py`."""

    def ready(self, wanted: StructuredOutputsParams) -> bool:
        """True if a request for it can start now."""

    def prepare(self, wanted: StructuredOutputsParams) -> None:
        """Make it ready; may take long, and may be called in another thread. Raises RequestError."""

    def submitted(self, plan: PlanT_contra) -> StepMasks | None:
        """A plan was handed over; -> masks that are known now."""

    def committed(self, result: StepResult) -> StepMasks | None:
        """A result came; -> masks that it made known."""


class Engine(Generic[PlanT]):
    """Joins one that decides (`scheduler`) and one that does (`runtime`).

    `add`, `finish`, `abort` and `wake` may be called from any thread; `turn` belongs to one. `run_ahead` plans
    are on their way to each worker at any time, so that the device never waits for Python. `clock` gives
    seconds; with a clock of the caller's, every decision can be repeated. Without a `masker` requests for
    structured output are refused; their grammars are compiled beside the loop. When work ends the books are checked,
    but not more often than every `check_seconds`.
    """

    def __init__(
        self,
        scheduler: Scheduler[PlanT, StepResult],
        runtime: Runtime[PlanT],
        *,
        run_ahead: int = 2,
        clock: Clock = time.monotonic,
        check_seconds: float = 60.0,
        masker: Masking[PlanT] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runtime = runtime
        self.run_ahead = run_ahead
        self.clock = clock
        self.masker = masker
        self._compiling: dict[str, Request] = {}
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="cellar-grammar")  # starts its thread when used
        self._mailbox: Mailbox[Callable[[StepOutput], None]] = Mailbox(self.wake)
        self._loop: Loop[PlanT, StepResult | CopyResult, StepOutput] = Loop(
            scheduler, runtime, self, lambda: self.clock(), check_seconds
        )

    def add(self, request: Request) -> None:
        """Queue a request; one that could never run comes back as finished with an error."""
        self._post(lambda refused: self._admit(request, refused))

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason) -> None:
        """End a request after `num_tokens` output tokens; later ones are void."""
        self._post(lambda _: self.scheduler.finish(request_id, num_tokens, reason))

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown ids are ignored."""
        self._post(lambda _: self._abort(request_id))

    def wake(self) -> None:
        """End a waiting `turn` from another thread."""
        self.runtime.wake()

    def receive(self) -> StepOutput:
        """Read the mailbox and plan nothing: what is refused is known before anything starts.

        Letters that arrive meanwhile wait for the next time.
        """
        refused = StepOutput()
        for letter in self._mailbox.read():
            self._loop.stir()
            letter(refused)
        return refused

    def turn(self, timeout: float | None = None) -> list[StepOutput]:
        """One turn of the loop; waits up to `timeout` seconds (None: for ever) for a result, or for a `wake`.

        Raises IntegrityError if the bookkeeping is broken, or requests wait and nothing can be planned: a defect.
        """
        return self._loop.turn(timeout, self.run_ahead)

    def has_work(self) -> bool:
        """True while a request waits or runs, or a message is unread."""
        return bool(len(self._mailbox) or self._compiling) or self.scheduler.has_work()

    def stats(self) -> SchedulerStats:
        """A snapshot of queues and cache; call it between turns."""
        return self.scheduler.stats()

    def close(self) -> None:
        """Stop the workers and free the device's memory."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self.runtime.close()

    # -- what the loop asks -----------------------------------------------------------------------

    def received(self) -> list[StepOutput]:
        """Read the mailbox."""
        refused = self.receive()
        return [refused] if refused.finished else []

    def submitted(self, plan: PlanT) -> None:
        """Hand in the masks that are known by now."""
        if self.masker is not None:
            self._supply(self.masker.submitted(plan))

    def committed(self, result: StepResult | CopyResult) -> StepOutput | None:
        """A step that failed ends the requests that it names; the others go on."""
        if not isinstance(result, StepResult):
            return None
        output = self.scheduler.commit(result, self.clock())
        if self.masker is not None:
            self._supply(self.masker.committed(result))
        return output

    # -- letters ----------------------------------------------------------------------------------

    def _post(self, letter: Callable[[StepOutput], None]) -> None:
        self._mailbox.post(letter)

    def _admit(self, request: Request, refused: StepOutput) -> None:
        """Queue a request; one whose grammar is not compiled yet comes here again when it is."""
        wanted, masker = request.params.structured_outputs, self.masker
        try:
            if wanted is not None:
                if masker is None:
                    raise RequestError("structured output needs a tokenizer; load one.", "structured_outputs")
                if not masker.ready(wanted):
                    self._compiling[request.id] = request
                    self._compiler.submit(self._compile, request, masker, wanted)
                    return
            self.scheduler.add(request, self.clock())
        except IntegrityError:
            raise
        except CellarError as error:
            refused.finished[request.id] = (FinishReason.ERROR, str(error))

    def _compile(self, request: Request, masker: Masking[PlanT], wanted: StructuredOutputsParams) -> None:
        """In a thread beside the loop: compile a grammar, then have its request queued, or refused."""
        reason: str | None = None
        try:
            masker.prepare(wanted)
        except Exception as error:  # whatever it is, the request must end
            reason = str(error)
        self._post(lambda refused: self._compiled(request, refused, reason))

    def _compiled(self, request: Request, refused: StepOutput, reason: str | None) -> None:
        if self._compiling.get(request.id) is not request:
            return  # it was dropped meanwhile; its id may be another's by now
        del self._compiling[request.id]
        if reason is None:
            self._admit(request, refused)
        else:
            refused.finished[request.id] = (FinishReason.ERROR, reason)

    def _abort(self, request_id: str) -> None:
        self._compiling.pop(request_id, None)
        self.scheduler.abort(request_id)

    def _supply(self, masks: StepMasks | None) -> None:
        if masks is not None:
            self.runtime.supply(masks.step, masks.masks)
