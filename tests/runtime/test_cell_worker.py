"""CellWorker with an accelerator, on the CPU: launches and answers in parts of a plan, and what fails on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from cellar.core.tasks import NodeFlag, TaskPlan, TaskResult
from cellar.runtime.cell_graphs import Launched
from cellar.runtime.cell_harvest import Harvested
from cellar.runtime.cell_worker import CellWorker, Results

TASKS, NODES = 5, 2
WHOLE, UNLAUNCHED, BROKEN = range(3)


class Moment:
    """An event: two milliseconds after the one before. `broken`: the device reports an error when it is awaited."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("the device fell over")

    def elapsed_time(self, _: Moment) -> float:
        return 2.0


class Launcher:
    """In place of a GraphExecutor: two tasks a part. Fails in the launch, or in the device, of some plans."""

    def launch(self, plan: TaskPlan) -> Iterator[Launched]:
        for first in range(0, TASKS, 2):
            if plan.plan == UNLAUNCHED and first == 2:
                raise ValueError("no such kernel")
            counts = [NODES] * min(2, TASKS - first)
            finite = torch.tensor([[True, first != 2, False]] * len(counts))  # the third is a pad
            answer = Harvested(first, counts, finite, [torch.full((len(counts),), float(first)), None])
            broken = plan.plan == BROKEN and first == 2
            yield Launched(first, first + len(counts), answer, Moment(), Moment(broken))


def plan(number: int) -> TaskPlan:
    cu = np.arange(TASKS + 1, dtype=np.int32) * NODES
    rows = np.zeros((1, TASKS * NODES), np.int32)
    return TaskPlan(number, 0, 0, 0, cu, rows, rows, (np.arange(TASKS, dtype=np.int32) * NODES, None))


def answers(number: int, launched: int) -> list[TaskResult]:
    """Of one plan, of which so many parts are launched, or fail to be."""
    results: Results = SimpleQueue()
    opener: Callable[[], Any] = Launcher
    worker = CellWorker(0, opener, results, torch.device("cpu"), 1)
    worker.ready()
    worker.submit(plan(number))
    deadline = time.monotonic() + 20
    while worker._launched.qsize() < launched and time.monotonic() < deadline:
        time.sleep(0.001)
    assert worker.in_flight == 1
    worker.close()
    worker._await_all()  # what the second thread does, until the worker's end
    found = []
    while not results.empty():
        item = results.get()
        assert item is not None
        found.append(item[1])
        if item[2]:
            worker.collected()
    assert worker.in_flight == 0, "the last result says that it is the last"
    return found


def test_parts_of_a_plan_are_answered_in_order() -> None:
    results = answers(WHOLE, 3)
    assert [(r.first, r.stop, r.seconds) for r in results] == [(0, 2, 2e-3), (2, 4, 2e-3), (4, 5, 2e-3)]
    assert results[0].flags.tolist() == [NodeFlag.OK] * 4
    assert results[1].flags.tolist() == [NodeFlag.OK, NodeFlag.NAN] * 2
    assert [values.tolist() for r in results if (values := r.values[0]) is not None] == [[0, 0], [2, 2], [4]]
    assert all(r.values[1] is None for r in results)


@pytest.mark.parametrize(
    ("number", "launched", "message"), [(UNLAUNCHED, 2, "no such kernel"), (BROKEN, 3, "fell over")]
)
def test_what_fails_ends_the_rest_of_its_plan(number: int, launched: int, message: str) -> None:
    first, rest = answers(number, launched)
    assert (first.first, first.stop, first.error) == (0, 2, None)
    assert (rest.first, rest.stop) == (2, TASKS)
    assert rest.error is not None
    assert message in rest.error
