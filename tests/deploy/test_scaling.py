"""How many engines are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellar.core.errors import ConfigError
from cellar.core.messages import SchedulerStats
from cellar.deploy.scaling import PRESSURE, REQUESTS, Policy, Targets, load_of


def stats(**given: int) -> SchedulerStats:
    zero = dict.fromkeys(("prefix_queries", "prefix_hits", "preemptions", "prompt_tokens", "generation_tokens"), 0)
    return SchedulerStats(**{**zero, **given})


def test_what_an_engine_tells_of_itself() -> None:
    told = load_of(stats(running=3, waiting=4, total_chunks=100, free_chunks=20, cached_chunks=50))
    assert told == {REQUESTS: 7.0, PRESSURE: 0.3}  # what lies there for later turns presses nobody


@pytest.mark.parametrize(
    ("requests", "pressures", "engines"),
    [
        ([], [], 0),
        ([0, 0], [0.0, 0.0], 0),
        ([64, 64], [0.1, 0.1], 2),
        ([65, 64], [0.1, 0.1], 3),
        ([3, 3], [0.7, 0.7], 2),
        ([3, 3], [1.0, 0.9], 3),
        ([640], [0.1], 10),
    ],
)
def test_both_targets_are_kept(requests: list[float], pressures: list[float], engines: int) -> None:
    assert Targets(64, 0.7).engines(requests, pressures) == engines


def test_more_work_never_means_fewer_engines() -> None:
    targets, asked = Targets(8, 0.5), 0
    for load in range(200):
        wanted = targets.engines([load, 2], [load / 200, 0.1])
        assert wanted >= asked
        asked = wanted


def test_the_policy_reads_what_ray_has_gathered() -> None:
    policy = Policy(requests=10, pressure=0.5)
    gathered: Any = {REQUESTS: {"a": 10.0, "b": 11.0}, PRESSURE: {"a": 0.1, "b": 0.2}}
    assert policy(cast(Any, SimpleNamespace(aggregated_metrics=gathered))) == (3, {})
    assert policy(cast(Any, SimpleNamespace(aggregated_metrics=None))) == (0, {})


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"pressure": 0}, {"pressure": 1.5}])
def test_targets_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Policy(**wrong)
