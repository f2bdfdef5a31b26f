"""Histogram: counts of values by bucket, in a tally."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from prometheus_client.core import HistogramMetricFamily, Metric

from cellar.server.tally import Tally


class Histogram:
    """Counts of values by bucket, not cumulated, and their sum, in a tally."""

    def __init__(self, tally: Tally, stem: str, help: str, bounds: tuple[float, ...]) -> None:
        self.stem = stem
        self._help = help
        self._bounds = bounds
        self._names = [f"{stem}/{k}" for k in range(len(bounds) + 1)] + [f"{stem}/sum"]
        self._values = tally.values
        self._first = tally.places(self._names)
        self._sum = self._first + len(bounds) + 1

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._values[self._first + bisect_left(self._bounds, value)] += times
        self._values[self._sum] += value * times

    def family(self, labels: Mapping[str, str], counts: Mapping[str, float]) -> Metric:
        """The histogram as Prometheus has it."""
        cumulated, buckets = 0.0, list[tuple[str, float]]()
        for bound, name in zip((*map(float, self._bounds), "+Inf"), self._names, strict=False):
            cumulated += counts.get(name, 0.0)
            buckets.append((str(bound), cumulated))
        family = HistogramMetricFamily(f"cellar:{self.stem}", self._help, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, counts.get(self._names[-1], 0.0))
        return family
