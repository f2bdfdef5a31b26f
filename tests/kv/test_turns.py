"""NextTurns against its definition, counted anew from all that happened; planted bugs; and what a store keeps."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.kv import turns as turns_module
from cellar.kv.costs import model_costs
from cellar.kv.policy import ChanceValue, LeastRecentlyUsed, Policy, RetentionValue, named_policy
from cellar.kv.store import KVStore
from cellar.kv.turns import NUM_BUCKETS, NUM_GROUPS, PRIOR_RETURNS, NextTurns, group_of
from cellar.planner.models import known_spec

STEPS = (0.0, 0.3, 1.0, 2.0, 5.0, 30.0, 200.0, 9000.0)
Event = tuple[str, int, int, int]
"""Kind, conversation, turns, and which of STEPS passes before it."""


class Definition:
    """All idle times in full: [start, stop), turns, and whether a turn ended them."""

    def __init__(self) -> None:
        self.idle: dict[int, tuple[float, int]] = {}
        self.past: list[tuple[float, float, int, bool]] = []

    def stop(self, conversation: int, now: float, returned: bool) -> None:
        if conversation in self.idle:
            start, turns = self.idle.pop(conversation)
            self.past.append((start, now, turns, returned))

    def observed(self, now: float) -> tuple[np.ndarray, np.ndarray]:
        returns, waited = np.zeros((2, NUM_GROUPS, NUM_BUCKETS))
        for start, stop, turns, returned in [*self.past, *((s, now, t, False) for s, t in self.idle.values())]:
            group = next((g for g, most in enumerate((1, 2, 4, 8, 16, 32)) if turns <= most), 6)
            for bucket in range(NUM_BUCKETS):
                begin = 2.0**bucket if bucket else 0.0
                end = 2.0 ** (bucket + 1) if bucket < NUM_BUCKETS - 1 else np.inf
                waited[group, bucket] += max(0.0, min(stop - start, end) - begin)
                returns[group, bucket] += returned and begin <= stop - start < end
        return returns, waited


def check(events: list[Event]) -> None:
    learned, truth, now = NextTurns(), Definition(), 0.0
    for kind, conversation, turns, step in events:
        now += STEPS[step]
        if kind == "ended" and conversation not in truth.idle:
            learned.ended(conversation, turns, now)
            truth.idle[conversation] = now, turns
        elif kind == "began":
            learned.began(conversation, now)
            truth.stop(conversation, now, True)
        elif kind == "forgotten":
            learned.began(99, now)  # the moment passes for it, too
            learned.forgotten(conversation)
            truth.stop(conversation, now, False)
        else:
            learned.began(99, now)
        returns, waited = learned.observed()
        expected_returns, expected_waited = truth.observed(now)
        assert np.array_equal(returns, expected_returns)
        assert np.allclose(waited, expected_waited, rtol=1e-9, atol=1e-9 * max(now, 1.0) * len(events))
        prior = turns_module._PRIOR
        factor = (expected_returns.sum() + PRIOR_RETURNS) / ((expected_waited * prior).sum() + PRIOR_RETURNS)
        assumed = PRIOR_RETURNS / (factor * prior)
        together = (expected_returns.sum(0) + PRIOR_RETURNS) / (expected_waited.sum(0) + assumed)
        hazard = (expected_returns + PRIOR_RETURNS) / (expected_waited + PRIOR_RETURNS / together)
        learned._news = 1 << 30  # the estimate is made now and then
        idle = np.array([[1.0, 2.0], [64 * 2**0.25, 1e6]])
        found = learned.chance(idle, np.array([[1, 4], [40, 17]]))
        between = ahead(hazard[6], 6) ** 0.75 * ahead(hazard[6], 7) ** 0.25
        expected = [[ahead(hazard[0], 0), ahead(hazard[2], 1)], [between, hazard[5, NUM_BUCKETS - 1]]]
        assert np.allclose(found, expected)


def ahead(hazard: np.ndarray, begin: int) -> float:
    """By small steps: most returns per second that one waits on, over all ends of a bucket."""
    left, returns, seconds, best = 1.0, 0.0, 0.0, 0.0
    for bucket in range(begin, NUM_BUCKETS):
        width = (2.0 ** (bucket + 1) if bucket < NUM_BUCKETS - 1 else np.inf) - (2.0**bucket if bucket else 0.0)
        gone = left * (1.0 - np.exp(-hazard[bucket] * width))
        returns += gone
        seconds += gone / hazard[bucket]
        left -= gone
        best = max(best, returns / seconds)
    return best


def random_events(seed: int, count: int = 40) -> list[Event]:
    rng = random.Random(seed)
    kinds = ("ended", "ended", "began", "forgotten")
    return [
        (rng.choice(kinds), rng.randrange(6), rng.randrange(1, 50), rng.randrange(len(STEPS))) for _ in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(
    st.tuples(st.sampled_from(["ended", "began", "forgotten"]), st.integers(0, 5), st.integers(1, 60),
              st.integers(0, len(STEPS) - 1)),
    max_size=30,
))  # fmt: skip
def test_what_was_learned_is_what_happened(events: list[Event]) -> None:
    check(events)


def test_groups_of_turns() -> None:
    assert [group_of(n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 33, 10_000)] == [0, 0, 1, 2, 2, 3, 3, 4, 6, 6]


def hunt(cases: int) -> None:
    for seed in range(cases):
        check(random_events(seed))


# -- planted bugs --------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Plant] = {}


def bug(plant: Plant) -> Plant:
    BUGS[plant.__name__] = plant
    return plant


@bug
def who_was_forgotten_counts_as_returned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NextTurns, "forgotten", lambda learned, number: learned.began(number, learned._now))


@bug
def who_never_returns_does_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NextTurns, "forgotten", lambda learned, number: learned._idle.pop(number, None))


@bug
def who_still_waits_does_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NextTurns, "observed", lambda learned: (learned._returns, learned._waited))


@bug
def nobody_leaves_the_first_bucket(patch: pytest.MonkeyPatch) -> None:
    def advance(learned: NextTurns, now: float) -> None:
        learned._now = now
        learned._news += 1

    patch.setattr(NextTurns, "_advance", advance)


@bug
def entry_of_an_earlier_idle_time_moves_the_later_one(patch: pytest.MonkeyPatch) -> None:
    advance = NextTurns._advance

    def careless(learned: NextTurns, now: float) -> None:
        for bucket, queue in enumerate(learned._queues):
            for k, idle in enumerate(queue):
                held = learned._idle.get(idle.conversation)
                if held is not None and held[1] == bucket:
                    queue[k] = held[0]
        advance(learned, now)

    patch.setattr(NextTurns, "_advance", careless)


@bug
def turns_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(turns_module, "group_of", lambda turns: 0)


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        hunt(60)


def test_without_a_bug_nothing_is_found() -> None:
    hunt(30)


def test_if_nobody_returns_the_order_is_that_of_the_paper() -> None:
    """Most are seen while young; that must not make the old look better."""
    learned = NextTurns()
    for k in range(2000):
        learned.ended(k, 1, float(k))
        if k >= 100:
            learned.forgotten(k - 100)
    found = learned.chance(2.0 ** np.arange(NUM_BUCKETS), np.ones(NUM_BUCKETS, np.int32))
    assert (np.diff(found) < 0).all()


def test_who_still_reads_is_worth_what_comes_after() -> None:
    """Nobody returns within 16 s, everybody in the next 16: a fresh conversation is worth a return in 24 s or so."""
    hazard = np.full((1, NUM_BUCKETS), 1e-6)
    hazard[0, 4] = 1.0
    found = turns_module.best_ahead(hazard)[0]
    assert found[0] == pytest.approx(1 / 17, rel=0.01)
    assert found[3] == pytest.approx(1 / 9, rel=0.01)
    assert found[4] == pytest.approx(1.0, rel=0.01)
    assert found[5] < 1e-5


# -- in a store ----------------------------------------------------------------------------------------


def serve(store: KVStore, tokens: list[int], now: float) -> int:
    """A turn that is answered at once -> how many of its tokens were there."""
    array = np.array(tokens, np.int32)
    chain = store.chain(b"")
    held = store.reserve(store.find(chain, array), len(array), now=now)
    assert held is not None
    whole = len(array) // store.chunk_size
    chain.grow(array, whole)
    store.names.commit(held.slots[:whole].tolist(), chain, 0, held.conversation)
    store.release(held.slots, held.conversation, now)
    store.check_integrity()
    return held.num_cached_tokens


def long_waits(policy: Policy, seed: int) -> int:
    """Hits where most users leave at once, and some come back after 20 to 180 s, again and again."""
    store, random_, hits = KVStore(120, 1, policy=policy), random.Random(seed), 0
    due: list[tuple[float, list[int]]] = []
    for number in range(1, 1501):
        now = float(number)
        while due and due[0][0] <= now:
            _, tokens = due.pop(0)
            tokens = [*tokens, len(tokens)]
            hits += serve(store, tokens, now)
            if random_.random() < 0.85:
                due.append((now + 20.0 + 160.0 * random_.random(), tokens))
        tokens = [10_000 + number, 1, 2]
        serve(store, tokens, now)
        if number % 20 == 0:  # one of twenty goes on
            due.append((now + 20.0 + 160.0 * random_.random(), tokens))
        due.sort(key=lambda entry: entry[0])
    return hits


@pytest.mark.long
def test_chances_learned_keep_those_who_come_back() -> None:
    """Users who wait long but surely are worth more than many who were just here: 1 / T says the opposite."""
    costs = {1: 1.0, 64: 1.0}
    learned, idle, recent = (long_waits(p, 1) for p in (ChanceValue(costs), RetentionValue(costs), LeastRecentlyUsed()))
    assert learned > 1.2 * max(idle, recent), (learned, idle, recent)


def test_before_anything_is_seen_chances_are_those_of_the_paper() -> None:
    chance, value = ChanceValue({1: 1.0}), RetentionValue({1: 1.0})
    idle = 2.0 ** np.arange(1, NUM_BUCKETS - 1, 0.3)[:, None]
    turns = np.ones(idle.shape, np.int32)
    found = chance.weight(idle, turns)
    assert np.allclose(found / value.weight(idle, turns), 0.5**0.5), "but for a factor that changes no order"
    both = np.concatenate((idle, np.full_like(idle, np.inf)), 1)
    assert np.allclose(chance.weight(both, np.ones(both.shape, np.int32)), found)


def test_policies_have_names() -> None:
    spec = known_spec("palm-8b")
    assert spec is not None
    costs = model_costs(spec)
    assert list(costs) == [2**k for k in range(13)]
    assert costs[2048] > costs[1]
    kinds = {"value": RetentionValue, "chance": ChanceValue, "lru": LeastRecentlyUsed}
    for name, kind in kinds.items():
        assert isinstance(named_policy(name, costs), kind)  # type: ignore[arg-type]
