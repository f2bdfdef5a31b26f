"""Several simulated replicas behind a real router."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest

from cellar.core.config import ScheduleConfig
from cellar.core.errors import ConfigError
from cellar.core.messages import Tier
from cellar.kv.policy import named_policy
from cellar.planner.cost import dimensions
from cellar.planner.steps import StepPrices, chunk_costs
from cellar.routing.router import Why
from cellar.runtime.protocol import Capacity
from cellar.simulate.options import RoutingOptions
from cellar.simulate.simulator import SimulatedRun, Simulation
from tests.simulate.test_simulator import CHUNK, Load, Talk, Turn, machine, singles, spec, spell, talks

PRICES = StepPrices(dimensions(spec()), machine())
COSTS = chunk_costs(PRICES, CHUNK, 4096)


def fleet(
    load: Load,
    replicas: int,
    routing: Literal["affinity", "round-robin", "least-loaded", "two-choices"] = "affinity",
    *,
    num_slots: int = 4000,
    host: int = 0,
    interval: float = 1.0,
    judged: int = 0,
    **options: float,
) -> SimulatedRun:
    capacity = Capacity(num_slots, 64, CHUNK, 4096, {Tier.HOST: host} if host else {})
    return Simulation(
        load,
        spell,
        PRICES,
        capacity,
        ScheduleConfig(max_num_seqs=64, max_num_batched_tokens=2048),
        policy=(lambda: named_policy("value", COSTS)) if host else None,
        routing=RoutingOptions(replicas=replicas, routing=routing, digest_interval=interval, judged=judged),
        **options,  # type: ignore[arg-type]
    ).run()


def long_talks(count: int, turns: int, gap: float, think: float = 3.0) -> Load:
    """Conversations that say a lot: 300 tokens a turn."""
    rng = np.random.default_rng(1)
    found = [
        Talk([Turn(300, 20, float(rng.exponential(think)), 1_000_000 + 1000 * (50 * k + j)) for j in range(turns)])
        for k in range(count)
    ]
    return Load(found, np.arange(count) * gap)


@pytest.mark.parametrize("routing", ["affinity", "round-robin", "least-loaded", "two-choices"])
def test_every_request_is_answered_where_it_was_sent(
    routing: Literal["affinity", "round-robin", "least-loaded", "two-choices"],
) -> None:
    load = talks(20, 3, 1.0)
    run = fleet(load, 4, routing, host=200)
    assert len(run.requests) == 60
    assert all(len(r.token_times) == r.num_output for r in run.requests)
    assert all(r.token_times[0] > r.arrival for r in run.requests)
    assert sum(run.placements.reasons.values()) == 60
    sampled = [sum(step.num_sampled for step in steps) for steps in run.replica_steps]
    made = Counter[int]()
    for r in run.requests:
        made[r.replica] += r.num_output
    # A decode that was planned before its request's last token came is void.
    assert all(sampled[k] >= made[k] for k in range(4))
    for steps in run.replica_steps:
        assert all(b.begin >= a.end - 1e-12 for a, b in pairwise(steps))
    assert run.stats.generation_tokens == sum(r.num_output for r in run.requests)
    assert run.stats.total_chunks == 4 * 4000


def test_turns_of_one_conversation_come_after_each_other_on_all_clocks() -> None:
    run = fleet(talks(30, 4, 0.5, gap=0.05), 5, "round-robin")
    last: dict[int, float] = {}
    for r in run.requests:
        assert r.arrival >= last.get(r.conversation, 0.0)
        last[r.conversation] = r.finish


def test_an_idle_replica_begins_when_its_request_comes() -> None:
    """Two requests at a time on two replicas take as long as one alone: neither clock holds up the other."""
    one = Talk((Turn(500, 20, first=0),))
    alone = fleet(Load([one], np.array([0.0])), 1).requests[0]
    other = Talk((Turn(500, 20, first=5000),))
    both = fleet(Load([one, other], np.array([0.0, 0.001])), 2, "round-robin").requests
    assert {r.replica for r in both} == {0, 1}
    for r in both:
        assert r.finish - r.arrival == pytest.approx(alone.finish - alone.arrival, rel=1e-6)


def test_one_replica_is_the_engine_alone() -> None:
    load = talks(25, 3, 0.5)
    one = fleet(load, 1, "round-robin")
    assert [r.replica for r in one.requests] == [0] * 75
    assert not one.placements.reasons
    assert one.stats is one.replica_stats[0]


def test_the_same_load_goes_the_same_way() -> None:
    first, second = (fleet(talks(15, 3, 0.5, gap=0.05), 4, judged=10) for _ in range(2))
    assert [(r.replica, r.token_times) for r in first.requests] == [(r.replica, r.token_times) for r in second.requests]
    assert first.placements == second.placements


def test_affinity_finds_what_the_others_do_not_and_answers_sooner() -> None:
    load = long_talks(30, 4, gap=0.05)
    runs = {name: fleet(load, 4, name) for name in ("affinity", "round-robin", "least-loaded")}  # type: ignore[arg-type]
    assert runs["affinity"].hit_rate > 0.6
    for name in ("round-robin", "least-loaded"):
        assert runs[name].hit_rate < 0.6 * runs["affinity"].hit_rate
    first = {
        name: np.percentile([r.token_times[0] - r.arrival for r in run.requests], 90) for name, run in runs.items()
    }
    assert first["affinity"] < 0.8 * min(first["round-robin"], first["least-loaded"])
    why = runs["affinity"].placements.reasons
    assert why[Why.CHUNKS] + why[Why.SESSION] > 75


def test_a_burst_between_two_reports_is_spread() -> None:
    load = singles(64, 1e6, prompt=400, output=40)
    counts = Counter(r.replica for r in fleet(load, 8, interval=1000.0).requests)
    assert len(counts) == 8
    assert max(counts.values()) <= 14


def test_stale_reports_cost_and_fresh_ones_do_not() -> None:
    load = long_talks(30, 4, gap=0.05)
    lost = {
        interval: np.mean(fleet(load, 4, num_slots=400, interval=interval, judged=40).placements.losses)
        for interval in (0.05, 30.0)
    }
    blind = np.mean(fleet(load, 4, "round-robin", num_slots=400, judged=40).placements.losses)
    assert lost[0.05] < 0.002
    assert lost[0.05] < 0.5 * lost[30.0] < blind


def test_reports_come_at_their_interval() -> None:
    run = fleet(talks(30, 3, 1.0), 3, interval=0.5)
    assert run.placements.reports == pytest.approx(3 + 3 * run.duration / 0.5, abs=4)
    assert run.placements.digest_bytes > 0


def test_options_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="replicas is 0"):
        RoutingOptions(replicas=0)
    with pytest.raises(ConfigError, match="digest_interval is 0"):
        RoutingOptions(digest_interval=0.0)
    with pytest.raises(ConfigError, match="judged is -1"):
        RoutingOptions(judged=-1)
