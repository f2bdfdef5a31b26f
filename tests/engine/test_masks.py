"""MaskDesk: how long a step waits, and what its threads take from those of the steps."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cellar.core.messages import Emit, Flag, Source, Spans, StepPlan, StepResult, TableUpdate
from cellar.core.priority import NICER
from cellar.engine import masks as masks_module
from cellar.engine import structured as structured_module
from cellar.engine.masks import MaskDesk
from cellar.engine.patience import LEAST_PATIENCE, STEP_SECONDS
from cellar.engine.structured import StructuredOutput
from cellar.text.masker import MaskRow, Wanted
from tests.limits import SECONDS

MASK = np.zeros(1, np.int32)
NONE = np.empty(0, np.int32)


class Held:
    """A matcher whose mask comes when it may go."""

    def __init__(self, go: threading.Event) -> None:
        self.go = go
        self.nice: int | None = None

    def consume(self, token: int) -> None: ...

    def mask(self) -> Any:
        assert self.go.wait(SECONDS)
        self.nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) if sys.platform == "linux" else None
        return MASK


def row(name: str, matcher: Held) -> MaskRow:
    return MaskRow(name, (name,), lambda: matcher, MASK)  # type: ignore[arg-type, return-value]


class Told:
    """What a desk has said, in order."""

    def __init__(self) -> None:
        self.given: list[tuple[int, bool]] = []  # step, and whether there was a mask
        self.computing: list[int] = []  # threads
        self.changed = threading.Condition()

    def supply(self, step: int, masks: Mapping[int, Any]) -> None:
        with self.changed:
            self.given += [(step, mask is not None) for mask in masks.values()]
            self.changed.notify_all()

    def told(self, state: MaskRow, refusal: str | None) -> None:
        assert refusal is None
        with self.changed:
            self.changed.notify_all()

    def masking(self, threads: int) -> None:
        with self.changed:
            self.computing.append(threads)
            self.changed.notify_all()

    def until(self, count: int) -> list[tuple[int, bool]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.given) >= count, SECONDS)
            return list(self.given)


def desk_of(told: Told) -> MaskDesk:
    return MaskDesk(told.supply, told.told, told.masking, budget=SECONDS)


class Threads:
    """Those of masks that were begun since; engines of other tests may have left theirs."""

    def __init__(self) -> None:
        self._others = set(threading.enumerate())

    def now(self) -> list[threading.Thread]:
        return [
            thread for thread in threading.enumerate() if thread.name == "cellar-masks" and thread not in self._others
        ]

    def settle(self) -> None:
        for thread in self.now():
            thread.join(SECONDS)
        assert not self.now()


def test_a_step_that_waits_less_hears_first() -> None:
    """Whoever asked before it, for a step that may wait longer."""
    go, told, threads = threading.Event(), Told(), Threads()
    desk = desk_of(told)
    desk.ask([Wanted(1, 0, row("patient", Held(go)))], SECONDS)
    desk.ask([Wanted(2, 0, row("hurried", Held(go)))], 0.01)
    assert told.until(1) == [(2, False)]
    go.set()
    assert told.until(2)[1] == (1, True)
    desk.close()
    threads.settle()


def test_it_is_told_how_many_threads_compute() -> None:
    """Those whose mask is late, too, and whose request has ended."""
    go, told, threads = threading.Event(), Told(), Threads()
    desk = desk_of(told)
    desk.ask([Wanted(1, 0, row("held", Held(go)))], 0.001)
    assert told.until(1) == [(1, False)]
    with told.changed:
        assert told.changed.wait_for(lambda: told.computing == [1], SECONDS)
    go.set()
    desk.ask([Wanted(2, 0, row("next", Held(go)))], SECONDS)
    assert told.until(2)[1] == (2, True)
    desk.close()
    threads.settle()
    assert told.computing in ([1, 0, 1, 0], [1, 2, 1, 0])


@pytest.mark.skipif(sys.platform != "linux", reason="threads of one process have one priority elsewhere")
def test_threads_that_compute_masks_step_back() -> None:
    go, told, threads = threading.Event(), Told(), Threads()
    go.set()
    matcher, desk = Held(go), desk_of(told)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    desk.ask([Wanted(1, 0, row("a", matcher))], patience=SECONDS)
    assert told.until(1) == [(1, True)]
    assert matcher.nice == min(own + NICER, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own, "and nobody else does"
    desk.close()
    threads.settle()


def test_a_mask_that_is_held_up_has_a_thread_of_its_own_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two cores one thread computes masks; who is late because of their number gets no second one."""
    monkeypatch.setattr(masks_module, "num_cores", lambda: 2)
    go, quick, told, threads = threading.Event(), threading.Event(), Told(), Threads()
    quick.set()
    desk = desk_of(told)
    desk.ask([Wanted(1, 0, row("held", Held(go)))])
    desk.ask([Wanted(1, k, row(f"quick-{k}", Held(quick))) for k in range(1, 4)])
    assert told.until(4)[0] == (1, False), "all are late"
    assert len(threads.now()) == 4, "the keeper, that for slow ones, the one that is held, and one more"
    desk.ask([Wanted(2, 0, row("late", Held(quick)))])
    assert told.until(5)[4] == (2, True)
    go.set()
    for _ in range(1000):
        if len(threads.now()) == 3:
            break
        threading.Event().wait(SECONDS / 1000)
    assert len(threads.now()) == 3
    desk.ask([Wanted(3, 0, row("last", Held(quick)))])
    assert told.until(6)[5] == (3, True)
    desk.close()
    threads.settle()


def test_a_mask_is_charged_for_its_own_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is late because others stood before it costs its sequence nothing; one that would have been late costs
    what it took, in the line or not.
    """
    monkeypatch.setattr(masks_module, "num_cores", lambda: 2)
    seconds, patience, told, threads = 0.0, 1.0, Told(), Threads()
    clock = threading.Condition()

    def now() -> float:
        return seconds

    class Takes(Held):
        """A matcher that computes for so long, by the clock, from when it may go."""

        def __init__(self, takes: float) -> None:
            super().__init__(threading.Event())
            self.begun = threading.Event()
            self.takes = takes

        def mask(self) -> Any:
            nonlocal seconds
            self.begun.set()
            assert self.go.wait(SECONDS)
            with clock:
                seconds += self.takes
            return MASK

    desk = MaskDesk(told.supply, told.told, told.masking, budget=SECONDS, clock=now)
    monkeypatch.setattr(masks_module, "_is_long", lambda job, now: False)  # one thread all the while
    first, second, third = Takes(2.0), Takes(0.25), Takes(3.0)
    states = [row(name, matcher) for name, matcher in (("first", first), ("second", second), ("third", third))]
    desk.ask([Wanted(1, k, state) for k, state in enumerate(states)], patience)
    assert first.begun.wait(SECONDS)
    seconds = 1.5  # all three are late now
    desk.ask([Wanted(2, 0, row("other", second))], -1.0)  # the keeper looks at once
    assert [given for given in told.until(4) if given[0] == 1] == [(1, False)] * 3
    for matcher in (first, second, third):
        matcher.go.set()
    with told.changed:
        assert told.changed.wait_for(lambda: not any(state.computing for state in states), SECONDS)
    assert [state.seconds for state in states] == [3.5, 0.0, 3.0]
    desk.close()
    threads.settle()


class Asked:
    """A desk that writes down how long it may take."""

    def __init__(self, *_: Any) -> None:
        self.patience: list[float] = []

    def ask(self, wanted: list[Wanted], patience: float) -> None:
        self.patience.append(patience)

    def close(self) -> None: ...


class Masking:
    """Each plan wants the mask of its row 0 at once, each result that of the next step."""

    def submitted(self, plan: StepPlan) -> list[Wanted]:
        return [Wanted(plan.step, 0, row("a", Held(threading.Event())))]

    def committed(self, result: StepResult) -> list[Wanted]:
        return [Wanted(result.step + 1, 0, row("a", Held(threading.Event())))]

    def newly_parked(self) -> list[MaskRow]:
        return []


@pytest.mark.parametrize(
    ("others", "seconds", "patience"),
    [
        (1, 0.02, 0.02),
        (1, 0.001, LEAST_PATIENCE),
        (1, 0.2, STEP_SECONDS),
        (1, 0.0, STEP_SECONDS),
        (0, 0.001, STEP_SECONDS),
    ],
)
def test_others_wait_no_longer_than_their_step_takes(
    monkeypatch: pytest.MonkeyPatch, others: int, seconds: float, patience: float
) -> None:
    """Masks have as long as the step itself, from when it begins; nobody is hurried who waits for its own masks."""
    monkeypatch.setattr(structured_module, "MaskDesk", Asked)
    output = StructuredOutput(Masking(), lambda step, masks: None, lambda threads: None)  # type: ignore[arg-type]
    output.attach(None, 5.0)  # type: ignore[arg-type]
    rows = np.arange(1 + others, dtype=np.int32)
    ones = np.ones(len(rows), np.int32)
    spans = Spans(rows, ones, 2 * ones, Source.DEVICE * ones, Emit.LAST * ones)
    for step in (0, 1):
        output.submitted(StepPlan(step, spans, NONE, TableUpdate(NONE, NONE, NONE), masked_rows=(0,)))
    result = StepResult(0, ones.reshape(-1, 1), ones, Flag.OK * ones, seconds=seconds)
    output.committed(result)
    assert output._desk.patience == [STEP_SECONDS, STEP_SECONDS, pytest.approx(patience)]  # type: ignore[union-attr]
    output.close()
