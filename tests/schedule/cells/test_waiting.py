"""The queue of requests that wait, against a list; and that leaving it does not grow with its length."""

from __future__ import annotations

import time
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from cellar.core.cell_graphs import CellGraph, CellRequest
from cellar.schedule.cells.waiting import Waiting


def request(id: str) -> CellRequest:
    return CellRequest(id, 0, cast(CellGraph, None), ())


@given(st.lists(st.tuples(st.sampled_from(["append", "leave", "pop"]), st.integers(0, 30)), max_size=80))
def test_as_a_list(steps: list[tuple[str, int]]) -> None:
    queue, expected = Waiting(), cast(list[Any], [])
    for k, (what, number) in enumerate(steps):
        if what == "append":
            expected.append(request(str(k % 7)))  # ids come again
            queue.append(expected[-1])
        elif what == "leave" and expected:
            queue.leave(expected.pop(number % len(expected)))
        elif what == "pop":
            front = queue.front(number)
            assert front == expected[: len(front)]
            assert front or not expected or not number
            count = min(len(front), number // 2)
            queue.pop(count)
            del expected[:count]
        assert len(queue) == len(expected)
    found = []
    while queue:
        front = queue.front(len(queue))
        found += front
        queue.pop(len(front))
    assert found == expected


def test_nobody_waits_when_the_last_have_left() -> None:
    queue, first, second = Waiting(), request("first"), request("second")
    queue.append(first)
    queue.append(second)
    queue.leave(second)
    queue.pop(1)
    assert len(queue) == 0
    assert queue.front(3) == []


def test_leaving_costs_the_same_however_many_wait() -> None:
    def seconds(count: int) -> float:
        queue, requests = Waiting(), [request(str(k)) for k in range(count)]
        for one in requests:
            queue.append(one)
        start = time.thread_time()
        for one in reversed(requests):
            queue.leave(one)
        return time.thread_time() - start

    few = min(seconds(1_000) for _ in range(5))
    assert min(seconds(16_000) for _ in range(3)) < 100 * few  # 16 times; a search through all would be 256 times
