"""WaitingQueue against a sorted list."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.kv.identity import Chain
from cellar.schedule.steps.queue import WaitingQueue
from cellar.schedule.steps.request import RequestState
from tests.schedule.steps.driver import request


def waiting(priority: int, arrival: int, owner: str = "") -> RequestState:
    asked = request(f"r{arrival}", [1], 1, owner=owner)
    return RequestState(asked, (priority, arrival), 2, Chain(b"", 4), np.array([1], np.int32))


@given(st.lists(st.tuples(st.sampled_from(("push", "push", "first", "remove")), st.integers(0, 99)), max_size=200))
def test_it_is_a_sorted_list(ops: list[tuple[str, int]]) -> None:
    queue = WaitingQueue()
    model: list[RequestState] = []
    for arrival, (kind, number) in enumerate(ops):
        if kind == "push":
            model.append(waiting(number % 3, arrival))
            queue.push(model[-1])
        elif kind == "remove" and model:
            queue.remove(model.pop(number % len(model)))
        assert queue.first() is (min(model, key=lambda s: s.key) if model else None)
        assert len(queue) == len(model)
        assert all(state in queue for state in model)


def test_removed_requests_do_not_pile_up() -> None:
    queue = WaitingQueue()
    first = waiting(0, -1)
    queue.push(first)
    for arrival in range(1000):
        state = waiting(0, arrival)
        queue.push(state)
        queue.remove(state)
    assert queue.first() is first
    assert len(queue._heap) < 50


def test_pushed_again_stands_in_its_place_once() -> None:
    queue = WaitingQueue()
    states = [waiting(0, arrival) for arrival in range(4)]
    for state in states:
        queue.push(state)
    queue.remove(states[2])
    queue.push(states[2])
    order = []
    while (state := queue.first()) is not None:
        order.append(state)
        queue.remove(state)
    assert order == states


def take_turns(ops: list[tuple[str, int]]) -> None:
    """While a request is the first of its owner, any other owner is served at most once by a turn after its own.

    And no request of one owner overtakes an earlier one of the same priority.
    """
    queue = WaitingQueue()
    waits: list[RequestState] = []
    overtaken: dict[RequestState, dict[str, int]] = {}
    for number, (kind, a) in enumerate(ops):
        if kind == "add":
            waits.append(waiting(a % 2, queue.turn(), "abcd"[a % 4]))
            queue.add(waits[-1])
        elif waits and kind == "drop":
            queue.remove(waits.pop(a % len(waits)))
        elif waits:
            first = queue.first()
            assert first is not None
            earlier = [s for s in waits if (s.key[0], s.owner) == (first.key[0], first.owner)]
            assert earlier[0] is first, f"op {number}: somebody overtook its own owner"
            heads = {(s.key[0], s.owner): s for s in reversed(waits)}
            for (priority, owner), head in heads.items():
                assert priority >= first.key[0]
                if priority == first.key[0] and owner != first.owner:
                    seen = overtaken.setdefault(head, {})
                    seen[first.owner] = seen.get(first.owner, 0) + 1
                    assert seen[first.owner] <= 1, f"op {number}: {first.owner} is served twice before {owner} once"
            queue.remove(first)
            waits.remove(first)
        assert len(queue) == len(waits)
        assert all(state in queue for state in waits)
    order = []
    while (state := queue.first()) is not None:
        order.append(state)
        queue.remove(state)
    assert sorted(map(id, order)) == sorted(map(id, waits))
    assert not queue._lines


@given(st.lists(st.tuples(st.sampled_from(("add", "add", "serve", "drop")), st.integers(0, 99)), max_size=200))
def test_owners_take_turns(ops: list[tuple[str, int]]) -> None:
    take_turns(ops)


def plainly(queue: WaitingQueue, state: RequestState) -> None:
    """First come, first served, whoever it is."""
    queue.push(state)


def next_at_once(queue: WaitingQueue, name: tuple[int, str], line: Any) -> None:
    """The next of a line goes before all others."""
    key = line.head.key[0], line.head.key[1] - 10**6
    WaitingQueue.__dict__["_kept"](queue, name, line)
    if name in queue._lines:
        queue._heap.remove((line.head.key, line.head))
        heapq.heapify(queue._heap)
        line.head.key = key
        queue.push(line.head)


def many_turns(rounds: int) -> None:
    draw = random.Random(0)
    kinds = ("add", "add", "serve", "drop")
    for _ in range(rounds):
        take_turns([(draw.choice(kinds), draw.randrange(100)) for _ in range(100)])


@pytest.mark.parametrize(("method", "bug"), [("add", plainly), ("_advance", next_at_once)])
def test_planted_bug_is_found(method: str, bug: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue, "_kept", getattr(WaitingQueue, method), raising=False)
    monkeypatch.setattr(WaitingQueue, method, bug)
    with pytest.raises(AssertionError, match="op"):
        many_turns(200)


def test_a_thousand_of_one_owner_stand_behind_one_of_another() -> None:
    queue = WaitingQueue()
    many = [waiting(0, queue.turn(), "greedy") for _ in range(1000)]
    for state in many:
        queue.add(state)
    other = waiting(0, queue.turn(), "modest")
    queue.add(other)
    queue.remove(many[0])
    assert queue.first() is other
    queue.remove(other)
    assert queue.first() is many[1]
