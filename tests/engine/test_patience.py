"""How long a step waits for masks, and that others are not held up by them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.engine import patience
from cellar.engine.patience import LATEST, LEAST_PATIENCE, STEP_SECONDS, Patience


def after(steps: list[tuple[int, float, bool]]) -> Patience:
    """Steps of so many tokens and seconds, with others or without."""
    found = Patience()
    for tokens, seconds, others in steps:
        found.planned(others)
        found.measured(tokens, seconds)
    return found


def test_alone_a_step_waits_for_every_mask_that_is_not_slow() -> None:
    assert Patience().of(8) == STEP_SECONDS
    assert after([(8, 0.02, False)] * 100).of(8) == STEP_SECONDS


def test_before_a_first_measurement_others_wait_as_long() -> None:
    assert after([(8, 0.0, True)]).of(8) == STEP_SECONDS


def check_slow_ones() -> None:
    """Masks beside them have made most steps slow: these must not make the next ones wait longer."""
    slow = [(24, 0.04, True)] * (LATEST - 1)
    assert after([(24, 0.02, True), *slow]).of(24) == 0.02


def check_those_to_come() -> None:
    """Whoever comes waits for the steps on their way, so others are remembered, for a while."""
    steps = [(8, 0.02, True)] + [(8, 0.02, False)] * (LATEST - 1)
    assert after(steps).of(8) == 0.02
    assert after([*steps, (8, 0.02, False)]).of(8) == STEP_SECONDS


def check_sizes() -> None:
    """A step of one row is no measure of one with 24, if one of about as many was seen."""
    steps = [(24, 0.03, True), *[(1, 0.015, True)] * LATEST]
    assert after(steps).of(25) == 0.03
    assert after(steps).of(1) == 0.015


def test_the_fastest_of_the_latest_counts() -> None:
    check_slow_ones()
    assert after([(24, 0.02, True), *[(24, 0.04, True)] * LATEST]).of(24) == 0.04, "a machine that is another"


def test_others_are_remembered() -> None:
    check_those_to_come()


def test_steps_of_as_many_tokens_say_it() -> None:
    check_sizes()


@given(
    st.lists(st.tuples(st.integers(1, 512), st.floats(0, 1), st.booleans()), max_size=80),
    st.integers(1, 512),
)
def test_it_is_between_the_least_and_the_most(steps: list[tuple[int, float, bool]], tokens: int) -> None:
    found = after(steps)
    assert LEAST_PATIENCE <= found.of(tokens) <= STEP_SECONDS
    found.planned(True)
    alike = [s for t, s, _ in steps if t.bit_length() == tokens.bit_length() and s > 0]
    if alike:
        assert found.of(tokens) <= max(LEAST_PATIENCE, min(alike[-LATEST:]))


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [
        ("LATEST", 1, check_those_to_come),  # who has gone for a step is forgotten
        ("min", max, check_slow_ones),  # the slowest counts
        ("min", lambda *found, key=None: min(*found), check_sizes),  # whatever was seen
    ],
)
def test_planted_defects_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, check: Callable[[], None]
) -> None:
    check()
    monkeypatch.setattr(patience, name, value, raising=False)
    with pytest.raises(AssertionError):
        check()
