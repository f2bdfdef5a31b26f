from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence

import pytest

from benchmarks import honest
from tests.limits import ROOT


@pytest.mark.parametrize(("count", "low", "high"), [(1, 0, 0), (5, 0, 4), (6, 0, 5), (8, 0, 7), (9, 1, 7), (24, 6, 17)])
def test_the_interval_is_the_sign_tests(count: int, low: int, high: int) -> None:
    """Tables of the sign test have these ranks."""
    ratios = random.Random(count).sample(range(count), count)
    assert honest.around(ratios) == (low, high)


@pytest.mark.parametrize("count", [20, 60, 300])
def test_the_interval_holds_the_median_19_times_of_20(count: int) -> None:
    draw, true = random.Random(3), 1.0

    def held(ratios: Sequence[float]) -> bool:
        low, high = honest.around(ratios)
        return low <= true <= high

    kept = statistics.mean(held([draw.lognormvariate(0, 0.3) for _ in range(count)]) for _ in range(1000))
    assert 0.93 < kept < 0.985


def test_rounds_are_compared_in_pairs() -> None:
    """A slow minute of the machine, in which both trees are half as fast, leaves the ratio."""
    rounds = []
    for k in range(12):
        pace = 0.5 if k % 3 else 1.0
        first, second = (honest.Turn(speed * pace, 2 * pace, [0.1 / pace] * 50) for speed in (10.0, 11.0))
        rounds.append((first, second))
    found = honest.report(rounds)
    assert (found["http"]["ratio"], found["http"]["low"], found["http"]["high"]) == pytest.approx((1.1, 1.1, 1.1))
    assert found["first p99"]["ratio"] == 1
    assert found["http / offline"]["before"] == 5


@pytest.mark.long
def test_a_tree_against_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [str(ROOT), str(ROOT), "--rounds", "2", "--streams", "3", "--waves", "1", "--output", "4"]
    monkeypatch.setattr("sys.argv", ["honest", *arguments])
    honest.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["rounds"] == 2
    assert list(found["figures"]) == ["http", "first p50", "first p99", "offline", "http / offline"]
    assert all(figure["before"] > 0 < figure["after"] for figure in found["figures"].values())
