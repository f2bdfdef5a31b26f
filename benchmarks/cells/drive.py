"""Driving a system: an open loop of Poisson arrivals, one request at a time, or all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.cells.arrivals import FloatArray
from benchmarks.cells.system import System

MOST_ARRIVALS = 4096
"""Requests brought in one turn: more would keep a device waiting that could have begun with the first."""

QUANTILES = np.linspace(0.0, 1.0, 201)


@dataclass(frozen=True)
class Trace:
    """Times of every request of a run, in seconds from its start; began and ended are inf where it was not done.

    `pace` is that of the processor meanwhile, as `clock.Pace` takes it; 0: not known.
    """

    arrived: FloatArray
    began: FloatArray
    ended: FloatArray
    seconds: float
    pace: float = 0.0

    def measured(self, warm_up: float = 0.0) -> Trace:
        """Without the requests that came in the first `warm_up` seconds."""
        kept = self.arrived >= warm_up
        return Trace(self.arrived[kept], self.began[kept], self.ended[kept], self.seconds - warm_up, self.pace)

    @property
    def throughput(self) -> float:
        """Requests done per second between the first arrival and the last end."""
        done = np.isfinite(self.ended)
        if not done.any():
            return 0.0
        return float(done.sum() / max(self.ended[done].max() - self.arrived.min(), 1e-9))

    @property
    def latency(self) -> FloatArray:
        """Arrival to end."""
        return self.ended - self.arrived

    @property
    def queueing(self) -> FloatArray:
        """Arrival to the start of the first cell."""
        return self.began - self.arrived

    @property
    def compute(self) -> FloatArray:
        """Start of the first cell to the end; only of requests that were done."""
        done = np.isfinite(self.ended)
        return np.asarray(self.ended[done] - self.began[done], np.float64)


def percentile(values: FloatArray, share: float) -> float:
    """The smallest value that `share` of all do not exceed; inf counts, and nothing is inf."""
    if not len(values):
        return float("inf")
    return float(np.sort(values)[min(len(values) - 1, int(np.ceil(share * len(values))) - 1)])


def open_loop(
    system: System,
    arrived: FloatArray,
    grace: float,
    longest_wait: float = 0.01,
    beside: Callable[[], None] | None = None,
) -> Trace:
    """Let request k come at arrived[k], whatever the system does; ends `grace` seconds after the last arrival.

    One thread brings the requests and drives the system: one that comes while the system computes is noticed
    after it, but its time runs from its arrival. `beside` is called between its turns.
    """
    count = len(arrived)
    began, ended = np.full(count, np.inf), np.full(count, np.inf)
    come = done = 0
    clock = system.clock
    system.expect(count)
    start = clock()
    end = (arrived[-1] if count else 0.0) + grace
    while done < count:
        if beside is not None:
            beside()
        now = clock() - start
        if now > end:
            system.drop()
            break
        due = min(int(np.searchsorted(arrived, now, side="right")), come + MOST_ARRIVALS)
        if due > come:
            system.arrive(range(come, due), start + now)
            come = due
        wait = longest_wait if come == count else min(longest_wait, max(0.0, arrived[come] - now))
        answers = system.turn(wait)
        if answers:  # column by column: one by one they cost a fast system a tenth of its time
            requests, begins, ends = map(np.array, zip(*answers, strict=True))
            began[requests], ended[requests] = begins - start, ends - start
            done += len(answers)
    return Trace(arrived, began, ended, clock() - start)


def one_at_a_time(system: System, count: int, beside: Callable[[], None] | None = None) -> Trace:
    """The unloaded system: each request comes when the one before it is done."""
    arrived, began, ended = np.empty(count), np.empty(count), np.empty(count)
    clock = system.clock
    system.expect(count)
    start = clock()
    for k in range(count):
        if beside is not None:
            beside()
        arrived[k] = clock() - start
        system.arrive((k,), start + arrived[k])
        answers = list(system.turn(1.0))
        while not answers:
            answers = list(system.turn(1.0))
        _, began_at, ended_at = answers[0]
        began[k], ended[k] = began_at - start, ended_at - start
    return Trace(arrived, began, ended, clock() - start)


def all_at_once(system: System, count: int, beside: Callable[[], None] | None = None) -> Trace:
    """The saturated system: everything is there at the start."""
    return open_loop(system, np.zeros(count), float("inf"), beside=beside)
