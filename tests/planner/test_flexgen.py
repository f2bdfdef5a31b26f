"""The offload model fitted to half of what FlexGen measured, and judged on the other half."""

from __future__ import annotations

import math

import pytest

from cellar.planner.flexgen import (
    FOUR_BITS,
    HALVES,
    ROWS,
    Row,
    fit,
    fit_unpacking,
    four_bits,
    predicted,
    with_constants,
)
from cellar.planner.machines import Machine, flexgen_t4

UNSEEN = {
    # The other half has no copy of KV over the link: FlexGen's go through a buffer, at half the rate of its weights.
    "30B, no CPU attention": 2.3,
    # One row alone says what each of these costs.
    "175B, prefill, KV written": 2.0,
    "175B, decode, KV written": 2.6,
    # FlexGen's CPU attention reached 8.8 GB/s with 30B and 17 with 175B.
    "175B, decode, compute": 1.9,
    "175B, decode, weights": 1.6,
}
"""Rows that half of the others cannot foretell, why, and by which factor they may be missed."""


@pytest.fixture(scope="module")
def fitted() -> list[Machine]:
    machine = flexgen_t4()
    return [with_constants(machine, fit(half, machine)) for half in HALVES]


def factor(row: Row, machine: Machine) -> float:
    return math.exp(abs(math.log(predicted(row, machine) / row.published)))


def test_halves_share_nothing_and_have_both_models() -> None:
    assert sorted(row.name for half in HALVES for row in half) == sorted(row.name for row in ROWS)
    for half in HALVES:
        assert {row.policy.model for row in half} >= {"30B", "175B"}
        assert {row.kind for row in half} >= {"all", "decode"}


@pytest.mark.parametrize("half", [0, 1])
def test_a_half_is_met_and_foretells_the_other(half: int, fitted: list[Machine]) -> None:
    for row in HALVES[half]:
        assert factor(row, fitted[half]) < 1.2, row.name
    for row in HALVES[1 - half]:
        assert factor(row, fitted[half]) < UNSEEN.get(row.name, 1.25), row.name


def test_in_the_mean_within_a_third(fitted: list[Machine]) -> None:
    missed = [math.log(factor(row, fitted[1 - half])) for half in (0, 1) for row in HALVES[half]]
    assert math.exp(sum(missed) / len(missed)) < 1.33


def test_four_bits_cost_what_unpacking_does() -> None:
    """Fitted to 30B it foretells the others; without it their rates are two to three times too high."""
    machine = flexgen_t4()
    machine = with_constants(machine, fit(ROWS, machine))
    seconds = fit_unpacking("30B", machine)
    assert four_bits("30B", machine, seconds) == pytest.approx(FOUR_BITS["30B"], rel=0.02)
    for model in ("6.7B", "175B"):
        assert 1 / 1.3 < four_bits(model, machine, seconds) / FOUR_BITS[model] < 1.3
        assert four_bits(model, machine, 0.0) / FOUR_BITS[model] > 1.8
