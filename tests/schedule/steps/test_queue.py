"""WaitingQueue against a sorted list."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cellar.kv.identity import Chain
from cellar.schedule.steps.queue import WaitingQueue
from cellar.schedule.steps.request import RequestState
from tests.schedule.steps.driver import request


def waiting(priority: int, arrival: int) -> RequestState:
    return RequestState(request("r", [1], 1), (priority, arrival), 2, Chain(b"", 4), np.array([1], np.int32))


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
