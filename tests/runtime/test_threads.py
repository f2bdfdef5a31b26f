"""The choice of the number of threads, on machines made of formulas: within a fifth of the best fixed number beside any
neighbour, as fast as all threads where there is none, and back within two seconds when neighbours come and go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.runtime import threads
from cellar.runtime.threads import ThreadChoice, counts_up_to

LAYERS = 6
# Threads, seconds -> seconds that a lap takes.
Machine = Callable[[int, float], float]


@dataclass(frozen=True)
class Lap:
    start: float
    stop: float
    threads: int


def drive(machine: Machine, most: int, seconds: float, kinds: int = 1) -> list[Lap]:
    """Steps of `LAYERS` laps, by turns of each kind, one after the other."""
    choice, now, step = ThreadChoice(most), 0.0, 0
    laps: list[Lap] = []
    while now < seconds:
        count = choice.begin(step % kinds, 1.0, now)
        for _ in range(LAYERS):
            assert 1 <= count <= most
            stop = now + machine(count, now)
            laps.append(Lap(now, stop, count))
            now = stop
            count = choice.lap(now)
        step += 1
    return laps


def rate(laps: list[Lap], start: float, stop: float) -> float:
    """Laps a second."""
    within = [lap for lap in laps if start <= lap.start < stop]
    return len(within) / (within[-1].stop - within[0].start)


def fixed_rate(machine: Machine, count: int, start: float, stop: float) -> float:
    now, laps = start, 0
    while now < stop:
        now += machine(count, now)
        laps += 1
    return laps / (now - start)


def best_rate(machine: Machine, most: int, start: float, stop: float) -> float:
    return max(fixed_rate(machine, count, start, stop) for count in counts_up_to(most))


@dataclass
class Cores:
    """`cores` of them, foreign processes on `taken` of them between `begin` and `end`, and the noise of any machine.

    A lap takes `alone` on one thread; of it the share `serial` cannot be divided. A thread without a core of its own
    waits for one: a part of the laps, for up to `wait` seconds.
    """

    cores: int
    alone: float
    serial: float
    wait: float
    taken: int
    begin: float
    end: float
    random: Random

    def __call__(self, count: int, now: float) -> float:
        seconds = self.alone * (self.serial + (1 - self.serial) / count) * self.random.uniform(0.9, 1.15)
        without = count - (self.cores - self.taken if self.begin <= now < self.end else self.cores)
        if without > 0:
            seconds += self.random.choice((0.1, 0.5, 1.0)) * self.wait
        return seconds


LAP = st.floats(0.0005, 0.01)  # longer ones need more than these seconds for several tries of several kinds


@settings(max_examples=10, derandomize=True)
@given(alone=LAP, serial=st.floats(0.05, 0.5), cores=st.sampled_from([2, 3, 4, 8, 16]), seed=st.integers(0, 99))
def test_without_neighbours_all_threads_lose_nothing(alone: float, serial: float, cores: int, seed: int) -> None:
    check_quiet(alone, serial, cores, seed)


def check_quiet(alone: float, serial: float, cores: int, seed: int) -> None:
    machine = Cores(cores, alone, serial, 0.0, 0, 0, 0, Random(seed))
    laps = drive(machine, cores, 8)
    # Each number is tried once for a moment, and then nothing changes.
    assert rate(laps, 0, 8) > 0.9 * fixed_rate(machine, cores, 0, 8)
    assert rate(laps, 4, 8) > 0.97 * fixed_rate(machine, cores, 4, 8)


def check_company(alone: float, serial: float, wait: float, cores: int, taken: int, seed: int, kinds: int = 1) -> None:
    machine = Cores(cores, alone, serial, wait, taken, 0, 99, Random(seed))
    laps = drive(machine, cores, 9, kinds)
    assert rate(laps, 2, 9) > 0.8 * best_rate(machine, cores, 2, 9)


@settings(max_examples=15, derandomize=True)
@given(
    alone=LAP,
    serial=st.floats(0.05, 0.5),
    wait=st.floats(0.004, 0.05),
    cores=st.sampled_from([2, 3, 4, 8]),
    taken=st.integers(1, 2),
    seed=st.integers(0, 99),
    kinds=st.integers(1, 3),
)
def test_beside_neighbours_it_is_near_the_best_fixed_number(
    alone: float, serial: float, wait: float, cores: int, taken: int, seed: int, kinds: int
) -> None:
    check_company(alone, serial, wait, cores, min(taken, cores - 1), seed, kinds)


def check_coming_and_going(alone: float, wait: float, cores: int, seed: int) -> None:
    machine = Cores(cores, alone, 0.2, wait, 1, 4.0, 9.0, Random(seed))
    laps = drive(machine, cores, 14)
    for start, stop in ((0, 4), (6, 9), (11, 14)):
        assert rate(laps, start, stop) > 0.8 * best_rate(machine, cores, start, stop), f"from {start} to {stop}"


@settings(max_examples=10, derandomize=True)
@given(alone=LAP, wait=st.floats(0.01, 0.05), cores=st.sampled_from([2, 3, 8]), seed=st.integers(0, 99))
def test_neighbours_that_come_and_go_are_noticed_within_two_seconds(
    alone: float, wait: float, cores: int, seed: int
) -> None:
    check_coming_and_going(alone, wait, cores, seed)


def test_one_of_eight_cores_is_taken() -> None:
    machine = Cores(8, 0.004, 0.05, 0.02, 1, 0, 99, Random(0))
    used = [lap.threads for lap in drive(machine, 8, 6) if lap.start > 2]
    assert used.count(7) > 0.9 * len(used)


def test_work_too_small_to_divide_stays_on_one_thread() -> None:
    laps = drive(lambda count, now: 0.0001 + 0.00005 * count, 4, 6)
    assert rate(laps, 1, 6) > 0.9 / 0.00015


def test_one_core_leaves_no_choice() -> None:
    assert {lap.threads for lap in drive(lambda count, now: 0.01, 1, 2)} == {1}


def test_a_single_slow_lap_changes_nothing_for_long() -> None:
    """A page fault, another program's millisecond: the best number is back within a fraction of a second."""

    def machine(count: int, now: float) -> float:
        return 0.15 if 3.0 <= now < 3.15 else 0.001 / count

    laps = drive(machine, 2, 6)
    assert rate(laps, 3.5, 6) > 0.9 * fixed_rate(machine, 2, 3.5, 6)


def test_a_new_kind_begins_with_what_its_neighbour_has_found() -> None:
    choice, now = ThreadChoice(2), 0.0
    count = choice.begin("prompt", 1.0, now)
    for _ in range(200):
        now += 0.05 if count == 2 else 0.002
        count = choice.lap(now)
    assert choice.begin("decode", 1.0, now) == 1


def test_far_more_work_begins_with_all_threads() -> None:
    """A prompt of 2,000 took twice as long on the one thread that single tokens go best on as the next one did."""
    choice, now = ThreadChoice(8), 0.0
    for _ in range(200):
        count = choice.begin("token", 1.0, now, 1.0)
        for _ in range(LAYERS):
            now += 0.001 * count
            count = choice.lap(now)
    assert choice.begin("token", 1.0, now, 1.0) == 1
    assert choice.begin("four tokens", 1.0, now, 4.0) == 1
    assert choice.begin("prompt", 2000.0, now) == 8
    assert choice.begin("another prompt", 1900.0, now) == 8
    assert choice.begin("two tokens", 1.0, now, 2.0) == 1


def test_what_is_tried() -> None:
    assert counts_up_to(1) == (1,)
    assert counts_up_to(2) == (1, 2)
    assert counts_up_to(6) == (1, 2, 4, 5, 6)
    assert counts_up_to(64) == (1, 2, 4, 8, 16, 32, 63, 64)


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [
        ("LOST", 1e9, lambda: check_company(0.002, 0.2, 0.6, 2, 1, 0)),  # a try that has failed goes on
        ("SHARE", 1e9, lambda: check_company(0.0005, 0.2, 0.1, 8, 2, 0, 3)),  # nobody counts what tries cost
        ("CHANGED", 1e9, lambda: check_coming_and_going(0.002, 0.03, 2, 0)),  # nobody sees a neighbour come
        ("PATIENCE_MOST", 1e9, lambda: check_coming_and_going(0.002, 0.03, 2, 0)),  # nobody sees one go
        ("BETTER", 1e9, lambda: check_company(0.001, 0.2, 0.05, 2, 1, 0)),  # what is worse is taken
    ],
)
def test_planted_defects_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float, check: Callable[[], None]
) -> None:
    check()
    monkeypatch.setattr(threads, name, value)
    if name == "PATIENCE_MOST":
        monkeypatch.setattr(threads, "PATIENCE_LEAST", value)
    with pytest.raises(AssertionError):
        check()
