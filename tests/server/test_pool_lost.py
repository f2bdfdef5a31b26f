"""Engines that are lost together, and what a second engine says again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any, cast

import numpy as np
import pytest

from cellar import SamplingParams
from cellar.core.errors import CellarError
from cellar.core.messages import FinishReason, MemoryAnswer, MemoryQuestion, Request, StepOutput, Tier
from cellar.server.pool import pool as module
from cellar.server.pool.choice import Sticky
from cellar.server.pool.pool import Pool
from cellar.server.pool.stream import Stream, told_once
from cellar.server.pool.totals import NOTHING
from cellar.server.wire import Reported

REQUEST = Request("one", np.array([1, 2], np.int32), SamplingParams(), frozenset(), 8)


class Scripted:
    """An engine whose turns do what is written; nothing can be done with one that is closed."""

    def __init__(self, turn: Callable[[], list[StepOutput]], deaf: bool = False) -> None:
        self._turn = turn
        self._deaf = deaf
        self.added: list[Request] = []
        self.asked: list[Callable[[MemoryAnswer | CellarError], None]] = []
        self.closed = False
        self.reported: list[Reported] = []
        self.connection, self._theirs = Pipe()

    def add(self, *requests: Request) -> None:
        if self._deaf:
            raise CellarError("it has gone")
        self.added += requests

    def take(self) -> list[StepOutput]:
        if self.closed:
            raise OSError("handle is closed")
        return self._turn()

    def memory(self, question: MemoryQuestion, then: Callable[[MemoryAnswer | CellarError], None]) -> None:
        self.asked.append(then)

    def stats(self) -> Any:
        return NOTHING

    def close(self) -> None:
        self.closed = True
        self.connection.close()
        self._theirs.close()


def gone() -> list[StepOutput]:
    raise CellarError("it has gone")


def test_two_engines_that_are_lost_together_end_nobody_else() -> None:
    pool = Pool(Sticky())
    first, second, third = Scripted(gone), Scripted(list, deaf=True), Scripted(list)
    pool.join("first", cast(Any, first))
    pool.add(REQUEST)
    pool.join("second", cast(Any, second))
    pool.join("third", cast(Any, third))
    assert pool.turn(0.0) == []  # the first is lost, the second when it is to go on, and is not asked for news then
    assert [place.address for place in pool.places] == ["third"]
    assert [request.id for request in third.added] == ["one"]
    pool.close()


@pytest.mark.parametrize("forget", [True, False])
def test_what_a_lost_engine_was_to_forget_is_not_said_to_be_forgotten(forget: bool) -> None:
    """It may lie on its disk, from where the next engine there has it again."""
    pool, answers = Pool(Sticky()), list[MemoryAnswer | CellarError]()
    stays, goes = Scripted(list), Scripted(gone)
    pool.join("stays", cast(Any, stays))
    pool.join("goes", cast(Any, goes))
    pool.memory(MemoryQuestion(("a",), forget=forget), answers.append)
    stays.asked[0](({Tier.DEVICE: 3},))
    pool.turn(0.0)
    assert len(answers) == 1
    if forget:
        assert isinstance(answers[0], CellarError)
    else:
        assert answers == [({Tier.DEVICE: 3},)]
    pool.close()


def test_where_there_is_no_engine_nothing_is_forgotten() -> None:
    pool, answers = Pool(Sticky()), list[MemoryAnswer | CellarError]()
    pool.memory(MemoryQuestion(("a",), forget=True), answers.append)
    pool.turn(0.0)
    assert isinstance(answers[0], CellarError)
    pool.close()


def test_ten_thousand_streams_that_wait_cost_no_turn_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn looked at every one of them, and each client that gives up is a turn."""
    now = 0.0
    pool = Pool(Sticky(), lambda: now)
    for k in range(10_000):
        now = k / 1000
        pool.add(replace(REQUEST, id=str(k)))
    looked: list[str] = []
    waiting = pool._homeless

    class Watched(dict[str, float]):
        def __getitem__(self, id: str) -> float:
            looked.append(id)
            return super().__getitem__(id)

    monkeypatch.setattr(pool, "_homeless", Watched(waiting))
    assert pool.turn(0.0) == []
    assert len(looked) < 10
    now = module.PATIENCE_SECONDS + 2.0005
    (ended,) = pool.turn(0.0)
    assert ended.finished.keys() == {str(k) for k in range(2001)}
    assert all(reason is FinishReason.ERROR for reason, _ in ended.finished.values())
    pool.close()


def test_what_was_cached_is_told_once() -> None:
    stream = Stream[None](REQUEST)
    first = StepOutput(num_cached_tokens={"one": 1}, queue_seconds={"one": 0.5})
    told_once(first, "one", stream)
    assert (first.num_cached_tokens, first.queue_seconds) == ({"one": 1}, {"one": 0.5})
    again = StepOutput(
        num_cached_tokens={"one": 6}, queue_seconds={"one": 2.0}, finished={"one": (FinishReason.STOP, None)}
    )
    told_once(again, "one", stream)  # of prompt and output: more than the prompt has tokens
    assert (again.num_cached_tokens, again.queue_seconds) == ({}, {})
    assert again.finished == {"one": (FinishReason.STOP, None)}
