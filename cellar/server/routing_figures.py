"""What is counted where requests are given to engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from cellar.routing.router import Why
from cellar.server.histogram import Histogram
from cellar.server.tally import Tally

_SECONDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1)
_MIGRATED = "requests_migrated"
_CHOICES = "router_choices"


class RoutingFigures:
    """Counts in a tally; the front's engine thread alone adds to them."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._seconds = Histogram(
            tally,
            "router_choice_seconds",
            "Time to choose an engine for a request, with the names of its chunks.",
            _SECONDS,
        )
        tally.places([_MIGRATED, *(f"{_CHOICES}/{why}" for why in Why)])

    def chosen(self, why: str, seconds: float) -> None:
        """A request was given to an engine, out of several."""
        self._tally.add(f"{_CHOICES}/{why}")
        self._seconds.observe(seconds)

    def migrated(self, count: int) -> None:
        """So many sequences go on at another engine, because theirs was lost or drains."""
        self._tally.add(_MIGRATED, count)

    def families(self, labels: Mapping[str, str], counts: Mapping[str, float]) -> Iterator[Metric]:
        """As Prometheus has them, from `counts` of all fronts."""
        moved = CounterMetricFamily(
            f"cellar:{_MIGRATED}", "Sequences that went on at another engine.", labels=list(labels)
        )
        moved.add_metric(list(labels.values()), counts.get(_MIGRATED, 0.0))
        yield moved
        choices = CounterMetricFamily(
            f"cellar:{_CHOICES}", "Engines chosen for a request, by what decided.", labels=[*labels, "reason"]
        )
        for why in Why:
            choices.add_metric([*labels.values(), why], counts.get(f"{_CHOICES}/{why}", 0.0))
        yield choices
        yield self._seconds.family(labels, counts)
