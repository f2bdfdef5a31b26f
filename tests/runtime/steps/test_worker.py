"""A worker's idle moments: what later steps want is prepared then, a piece at a time, and no plan waits for two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from cellar.core.messages import StepPlan, StepResult
from cellar.runtime.pace import Pace
from cellar.runtime.steps.masks import MaskBox
from cellar.runtime.steps.worker import StepWorker
from tests.limits import SECONDS, until


class Runs:
    """An executor that notes what it runs."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def launch(self, plan: StepPlan, masks: MaskBox, pace: Pace | None = None) -> Callable[[], StepResult]:
        self._done.append(f"step {plan.step}")
        none = np.empty(0, np.int32)
        return lambda: StepResult(plan.step, none.reshape(0, 1), none, none)

    def out_of_step(self, error: Exception) -> bool:
        return False


@contextmanager
def worker_of(done: list[str], prepare: Callable[[], bool]) -> Iterator[tuple[StepWorker, Any]]:
    results: Any = SimpleQueue()
    masks = MaskBox()
    worker = StepWorker(0, Runs(done), results, masks, torch.device("cpu"), 1, prepare)
    try:
        yield worker, results
    finally:
        masks.close()
        worker.close()


def plan(step: int) -> Any:
    class Plan:
        masked_rows = ()

    made = Plan()
    made.step = step  # type: ignore[attr-defined]
    return made


def test_pieces_are_prepared_until_none_is_left_and_plans_go_first() -> None:
    done: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def prepare() -> bool:
        if len(done) == 1:
            begun.set()
            go_on.wait(SECONDS)
        done.append("piece")
        return done.count("piece") < 4

    with worker_of(done, prepare) as (worker, results):
        assert begun.wait(SECONDS)
        for step in range(3):
            worker.submit(plan(step))
        go_on.set()
        assert [results.get(timeout=SECONDS)[1].step for _ in range(3)] == [0, 1, 2]
        until(lambda: done.count("piece") == 4)
        worker.submit(plan(3))
        results.get(timeout=SECONDS)
    assert done == ["piece", "piece", "step 0", "step 1", "step 2", "piece", "piece", "step 3"]


def test_steps_run_where_nothing_can_be_prepared(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    def prepare() -> bool:
        done.append("piece")
        raise RuntimeError("no room for a graph")

    with worker_of(done, prepare) as (worker, results):
        until(lambda: "no room for a graph" in caplog.text)
        worker.submit(plan(0))
        assert results.get(timeout=SECONDS)[1].error is None
    assert done == ["piece", "step 0"]
