"""The simulator: what must hold whatever the load, and that nothing of the deciding side is its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellar.core.config import CacheConfig, ScheduleConfig
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.hardware import Measure
from cellar.core.messages import IntArray, Tier
from cellar.core.specs import ModelSpec
from cellar.kv.movement import Movement
from cellar.kv.policy import named_policy
from cellar.planner.cost import dimensions
from cellar.planner.machines import Machine, h200
from cellar.planner.models import decoder_spec
from cellar.planner.steps import StepPrices, chunk_costs
from cellar.planner.work import step_work
from cellar.runtime.protocol import Capacity
from cellar.simulate.link import LinkModel
from cellar.simulate.runtime import generated
from cellar.simulate.simulator import SimulatedRun, Simulation, capacity_of

CHUNK = 16


@dataclass(frozen=True)
class Turn:
    """`first`: the token id from which this turn's tokens count up."""

    num_tokens: int
    output_tokens: int
    think_time: float = 0.0
    first: int = 0


@dataclass(frozen=True)
class Talk:
    turns: Sequence[Turn]


@dataclass(frozen=True)
class Load:
    conversations: Sequence[Talk]
    arrivals: NDArray[np.float64]


def spell(turn: Turn) -> IntArray:
    return np.arange(turn.first, turn.first + turn.num_tokens, dtype=np.int32)


def spec() -> ModelSpec:
    return decoder_spec(
        "mid", layers=24, embed=2048, mlp=8192, heads=16, kv_heads=4, head_dim=128, vocab=32_000, gated=True,
        parallel=False, max_position=4096, chunk_size=CHUNK,
    )  # fmt: skip


def machine() -> Machine:
    """Steps with prompts begin as fast as any, so that a bound is a bound."""
    m = h200()
    return replace(m, constants=replace(m.constants, eager_seconds=Measure(0.0, "s", "assumed")))


def simulation(
    load: Load,
    *,
    num_slots: int = 4000,
    rows: int = 64,
    tokens: int = 2048,
    run_ahead: int = 2,
    host: int = 0,
    policy: Literal["value", "chance", "lru"] = "value",
    **options: object,
) -> Simulation[Turn]:
    config = ScheduleConfig(max_num_seqs=rows, max_num_batched_tokens=tokens, run_ahead=run_ahead)
    prices = StepPrices(dimensions(spec()), machine())
    capacity = Capacity(num_slots, rows, CHUNK, 4096, {Tier.HOST: host} if host else {})
    costs = chunk_costs(prices, CHUNK, 4096)
    chosen = (lambda: named_policy(policy, costs)) if host else None
    return Simulation(load, spell, prices, capacity, config, policy=chosen, **options)  # type: ignore[arg-type]


def singles(count: int, rate: float, prompt: int = 300, output: int = 100, seed: int = 0) -> Load:
    """Poisson arrivals of single requests with lengths around the given ones; their moments scale with 1 / rate."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0, count)) / rate
    prompts = rng.integers(prompt // 2, 2 * prompt, count)
    outputs = rng.integers(max(output // 2, 1), 2 * output, count)
    talks = [
        Talk((Turn(int(p), int(n), first=10_000 * k),)) for k, (p, n) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return Load(talks, arrivals)


def talks(count: int, turns: int, think: float, seed: int = 0, gap: float = 0.2) -> Load:
    rng = np.random.default_rng(seed)
    found = []
    for k in range(count):
        said = [
            Turn(
                int(rng.integers(5, 120)), int(rng.integers(3, 60)), float(rng.exponential(think)), 1000 * (50 * k + j)
            )
            for j in range(turns)
        ]
        found.append(Talk(said))
    return Load(found, np.cumsum(rng.exponential(gap, count)))


def mean_latency(run: SimulatedRun) -> float:
    return float(np.mean([r.finish - r.arrival for r in run.requests]))


# -- laws ---------------------------------------------------------------------------------------------


def test_every_token_asked_for_is_made_and_none_more() -> None:
    load = talks(30, 4, 1.0)
    run = simulation(load).run()
    assert len(run.requests) == 120
    for r in run.requests:
        turn = load.conversations[r.conversation].turns[r.turn]
        assert r.error is None
        assert len(r.token_times) == r.num_output == turn.output_tokens
        assert r.token_times == sorted(r.token_times)
        assert r.token_times[0] > r.arrival
    assert run.stats.generation_tokens == sum(t.output_tokens for talk in load.conversations for t in talk.turns)
    assert run.stats.running == run.stats.waiting == 0


def test_turns_follow_answers_and_thinking() -> None:
    load = talks(20, 5, 2.0)
    run = simulation(load).run()
    by_turn = {(r.conversation, r.turn): r for r in run.requests}
    for (talk, turn), r in by_turn.items():
        if turn:
            before = by_turn[talk, turn - 1]
            asked = load.conversations[talk].turns[turn]
            assert r.arrival == pytest.approx(before.finish + asked.think_time)
            assert r.num_prompt == before.num_prompt + before.num_output + asked.num_tokens
        else:
            assert r.arrival == load.arrivals[talk]


def test_work_is_conserved() -> None:
    """The device computes each position once, but for what the cache knew, and what was under way at an end."""
    load = singles(60, 20.0)
    run = simulation(load, num_slots=20_000).run()
    asked = sum(r.num_prompt - r.num_cached + r.num_output - 1 for r in run.requests)
    made = sum(step.num_tokens for step in run.steps)
    assert run.stats.preemptions == 0
    assert asked == made  # ends by length are foreseen: nothing is computed past them
    # Each step lasts what it costs, and the device rests only when nobody waits.
    idle = [b.begin - a.end for a, b in zip(run.steps, run.steps[1:], strict=False)]
    assert min(idle) >= -1e-9
    events = sorted([(r.arrival, 1) for r in run.requests] + [(r.finish, -1) for r in run.requests])
    for a, b in zip(run.steps, run.steps[1:], strict=False):
        if b.begin - a.end > 1e-9:
            present = sum(change for moment, change in events if moment <= a.end + 1e-12)
            assert present == 0


def test_littles_law() -> None:
    """Mean number in the system, as the scheduler counts it step by step, is throughput times mean latency."""
    sim = simulation(singles(250, 25.0), snapshot_seconds=0.0)
    run = sim.run()
    moments = np.array([s.now for s in run.snapshots])
    present = np.array([s.stats.running + s.stats.waiting for s in run.snapshots])
    counted = float((present[1:] * np.diff(moments)).sum()) / run.duration
    throughput = len(run.requests) / run.duration
    assert counted == pytest.approx(throughput * mean_latency(run), rel=0.05)


def test_saturation_comes_near_the_bound() -> None:
    """All at once: as fast as the device can go through this work, within what a batch's beginning and end cost."""
    rows, output, prompt = 64, 400, 100
    load = Load([Talk((Turn(prompt, output, first=10_000 * k),)) for k in range(4 * rows)], np.zeros(4 * rows))
    sim = simulation(load, rows=rows, num_slots=20_000)
    run = sim.run()
    prices = StepPrices(dimensions(spec()), machine())
    middle = np.full(rows, prompt + output // 2)
    decode = prices.seconds(prices.decodes(middle))
    prompts = prices.seconds(step_work(np.zeros(rows, np.int32), np.full(rows, prompt, np.int32), rows))
    ideal = 4 * (output * decode + prompts)
    assert 0.97 * ideal < run.duration < 1.1 * ideal
    assert run.busy > 0.99
    bound = prices.timeline(prices.decodes(middle)).lower_bound
    assert run.duration > 4 * output * bound


def test_latency_grows_with_the_load() -> None:
    means = [mean_latency(simulation(singles(80, rate), rows=8).run()) for rate in (1.0, 10.0, 40.0, 160.0)]
    assert means == sorted(means)
    assert means[-1] > 2 * means[0]


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = (simulation(talks(25, 3, 0.5)).run() for _ in range(2))
    assert [r.token_times for r in one.requests] == [r.token_times for r in other.requests]
    assert one.steps == other.steps
    different = simulation(talks(25, 3, 0.5, seed=1)).run()
    assert [r.token_times for r in one.requests] != [r.token_times for r in different.requests]


# -- the cache is the real one ------------------------------------------------------------------------


def test_histories_are_found_in_the_cache() -> None:
    """With room for all, a turn finds what was said before, to the token, but the last one's K and V."""
    run = simulation(talks(20, 6, 1.0), num_slots=20_000).run()
    for r in run.requests:
        if r.turn:
            before = next(b for b in run.requests if (b.conversation, b.turn) == (r.conversation, r.turn - 1))
            known = before.num_prompt + before.num_output - 1  # the last token's K and V were never computed
            assert r.num_cached == known
        else:
            assert r.num_cached == 0


def test_without_caching_nothing_is_found_and_it_takes_longer() -> None:
    load = talks(40, 6, 0.2, gap=0.02)
    warm = simulation(load, num_slots=20_000).run()
    cold = simulation(load, num_slots=20_000, prefix_caching=False).run()
    assert sum(r.num_cached for r in cold.requests) == 0
    assert cold.hit_rate == 0.0 < warm.hit_rate
    assert sum(s.num_tokens for s in cold.steps) > 1.5 * sum(s.num_tokens for s in warm.steps)


def test_equal_beginnings_are_shared() -> None:
    """What a trace calls equal is equal: the second request finds the first one's prompt."""
    same = Talk((Turn(400, 5, first=7),))
    run = simulation(Load([same, same], np.array([0.0, 5.0]))).run()
    assert [r.num_cached for r in run.requests] == [0, 399 // CHUNK * CHUNK]


def test_a_small_cache_forgets() -> None:
    load = talks(30, 5, 20.0)
    rates = [simulation(load, num_slots=n).run().hit_rate for n in (100, 250, 20_000)]
    assert rates[0] < rates[1] < rates[2]


def test_answers_differ_between_conversations_and_positions() -> None:
    words = np.concatenate([generated(seed, 0, 5000) for seed in (0, 1, 2, 40_000)])
    assert len(set(words.tolist())) == len(words)
    assert (words >= 0).all()
    assert (generated(3, 10, 20) == generated(3, 0, 30)[10:20]).all()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_slots=st.integers(30, 400),
    rows=st.integers(1, 12),
    tokens=st.integers(1, 300),
    run_ahead=st.integers(1, 4),
    host=st.sampled_from([0.0, 1e-4, 0.05]),
    count=st.integers(1, 12),
    turns=st.integers(1, 3),
    concurrency=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 5),
)
def test_any_load_on_any_engine_ends_with_all_tokens(
    num_slots: int,
    rows: int,
    tokens: int,
    run_ahead: int,
    host: float,
    count: int,
    turns: int,
    concurrency: int | None,
    seed: int,
) -> None:
    """Little memory, few rows, suspensions: the work is done, in order, and the books balance (`run` checks them)."""
    load = talks(count, turns, 0.3, seed, gap=0.05)
    run = simulation(
        load, num_slots=max(num_slots, 60), rows=rows, tokens=tokens, run_ahead=run_ahead, host_seconds=host,
        max_concurrency=concurrency,
    ).run()  # fmt: skip
    assert len(run.requests) == count * turns
    assert all(len(r.token_times) == r.num_output for r in run.requests)
    assert all(b.begin >= a.end - 1e-12 for a, b in zip(run.steps, run.steps[1:], strict=False))
    if concurrency is not None:
        open_talks = sorted(
            [(min(r.arrival for r in run.requests if r.conversation == k), 1) for k in range(count)]
            + [(max(r.finish for r in run.requests if r.conversation == k), -1) for k in range(count)],
            key=lambda event: event,
        )
        assert max(np.cumsum([change for _, change in open_talks])) <= concurrency


# -- slower tiers ------------------------------------------------------------------------------------

SLOW = LinkModel(load_rate=2e9, save_rate=2e9, chunk_seconds=1e-5, duplex=0.8)


def test_what_left_the_device_is_found_in_the_host() -> None:
    load = talks(30, 5, 20.0)
    alone = simulation(load, num_slots=100).run()
    below = simulation(load, num_slots=100, host=2000).run()
    assert sum(r.num_recomputed for r in alone.requests) > 2000
    assert sum(r.num_recomputed for r in below.requests) < 200, "next to all of the history is somewhere"
    host = below.stats.tiers[1]
    assert host.loaded > 100
    assert host.saved > 100
    assert host.load_seconds > 0
    assert sum(s.num_tokens for s in below.steps) < sum(s.num_tokens for s in alone.steps)


def test_recomputed_tokens_and_seconds_are_those_of_the_histories() -> None:
    load = talks(40, 6, 0.2, gap=0.02)
    cold = simulation(load, num_slots=20_000, prefix_caching=False)
    run = cold.run()
    cost = StepPrices(dimensions(spec()), machine()).cost
    for r in run.requests:
        assert r.num_recomputed == r.num_history
        attended = r.num_history * (r.num_history + 1) / 2
        assert r.recomputed_seconds == pytest.approx(cost.token_flops * r.num_history + cost.attended * attended)


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_delays_the_step_that_needs_it(layerwise: bool) -> None:
    """One conversation whose history lies in the host alone: the first token waits for the link, or overlaps it."""
    talk = Talk((Turn(2000, 10, first=0), Turn(20, 3, think_time=40.0, first=9000)))
    others = [Talk((Turn(450, 2, first=1000 * k),)) for k in range(10, 22)]
    load = Load([talk, *others], np.concatenate(([0.0], np.arange(12) + 5.0)))
    link = replace(SLOW, layerwise=layerwise)
    sim = simulation(load, num_slots=260, host=400, links={Tier.HOST: link})
    run = sim.run()
    back = next(r for r in run.requests if r.turn == 1)
    assert back.num_recomputed == 0
    chunks = run.stats.tiers[1].loaded
    assert chunks > 60
    nbytes = 24 * 2 * 4 * 128 * 2 * CHUNK
    seconds = chunks * (nbytes / link.load_rate + link.chunk_seconds)
    work = step_work(np.array([back.num_history]), np.array([back.num_prompt]), 1)
    step = sim.replicas[0].runtime._prices.seconds(work)
    waited = back.token_times[0] - back.arrival
    if layerwise:
        assert max(seconds, step) < waited < seconds + 0.2 * step, "the last layer alone is left when all has come"
    else:
        assert waited == pytest.approx(seconds + step, rel=0.01)


CONVOY = 100


def convoy(num_slots: int, link: LinkModel) -> tuple[SimulatedRun, list[NDArray[np.float64]]]:
    """A hundred users come back at once, 2,000 tokens of each lie in the host, while four answers are being made, and
    then somebody has something new to ask five times a second; -> seconds until each token of these, answers first.
    """
    begin = 100.0
    back = [
        Talk((Turn(2000, 2, first=3000 * k), Turn(20, 3, think_time=begin - 0.5 * k, first=9000 + 3000 * k)))
        for k in range(CONVOY)
    ]
    pushing = [Talk((Turn(2000, 2, first=1_000_000 + 3000 * k),)) for k in range(CONVOY + 20)]
    answers = [Talk((Turn(40, 1500, first=2_000_000 + 3000 * k),)) for k in range(4)]
    new = [Talk((Turn(40, 20, first=3_000_000 + 3000 * k),)) for k in range(20)]
    arrivals = [0.5 * np.arange(100), 52.0 + 0.3 * np.arange(120), np.full(4, begin - 1), begin + 0.2 * np.arange(20)]
    load = Load([*back, *pushing, *answers, *new], np.concatenate(arrivals))
    run = simulation(load, num_slots=num_slots, rows=256, host=20_000, links={Tier.HOST: link}).run()
    first = len(back) + len(pushing)
    return run, [np.array(r.token_times) - r.arrival for r in run.requests if r.conversation >= first]


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_convoy_of_loads_delays_nobody_who_needs_none(layerwise: bool) -> None:
    """Five seconds of copying: whoever needs none of it is as fast as with a link that takes no time."""
    run, waited = convoy(16_000, replace(SLOW, layerwise=layerwise))
    _, at_best = convoy(16_000, LinkModel(load_rate=1e18, save_rate=1e18))
    assert run.stats.tiers[1].loaded > 12_000
    assert max(r.finish - r.arrival for r in run.requests if r.turn == 1) > 4.5, "the last of the convoy has waited"
    for found, best in zip(waited, at_best, strict=True):
        assert found[0] < best[0] + 0.005
        assert found[-1] < 1.02 * best[-1] + 0.005
        assert np.diff(found).max() < 0.005, "a step takes about 1 ms"


def test_a_convoy_that_takes_all_memory_delays_no_decode() -> None:
    """What is copied out waits behind what is copied in; meanwhile decodes need the slots that were kept free."""
    run, waited = convoy(14_000, SLOW)
    assert run.stats.preemptions == 0
    for found in waited[:4]:
        assert np.diff(found).max() < 0.005


def crowd(link: LinkModel) -> tuple[SimulatedRun, dict[str, list[float]]]:
    """Fifty users rest, and their memory is on the device; then fifty others come at once, with as much to read, while
    answers are being made and somebody has a short question now and then; then those of before come back. -> seconds
    until the first tokens of each kind.
    """
    users, begin = 50, 60.0
    rest = [
        Talk((Turn(2000, 2, first=3000 * k), Turn(20, 3, think_time=120.0 - 0.5 * k, first=9000 + 3000 * k)))
        for k in range(users)
    ]
    come = [Talk((Turn(2000, 20, first=4_000_000 + 3000 * k),)) for k in range(users)]
    answers = [Talk((Turn(40, 1500, first=2_000_000 + 3000 * k),)) for k in range(4)]
    short = [Talk((Turn(40, 20, first=3_000_000 + 3000 * k),)) for k in range(10)]
    arrivals = [0.5 * np.arange(users), np.full(users, begin), np.full(4, begin - 1), begin + 0.05 * np.arange(10)]
    load = Load([*rest, *come, *answers, *short], np.concatenate(arrivals))
    run = simulation(load, num_slots=7000, rows=256, host=20_000, links={Tier.HOST: link}).run()
    found: dict[str, list[float]] = {"rest": [], "back": [], "come": [], "answers": [], "short": []}
    for r in run.requests:
        ends = (users, 2 * users, 2 * users + 4, np.inf)
        kind = ("rest", "come", "answers", "short")[next(k for k, end in enumerate(ends) if r.conversation < end)]
        found["back" if r.turn else kind].append(r.token_times[0] - r.arrival)
    return run, found


def test_a_crowd_waits_until_what_it_displaces_has_been_copied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying out takes less than computing again, so nothing is lost, and nobody waits longer for it."""
    fast = LinkModel(load_rate=5e10, save_rate=5e10, chunk_seconds=1e-6, duplex=0.8)
    run, waited = crowd(fast)
    monkeypatch.setattr(Movement, "puts_off", lambda *_: False)
    at_once, before = crowd(fast)
    lost, lost_before = (sum(r.num_recomputed for r in one.requests) for one in (run, at_once))
    assert lost_before > 10_000
    assert lost < lost_before / 20
    assert np.mean(waited["back"]) < 0.9 * np.mean(before["back"])
    for kind in ("come", "answers", "short"):
        assert np.mean(waited[kind]) < 1.03 * np.mean(before[kind])
        assert max(waited[kind]) < 1.05 * max(before[kind]) + 0.005


def alternating(link: LinkModel) -> tuple[int, list[float]]:
    """Two agents with long contexts take turns, and never run at once: each turn needs most of the device. -> tokens
    that were computed again, and seconds until each first token.
    """
    talks = [
        Talk(tuple(Turn(3400 if not k else 100, 20, think_time=20.0, first=own + 5000 * k) for k in range(5)))
        for own in (0, 1_000_000)
    ]
    load = Load(talks, np.array([0.0, 10.0]))
    run = simulation(load, num_slots=300, rows=16, host=8_000, links={Tier.HOST: link}).run()
    return sum(r.num_recomputed for r in run.requests), [r.token_times[0] - r.arrival for r in run.requests]


def test_who_is_alone_waits_for_copies_that_are_much_faster_than_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = LinkModel(load_rate=5e10, save_rate=5e10, chunk_seconds=1e-6, duplex=0.8)
    lost, waited = alternating(fast)
    monkeypatch.setattr("cellar.schedule.steps.prompts.ALONE_PATIENCE", 0.0)
    lost_before, before = alternating(fast)
    assert lost < lost_before / 3, "what is left was lost before anything had been measured"
    assert sum(waited) < 0.9 * sum(before)
    assert max(waited) == max(before)


def test_who_is_alone_does_not_wait_for_slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(SLOW, save_rate=5e8)
    lost, waited = alternating(slow)
    monkeypatch.setattr("cellar.schedule.steps.prompts.ALONE_PATIENCE", 0.0)
    assert (lost, waited) == alternating(slow)
    assert lost > 5_000


def test_a_crowd_does_not_wait_for_what_is_computed_sooner() -> None:
    slow = replace(SLOW, save_rate=5e8)
    run, waited = crowd(slow)
    assert max(waited["short"]) < 0.1
    assert sum(r.num_recomputed for r in run.requests) > 10_000


def test_phases_apart_never_share_a_step_and_take_longer_to_answer() -> None:
    load = talks(40, 4, 1.0, gap=0.05)
    unified, apart = (simulation(load, num_slots=20_000, phases_apart=k).run() for k in (False, True))
    assert any(0 < s.num_decodes < s.num_tokens for s in unified.steps)
    assert all(s.num_decodes in (0, s.num_tokens) for s in apart.steps)
    assert sum(len(r.token_times) for r in apart.requests) == sum(len(r.token_times) for r in unified.requests)
    assert mean_latency(apart) > mean_latency(unified)


def test_a_run_can_end_before_its_load() -> None:
    load = talks(40, 4, 1.0, gap=0.5)
    run = simulation(load, stop_seconds=10.0).run()
    assert max(t for r in run.requests for t in r.token_times) < load.arrivals[0] + 10.5
    assert any(len(r.token_times) < r.num_output for r in run.requests) or len(run.requests) < 160


@pytest.mark.long
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_slots=st.integers(60, 300),
    host=st.sampled_from([1, 20, 400]),
    policy=st.sampled_from(["value", "chance", "lru"]),
    apart=st.booleans(),
    layerwise=st.booleans(),
    rate=st.sampled_from([2e9, 1e12]),
    rows=st.integers(1, 12),
    run_ahead=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_any_load_with_any_host_ends_with_all_tokens(
    num_slots: int, host: int, policy: Literal["value", "chance", "lru"], apart: bool, layerwise: bool, rate: float,
    rows: int, run_ahead: int, seed: int,
) -> None:  # fmt: skip
    load = talks(10, 3, 0.3, seed, gap=0.05)
    run = simulation(
        load, num_slots=num_slots, host=host, policy=policy, rows=rows, run_ahead=run_ahead, phases_apart=apart,
        links={Tier.HOST: replace(SLOW, layerwise=layerwise, load_rate=rate, save_rate=rate)},
    ).run()  # fmt: skip
    assert len(run.requests) == 30
    assert all(len(r.token_times) == r.num_output for r in run.requests)


# -- the loop -----------------------------------------------------------------------------------------


def test_running_ahead_hides_the_host() -> None:
    load = Load([Talk((Turn(100, 200),))], np.zeros(1))
    took = {(depth, host): simulation(load, run_ahead=depth, host_seconds=host).run().duration
            for depth in (1, 2) for host in (0.0, 2e-4)}  # fmt: skip
    assert took[2, 2e-4] == pytest.approx(took[2, 0.0], rel=0.01)
    assert took[1, 2e-4] == pytest.approx(took[1, 0.0] + 200 * 2e-4, rel=0.01)


def test_nothing_is_sent_after_the_last_second() -> None:
    load = talks(50, 4, 2.0, gap=0.2)
    run = simulation(load, max_seconds=5.0).run()
    assert 0 < len(run.requests) < 200
    assert max(r.arrival for r in run.requests) <= load.arrivals[0] + 5.0
    assert all(len(r.token_times) == r.num_output for r in run.requests)


def test_a_refused_request_is_an_error_and_ends_its_conversation() -> None:
    load = Load([Talk((Turn(4096, 1), Turn(5, 5))), Talk((Turn(20, 5, first=9000),))], np.zeros(2))
    run = simulation(load).run()
    assert [bool(r.error) for r in run.requests] == [True, False]
    assert "max_model_len" in str(run.requests[0].error)


# -- the edge -----------------------------------------------------------------------------------------


def test_capacity() -> None:
    prices = StepPrices(dimensions(spec()), machine())
    schedule = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=2048)
    per_token = 24 * 2 * 4 * 128 * 2
    given_bytes = CacheConfig(kv_cache_memory_bytes=per_token * 16 * 500, block_size=16)
    assert capacity_of(spec(), prices, given_bytes, schedule, 4096) == Capacity(500, 8, 16, 4096)
    rest = capacity_of(spec(), prices, CacheConfig(block_size=16), schedule, 4096)
    weights = 2 * dimensions(spec()).parameters
    assert rest.num_slots * 16 * per_token == pytest.approx(0.9 * 141e9 - weights, rel=0.01)
    with pytest.raises(CapacityError, match="--max-model-len"):
        capacity_of(spec(), prices, given_bytes, schedule, 100_000)
    with_host = CacheConfig(kv_cache_memory_bytes=per_token * 16 * 500, block_size=16, kv_offloading_size=1.0)
    assert capacity_of(spec(), prices, with_host, schedule, 4096).tiers == {Tier.HOST: 2**30 // (per_token * 16)}
    with pytest.raises(CapacityError, match="kv_offloading_size asks for 9999 GiB, but the host of"):
        capacity_of(spec(), prices, CacheConfig(kv_offloading_size=9999.0), schedule, 4096)


def test_no_conversation_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        simulation(Load([], np.zeros(0)))
    assert not math.isnan(simulation(Load([Talk((Turn(1, 1),))], np.zeros(1))).run().hit_rate)
