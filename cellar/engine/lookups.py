"""Lookups: goes with an engine; a request waits, for a moment, for what other engines have written of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from cellar.core.messages import ChunkLabel, Request, StepPlan, StepResult, Tier
from cellar.engine.engine import Companion, Resume
from cellar.kv.foreign import Foreign

Found = Sequence[ChunkLabel]


class Asks(Protocol):
    """Asks a shared tier; see `runtime/tiers/lookup.py`."""

    @property
    def is_open(self) -> bool:
        """False while asking would bring nothing."""

    def ask(self, labels: Found, parents: Sequence[bytes], then: Callable[[Found], None]) -> None:
        """`then` is called, in another thread and within a bound, with what is there."""

    def adopt(self, slots: Sequence[int], labels: Found) -> None:
        """Slots of the tier stand for chunks that were found."""


class Lookups:
    """Implements the engine's `Companion`, before another one (`then`) that sees each request after it."""

    def __init__(
        self,
        asks: Asks,
        foreign: Foreign,
        clock: Callable[[], float],
        then: Companion[Request, StepPlan, StepResult],
    ) -> None:
        self._asks = asks
        self._foreign = foreign
        self._clock = clock
        self._then = then
        self._held: dict[str, Request] = {}
        self._found: dict[str, Found] = {}  # written by the thread that asks
        self._asked: set[str] = set()

    def holds(self, request: Request, resume: Resume) -> bool:
        """True while the shared tier is asked, or the next companion holds the request."""
        if request.id not in self._asked and self._asks.is_open and request.params.prompt_logprobs is None:
            wanted = self._foreign.missing(
                np.ascontiguousarray(request.prompt, np.int32), request.salt, request.conversation
            )
            if wanted:
                self._held[request.id] = request
                self._asks.ask(wanted.labels, wanted.parents, partial(self._answered, request, resume))
                return True
        held = self._then.holds(request, resume)
        if not held:
            self._asked.discard(request.id)
        return held

    def has_work(self) -> bool:
        """True while a request is kept here."""
        return bool(self._held) or self._then.has_work()

    def release(self, request: Request) -> bool:
        """A request goes on -> whether it was kept, and not dropped meanwhile."""
        found = self._found.pop(request.id, ())
        if self._held.get(request.id) is not request:
            return self._then.release(request)
        del self._held[request.id]
        self._asked.add(request.id)
        if found:
            slots, labels = self._foreign.adopt(Tier.REMOTE, found, self._clock())
            self._asks.adopt(slots.tolist(), labels)
        return True

    def drop(self, request_id: str) -> None:
        """A request is dropped."""
        self._held.pop(request_id, None)
        self._found.pop(request_id, None)
        self._asked.discard(request_id)
        self._then.drop(request_id)

    def submitted(self, plan: StepPlan) -> None:
        """Nothing of ours."""
        self._then.submitted(plan)

    def committed(self, result: StepResult) -> None:
        """Nothing of ours."""
        self._then.committed(result)

    def close(self) -> None:
        """The engine ends."""
        self._then.close()

    def _answered(self, request: Request, resume: Resume, found: Found) -> None:
        """In the thread that asks."""
        if found:
            self._found[request.id] = found
        resume(None)
