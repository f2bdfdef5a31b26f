"""WaitingQueue against a sorted list."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.kv.identity import Chain
from cellar.schedule.steps.queue import WaitingQueue
from cellar.schedule.steps.request import RequestState
from tests.schedule.steps.driver import request

NUMBERS = count()


def waiting(priority: int, arrival: int, owner: str = "", tenant: str = "") -> RequestState:
    asked = request(f"r{arrival}", [1], 1, owner=owner, tenant=tenant)
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
    assert queue.in_line(lambda state: True) == states
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
        queue._heap.remove(next(entry for entry in queue._heap if entry[2] is line.head))
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


def queued(queue: WaitingQueue, tenant: str, owner: str = "") -> RequestState:
    """Without a name each is an owner of its own: turns alone do not tell, two tenants may have the same."""
    state = waiting(0, queue.turn(tenant), owner or f"{next(NUMBERS)}", tenant)
    queue.add(state)
    return state


def served(queue: WaitingQueue, count: int) -> list[RequestState]:
    """The next so many, in order."""
    order = []
    for _ in range(count):
        state = queue.first()
        assert state is not None
        queue.remove(state)
        order.append(state)
    return order


def test_tenants_take_turns_however_many_requests_each_sends() -> None:
    queue = WaitingQueue()
    many = [queued(queue, "A") for _ in range(100)]
    assert served(queue, 10) == many[:10]
    few = [queued(queue, "B") for _ in range(3)]
    late = queued(queue, "C")
    order = served(queue, 8)
    assert [state for state in order if state.tenant == "A"] == many[10:14]
    assert [state for state in order if state.tenant == "B"] == few
    assert order.index(few[0]) <= 2, "it comes with the next turn, not after all that others have waiting"
    assert order.index(late) <= 2
    assert order.index(few[2]) > order.index(many[11]), "who has waited is not overtaken again and again"
    assert served(queue, 86) == many[14:]
    assert not queue.tenants
    assert not queue._last, "who has nothing waiting is not remembered"


def test_who_was_away_has_saved_up_nothing() -> None:
    queue = WaitingQueue()
    queued(queue, "B")
    for _ in range(50):
        queued(queue, "A")
    served(queue, 51)
    theirs, mine = ([queued(queue, tenant) for _ in range(6)] for tenant in "AB")
    order = served(queue, 12)
    for k in range(6):
        assert {order[2 * k], order[2 * k + 1]} == {theirs[k], mine[k]}


def test_a_tenants_owners_share_its_turns() -> None:
    """A's request of many sequences stands behind A's other one, and both together have half of the turns."""
    queue = WaitingQueue()
    many = [queued(queue, "A", "a1") for _ in range(20)]
    single = queued(queue, "A", "a2")
    for _ in range(5):
        queued(queue, "B")
    order = served(queue, 8)
    assert order.index(single) <= 3
    assert sum(state.tenant == "B" for state in order) == 4
    assert served(queue, 18)[-1] is many[-1]


@given(st.lists(st.tuples(st.sampled_from(("add", "add", "serve")), st.integers(0, 99)), max_size=200))
def test_no_tenant_is_overtaken_again_and_again(ops: list[tuple[str, int]]) -> None:
    """Between two turns of a tenant that waits all the time, any other has two at most."""
    queue = WaitingQueue()
    waits: list[RequestState] = []
    since: dict[str, dict[str, int]] = {}  # by who waits: how often others were served since it came, or was served
    for kind, a in ops:
        if kind == "add":
            waits.append(queued(queue, "ABC"[a % 3]))
        elif waits:
            (first,) = served(queue, 1)
            assert next(state for state in waits if state.tenant == first.tenant) is first
            waits.remove(first)
            since.pop(first.tenant, None)
            for tenant in {state.tenant for state in waits} - {first.tenant}:
                seen = since.setdefault(tenant, {})
                seen[first.tenant] = seen.get(first.tenant, 0) + 1
                assert seen[first.tenant] <= 2
        assert queue.tenants == {state.tenant for state in waits}
