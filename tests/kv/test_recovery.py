"""Load or compute again: the choice against the best of all choices, and what rates and queues are learned from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.core.messages import CopyBatch, CopyResult, Tier
from cellar.kv import recovery as recovery_module
from cellar.kv.links import Line, Link
from cellar.kv.recovery import BESIDE_A_LOAD, MARGIN, RETRY_SECONDS, TURN_SECONDS, Recovery
from cellar.kv.states import LOADING
from cellar.kv.store import KVStore, Reservation, Residency
from tests.kv.test_tiers import CHUNK, Bench, talk

# -- the choice ----------------------------------------------------------------------------------------


def link(fixed: float, each: float, queue: tuple[int, ...] = (), now: float = 0.0) -> Link:
    """A link that takes `fixed + each * n` seconds, with loads of so many chunks ordered at `now`."""
    made = Link()
    clock = -1e6
    for k in range(60):
        count = 1 + 7 * (k % 2)
        made.ordered(k, count, clock)
        clock += fixed + count * each
        made.came(k, True, clock)
    made._last = now
    for k, count in enumerate(queue):
        made.ordered(100 + k, count, now)
    return made


def end(
    load: np.ndarray, tier: np.ndarray, cost: np.ndarray, rates: list[tuple[float, float, int]], floor: float
) -> float:
    """When computing ends, by definition; rates: fixed, each, chunks queued."""
    ready = [0.0, floor]
    for t, (fixed, each, queued) in enumerate(rates, 1):
        count = int(np.count_nonzero(load & (tier == t)))
        if count:
            ready.append((fixed + each * queued if queued else 0.0) + fixed + each * count)
    return max(ready) + (1 + MARGIN) * float(cost[~load].sum())


Case = tuple[list[tuple[int, float]], list[tuple[float, float, int]], float]
CASES = st.tuples(
    st.lists(st.tuples(st.integers(1, 2), st.floats(0.01, 5.0)), min_size=1, max_size=7),
    st.lists(
        st.tuples(st.sampled_from((0.0, 0.5, 3.0)), st.floats(0.01, 4.0), st.integers(0, 5)), min_size=2, max_size=2
    ),
    st.sampled_from((0.0, 0.0, 1.0, 6.0)),
)


def check(case: Case) -> None:
    chunks, rates, floor = case
    tier, cost = np.array([t for t, _ in chunks]), np.array([c for _, c in chunks])
    links = [Link(), *(link(f, e, (q,) if q else ()) for f, e, q in rates)]
    chooser = Recovery("faster")
    chooser.measured(1.0, 1.0)
    load = chooser.loads(tier, cost, links, 0.0, floor)
    ends = [end(np.array(choice), tier, cost, rates, floor) for choice in product((False, True), repeat=len(chunks))]
    assert end(load, tier, cost, rates, floor) <= min(ends) + 1e-4 * (1 + max(ends)), "another choice ends earlier"


@settings(max_examples=300, deadline=None)
@given(CASES)
def test_no_other_choice_ends_earlier(case: Case) -> None:
    check(case)


def _queue_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Link, "wait", lambda link, now, until=None: 0.0)


def _what_is_awaited_anyhow_is_ignored(patch: pytest.MonkeyPatch) -> None:
    loads = Recovery.loads
    patch.setattr(Recovery, "loads", lambda self, tier, cost, links, now, floor: loads(self, tier, cost, links, now))


def _margin_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery_module, "MARGIN", 0.0)


def _everything_is_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recovery, "loads", lambda self, tier, *rest: np.ones(len(tier), np.bool_))


def _cheapest_chunks_are_loaded_first(patch: pytest.MonkeyPatch) -> None:
    loads = Recovery.loads
    patch.setattr(Recovery, "loads", lambda self, tier, cost, *rest: loads(self, tier, cost.max() - cost + 1, *rest))


def _what_a_batch_costs_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    rate = Link.rate
    patch.setattr(Link, "rate", lambda self: (0.0, rate(self)[1]))


BUGS = (
    _queue_is_ignored,
    _what_is_awaited_anyhow_is_ignored,
    _margin_is_forgotten,
    _everything_is_loaded,
    _cheapest_chunks_are_loaded_first,
    _what_a_batch_costs_is_forgotten,
)


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    def hunt() -> None:
        rng = np.random.default_rng(0)
        for _ in range(400):
            chunks = [(int(rng.integers(1, 3)), float(rng.uniform(0.01, 5))) for _ in range(rng.integers(1, 6))]
            rates = [
                (float(rng.choice((0.0, 0.5, 3.0))), float(rng.uniform(0.01, 4)), int(rng.integers(6)))
                for _ in range(2)
            ]
            check((chunks, rates, float(rng.choice((0.0, 1.0, 6.0)))))

    with pytest.raises(AssertionError):
        hunt()


def test_rules_force_one_or_the_other_and_nothing_known_means_load() -> None:
    tier, cost = np.array([0, 1, 2]), np.ones(3)
    slow = [Link(), link(0.0, 50.0), link(0.0, 50.0)]
    assert Recovery("load").loads(tier, cost, slow, 0.0).tolist() == [True] * 3
    assert Recovery("compute").loads(tier, cost, slow, 0.0).tolist() == [True, False, False]
    assert Recovery("faster").loads(tier, cost, slow, 0.0).tolist() == [True] * 3, "no step has been measured"
    known = Recovery("faster")
    known.measured(1.0, 1.0)
    assert known.loads(tier, cost, slow, 0.0).tolist() == [True, False, False]
    assert known.loads(tier, cost, [Link(), Link(), slow[2]], 0.0).tolist() == [True, True, False]


def test_tier_that_was_given_up_is_asked_for_one_chunk_after_a_while() -> None:
    known = Recovery("faster")
    known.measured(1.0, 1.0)
    slow, tier, cost = [Link(), link(0.0, 50.0)], np.array([1, 1, 1]), np.array([1.0, 3.0, 2.0])
    assert not known.loads(tier, cost, slow, RETRY_SECONDS - 1).any()
    assert known.loads(tier, cost, slow, RETRY_SECONDS).tolist() == [False, True, False]
    slow[1].ordered(7, 1, RETRY_SECONDS)
    assert not known.loads(tier, cost, slow, RETRY_SECONDS + 1).any(), "one asks, not everybody"
    slow[1].came(7, True, RETRY_SECONDS + 0.1)
    assert known.loads(tier, cost, slow, RETRY_SECONDS + 1).all(), "it has become fast"


@pytest.mark.parametrize("slow_loads", [1, 2, 3])
def test_slow_loads_at_the_beginning_are_not_believed_for_long(slow_loads: int) -> None:
    """As on four GPUs, where nothing came from the host after the first seconds: 35 chunks are computed in 58 ms and
    loaded in 6.5, but the first loads took 300 while memory was still registered.
    """
    known, tier, cost = Recovery("faster"), np.ones(35, np.int8), np.ones(35)
    known.measured(35.0, 0.058)
    links, now = [Link(), Link()], 0.0
    for number in range(slow_loads):
        links[1].ordered(number, 35 - number, now)
    for number in range(slow_loads):
        now += 0.3
        links[1].came(number, True, now)
    loaded = []
    for number in range(100, 180):
        now += 0.125
        count = int(np.count_nonzero(known.loads(tier, cost, links, now)))
        loaded.append(count)
        if count:
            links[1].ordered(number, count, now)
            links[1].came(number, True, now + 0.003 + 0.0001 * count)
    assert all(count == 35 for count in loaded[72:]), loaded  # after 9 s
    assert sum(count > 0 for count in loaded[:8]) <= 1, "what was slow is not tried by everybody"


def test_a_tier_that_is_too_slow_is_asked_seldom() -> None:
    known, tier, cost = Recovery("faster"), np.ones(35, np.int8), np.ones(35)
    known.measured(35.0, 0.058)
    links, now, busy = [Link(), link(0.0, 0.01)], 0.0, 0.0
    for number in range(1000):
        now += 0.1
        count = int(np.count_nonzero(known.loads(tier, cost, links, now)))
        if count:
            links[1].ordered(1000 + number, count, now)
            links[1].came(1000 + number, True, now + 0.01 * count)
            busy += 0.01 * count
    assert 0 < busy < 0.05 * now


# -- what is learned -----------------------------------------------------------------------------------


@given(st.floats(0.0, 10.0), st.floats(0.001, 10.0), st.lists(st.integers(1, 64), min_size=2, max_size=30, unique=True))
def test_line_is_found_in_what_lies_on_one(fixed: float, each: float, counts: list[int]) -> None:
    line = Line()
    for count in counts:
        line.add(count, fixed + each * count)
    assert line.fit() == pytest.approx((fixed, each), rel=1e-3, abs=1e-3 * (fixed + 64 * each))


def test_one_measurement_is_all_of_the_chunks() -> None:
    line = Line()
    line.add(4, 2.0)
    line.add(4, 2.0)
    assert line.fit() == (0.0, 0.5)


def test_queue_counts_what_was_ordered_and_a_late_load_takes_as_long_again() -> None:
    made = link(0.0, 1.0, (4, 2), now=10.0)
    assert made.wait(10.0) == pytest.approx(6.0, rel=1e-3)
    assert made.wait(13.0) == pytest.approx(3.0, rel=1e-3)
    assert made.wait(13.0, until=100) == pytest.approx(1.0, rel=1e-3)
    assert made.wait(19.0, until=100) == pytest.approx(5.0, rel=1e-3)
    made.came(100, True, 20.0)
    assert made.wait(20.0) == pytest.approx(2.0, rel=0.5)


def test_result_that_waited_for_a_step_does_not_make_its_link_slow() -> None:
    made = Link()
    for k, (count, when) in enumerate(((8, 1.0), (2, 2.0), (5, 3.0))):
        made.ordered(k, count, when - 0.9)
        made.came(k, True, when, seconds=0.01 * count)
    assert made.rate() == pytest.approx((0.0, 0.01), abs=1e-9)
    made.ordered(3, 4, 5.0)
    made.came(3, True, 5.02, seconds=0.08)
    assert made.seconds(4) < 0.04, "another thread copied most of it while the one before came"


def test_seconds_of_prompts_are_those_beyond_a_step_of_decodes() -> None:
    made = Recovery("faster", {1: 10.0, 1024: 10.0})
    assert made.seconds_per_cost is None
    made.measured(0.0, 1.0)
    assert made.seconds_per_cost is None, "decodes alone say nothing of prompts"
    made.measured(20.0, 5.0)
    assert made.seconds_per_cost == pytest.approx(4.0 / 20.0)
    assert made.cost(np.array([0, 32]), np.array([32, 48]), 32).tolist() == [10.0, 5.0]


def test_a_step_takes_what_decodes_take_and_the_first_of_what_is_to_be_computed() -> None:
    made = Recovery("faster", {1: 10.0, 1024: 10.0})
    made.measured(0.0, 1.0)
    assert made.step_seconds([(0, 32)], 32, 100) == 0.0, "nothing is known of prompts"
    made.measured(20.0, 5.0)
    assert made.step_seconds([(0, 32)], 32, 100) == pytest.approx(1.0 + 2.0)
    assert made.step_seconds([(0, 32), (64, 128)], 32, 64) == pytest.approx(1.0 + 2.0 + 2.0)
    assert made.step_seconds([(0, 32), (64, 128)], 32, 16) == pytest.approx(1.0 + 1.0)


def test_a_short_step_is_expected_to_last_as_long_as_others_of_its_size() -> None:
    made = Recovery("faster", {1: 10.0, 1024: 10.0})
    made.measured(50.0, 7.5)
    known = 1.5 * BESIDE_A_LOAD + TURN_SECONDS
    assert made.lead([(0, 32)], 32, 100) == pytest.approx(known), "nothing is known of short ones"
    for _ in range(20):
        made.measured(10.0, 3.0)
        made.measured(160.0, 16.0)
    assert made.seconds_per_cost == pytest.approx(0.1, rel=0.02), "long ones count most"
    assert made.step_seconds([(0, 32)], 32, 100) == pytest.approx(3.0)
    assert made.step_seconds([(0, 512)], 32, 512) == pytest.approx(16.0)
    assert made.step_seconds([(0, 160)], 32, 200) == pytest.approx(7.5), (
        "one of that size came long ago, and none since"
    )


# -- in the store --------------------------------------------------------------------------------------


class Chooser(Bench):
    """A store that has loaded four chunks in as many seconds, and computes one in `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(device=8, host=64)
        recovery = Recovery("faster", {1: 1.0})
        self.store = KVStore(8, CHUNK, tiers={Tier.HOST: 64}, recovery=recovery)
        self.spill(talk(0, 16))
        held = self.open([*talk(0, 16), 7])
        self.load(4.0)
        self.close(talk(0, 16), held)
        self.store.measured(np.array([[0, CHUNK]], np.int32), seconds)

    def load(self, seconds: float) -> int:
        """Answer all that is ordered, so many seconds later; -> chunks that came from the host."""
        batches = self.store.copies(self.now)
        self.now += seconds
        for batch in batches:
            self.store.commit_copy(CopyResult(batch.number, np.ones(len(batch), np.bool_), nbytes=8), self.now)
        return sum(len(b) for b in batches if getattr(b, "source", None) is Tier.HOST)


@pytest.mark.parametrize(("seconds", "loaded"), [(0.5, 0), (0.92, 2), (5.0, 2)])
def test_chunk_is_computed_where_that_is_faster(seconds: float, loaded: int) -> None:
    bench = Chooser(seconds)
    bench.spill(talk(1, 8))
    held = bench.open([*talk(1, 8), 7])
    assert bench.load(0.0) == loaded
    assert held.num_cached_tokens == loaded * CHUNK
    assert held.hits == (0, loaded * CHUNK)
    assert held.num_recomputed == 8 - loaded * CHUNK
    assert held.compute == (((8, 9),) if loaded else ((0, 9),))
    bench.close(talk(1, 8), held)
    assert [tier for tier, _, _ in bench.where(talk(1, 8))] == [0, 0], "the device has it, however it came"
    moved = bench.stats(Tier.HOST)
    assert moved.load_nbytes == (16 if loaded else 8)


def test_a_load_says_how_long_the_step_that_needs_it_will_compute() -> None:
    bench = Chooser(5.0)
    bench.spill(talk(1, 8))
    tokens = np.array([*talk(1, 8), *range(50, 60)], np.int32)
    found = bench.store.find(bench.store.chain(b""), tokens)
    assert bench.store.reserve(found, len(tokens), now=bench.now, step_tokens=CHUNK) is not None
    (batch,) = (b for b in bench.store.copies(bench.now) if isinstance(b, CopyBatch) and b.target is Tier.DEVICE)
    wanted = 5.0 * BESIDE_A_LOAD + TURN_SECONDS
    assert batch.lead == pytest.approx(wanted), "as long as a chunk takes beside a load, and the turn before it"


def test_queue_on_the_link_makes_computing_faster() -> None:
    bench = Chooser(1.5)
    for k in (1, 2):
        bench.spill(talk(k, 8))
    first = bench.open([*talk(1, 8), 7])
    assert first.awaits
    second = bench.open([*talk(2, 8), 7])
    assert not second.awaits, "2 s of queue and 2 of loading against 3 of computing"
    assert second.compute == ((0, 9),)


def test_what_another_request_loads_is_awaited_and_not_computed() -> None:
    bench = Chooser(1.5)
    bench.spill(talk(1, 8))
    first = bench.open([*talk(1, 8), 7])
    bench.store.measured(np.array([[0, CHUNK]] * 50, np.int32), 0.05)  # computing has become much faster
    second = bench.open([*talk(1, 8), 8])
    assert second.awaits == first.awaits
    assert second.compute == ((8, 9),)
    assert second.slots[:2].tolist() == first.slots[:2].tolist()


def _what_another_loads_is_computed(patch: pytest.MonkeyPatch) -> None:
    reserve = KVStore.reserve

    def blind(store: KVStore, found: Residency | None, *rest: Any, **options: Any) -> Reservation | None:
        if found is not None:
            there = found.state != LOADING
            found = dataclasses.replace(
                found,
                chunk=np.where(there, found.chunk, np.int32(-1)),
                tokens=np.where(there, found.tokens, np.int32(0)),
                tier=np.where(there, found.tier, np.int8(-1)),
                slot=np.where(there, found.slot, np.int32(-1)),
            )
        return reserve(store, found, *rest, **options)

    patch.setattr(KVStore, "reserve", blind)


def test_computing_what_another_loads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too rare for random operations."""
    _what_another_loads_is_computed(monkeypatch)
    with pytest.raises(AssertionError):
        test_what_another_request_loads_is_awaited_and_not_computed()


def test_load_that_ends_before_the_prompts_ahead_costs_nothing() -> None:
    bench = Chooser(0.5)
    bench.spill(talk(1, 8))
    array = np.array([*talk(1, 8), 7], np.int32)
    found = bench.store.find(bench.store.chain(b""), array)
    held = bench.store.reserve(found, 9, now=bench.now, before=[(0, 40)])
    assert held is not None
    assert held.compute == ((8, 9),), "five seconds of prompts are computed first, the load takes two"


def test_the_short_way_to_load_all_decides_as_the_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random costs, links, queues and floors; the short way is taken in a quarter of them, or more."""
    rng, taken, short = np.random.default_rng(0), 0, Recovery._gains_throughout
    for _ in range(2000):
        recovery = Recovery("faster", {1: 1.0, 1024: 1.5})
        recovery.measured(100.0, 10 ** rng.uniform(-3, 0))
        count = int(rng.integers(1, 40))
        cost, tier = rng.uniform(0.5, 3, count), rng.integers(0, 2, count)
        rate, wait = (10 ** rng.uniform(-5, -1), 10 ** rng.uniform(-6, -1)), rng.choice([0.0, 10 ** rng.uniform(-4, 0)])
        way_in: Any = SimpleNamespace(known=True, last=0.0, rate=lambda r=rate: r, wait=lambda now, w=wait: w)
        floor = float(rng.choice([0.0, 10 ** rng.uniform(-4, 0)]))
        found = []
        for way in (short, lambda *_: False):
            monkeypatch.setattr(Recovery, "_gains_throughout", way)
            found.append(recovery.loads(tier, cost, [way_in, way_in], 100.0, floor).tolist())
        assert found[0] == found[1]
        known = recovery.seconds_per_cost
        assert known is not None
        taken += bool((tier > 0).any()) and short(recovery, way_in, cost[tier == 1], known, 100.0, floor)
    assert taken >= 500
