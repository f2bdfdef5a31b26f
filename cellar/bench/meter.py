"""A runtime that counts what passes through it: tokens, contexts and seconds of every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import CopyResult, Emit, Source, StepPlan, StepResult, TierOrder
from cellar.core.specs import ModelSpec
from cellar.runtime.protocol import Capacity, Runtime, Worker

Phase = Literal["prefill", "decode", "mixed"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. `context` sums over its tokens what each attends to, `resident` over its spans the KV read once."""

    phase: Phase
    num_tokens: int
    num_sampled: int
    context: int
    resident: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PhaseTotal:
    """All steps of one phase: FLOPs needed, and the fewest bytes that had to be read."""

    phase: str
    num_steps: int
    num_tokens: int
    seconds: float
    flops: float
    nbytes: float


class MeteredRuntime:
    """Implements `Runtime[StepPlan]` by another one; `observe` hears of every step that has finished."""

    def __init__(self, inner: Runtime[StepPlan], observe: Callable[[StepPlan, StepResult], None]) -> None:
        self._inner = inner
        self._observe = observe
        self._pending: deque[StepPlan] = deque()
        self._workers = tuple(_MeteredWorker(worker, self._pending) for worker in inner.workers)

    @property
    def workers(self) -> Sequence[Worker[StepPlan]]:
        return self._workers

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    def copy(self, batch: TierOrder) -> None:
        self._inner.copy(batch)

    def poll(self, timeout: float | None) -> list[StepResult | CopyResult]:
        results = self._inner.poll(timeout)
        for result in results:
            if isinstance(result, StepResult):
                self._observe(self._pending.popleft(), result)
        return results

    def wake(self) -> None:
        self._inner.wake()

    def supply(self, step: int, masks: Mapping[int, NDArray[np.int32] | None]) -> None:
        self._inner.supply(step, masks)

    def masking(self, threads: int) -> None:
        self._inner.masking(threads)

    def close(self) -> None:
        self._inner.close()


class _MeteredWorker:
    def __init__(self, inner: Worker[StepPlan], pending: deque[StepPlan]) -> None:
        self._inner = inner
        self._pending = pending

    @property
    def id(self) -> int:
        return self._inner.id

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight

    def submit(self, plan: StepPlan) -> None:
        self._pending.append(plan)
        self._inner.submit(plan)


def totals(records: Sequence[StepRecord], spec: ModelSpec) -> list[PhaseTotal]:
    """Sums by phase, in the order prefill, mixed, decode; phases without a step are left out."""
    found = []
    for phase in ("prefill", "mixed", "decode"):
        steps = [r for r in records if r.phase == phase]
        if steps:
            found.append(
                PhaseTotal(
                    phase=phase,
                    num_steps=len(steps),
                    num_tokens=sum(r.num_tokens for r in steps),
                    seconds=sum(r.seconds for r in steps),
                    flops=float(
                        sum(spec.flops(r.num_tokens, r.context // max(r.num_tokens, 1), r.num_sampled) for r in steps)
                    ),
                    nbytes=float(sum(spec.step_nbytes(r.resident) for r in steps)),
                )
            )
    return found


def phase_of(plan: StepPlan) -> Phase:
    """Prefill if all its tokens come from the host, decode if none does."""
    device = plan.spans.source == Source.DEVICE
    return "decode" if bool(device.all()) else "mixed" if bool(device.any()) else "prefill"


def record(plan: StepPlan, result: StepResult) -> StepRecord:
    """The counts of one step."""
    spans = plan.spans
    length = (spans.stop - spans.start).astype(np.int64)
    return StepRecord(
        phase=phase_of(plan),
        num_tokens=int(length.sum()),
        num_sampled=int((spans.emit == Emit.LAST).sum()),
        context=int((length * (spans.start + spans.stop + 1)).sum()) // 2,
        resident=int(spans.stop.astype(np.int64).sum()),
        seconds=result.seconds,
    )
