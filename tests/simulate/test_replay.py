"""Replays of traces: the store's hits are the real ones, and nothing beats who knows the future."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.core.errors import CapacityError
from cellar.kv.policy import PolicyName, named_policy
from cellar.simulate.replay import optimum, replay

COSTS = np.arange(1.0, 100.0)
POLICIES: tuple[PolicyName, ...] = ("lru", "value", "chance")


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def replayed(prompts: list[np.ndarray], size: int, name: PolicyName = "lru") -> tuple[int, float]:
    policy = named_policy(name, {1: 1.0, 64: 64.0})
    found = replay(prompts, np.arange(len(prompts)) * 10.0, size, policy, COSTS)
    assert found.blocks == sum(len(p) for p in prompts)
    assert found.cost == sum(COSTS[: len(p)].sum() for p in prompts)
    return found.hits, found.saved


def test_hits_and_what_they_save() -> None:
    prompts = [ids(1, 2, 3), ids(7, 8), ids(1, 2, 3, 4)]
    assert replayed(prompts, 20) == (3, 6.0)
    assert optimum(prompts, 3, COSTS).hits == 3, "what never comes back takes no room"
    assert replayed(prompts, 4) == (2, 5.0), "the leading block went first"
    with pytest.raises(CapacityError, match="a prompt of 4 blocks does not fit 3"):
        replayed(prompts, 3)
    assert optimum([], 3, COSTS).hit_share == 0.0


def most(sequence: list[int], size: int) -> int:
    """By trying everything: after each access any blocks seen so far may be kept."""
    states = {frozenset[int](): 0}
    for block in sequence:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            now = hits + (block in kept)
            pool = kept | {block}
            for count in range(min(size, len(pool)) + 1):
                for choice in combinations(sorted(pool), count):
                    key = frozenset(choice)
                    after[key] = max(after.get(key, 0), now)
        states = after
    return max(states.values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 3))
def test_the_optimum_is_one(sequence: list[int], size: int) -> None:
    prompts = [ids(block) for block in sequence]
    assert optimum(prompts, size, COSTS).hits == most(sequence, size)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(6, 40), st.sampled_from(POLICIES))
def test_no_policy_beats_the_optimum(seed: int, size: int, name: PolicyName) -> None:
    random = np.random.default_rng(seed)
    talks: list[list[int]] = [[] for _ in range(8)]
    prompts, number = [], 0
    for _ in range(60):
        talk = talks[int(random.integers(8))]
        if len(talk) >= 6:
            talk.clear()
        for _ in range(int(random.integers(1, 3))):
            number += 1
            talk.append(number)
        prompts.append(ids(*talk[:6]))
    hits, saved = replayed(prompts, size, name)
    best, plenty = optimum(prompts, size, COSTS), replayed(prompts, 400, name)
    assert hits <= best.hits <= plenty[0]
    assert saved <= plenty[1]
