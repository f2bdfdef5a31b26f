"""The load sweep: latency at rising loads, each system's peak, and the comparison at half of a baseline's peak."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from cellar.bench.cells.arrivals import poisson
from cellar.bench.cells.drive import QUANTILES, Trace, percentile
from cellar.bench.cells.subject import Subject

SLOWDOWN = 10.0
"""A system is saturated where its p90 latency is this many times that of the unloaded system."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Quantiles:
    """Of times in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Quantiles:
        """inf where requests were not done."""
        return cls(*(percentile(values, share) for share in (0.5, 0.9, 0.99)))


@dataclass(frozen=True)
class Point:
    """One system at one load. Rates in requests/s; `unfinished` requests count as infinitely late."""

    rate: float
    throughput: float
    latency: Quantiles
    queueing: Quantiles
    compute: Quantiles
    num_requests: int
    unfinished: int

    @classmethod
    def of(cls, rate: float, trace: Trace) -> Point:
        """What a run showed."""
        return cls(
            rate,
            trace.throughput,
            Quantiles.of(trace.latency),
            Quantiles.of(trace.queueing),
            Quantiles.of(trace.compute),
            len(trace.arrived),
            int(np.isinf(trace.ended).sum()),
        )


@dataclass(frozen=True)
class Distribution:
    """Queueing and compute at one load, as their quantiles at `shares`."""

    rate: float
    shares: list[float]
    queueing: list[float]
    compute: list[float]

    @classmethod
    def of(cls, rate: float, trace: Trace) -> Distribution:
        """From all requests that were done."""
        done = np.isfinite(trace.ended)
        queueing = trace.queueing[done] if done.any() else np.full(1, np.inf)
        compute = trace.compute if done.any() else np.full(1, np.inf)
        return cls(
            rate,
            QUANTILES.tolist(),
            np.quantile(queueing, QUANTILES).tolist(),
            np.quantile(compute, QUANTILES).tolist(),
        )


@dataclass
class Curve:
    """Everything measured of one system. `saturated` is the throughput when all requests are there at once."""

    system: str
    unloaded: Quantiles
    saturated: float
    points: list[Point] = field(default_factory=list)
    peak: float = 0.0
    distribution: Distribution | None = None

    def settle(self, bound: float) -> None:
        """Sort the points and find the peak: the highest load up to which p90 stays under `bound` seconds.

        A load above which a second, higher one holds again was disturbed, and does not end the search.
        """
        self.points.sort(key=lambda point: point.rate)
        held = [point.rate for point in self.points if point.latency.p90 < bound]
        self.peak = max(held, default=0.0)


@dataclass(frozen=True)
class Comparison:
    """Ours beside one baseline: p90 at half of the baseline's peak (medians of several runs), and the peaks."""

    baseline: str
    rate: float
    p90_ours: float
    p90_baseline: float
    latency_reduction: float
    peak_ours: float
    peak_baseline: float
    throughput_gain: float


@dataclass(frozen=True)
class Schedule:
    """How long and how often is measured. Without `rates` they follow from the systems' saturated throughput."""

    seconds: float = 5.0
    warm_up: float = 0.5
    rounds: int = 3
    rates: tuple[float, ...] = ()
    refinements: int = 4
    unloaded_requests: int = 200
    saturating_requests: int = 2000
    seed: int = 0


class Sweep:
    """Runs systems by turns at every load, so that what disturbs the machine disturbs all. `systems[0]` is ours.

    All have one bound on p90, from the lowest unloaded p90: a system that is slow when idle gets no more room for it.
    Those of the names in `apart` (other kernels) are held to it, and do not set it.
    """

    def __init__(
        self,
        systems: Sequence[Subject],
        schedule: Schedule,
        say: Say = lambda line: None,
        apart: Collection[str] = (),
    ) -> None:
        self._systems = systems
        self._apart = frozenset(apart)
        self._schedule = schedule
        self._say = say
        self.curves: dict[str, Curve] = {}
        self.bound = 0.0

    def run(self) -> list[Comparison]:
        """Measure everything; the curves are in `curves`, the comparisons with each other system are returned."""
        self._unloaded()
        self._rising()
        for system in self._systems:
            self._refine(system)
        self._distributions()
        ours, *others = self._systems
        return [self._compare(ours, other) for other in others]

    def _unloaded(self) -> None:
        plan = self._schedule
        for system in self._systems:
            system.unloaded(10)  # first calls choose and pack
            alone = system.unloaded(plan.unloaded_requests)
            full = system.saturated(plan.saturating_requests)
            curve = Curve(system.name, Quantiles.of(alone.latency), full.throughput)
            self.curves[system.name] = curve
            self._say(
                f"{system.name}: unloaded p90 {1e3 * curve.unloaded.p90:.2f} ms, "
                f"saturated {curve.saturated:.0f} requests/s"
            )
        setting = [curve for name, curve in self.curves.items() if name not in self._apart]
        self.bound = SLOWDOWN * min(curve.unloaded.p90 for curve in setting)

    def _rising(self) -> None:
        plan = self._schedule
        fastest = max(curve.saturated for curve in self.curves.values())
        rates = plan.rates or [share * fastest for share in (0.02, 0.05, *np.arange(0.1, 1.11, 0.1))]
        missed = dict.fromkeys(self.curves, 0)
        for rate in sorted(rates):
            for system in self._systems:
                if missed[system.name] >= 2 and not plan.rates:
                    continue
                point = self._measure(system, float(rate))
                missed[system.name] += point.latency.p90 >= self.bound

    def _refine(self, system: Subject) -> None:
        """Halve the gap between the highest load that held and the next one that did not."""
        curve = self.curves[system.name]
        for _ in range(self._schedule.refinements):
            curve.settle(self.bound)
            above = [point.rate for point in curve.points if point.rate > curve.peak]
            self._measure(system, (curve.peak + min(above)) / 2 if above else 1.1 * curve.peak)
        curve.settle(self.bound)

    def _distributions(self) -> None:
        """All systems at one load that all bear: half of the lowest peak (figure 2.9)."""
        rate = min(curve.peak for curve in self.curves.values()) / 2
        for system in self._systems if rate else ():
            self.curves[system.name].distribution = Distribution.of(rate, self._trace(system, rate, 0))

    def _compare(self, ours: Subject, other: Subject) -> Comparison:
        mine, theirs = self.curves[ours.name], self.curves[other.name]
        rate = theirs.peak / 2
        p90: dict[str, list[float]] = {ours.name: [], other.name: []}
        for k in range(self._schedule.rounds if rate else 0):
            for system in (ours, other):
                trace = self._trace(system, rate, k)
                p90[system.name].append(percentile(trace.latency, 0.9))
        here, there = (statistics.median(p90[s.name] or [float("inf")]) for s in (ours, other))
        found = Comparison(
            other.name,
            rate,
            here,
            there,
            1 - here / there,
            mine.peak,
            theirs.peak,
            mine.peak / max(theirs.peak, 1e-9) - 1,
        )
        self._say(
            f"{ours.name} against {other.name}: p90 at {rate:.0f} requests/s {1e3 * here:.2f} / {1e3 * there:.2f} ms "
            f"({-100 * found.latency_reduction:+.0f} %), peak {mine.peak:.0f} / {theirs.peak:.0f} "
            f"({100 * found.throughput_gain:+.0f} %)"
        )
        return found

    def _measure(self, system: Subject, rate: float) -> Point:
        point = Point.of(rate, self._trace(system, rate, 0))
        self.curves[system.name].points.append(point)
        self._say(
            f"{system.name} at {rate:.0f} requests/s: {point.throughput:.0f} done, p90 {1e3 * point.latency.p90:.2f} ms"
            f" (queueing {1e3 * point.queueing.p90:.2f}, compute {1e3 * point.compute.p90:.2f})"
        )
        return point

    def _trace(self, system: Subject, rate: float, run: int) -> Trace:
        plan = self._schedule
        arrived = poisson(rate, plan.seconds + plan.warm_up, plan.seed + run)
        # Whoever is later than this is beyond the bound anyway.
        trace = system.loaded(arrived, max(4 * self.bound, 0.2))
        return trace.measured(plan.warm_up)
