"""Routers that know nothing of chunks."""

from __future__ import annotations

from collections import Counter

import pytest

from cellar.core.errors import CapacityError
from cellar.routing.baselines import RuleRouter, least_loaded, round_robin, two_choices
from tests.routing.fleet import fleet, request

ALL = [round_robin, least_loaded, two_choices]


def known(router: RuleRouter, count: int = 4) -> RuleRouter:
    for replica in fleet(count):
        assert router.report(replica.report(), 0.0)
    return router


@pytest.mark.parametrize("make", [round_robin, least_loaded])
def test_all_get_as_many(make: type[RuleRouter]) -> None:
    router = known(make())
    assert set(Counter(router.choose(request([k]), 0.0).replica for k in range(40)).values()) == {10}


def test_least_loaded_looks_at_what_is_outstanding() -> None:
    router = known(least_loaded(), 3)
    sent = [router.choose(request([k]), 0.0) for k in range(9)]
    done = [choice for choice in sent if choice.replica == "r1"]
    for choice in done:
        router.ended(choice.number, 1, 0.0)
        router.ended(choice.number, 1, 0.0)
    assert [router.choose(request([k]), 0.0).replica for k in range(3)] == ["r1"] * 3


def test_two_choices_are_better_than_one() -> None:
    router = known(two_choices(seed=1), 16)
    counts = Counter(router.choose(request([k]), 0.0).replica for k in range(1600))
    assert max(counts.values()) - min(counts.values()) < 20  # drawn alone they would be 40 apart


@pytest.mark.parametrize("make", ALL)
def test_who_drains_or_is_gone_is_not_chosen(make: type[RuleRouter]) -> None:
    router = known(make(), 3)
    replicas = fleet(3)
    router.report(replicas[0].report(draining=True), 0.0)
    router.remove("r1")
    router.remove("r1")
    assert {router.choose(request([k]), 0.0).replica for k in range(5)} == {"r2"}
    assert router.choose(request([1]), 0.0, among=["r0", "r1"]).replica == "r0"
    with pytest.raises(CapacityError, match="no replica"):
        router.choose(request([1]), 0.0, among=["r1"])
