"""The load sweep: latency at rising loads, each system's peak, and the comparison at half of a baseline's peak."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from benchmarks.cells.arrivals import poisson
from benchmarks.cells.drive import QUANTILES, Trace, percentile
from benchmarks.cells.subject import Subject

SLOWDOWN = 10.0
"""A system is saturated where its p90 latency is this many times that of the unloaded system."""

CALM = 1.25
"""A run is undisturbed whose pace is within this factor of the fastest that was seen."""

CONTRADICTION = 1.1
"""A point contradicts the next higher load if its p90 is more than this many times that one's."""

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

    @classmethod
    def middle(cls, several: Sequence[Quantiles]) -> Quantiles:
        """The median of several runs, of each quantile."""
        return cls(*(statistics.median([getattr(one, name) for one in several]) for name in ("p50", "p90", "p99")))


@dataclass(frozen=True)
class Point:
    """One system at one load. Rates in requests/s; `unfinished` requests count as infinitely late.

    Quantiles are the medians of those of `runs` runs with different arrivals; `pace` is the processor's in them, 0: not
    known.
    """

    rate: float
    throughput: float
    latency: Quantiles
    queueing: Quantiles
    compute: Quantiles
    num_requests: int
    unfinished: int
    runs: int = 1
    pace: float = 0.0

    @classmethod
    def of(cls, rate: float, *traces: Trace) -> Point:
        """What some runs showed."""
        return cls(
            rate,
            statistics.median([trace.throughput for trace in traces]),
            Quantiles.middle([Quantiles.of(trace.latency) for trace in traces]),
            Quantiles.middle([Quantiles.of(trace.queueing) for trace in traces]),
            Quantiles.middle([Quantiles.of(trace.compute) for trace in traces]),
            sum(len(trace.arrived) for trace in traces),
            sum(int(np.isinf(trace.ended).sum()) for trace in traces),
            len(traces),
            statistics.median([trace.pace for trace in traces]),
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

        It is where the curve crosses the bound, after points that contradict each other have become their mean (the
        nearest curve that never falls), so that no single point decides.
        """
        self.points.sort(key=lambda point: point.rate)
        risen = rising([math.log(max(point.latency.p90, 1e-9)) for point in self.points])
        rates, limit = [point.rate for point in self.points], math.log(bound) if bound > 0 else -math.inf
        held = sum(p90 < limit for p90 in risen)
        if not held:
            self.peak = 0.0
        elif held == len(rates) or math.isinf(risen[held]):
            self.peak = rates[held - 1]
        else:
            share = (limit - risen[held - 1]) / (risen[held] - risen[held - 1])
            self.peak = rates[held - 1] + share * (rates[held] - rates[held - 1])


def rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence, by squares, that never falls (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (last, many), (before, few) = pools.pop(), pools.pop()
            mean = math.inf if math.isinf(last) or math.isinf(before) else (last * many + before * few) / (many + few)
            pools.append((mean, many + few))
    return [value for value, count in pools for _ in range(count)]


@dataclass(frozen=True)
class Comparison:
    """Ours beside one baseline: p90 at half of the baseline's peak, and the peaks.

    Both run by turns with the same arrivals, `pairs` are their p90s. `latency_reduction` is by the median of the pairs'
    ratios, which shares the luck of the arrivals and of the minute; p90s are the medians.
    """

    baseline: str
    rate: float
    p90_ours: float
    p90_baseline: float
    latency_reduction: float
    peak_ours: float
    peak_baseline: float
    throughput_gain: float
    pairs: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Schedule:
    """How long and how often is measured. Without `rates` they follow from the systems' saturated throughput.

    A disturbed run is repeated up to `retries` times, and points that contradict each other are, each time with other
    arrivals.
    """

    seconds: float = 5.0
    warm_up: float = 0.5
    rounds: int = 3
    rates: tuple[float, ...] = ()
    refinements: int = 4
    retries: int = 2
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
        self._traces: dict[tuple[str, float], list[Trace]] = {}
        self._pace = float("inf")

    def run(self) -> list[Comparison]:
        """Measure everything; the curves are in `curves`, the comparisons with each other system are returned."""
        self._unloaded()
        self._rising()
        for _ in range(self._schedule.refinements):
            for system in self._systems:
                self._refine(system)
        for _ in range(self._schedule.retries):
            for system in self._systems:
                self._settle_contradictions(system)
        for curve in self.curves.values():
            curve.settle(self.bound)
        self._distributions()
        ours, *others = self._systems
        return [self._compare(ours, other) for other in others]

    def _unloaded(self) -> None:
        plan = self._schedule
        for system in self._systems:
            # First calls choose and pack, and forms of requests that were not seen before are compiled: loads at which
            # many come would otherwise be the only ones to pay for that.
            system.unloaded(10)
            system.saturated(plan.saturating_requests)
            alone = self._calm(lambda: [system.unloaded(plan.unloaded_requests)])[0]  # noqa: B023
            full = self._calm(lambda: [system.saturated(plan.saturating_requests)])[0]  # noqa: B023
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
        """One more point where the curve seems to cross the bound; a second run where there is one already."""
        curve = self.curves[system.name]
        curve.settle(self.bound)
        rates = [point.rate for point in curve.points]
        below = max((rate for rate in rates if rate <= curve.peak), default=0.0)
        above = min((rate for rate in rates if rate > curve.peak), default=1.2 * curve.peak)
        middle = (below + above) / 2
        near = min((rate for rate in rates if rate), key=lambda rate: abs(rate - middle), default=middle)
        if middle:
            self._measure(system, near if abs(near - middle) < 0.02 * middle else middle)

    def _distributions(self) -> None:
        """All systems at one load that all bear: half of the lowest peak (figure 2.9)."""
        rate = min(curve.peak for curve in self.curves.values()) / 2
        for system in self._systems if rate else ():
            self.curves[system.name].distribution = Distribution.of(rate, self._trace(system, rate, 0))

    def _settle_contradictions(self, system: Subject) -> None:
        """Measure again where a lower load was worse than the next higher one."""
        points = sorted(self.curves[system.name].points, key=lambda point: point.rate)
        again = {
            rate
            for low, high in pairwise(points)
            if low.latency.p90 > CONTRADICTION * high.latency.p90
            for rate in (low.rate, high.rate)
        }
        for rate in sorted(again):
            self._measure(system, rate)

    def _compare(self, ours: Subject, other: Subject) -> Comparison:
        mine, theirs = self.curves[ours.name], self.curves[other.name]
        rate = theirs.peak / 2
        pairs: list[tuple[float, float]] = []
        for k in range(self._schedule.rounds if rate else 0):
            first, second = self._calm(lambda: [self._trace(system, rate, k) for system in (ours, other)])  # noqa: B023
            pairs.append((percentile(first.latency, 0.9), percentile(second.latency, 0.9)))
        none = [(float("inf"), float("inf"))]
        here, there = (statistics.median(p90s) for p90s in zip(*(pairs or none), strict=True))
        ratios = [one / another for one, another in pairs if another < float("inf")]
        found = Comparison(
            other.name,
            rate,
            here,
            there,
            1 - statistics.median(ratios) if ratios else float("nan"),
            mine.peak,
            theirs.peak,
            mine.peak / max(theirs.peak, 1e-9) - 1,
            pairs,
        )
        self._say(
            f"{ours.name} against {other.name}: p90 at {rate:.0f} requests/s {1e3 * here:.2f} / {1e3 * there:.2f} ms "
            f"({-100 * found.latency_reduction:+.0f} %), peak {mine.peak:.0f} / {theirs.peak:.0f} "
            f"({100 * found.throughput_gain:+.0f} %)"
        )
        return found

    def _measure(self, system: Subject, rate: float) -> Point:
        """A point, of all the runs at this load so far and one more."""
        traces = self._traces.setdefault((system.name, rate), [])
        traces += self._calm(lambda: [self._trace(system, rate, len(traces))])
        point = Point.of(rate, *traces)
        points = self.curves[system.name].points
        points[:] = [other for other in points if other.rate != rate] + [point]
        self._say(
            f"{system.name} at {rate:.0f} requests/s: {point.throughput:.0f} done, p90 {1e3 * point.latency.p90:.2f} ms"
            f" (queueing {1e3 * point.queueing.p90:.2f}, compute {1e3 * point.compute.p90:.2f})"
        )
        return point

    def _calm(self, run: Callable[[], list[Trace]]) -> list[Trace]:
        """What `run` shows while nobody disturbs it, or of some tries the least disturbed."""
        best: list[Trace] = []
        for _ in range(1 + self._schedule.retries):
            traces = run()
            self._pace = min([self._pace, *(trace.pace for trace in traces if trace.pace)])
            if not best or _slowest(traces) < _slowest(best):
                best = traces
            if _slowest(best) <= CALM * self._pace:
                break
        return best

    def _trace(self, system: Subject, rate: float, run: int) -> Trace:
        plan = self._schedule
        arrived = poisson(rate, plan.seconds + plan.warm_up, plan.seed + run)
        # Whoever is later than this is beyond the bound anyway.
        trace = system.loaded(arrived, max(4 * self.bound, 0.2))
        return trace.measured(plan.warm_up)


def _slowest(traces: Sequence[Trace]) -> float:
    return max(trace.pace for trace in traces)
