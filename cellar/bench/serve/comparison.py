"""Comparison: two servers under the same load in turns, and the ratios of what their users felt.

Ratios are taken within a round, where both sides met the same machine and the same requests; their median is what
counts, and the least and the most say how far to trust it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cellar.reports.load import LoadReport
from cellar.reports.load_metrics import METRICS


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both sides, round by round."""

    label: str
    key: str
    first: tuple[float, ...]
    second: tuple[float, ...]
    higher_is_better: bool

    @property
    def ratios(self) -> tuple[float, ...]:
        """First by second, of the rounds in which both have the figure."""
        return tuple(a / b for a, b in zip(self.first, self.second, strict=True) if a == a and b == b and b > 0)

    @property
    def verdict(self) -> str:
        """Which side is ahead in every round, if one is."""
        ratios = self.ratios
        if not ratios or min(ratios) <= 1 <= max(ratios):
            return "even"
        return "first" if (min(ratios) > 1) == self.higher_is_better else "second"


@dataclass(frozen=True)
class Comparison:
    """The reports of both sides, a pair for each round; sides are named by their addresses."""

    first: str
    second: str
    rounds: Sequence[tuple[LoadReport, LoadReport]]

    def rows(self) -> Iterator[Row]:
        """Throughputs, then the latencies that are shown."""
        shown = self.rounds[0][0]
        yield self._row("requests/s", "request_throughput", True)
        yield self._row("output tokens/s", "output_throughput", True)
        for name in shown.shown:
            yield self._row(f"{METRICS[name].short} p50, ms", f"median_{name}_ms", False)
            for p, _ in shown.summaries[name].percentiles:
                yield self._row(f"{METRICS[name].short} p{p:g}, ms", f"p{p:g}_{name}_ms", False)

    def lines(self) -> Iterator[str]:
        """A table: each side's median over the rounds, and first by second."""
        yield f"first:  {self.first}"
        yield f"second: {self.second}"
        yield f"{'':<20} {'first':>10} {'second':>10} {'ratio':>7} {'least':>7} {'most':>7}  ahead in all rounds"
        for row in self.rows():
            ratios = row.ratios
            figures = (median(row.first), median(row.second))
            shares = (median(ratios), min(ratios), max(ratios)) if ratios else (float("nan"),) * 3
            yield (
                f"{row.label:<20} "
                + " ".join(f"{value:>10.2f}" for value in figures)
                + " "
                + " ".join(f"{value:>7.3f}" for value in shares)
                + f"  {row.verdict}"
            )

    def to_dict(self) -> dict[str, Any]:
        """For programs: both sides' figures of every round, and the median ratios by key."""
        return {
            "first": self.first,
            "second": self.second,
            "rounds": [[report.to_dict() for report in pair] for pair in self.rounds],
            "ratios": {row.key: median(row.ratios) if row.ratios else None for row in self.rows()},
        }

    def _row(self, label: str, key: str, higher_is_better: bool) -> Row:
        values = [
            tuple(float("nan") if (found := side.to_dict()[key]) is None else float(found) for side in sides)
            for sides in zip(*self.rounds, strict=True)
        ]
        return Row(label, key, values[0], values[1], higher_is_better)
