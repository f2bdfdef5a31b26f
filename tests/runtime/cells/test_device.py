"""DeviceWorker on the CPU: launches and answers in parts of a plan, what fails on the way, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cellar.core.errors import DeviceError
from cellar.core.tasks import NodeFlag, TaskPlan, TaskResult
from cellar.runtime.cells.collector import TaskOutputs
from cellar.runtime.cells.device import DeviceWorker
from cellar.runtime.cells.graphs import Launched

TASKS, NODES = 5, 2
WHOLE, UNLAUNCHED, BROKEN = range(3)


class Moment:
    """An event, two milliseconds after the one before, that passes at the third look.

    `broken`: the device reports an error when it is looked at.
    """

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.looks = 0

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError("the device fell over")
        self.looks += 1
        return self.looks >= 3

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
            answer = TaskOutputs(first, counts, finite, [torch.full((len(counts),), float(first)), None])
            broken = plan.plan == BROKEN and first == 2
            yield Launched(first, first + len(counts), answer, Moment(), Moment(broken))


def plan(number: int) -> TaskPlan:
    cu = np.arange(TASKS + 1, dtype=np.int32) * NODES
    rows = np.zeros((1, TASKS * NODES), np.int32)
    return TaskPlan(number, 0, 0, 0, cu, rows, rows, (np.arange(TASKS, dtype=np.int32) * NODES, None))


def opened() -> DeviceWorker:
    launcher: Any = Launcher()
    return DeviceWorker(0, lambda: launcher, torch.device("cpu"))


def answers(number: int) -> list[TaskResult]:
    """Of one plan."""
    worker = opened()
    worker.submit(plan(number))
    found: list[TaskResult] = []
    for _ in range(20):
        assert worker.in_flight == (not found or found[-1].stop < TASKS)
        found += worker.answered()
    assert worker.in_flight == 0, "the last result ends the plan"
    return found


def test_nobody_waits_for_what_is_not_done() -> None:
    worker = opened()
    worker.submit(plan(WHOLE))
    worker.submit(plan(3))
    assert worker.in_flight == 2
    assert worker.answered() == []
    assert worker.answered() == []
    assert [(r.plan, r.first) for r in worker.answered()] == [(WHOLE, 0)]
    worker.close()
    assert worker.answered() == []
    with pytest.raises(DeviceError, match="closed"):
        worker.submit(plan(4))


def test_parts_of_a_plan_are_answered_in_order() -> None:
    results = answers(WHOLE)
    assert [(r.first, r.stop, r.seconds) for r in results] == [(0, 2, 2e-3), (2, 4, 2e-3), (4, 5, 2e-3)]
    assert results[0].flags.tolist() == [NodeFlag.OK] * 4
    assert results[1].flags.tolist() == [NodeFlag.OK, NodeFlag.NAN] * 2
    assert [values.tolist() for r in results if (values := r.values[0]) is not None] == [[0, 0], [2, 2], [4]]
    assert all(r.values[1] is None for r in results)


@pytest.mark.parametrize(("number", "message"), [(UNLAUNCHED, "no such kernel"), (BROKEN, "fell over")])
def test_what_fails_ends_the_rest_of_its_plan(number: int, message: str) -> None:
    first, rest = answers(number)
    assert (first.first, first.stop, first.error) == (0, 2, None)
    assert (rest.first, rest.stop) == (2, TASKS)
    assert rest.error is not None
    assert message in rest.error
