"""A worker's idle moments: what later steps want is prepared then, a piece at a time, and no plan waits for two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from tests.runtime.steps.steps import runtime_of, tiny_model


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


class Graphs:
    """What `StepExecutor` asks, where it notes what is under way."""

    def __init__(self, under_way: list[str]) -> None:
        self.under_way = under_way
        self.pieces = 0

    def prepare(self) -> bool:
        assert not self.under_way
        self.under_way.append("a piece")
        self.pieces += 1
        time.sleep(0.001)
        self.under_way.remove("a piece")
        return True


class Untaken:
    """A lock that lets everybody in."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("planted", [False, True])
def test_steps_of_another_thread_and_pieces_take_turns(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who measures steps launches them from a thread of its own."""
    runtime = runtime_of(*tiny_model())
    executor = runtime.executor
    assert executor is not None
    under_way: list[str] = []
    graphs = Graphs(under_way)

    def launched(*_: Any) -> Any:
        assert not under_way
        under_way.append("a step")
        time.sleep(0.001)
        under_way.remove("a step")

    monkeypatch.setattr(executor, "_graphs", graphs)
    monkeypatch.setattr(executor, "_launched", launched)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    if planted:
        monkeypatch.setattr(executor, "_turn", Untaken())
    found: list[BaseException] = []

    def prepare() -> None:
        try:
            while graphs.pieces < 50:
                executor.prepare()
        except AssertionError as error:
            found.append(error)

    thread = threading.Thread(target=prepare)
    thread.start()
    try:
        while thread.is_alive():
            executor.launch(plan(0), MaskBox())
    except AssertionError as error:
        found.append(error)
    thread.join(SECONDS)
    monkeypatch.undo()
    runtime.close()
    assert bool(found) == planted
