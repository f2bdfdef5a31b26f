"""Pace: threads of the calling thread alone, fixed or as its laps suggest; one lap for each layer and each plan."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cellar.ops.cpu.launch import use_threads
from cellar.runtime.pace import Pace, magnitude


def in_a_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_a_thread_sets_its_own_number_and_nobody_elses() -> None:
    before = torch.get_num_threads()
    found: list[int] = []
    fresh: list[int] = []  # what a thread begins with may be another number, if somebody has set it since
    in_a_thread(lambda: fresh.append(torch.get_num_threads()))

    def work() -> None:
        use_threads(before + 2)
        found.append(torch.get_num_threads())
        in_a_thread(lambda: found.append(torch.get_num_threads()))

    in_a_thread(work)
    assert found == [before + 2, *fresh]
    assert torch.get_num_threads() == before


def test_a_fixed_number_is_never_changed() -> None:
    before = torch.get_num_threads()

    def work() -> None:
        pace = Pace(3, clock=lambda: pytest.fail("nobody asks for the time"))
        for _ in range(100):
            pace.begin("decode", 1.0)
            pace.lap()
            assert torch.get_num_threads() == pace.threads == 3

    try:
        in_a_thread(work)
    finally:
        torch.set_num_threads(before)


def test_laps_change_the_number() -> None:
    """Two threads take ten times as long as one; then a tenth."""

    def work() -> None:
        use_threads(2)
        now = 0.0
        pace = Pace(clock=lambda: now)
        assert pace.threads == 2
        for slow, wanted in ((2, 1), (1, 2)):
            for _ in range(2000):
                pace.begin("decode", 1.0)
                now += 0.01 if torch.get_num_threads() == slow else 0.001
                pace.lap()
            assert torch.get_num_threads() == pace.threads == wanted

    in_a_thread(work)


def test_counts_of_a_kind_differ_by_less_than_a_quarter_from_eight_on() -> None:
    assert [magnitude(count) for count in (0, 1, 2, 7, 8, 9, 10, 11, 12, 63, 64)] == [
        0,
        1,
        2,
        7,
        8,
        8,
        10,
        10,
        12,
        56,
        64,
    ]
    counts = np.arange(8, 5000)
    least = np.array([magnitude(int(count)) for count in counts])
    assert (counts < 1.25 * least).all()
    assert (least <= counts).all()
