"""Engines that are lost together, and what a second engine says again."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any, cast

import numpy as np

from cellar import SamplingParams
from cellar.core.errors import CellarError
from cellar.core.messages import FinishReason, Request, StepOutput
from cellar.server.pool.choice import Sticky
from cellar.server.pool.pool import Pool
from cellar.server.pool.stream import Stream, told_once
from cellar.server.pool.totals import NOTHING

REQUEST = Request("one", np.array([1, 2], np.int32), SamplingParams(), frozenset(), 8)


class Scripted:
    """An engine whose turns do what is written; nothing can be done with one that is closed."""

    def __init__(self, turn: Callable[[], list[StepOutput]], deaf: bool = False) -> None:
        self._turn = turn
        self._deaf = deaf
        self.added: list[Request] = []
        self.closed = False
        self.connection, self._theirs = Pipe()

    def add(self, *requests: Request) -> None:
        if self._deaf:
            raise CellarError("it has gone")
        self.added += requests

    def take(self) -> list[StepOutput]:
        if self.closed:
            raise OSError("handle is closed")
        return self._turn()

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
