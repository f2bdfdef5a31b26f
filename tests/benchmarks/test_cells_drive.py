"""Driving systems: policies of the baselines, the open loop, the sweep."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cells.arrivals import FloatArray
from benchmarks.cells.clock import Pace, WallClock, WorkClock
from benchmarks.cells.drive import MOST_ARRIVALS, Trace, all_at_once, one_at_a_time, open_loop, percentile
from benchmarks.cells.graph_batching import GraphBatching
from benchmarks.cells.padding import Buckets, Fixed, Padded, waste
from benchmarks.cells.report import Report, plot
from benchmarks.cells.subject import Local, Remote
from benchmarks.cells.sweep import Curve, Point, Quantiles, Schedule, Sweep, rising
from benchmarks.cells.system import Answer
from cellar.core.errors import DeviceError


class Clock:
    """Time that passes when somebody works or waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


class Steps:
    """An executor that takes a second per step, whatever the batch."""

    def __init__(self, clock: Clock, second: float = 1.0) -> None:
        self.clock = clock
        self.second = second
        self.batches: list[Padded] = []

    def start(self, batch: Padded) -> None:
        self.batches.append(batch)
        self.clock.now += self.second * batch.length

    def done(self, timeout: float) -> bool:
        return True


class OneServer:
    """A system with one server and a fixed time per request, on the fake clock."""

    def __init__(self, name: str, clock: Clock, seconds: float) -> None:
        self.name = name
        self.clock = clock
        self.seconds = seconds
        self.queue: list[int] = []

    def expect(self, count: int) -> None:
        self.expected = count

    def arrive(self, requests: Sequence[int], now: float) -> None:
        self.queue += requests

    def turn(self, timeout: float) -> Sequence[Answer]:
        if not self.queue:
            self.clock.sleep(timeout)
            return ()
        began = self.clock.now
        self.clock.now += self.seconds
        return [(self.queue.pop(0), began, self.clock.now)]

    def drop(self) -> None:
        self.queue.clear()


def test_buckets_are_served_by_turns() -> None:
    buckets = Buckets(10, max_batch=2)
    for request, length in enumerate([10, 11, 1, 20, 35, 9, 20]):
        buckets.add(request, length)
    assert buckets.next() == Padded((0, 2), 10)  # (0, 10], full
    assert buckets.next() == Padded((1, 3), 20)
    assert buckets.next() == Padded((4,), 40)  # starts part-full; (20, 30] is empty
    assert buckets.next() == Padded((5,), 10)
    buckets.add(7, 5)
    assert buckets.next() == Padded((6,), 20)  # its turn comes before the first bucket's
    assert buckets.next() == Padded((7,), 10)
    assert buckets.next() is None


def test_width_one_pads_nothing() -> None:
    buckets = Buckets(1, 512)
    for request, length in enumerate([3, 1, 3]):
        buckets.add(request, length)
    batches = [buckets.next(), buckets.next()]
    assert batches == [Padded((1,), 1), Padded((0, 2), 3)]
    assert waste([b for b in batches if b], [3, 1, 3]) == 0
    assert waste([Padded((0,), 10)], [5]) == 0.5


def test_the_fixed_graph_takes_one_shape() -> None:
    fixed = Fixed(24, 2)
    for request in range(3):
        fixed.add(request, 24)
    with pytest.raises(ValueError, match="not 23"):
        fixed.add(3, 23)
    assert [fixed.next(), fixed.next(), fixed.next()] == [Padded((0, 1), 24), Padded((2,), 24), None]


def test_graph_batching_ends_figure_2_5_at_5_and_12() -> None:
    """Eight requests, batch 4, any lengths together: the second batch starts when the first has ended."""
    clock = Clock()
    lengths = [2, 3, 3, 5, 5, 7, 3, 1]

    class Longest(Buckets):
        """Pads to the longest of the batch."""

        def next(self) -> Padded | None:
            batch = super().next()
            return batch and Padded(batch.requests, max(lengths[k] for k in batch.requests))

    steps = Steps(clock)
    system = GraphBatching("graph", Longest(1000, 4), steps, lengths.__getitem__, clock)
    trace = open_loop(system, np.array([0, 0, 0, 0, 1.5, 2.5, 2.6, 4.0]), 100)
    assert trace.ended.tolist() == [5] * 4 + [12] * 4
    assert trace.began.tolist() == [0] * 4 + [5] * 4
    assert trace.queueing[4] == 3.5
    assert trace.throughput == 8 / 12


def test_the_open_loop_does_not_wait_for_the_system() -> None:
    clock = Clock()
    server = OneServer("server", clock, 2.0)
    trace = open_loop(server, np.array([0.0, 1.0, 2.0, 3.0]), grace=4.0)
    assert trace.ended[:3].tolist() == pytest.approx([2, 4, 6])
    assert trace.latency[2] == pytest.approx(4)
    assert np.isfinite(trace.ended).sum() >= 3  # the rest was late by more than the grace
    assert server.queue == []
    late = trace.measured(1.0)
    assert len(late.arrived) == 3


def test_what_comes_at_once_is_brought_in_parts() -> None:
    class Counted(OneServer):
        largest = 0

        def arrive(self, requests: Sequence[int], now: float) -> None:
            self.largest = max(self.largest, len(requests))
            super().arrive(requests, now)

    server = Counted("server", Clock(), 0.001)
    trace = all_at_once(server, 2 * MOST_ARRIVALS + 5)
    assert np.isfinite(trace.ended).all()
    assert server.largest == MOST_ARRIVALS
    assert server.expected == 2 * MOST_ARRIVALS + 5


def test_unloaded_and_saturated() -> None:
    clock = Clock()
    server = OneServer("server", clock, 0.5)
    alone = one_at_a_time(server, 10)
    assert np.allclose(alone.latency, 0.5)
    full = all_at_once(server, 10)
    assert full.throughput == pytest.approx(2.0)


def test_percentiles_count_what_was_never_done() -> None:
    values = np.array([1.0] * 9 + [np.inf])
    assert percentile(values, 0.9) == 1.0
    assert percentile(values, 0.91) == np.inf
    assert percentile(np.array([]), 0.5) == np.inf
    assert percentile(np.array([3.0, 1.0, 2.0]), 0.5) == 2.0


def test_the_sweep_finds_peaks_and_compares() -> None:
    clock = Clock()
    fast, slow = OneServer("ours", clock, 0.010), OneServer("slow", clock, 0.020)
    schedule = Schedule(seconds=60, warm_up=5, rounds=1, refinements=5, unloaded_requests=20, saturating_requests=200)
    sweep = Sweep([Local(fast), Local(slow)], schedule)
    (found,) = sweep.run()
    assert sweep.bound == pytest.approx(0.1)
    # M/D/1 with a bound on p90: stable below 1 / service time, and over the bound beyond it
    assert 60 < found.peak_ours < 110
    assert 25 < found.peak_baseline < 50
    assert found.throughput_gain > 0.5
    assert 0 < found.latency_reduction < 1
    assert found.rate == pytest.approx(found.peak_baseline / 2)
    report = Report({"title": "a test"}, sweep.bound, list(sweep.curves.values()), [found])
    assert '"benchmark": "cells"' in report.summary()
    assert any("against slow" in line for line in report.table())


class Disturbed(Local):
    """A subject that some runs find on a processor of half the speed."""

    def __init__(self, server: OneServer, paces: Sequence[float]) -> None:
        super().__init__(server)
        self.server = server
        self.paces = [*paces]
        self.runs: list[float] = []

    def loaded(self, arrived: FloatArray, grace: float) -> Trace:
        pace = self.paces.pop(0) if self.paces else 1.0
        calm = self.server.seconds
        self.server.seconds *= pace
        trace = replace(super().loaded(arrived, grace), pace=pace)
        self.server.seconds = calm
        self.runs.append(pace)
        return trace


def small(retries: int, rates: tuple[float, ...], rounds: int = 0) -> Schedule:
    return Schedule(20, 1, rounds, rates, refinements=0, retries=retries, unloaded_requests=20, saturating_requests=50)


def test_a_disturbed_run_is_repeated() -> None:
    clock = Clock()
    subject = Disturbed(OneServer("ours", clock, 0.01), [1.0, 2.0, 1.05])
    sweep = Sweep([subject], small(2, (10.0, 20.0)))
    sweep.run()
    first, second = sweep.curves["ours"].points
    assert subject.runs[:3] == [1.0, 2.0, 1.05]
    assert (first.pace, second.pace) == (1.0, 1.05)
    assert second.runs == 1
    never = Disturbed(OneServer("ours", clock, 0.01), [1.0, 3.0, 2.0, 2.5])
    sweep = Sweep([never], small(2, (10.0, 20.0)))
    sweep.run()
    assert sweep.curves["ours"].points[1].pace == 2.0  # the least disturbed of them


def test_points_that_contradict_each_other_are_measured_again() -> None:
    clock = Clock()
    server = OneServer("ours", clock, 0.01)

    class Once(Local):
        """Slow at the first load, when it is measured first."""

        runs = 0

        def loaded(self, arrived: FloatArray, grace: float) -> Trace:
            self.runs += 1
            server.seconds = 0.05 if self.runs == 1 else 0.01
            return super().loaded(arrived, grace)

    sweep = Sweep([Once(server)], small(2, (10.0, 20.0, 30.0)))
    sweep.run()
    low, high, top = sweep.curves["ours"].points
    assert (low.runs, high.runs, top.runs) == (3, 3, 1)
    assert low.latency.p90 < high.latency.p90 < top.latency.p90


def test_pairs_share_their_arrivals() -> None:
    clock = Clock()
    seen: list[tuple[str, float]] = []

    class Noted(Local):
        def loaded(self, arrived: FloatArray, grace: float) -> Trace:
            seen.append((self.name, float(arrived.sum())))
            return super().loaded(arrived, grace)

    sweep = Sweep(
        [Noted(OneServer("ours", clock, 0.01)), Noted(OneServer("slow", clock, 0.02))], small(1, (5.0, 10.0), 3)
    )
    (found,) = sweep.run()
    assert len(found.pairs) == 3
    pairs = seen[-6:]
    assert [name for name, _ in pairs] == ["ours", "slow"] * 3
    assert len({load for _, load in pairs}) == 3
    assert all(one[1] == other[1] for one, other in zip(pairs[::2], pairs[1::2], strict=True))
    assert found.latency_reduction == pytest.approx(1 - np.median([one / other for one, other in found.pairs]))


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    clock = Clock()
    sweep = Sweep(
        [Local(OneServer("ours", clock, 0.01)), Local(OneServer("slow", clock, 0.03))],
        Schedule(seconds=2, rates=(5, 20, 200), rounds=1, refinements=0, unloaded_requests=5, saturating_requests=5),
    )
    found = sweep.run()
    report = Report({"title": "a test"}, sweep.bound, list(sweep.curves.values()), found)
    plot(report, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    report.save(tmp_path / "curves.json")
    assert "Infinity" not in (tmp_path / "curves.json").read_text()


class AtOnce:
    """A system for another process: does everything at once."""

    name = "at once"

    def __init__(self) -> None:
        self.queue: list[int] = []
        self.clock = WallClock()

    def expect(self, count: int) -> None:
        self.expected = count

    def arrive(self, requests: Sequence[int], now: float) -> None:
        self.queue += requests

    def turn(self, timeout: float) -> Sequence[Answer]:
        if not self.queue:
            time.sleep(timeout)
            return ()
        now = time.perf_counter()
        answers = [(request, now, now) for request in self.queue]
        self.queue = []
        return answers

    def drop(self) -> None:
        self.queue = []


def broken() -> AtOnce:
    raise DeviceError("there is no such device.")


@pytest.mark.long
def test_a_system_in_a_process_of_its_own() -> None:
    subject = Remote("at once", AtOnce)
    subject.ready()
    trace = subject.loaded(np.linspace(0, 0.2, 50), grace=60.0)
    assert np.isfinite(trace.ended).all()
    assert (trace.latency >= 0).all()
    assert len(subject.unloaded(5).arrived) == 5
    subject.close()
    failing = Remote("broken", broken)
    with pytest.raises(DeviceError, match="no such device"):
        failing.ready()
    failing.close()


def test_looks_at_the_pace_take_no_time() -> None:
    spent = 0.0

    class Slow(Pace):
        """A processor that needs so many seconds for the piece of work."""

        seconds = 1.0

        def look(self) -> float:
            nonlocal spent
            spent += self.seconds
            return self.seconds

    clock = WorkClock(lambda: spent, pace=1.0)
    clock._pace = slow = Slow()
    clock.tick()
    assert clock() == 0.0
    spent += 3.0
    assert clock() == 3.0  # undisturbed
    slow.seconds = 3.0
    clock.tick()
    assert clock() == 3.0
    spent += 4.0
    assert clock() == 5.0  # the mean of the last two looks, 2, is twice as long as undisturbed
    clock.sleep(1.0)
    assert clock() == 6.0
    assert clock.pace() == 2.0
    assert clock.pace() == 0.0
    assert 1e-6 < Pace().fastest(10) <= max(Pace().look() for _ in range(10)) * 100


def test_a_peak_is_where_the_curve_crosses_the_bound() -> None:
    assert rising([1.0, 3.0, 2.0, 4.0, 0.0]) == [1.0, 2.25, 2.25, 2.25, 2.25]
    assert rising([]) == []
    assert rising([1.0, math.inf, 2.0]) == [1.0, math.inf, math.inf]

    def point(rate: float, p90: float) -> Point:
        one = Quantiles(p90, p90, p90)
        return Point(rate, rate, one, one, one, 10, 0)

    def peak(*p90s: float) -> float:
        curve = Curve("ours", Quantiles(1.0, 1.0, 1.0), 5.0, [point(k + 1.0, p90) for k, p90 in enumerate(p90s)])
        curve.settle(10.0)
        return curve.peak

    assert peak(1.0, 1.0) == 2.0
    assert peak(20.0, 30.0) == 0.0
    assert peak(1.0, 1.0, 100.0) == pytest.approx(2.5)  # half way, by logarithms
    assert peak(1.0, 1.0, math.inf) == 2.0
    assert peak(1.0, 40.0, 1.0, 100.0) == pytest.approx(3 + math.log(10 / 40**0.5) / math.log(100 / 40**0.5))


def test_the_clock_of_work_skips_waiting() -> None:
    spent = 0.0

    def thread_time() -> float:
        return spent

    clock = WorkClock(thread_time)
    clock.sleep(3.0)
    spent = 0.5
    assert clock() == 3.5
    begin = WorkClock()
    before = begin()
    time.sleep(0.2)
    assert begin() - before < 0.1
