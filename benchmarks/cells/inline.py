"""A CPU runtime of cells without a thread of its own: `poll` computes the next task where it is called."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from benchmarks.cells.clock import Clock
from cellar.core.errors import IntegrityError
from cellar.core.messages import TierOrder
from cellar.core.tasks import CellCapacity, CellModelSpec, TaskPlan, TaskResult
from cellar.runtime.cells.banks import Banks, bank_rows
from cellar.runtime.cells.executor import Answer, CellExecutor
from cellar.runtime.cells.functions import rows_function
from cellar.runtime.cells.results import merged
from cellar.runtime.cells.worker import is_awaited
from cellar.runtime.transfer import uploader

CPU = torch.device("cpu")


class InlineWorker:
    """The one worker; plans wait in `plans`."""

    id = 0

    def __init__(self) -> None:
        self.plans: deque[TaskPlan] = deque()

    @property
    def in_flight(self) -> int:
        """Plans of which some task has not been answered."""
        return len(self.plans)

    def submit(self, plan: TaskPlan) -> None:
        """Queue a plan."""
        self.plans.append(plan)


class InlineRuntime:
    """Implements `CellRuntime` for one model on the CPU; for measuring with a `WorkClock`."""

    def __init__(
        self, model: CellModelSpec, modules: Sequence[nn.Module], clock: Clock, memory_bytes: int = 1 << 28
    ) -> None:
        rows = bank_rows([model], memory_bytes)
        self._capacity = CellCapacity(tuple(tuple(counts) for counts in rows))
        with torch.inference_mode():
            functions = [[rows_function(module, spec, CPU) for module, spec in zip(modules, model.cells, strict=True)]]
        self._executor = CellExecutor([model], functions, Banks([model], rows, CPU, uploader(CPU)))
        self._worker = InlineWorker()
        self._clock = clock
        self._running: Iterator[Answer] | None = None
        self._next_task = 0

    @property
    def workers(self) -> Sequence[InlineWorker]:
        return (self._worker,)

    @property
    def capacity(self) -> CellCapacity:
        return self._capacity

    @torch.inference_mode()
    def copy(self, batch: TierOrder) -> None:
        """Raises IntegrityError: rows of cells stay where they are."""
        raise IntegrityError(f"copies {batch.number} are between tiers, and cells have one.")

    def poll(self, timeout: float | None) -> list[TaskResult]:
        """Compute tasks until one has results that somebody waits for, as `CellWorker` hands them over; without any
        task, let the time pass.
        """
        if not self._worker.plans:
            self._clock.sleep(timeout or 0.0)
            return []
        plan = self._worker.plans[0]
        if self._running is None:
            self._executor.prepare(plan)
            self._running, self._next_task = self._executor.tasks(plan), 0
        results: list[TaskResult] = []
        begin = self._clock()
        while True:
            answer = next(self._running)
            end = self._clock()
            results.append(answer.result(plan, self._next_task, end - begin))
            begin, self._next_task = end, results[-1].stop
            if self._next_task == plan.num_tasks:
                self._worker.plans.popleft()
                self._running = None
                break
            if is_awaited(results[-1]):
                break
        return merged(results) if len(results) > 1 else results

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""
