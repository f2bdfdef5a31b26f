"""Rows that take turns while somebody with few of them waits for the same steps."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.schedule.steps.pace import LATEST, PRICE, Pace
from cellar.schedule.steps.portions import Portions, level


def measured(few: tuple[int, float], many: tuple[int, float], limit: float | None = 0.1) -> Pace:
    pace = Pace(limit)
    pace.decoded(*few)
    pace.decoded(*many)
    return pace


def holders(owners: list[str], waiting: str | None = None, arriving: bool = False, returns: bool = False) -> Any:
    """Rows of these owners, and one who waits, or may be back; `arriving`: rows are opened."""
    rows = SimpleNamespace(num_rows=len(owners), state=lambda row: SimpleNamespace(owner=owners[row]))
    queue = SimpleNamespace(first=lambda without: None if waiting is None or waiting in without else waiting)
    shares = Counter(owners)
    return SimpleNamespace(rows=rows, shares=shares, queue=queue, are_arriving=arriving, few_may_return=returns)


@pytest.mark.parametrize("step", [0.0, 0.001, 0.003, 0.05])
def test_what_turns_cost_is_bounded(step: float) -> None:
    row, count = 0.0002, 256
    pace = measured((1, step + row), (count, step + count * row))
    enough = pace.enough(count)
    assert 1 <= enough < count
    assert (step + enough * row) / enough <= (1 + PRICE) * (step + count * row) / count * 1.0001
    if enough > 1:
        assert (step + (enough - 1) * row) / (enough - 1) > (1 + PRICE) * (step + count * row) / count


def test_all_rows_are_enough_where_turns_are_not_worth_it() -> None:
    assert measured((1, 0.005), (256, 0.005)).enough(256) == 256, "a step costs the same whatever is in it"
    assert measured((1, 0.003), (256, 0.06), None).enough(256) == 256, "nobody waits for single tokens"
    assert measured((200, 0.05), (256, 0.06)).enough(256) == 256, "too near to each other to tell"
    assert Pace(0.1).enough(256) == 256


def test_a_crowd_that_comes_does_not_hide_what_few_rows_take() -> None:
    """The last steps of few rows are those while it arrives, which share their cores with the reading of it: instead of
    3 ms they took 70, and turns were of 203 rows of 256 instead of 73 for as long as the crowd stayed.
    """
    pace = Pace(0.1)
    for seconds in (*[0.0032] * 5, *[0.07] * 12):
        pace.decoded(1, seconds)
    for seconds in (0.5, 0.062, 0.2):
        pace.decoded(256, seconds)
    assert pace.enough(256) == measured((1, 0.0032), (256, 0.062)).enough(256)
    for _ in range(LATEST):
        pace.decoded(1, 0.07)
    assert pace.enough(256) == 256, "a machine that has become another is seen in time"


def test_about_as_many_rows_tell_how_many_are_enough() -> None:
    pace = measured((1, 0.0032), (256, 0.062))
    assert pace.enough(255) < 100
    assert pace.enough(127) == 127, "half as many were not seen"


def test_turns_are_taken_while_a_crowd_arrives() -> None:
    """No step of it is one of decodes alone until all of it is there: steps with its rows say what rows take."""
    pace = measured((1, 0.0032), (3, 0.0037))
    for count in (36, 69):
        pace.measured(count, 0.003 + 0.00023 * count, count)
    assert pace.enough(60, arriving=True) < 40
    assert pace.enough(200, arriving=True) < 100, "as those say that were seen"
    assert pace.enough(200) == 200, "once they can be measured by themselves, they are"
    pace.decoded(200, 0.0032)
    assert pace.enough(200, arriving=True) == 200, "and that counts more"


def test_steps_with_long_pieces_of_prompts_say_nothing_about_rows() -> None:
    pace = measured((1, 0.0032), (3, 0.0037))
    pace.measured(64, 0.02, 3)
    assert pace.enough(60, arriving=True) == 60


@pytest.mark.parametrize(
    ("shares", "most", "each"),
    [([255, 1], 70, 69), ([64, 64, 64, 63, 1], 69, 17), ([1] * 100, 70, 1), ([3, 2], 10, 3), ([10, 10], 1, 1)],
)
def test_levels(shares: list[int], most: int, each: int) -> None:
    assert level(shares, most) == each
    if each > 1:
        assert sum(min(share, each) for share in shares) <= most


def test_who_has_many_rows_takes_turns_fairly() -> None:
    owners = ["many"] * 100 + ["few"] + ["more"] * 155
    pace = measured((1, 0.0032), (256, 0.062))
    portions, ready, seen = Portions(holders(owners)), np.arange(256), Counter[int]()
    for _ in range(60):
        chosen = portions.of(ready, pace)
        assert len(chosen) <= pace.enough(256)
        assert (np.diff(chosen) > 0).all()
        seen.update(chosen.tolist())
    assert seen[100] == 60
    for owner in ("many", "more"):
        counts = [seen[row] for row in range(256) if owners[row] == owner]
        assert max(counts) - min(counts) <= 1
        assert min(counts) > 5


@given(
    st.lists(st.sampled_from("abcde"), min_size=2, max_size=60),
    st.integers(1, 40),
    st.floats(0.0, 0.01),
    st.floats(0.0, 0.001),
    st.booleans(),
    st.sampled_from([None, "new"]),
)
def test_nobody_starves(
    owners: list[str], there: int, step: float, row: float, arriving: bool, waiting: str | None
) -> None:
    """Rows that come one after another: each is in a step again after as many as there are rows, at the latest, and
    somebody is in every one.
    """
    pace = measured((1, step + row), (1000, step + 1000 * row))
    pace.measured(40, step + 41 * row, 40)
    found = holders(owners, waiting, arriving)
    portions, waits = Portions(found), Counter[int]()
    for k in range(4 * len(owners)):
        ready = np.arange(min(len(owners), there + k))
        found.shares = Counter(owners[: len(ready)])
        chosen = portions.of(ready, pace)
        assert len(chosen)
        assert set(chosen) <= set(ready)
        waits.update(set(ready.tolist()) - set(chosen.tolist()))
        for one in chosen.tolist():
            waits[one] = 0
        assert max(waits.values(), default=0) <= len(owners)


@pytest.mark.parametrize(
    ("owners", "waiting", "cut"),
    [
        (["a"] * 256, None, False),
        (["a"] * 256, "b", True),
        (["a"] * 128 + ["b"] * 128, None, False),
        ([f"{k}" for k in range(256)], None, False),
        ([f"{k}" for k in range(256)], "b", False),
        (["a"] * 255 + ["b"], None, True),
    ],
)
def test_turns_are_taken_for_somebody_alone(owners: list[str], waiting: str | None, cut: bool) -> None:
    found = Portions(holders(owners, waiting)).of(np.arange(256), measured((1, 0.0032), (256, 0.062)))
    assert (len(found) < 256) == cut


@pytest.mark.parametrize(
    ("owners", "cut"), [(["a"] * 256, True), (["a"] * 128 + ["b"] * 128, True), ([f"{k}" for k in range(256)], False)]
)
def test_turns_are_taken_while_somebody_may_be_back(owners: list[str], cut: bool) -> None:
    """Who comes back finds two steps of turns before it, and not two of all rows."""
    found = Portions(holders(owners, returns=True)).of(np.arange(256), measured((1, 0.0032), (256, 0.062)))
    assert (len(found) < 256) == cut
