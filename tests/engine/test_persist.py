"""An engine over a tier that outlives it: what is safe when it is closed, and when it says what it has forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np

from cellar.core.config import ScheduleConfig
from cellar.core.messages import IntArray, MemoryAnswer, MemoryQuestion, Request, Resting, Tier
from cellar.core.sampling import SamplingParams
from cellar.engine.steps import StepEngine, step_engine
from cellar.runtime.protocol import Capacity
from cellar.runtime.steps.fake import FakeRuntime
from cellar.schedule.steps.scheduler import StepScheduler

CAPACITY = Capacity(24, 4, 4, 64)
DISK = {Tier.DISK: 60}


def opened(before: FakeRuntime | None = None, **options: Any) -> tuple[StepEngine, FakeRuntime]:
    runtime = FakeRuntime(CAPACITY, vocab_size=29, tiers=DISK, copy_delay=3)
    scheduler = StepScheduler(24, 4, 4, 64, ScheduleConfig(), tiers=DISK)
    if before is not None:
        runtime.inherit(before)
        scheduler.restore(runtime.kept(), 0.0)
    return step_engine(scheduler, runtime, clock=lambda: 0.0, **options), runtime


def serve(engine: StepEngine, name: str = "r") -> int:
    """A request of 10 tokens that gets 4; -> how many of its prompt were found."""
    params = SamplingParams(temperature=0, seed=0, max_tokens=4)
    engine.add(Request(name, np.arange(10, dtype=np.int32), params, frozenset(), 4, conversation="mine"))
    cached = -1
    while engine.has_work():
        for output in engine.turn(0.0):
            cached = output.num_cached_tokens.get(name, cached)
    return cached


def num_kept(runtime: FakeRuntime) -> int:
    return len(runtime.kept()[Tier.DISK])


def test_closed_engine_has_brought_everything_to_the_disk() -> None:
    engine, runtime = opened()
    serve(engine)
    assert num_kept(runtime) == 0, "it has not rested long enough"
    engine.close()
    assert num_kept(runtime) == 4, "three chunks of 13 tokens with KV, and the tail"
    again, _ = opened(runtime)
    assert serve(again) == 8, "what whole chunks have"
    again.close()


def test_engine_without_time_keeps_what_it_had_written() -> None:
    engine, runtime = opened(persist_seconds=0.0)
    serve(engine)
    engine.close()
    assert num_kept(runtime) == 0


def test_what_is_forgotten_is_gone_from_the_disk_before_the_answer() -> None:
    engine, runtime = opened()
    serve(engine)
    engine.persist(60.0)
    assert num_kept(runtime) == 4
    answers: list[MemoryAnswer] = []
    engine.memory(MemoryQuestion(("mine",)), answers.append)
    assert answers == [({Tier.DEVICE: 13, Tier.DISK: 0},)]
    engine.memory(MemoryQuestion(("mine",), forget=True), answers.append)
    assert len(answers) == 1, "something is left"
    for _ in range(20):
        engine.turn(0.0)
        assert len(answers) == 1 or num_kept(runtime) == 0
    assert num_kept(runtime) == 0
    assert len(answers) == 2
    engine.close()
    assert serve(opened(runtime)[0]) == 0


def test_what_others_read_is_written_as_chosen_and_no_more() -> None:
    """Of a remote tier the engine asks what pays; without an answer that says so nothing is written."""
    asked: list[tuple[Resting, float]] = []

    def last_two(resting: Resting, seconds: float) -> IntArray:
        asked.append((resting, seconds))
        return resting.chunks[np.argsort(-resting.ends)][:2]

    tiers = {Tier.REMOTE: 60}
    runtime = FakeRuntime(CAPACITY, vocab_size=29, tiers=tiers, copy_delay=3)
    scheduler = StepScheduler(24, 4, 4, 64, ScheduleConfig(), tiers=tiers)
    engine = step_engine(scheduler, runtime, clock=lambda: 0.0, persist_seconds=9.0, leaving=last_two)
    serve(engine)
    engine.close()
    ((resting, seconds),) = asked
    assert seconds == 9.0
    assert sorted(resting.ends.tolist()) == [4, 8, 12, 13]
    assert len(set(resting.users.tolist())) == 1
    assert sorted(kept.label.end for kept in runtime.kept()[Tier.REMOTE]) == [12, 13]


def test_a_disk_keeps_all_whatever_it_costs() -> None:
    def none(resting: Resting, seconds: float) -> IntArray:
        raise AssertionError("a disk is asked of nobody")

    engine, runtime = opened(leaving=none)
    serve(engine)
    engine.close()
    assert num_kept(runtime) == 4
