"""StructuredOutput: goes with an engine of transformers; grammars are compiled beside its loop, masks in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import RequestError
from cellar.core.messages import Request, StepPlan, StepResult
from cellar.core.sampling import StructuredOutputsParams
from cellar.text.masker import StepMasks

Resume = Callable[[Exception | None], None]
Supply = Callable[[int, Mapping[int, NDArray[np.int32]]], None]


class Masking(Protocol):
    """Computes the masks of structured output; see `text/masker.py`."""

    def ready(self, constraint: StructuredOutputsParams) -> bool:
        """True if a request for it can start now."""

    def prepare(self, constraint: StructuredOutputsParams) -> None:
        """Make it ready; may take long, and may be called in another thread. Raises RequestError."""

    def submitted(self, plan: StepPlan) -> StepMasks | None:
        """A plan was handed over; -> masks that are known now."""

    def committed(self, result: StepResult) -> StepMasks | None:
        """A result came; -> masks that it made known."""


class StructuredOutput:
    """Implements the engine's `Companion`. Masks go to the runtime by `supply`.

    Without a `masker` requests for structured output are refused: there is no tokenizer.
    """

    def __init__(self, masker: Masking | None, supply: Supply) -> None:
        self.masker = masker
        self._supply = supply
        self._held: dict[str, Request] = {}
        self._masked: set[int] = set()  # steps on their way that have masks
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="cellar-grammar")  # starts its thread when used

    def holds(self, request: Request, resume: Resume) -> bool:
        """True if the request's grammar is being compiled. Raises RequestError without a tokenizer."""
        if not request.params.masked:
            return False
        if self.masker is None:
            raise RequestError("structured output needs a tokenizer; load one.", "structured_outputs")
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

    def submitted(self, plan: StepPlan) -> None:
        """Hand in the masks that are known by now."""
        if self.masker is not None and (plan.opens or plan.masked_rows):
            if plan.masked_rows:
                self._masked.add(plan.step)
            self._hand_in(self.masker.submitted(plan))

    def committed(self, result: StepResult) -> None:
        """Hand in the masks that the result made known."""
        if self.masker is not None and result.step in self._masked:
            self._masked.remove(result.step)
            self._hand_in(self.masker.committed(result))

    def close(self) -> None:
        """Compile no more."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _hand_in(self, masks: StepMasks | None) -> None:
        if masks is not None:
            self._supply(masks.step, masks.masks)


def _compile(masker: Masking, constraint: StructuredOutputsParams, resume: Resume) -> None:
    """In a thread beside the loop."""
    try:
        masker.prepare(constraint)
    except Exception as error:  # whatever it is, the request must end
        resume(error)
    else:
        resume(None)
