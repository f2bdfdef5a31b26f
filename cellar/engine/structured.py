"""StructuredOutput: goes with an engine of transformers; grammars are compiled, and masks made, beside its loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import RequestError
from cellar.core.messages import Request, StepPlan, StepResult
from cellar.core.sampling import StructuredOutputsParams
from cellar.engine.client import Message
from cellar.engine.masks import MaskDesk
from cellar.engine.patience import Patience
from cellar.text.masker import MaskRow, Wanted, sampled_rows

Resume = Callable[[Exception | None], None]
Supply = Callable[[int, Mapping[int, NDArray[np.int32] | None]], None]


class Masking(Protocol):
    """Computes the masks of structured output; see `text/masker.py`."""

    def ready(self, constraint: StructuredOutputsParams) -> bool:
        """True if a request for it can start now."""

    def prepare(self, constraint: StructuredOutputsParams) -> None:
        """Make it ready; may take long, and may be called in another thread. Raises RequestError."""

    def submitted(self, plan: StepPlan) -> list[Wanted]:
        """A plan was handed over; -> its masks that can be known now."""

    def committed(self, result: StepResult) -> list[Wanted]:
        """A result came; -> masks that can be known now."""

    def newly_parked(self) -> list[MaskRow]:
        """Rows whose masks were late in the last result."""

    def forget(self, name: str) -> None:
        """A request is dropped."""


class Owner(Protocol):
    """The part of an engine that hears of late masks."""

    def post(self, message: Message) -> None:
        """Have something done by the engine's thread."""

    def resume(self, request_id: str) -> None:
        """A request whose mask was late may be planned again."""

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request with an error."""


class StructuredOutput:
    """Implements the engine's `Companion`. Masks go to the runtime by `supply`, which hears by `masking` how many
    threads compute them.

    Without a `masker` requests for structured output are refused: there is no tokenizer.
    """

    def __init__(self, masker: Masking | None, supply: Supply, masking: Callable[[int], None]) -> None:
        self.masker = masker
        self._supply = supply
        self._masking = masking
        self._held: dict[str, Request] = {}
        self._masked: dict[int, int] = {}  # tokens of the steps on their way that have masks
        self._patience = Patience()
        self._owner: Owner | None = None
        self._desk: MaskDesk | None = None
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="cellar-grammar")  # starts its thread when used

    def holds(self, request: Request, resume: Resume) -> bool:
        """True if the request's grammar is being compiled. Raises RequestError without a tokenizer."""
        if not request.params.masked:
            return False
        if self.masker is None:
            wanted = "bad_words" if request.params.bad_words else "structured_outputs"
            wanted = "allowed_token_ids" if request.params.allowed_token_ids is not None else wanted
            raise RequestError(f"{wanted} needs a tokenizer; load one.", wanted)
        constraint = request.params.structured_outputs
        if constraint is None or self.masker.ready(constraint):
            return False
        self._held[request.id] = request
        self._compiler.submit(_compile, self.masker, constraint, resume)
        return True

    def has_work(self) -> bool:
        """True while a grammar is being compiled."""
        return bool(self._held)

    def release(self, request: Request) -> bool:
        """A grammar has been compiled -> whether its request still waits for it."""
        if self._held.get(request.id) is not request:
            return False
        del self._held[request.id]
        return True

    def drop(self, request_id: str) -> None:
        """A request is dropped."""
        self._held.pop(request_id, None)
        if self.masker is not None:
            self.masker.forget(request_id)

    def submitted(self, plan: StepPlan) -> None:
        """Have the masks handed in that can be known by now."""
        if self.masker is not None and (plan.opens or plan.masked_rows):
            if plan.masked_rows:
                self._masked[plan.step] = int((plan.spans.stop - plan.spans.start).sum())
                self._patience.planned(len(sampled_rows(plan)) > len(plan.masked_rows))
            self._ask(self.masker.submitted(plan))

    def committed(self, result: StepResult) -> None:
        """Have the masks handed in that can be known now."""
        if self.masker is not None and result.step in self._masked:
            self._patience.measured(self._masked.pop(result.step), result.seconds)
            self._ask(self.masker.committed(result))
            for state in self.masker.newly_parked():
                self._go_on(state)

    def close(self) -> None:
        """Compile and compute no more."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        if self._desk is not None:
            self._desk.close()

    def attach(self, owner: Owner, budget: float) -> None:
        """Whom to tell of late masks; one sequence's may take `budget` seconds."""
        self._owner = owner
        self._desk = MaskDesk(self._supply, self._told, self._masking, budget)

    def _ask(self, wanted: Sequence[Wanted]) -> None:
        """Hand them to the desk, step by step, with how long each step waits for them."""
        assert self._desk is not None
        by_step = dict[int, list[Wanted]]()
        for one in wanted:
            by_step.setdefault(one.step, []).append(one)
        for step, there in by_step.items():
            self._desk.ask(there, self._patience.of(self._masked[step]))

    def _told(self, state: MaskRow, refusal: str | None) -> None:
        """In any thread: a late mask is there, or will not be waited for."""
        assert self._owner is not None
        owner = self._owner
        if refusal is not None:
            owner.post(lambda: owner.fail(state.name, RequestError(refusal, "structured_outputs")))
        else:
            owner.post(lambda: self._go_on(state))

    def _go_on(self, state: MaskRow) -> None:
        """A request that waits for its mask may be planned again, if that is there."""
        assert self._owner is not None
        if state.parked and not state.computing:
            self._owner.resume(state.name)


def _compile(masker: Masking, constraint: StructuredOutputsParams, resume: Resume) -> None:
    """In a thread beside the loop."""
    try:
        masker.prepare(constraint)
    except Exception as error:  # whatever it is, the request must end
        resume(error)
    else:
        resume(None)
