"""The engine for transformer steps: its types, and how it is put together."""

from __future__ import annotations

import time
from collections.abc import Callable

from cellar.core.messages import Request, SchedulerStats, StepOutput, StepPlan, StepResult
from cellar.engine.engine import Engine
from cellar.engine.structured import Masking, StructuredOutput
from cellar.runtime.protocol import Runtime
from cellar.schedule.protocol import Scheduler

StepEngine = Engine[Request, StepPlan, StepResult, StepOutput, SchedulerStats]


def step_engine(
    scheduler: Scheduler[Request, StepPlan, StepResult, StepOutput, SchedulerStats],
    runtime: Runtime[StepPlan],
    *,
    run_ahead: int = 2,
    clock: Callable[[], float] = time.monotonic,
    check_seconds: float = 60.0,
    masker: Masking | None = None,
) -> StepEngine:
    """An engine with structured output beside it, which without a `masker` refuses requests for it."""
    return Engine(
        scheduler,
        runtime,
        StepOutput.refusal,
        run_ahead=run_ahead,
        clock=clock,
        check_seconds=check_seconds,
        companion=StructuredOutput(masker, runtime.supply),
    )
