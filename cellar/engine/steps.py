"""The engine for transformer steps: its types, and how it is put together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from cellar.core.messages import (
    IntArray,
    MemoryAnswer,
    MemoryQuestion,
    Request,
    Resting,
    SchedulerStats,
    StepOutput,
    StepPlan,
    StepResult,
)
from cellar.engine.engine import Engine
from cellar.engine.lookups import Asks, Lookups
from cellar.engine.structured import Masking, StructuredOutput
from cellar.kv.departure import Departure
from cellar.kv.foreign import Foreign
from cellar.runtime.protocol import Runtime
from cellar.schedule.protocol import Scheduler

logger = logging.getLogger(__name__)


class StepsScheduler(Scheduler[Request, StepPlan, StepResult, StepOutput, SchedulerStats], Protocol):
    """A scheduler of transformer steps, which knows what it remembers of whom."""

    def memory(self, question: MemoryQuestion, now: float | None = None) -> MemoryAnswer:
        """Where tokens of conversations lie; what is to be forgotten is found no more when this returns."""

    @property
    def foreign(self) -> Foreign:
        """What other engines have written to a tier that it shares with them."""

    @property
    def departure(self) -> Departure:
        """What is written when the engine ends."""

    @property
    def num_erasing(self) -> int:
        """Chunks of which something is left, though they were forgotten: tiers that outlive the process erase them."""

    def resume(self, request_id: str) -> None:
        """A request whose mask was late (`Flag.LATE`) may be planned again."""


Leaving = Callable[[Resting, float], IntArray]
"""Which chunks are to be written within so many seconds, in which order."""


class StepEngine(Engine[Request, StepPlan, StepResult, StepOutput, SchedulerStats]):
    """Implements `StepClient` over a scheduler in this process; made by `step_engine`."""

    scheduler: StepsScheduler

    def __init__(self, *arguments: Any, leaving: Leaving | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._leaving = leaving
        self._forgetting: list[Callable[[], None]] = []

    def memory(self, question: MemoryQuestion, then: Callable[[MemoryAnswer], None]) -> None:
        """Ask, and be told at once, or when what was forgotten has left tiers that outlive the process."""
        self.mark_dirty()
        answer = self.scheduler.memory(question, self.clock())
        if (question.forget or question.flush is not None) and self.scheduler.num_erasing:
            self._forgetting.append(lambda: then(answer))
        else:
            then(answer)

    def turn(self, timeout: float | None = None) -> list[StepOutput]:
        """One turn of the loop; see `Engine`."""
        outputs = super().turn(timeout)
        if self._forgetting and not self.scheduler.num_erasing:
            told, self._forgetting = self._forgetting, []
            for tell in told:
                tell()
        return outputs

    def persist(self, timeout: float) -> None:
        """Copy to tiers that outlive this process what would be lost with it, of what other engines may load that alone
        which pays; see `Engine`.
        """
        resting = None if self._leaving is None else self.scheduler.departure.resting(self.clock())
        if self._leaving is not None and resting is not None:
            chosen = self._leaving(resting, timeout)
            self.scheduler.departure.choose(chosen)
            logger.info("of %d chunks that rest %d are written for others", len(resting.chunks), len(chosen))
        super().persist(timeout)

    def resume(self, request_id: str) -> None:
        """A request whose mask was late may be planned again."""
        self.mark_dirty()
        self.scheduler.resume(request_id)


def step_engine(
    scheduler: StepsScheduler,
    runtime: Runtime[StepPlan],
    *,
    run_ahead: int = 2,
    clock: Callable[[], float] = time.monotonic,
    check_seconds: float = 60.0,
    persist_seconds: float = 30.0,
    masker: Masking | None = None,
    mask_timeout: float = 5.0,
    lookup: Asks | None = None,
    leaving: Leaving | None = None,
) -> StepEngine:
    """An engine with structured output beside it, which without a `masker` refuses requests for it.

    A sequence whose masks were late for `mask_timeout` seconds in all ends with an error.
    With `lookup` a tier that other engines write to is asked for what a request lacks. `leaving` chooses what is
    written to one at the end, all by default.
    """
    structured = StructuredOutput(masker, runtime.supply, runtime.masking)
    engine = StepEngine(
        scheduler,
        runtime,
        StepOutput.refusal,
        run_ahead=run_ahead,
        clock=clock,
        check_seconds=check_seconds,
        persist_seconds=persist_seconds,
        companion=structured if lookup is None else Lookups(lookup, scheduler.foreign, clock, structured),
        leaving=leaving,
    )
    structured.attach(engine, mask_timeout)
    return engine
