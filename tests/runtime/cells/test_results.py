"""Results that have piled up: those of one plan that follow each other become one."""

from __future__ import annotations

from typing import Any

import numpy as np

from cellar.core.tasks import TaskResult
from cellar.runtime.cells.results import merged


def result(plan: int, first: int, *, worker: int = 0, values: Any = None, **more: Any) -> TaskResult:
    return TaskResult(plan, worker, first, first + 1, np.array([first], np.uint8), (values, None), **more)


def test_tasks_of_a_plan_become_one() -> None:
    parts = [
        result(1, 0, values=np.array([1.0]), seconds=1.0),
        result(1, 1, values=np.zeros(0), errors={3: "three"}),
        result(1, 2, values=np.array([2.0, 3.0]), seconds=2.0),
    ]
    (one,) = merged(parts)
    assert (one.first, one.stop, one.seconds, one.errors) == (0, 3, 3.0, {3: "three"})
    assert one.flags.tolist() == [0, 1, 2]
    assert one.values[0] is not None
    assert one.values[0].tolist() == [1.0, 2.0, 3.0]
    assert one.values[1] is None


def test_others_stay_apart_and_in_order() -> None:
    parts = [
        result(1, 0),
        result(2, 1, worker=1),  # another worker's
        result(1, 1),
        result(1, 3),  # not the next
        result(1, 4, error="it broke"),
        result(3, 5),  # another plan's
    ]
    assert merged(parts) == parts
    assert merged([]) == []
