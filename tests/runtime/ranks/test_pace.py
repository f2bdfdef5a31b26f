"""A rank that keeps the others waiting is told from ranks that wait for each other alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.runtime.ranks.pace import AGAIN_SECONDS, SPAN_SECONDS, Pace, Pulse


@dataclass
class Beating:
    pulse: Pulse | None = None


def look(pace: Pace, shares: Sequence[float | None], seconds: float, step: float = 1.0) -> None:
    """Pulses of so many seconds in which rank k waits shares[k] of the time."""
    ranks = [Beating() for _ in shares]
    for tick in range(int(seconds / step) + 1):
        for rank, share in zip(ranks, shares, strict=True):
            rank.pulse = Pulse(tick * step, None if share is None else share * tick * step)
        pace.look(ranks)


@given(st.integers(2, 8), st.data())
def test_the_one_for_which_all_others_wait_is_found(size: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, size - 1))
    shares = [data.draw(st.floats(0.55, 1.0)) for _ in range(size)]
    shares[slow] = data.draw(st.floats(0.0, 0.1))
    pace = Pace()
    look(pace, shares, SPAN_SECONDS)
    assert pace.slow == slow


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8))
def test_ranks_that_wait_alike_are_none(shares: list[float]) -> None:
    """Each is there twice, so nobody waits least alone; and who waits little waits for nobody."""
    pace = Pace()
    look(pace, [*shares, *shares], 3 * SPAN_SECONDS)
    assert pace.slow is None
    pace = Pace()
    look(pace, [share * 0.49 for share in shares] + [0.0], 3 * SPAN_SECONDS)
    assert pace.slow is None


def test_it_is_said_once_a_minute_and_no_more_once_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    pace = Pace()
    with caplog.at_level(logging.WARNING):
        look(pace, [0.8, 0.05, 0.9], AGAIN_SECONDS - 1)
        assert [record.getMessage() for record in caplog.records] == [
            "rank 1 is slow: the others waited for it for 80 % of 10 s, it for them for 5 %; look for what else runs "
            "on its processor."
        ]
    fresh = Pace()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        look(fresh, [0.8, 0.05, 0.9], 3 * AGAIN_SECONDS)
    assert len(caplog.records) == 3


def test_one_that_cannot_say_keeps_all_from_being_judged() -> None:
    """Accelerators wait by themselves."""
    pace = Pace()
    look(pace, [0.9, None], 3 * SPAN_SECONDS)
    assert pace.slow is None
    pace.look([Beating(), Beating()])
