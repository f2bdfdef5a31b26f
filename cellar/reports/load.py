"""What a load test found: latencies as users feel them, throughput, goodput; as lines, JSON, CSV and plots.

Labels and JSON keys are vLLM's where it has them, so that what reads its output reads this. Inside, all times are
in seconds; milliseconds appear in lines, JSON and plots only. `cellar bench serve` and `cellar simulate` share it.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import ConfigError
from cellar.reports.load_metrics import GOODPUT_METRICS, METRICS

FloatArray: TypeAlias = NDArray[np.float64]

NO_GAPS: FloatArray = np.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class RequestTiming:
    """One request, as its client saw it. Times are in seconds from one origin; `gaps` lie between its token events.

    `arrival` is when it was sent, `delay` how long after it was due that was. `first_token` is NaN if none came.
    A request with `error` counts as failed, and none of its latencies count.
    """

    arrival: float
    first_token: float
    finish: float
    prompt_tokens: int
    output_tokens: int
    gaps: FloatArray = field(default_factory=lambda: NO_GAPS)
    error: str | None = None
    conversation: int = -1
    turn: int = 0
    delay: float = 0.0

    @classmethod
    def from_token_times(
        cls, arrival: float, token_times: Iterable[float], prompt_tokens: int, **rest: Any
    ) -> RequestTiming:
        """A request whose every token's time is known; it finishes with the last one."""
        times = np.asarray(list(token_times), dtype=np.float64)
        if not len(times):
            raise ValueError("a request that succeeded has at least one token")
        return cls(arrival, float(times[0]), float(times[-1]), prompt_tokens, len(times), gaps=np.diff(times), **rest)

    @property
    def ok(self) -> bool:
        """True if it succeeded."""
        return self.error is None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.first_token - self.arrival

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end."""
        return self.finish - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; NaN if there is no second one."""
        return (self.finish - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan

    @property
    def norm(self) -> float:
        """Seconds per token, waiting included; NaN without a token."""
        return self.e2el / self.output_tokens if self.output_tokens else math.nan

    def meets(self, bounds: Mapping[str, float]) -> bool:
        """True if it succeeded within every bound (seconds). A single token has no time per token to exceed."""
        return self.ok and not any(getattr(self, name) > bound for name, bound in bounds.items())


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one kind of latency, in seconds; NaN where there is no sample."""

    count: int
    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, samples: FloatArray, percentiles: Sequence[float]) -> Summary:
        """Percentiles interpolate linearly between samples; std is that of the samples themselves."""
        if not len(samples):
            return cls(0, math.nan, math.nan, math.nan, tuple((p, math.nan) for p in percentiles))
        found = np.percentile(samples, list(percentiles))
        return cls(
            len(samples),
            float(samples.mean()),
            float(np.median(samples)),
            float(samples.std()),
            tuple((p, float(value)) for p, value in zip(percentiles, found, strict=True)),
        )

    def at(self, percentile: float) -> float:
        """A percentile that was asked for. Raises KeyError."""
        return dict(self.percentiles)[percentile]


@dataclass(frozen=True, slots=True)
class Section:
    """More lines of a report, under a title of their own: label -> figure, and key -> figure in JSON."""

    title: str
    rows: tuple[tuple[str, str, float], ...]
    """(label with its unit, key in JSON, figure)"""


@dataclass(frozen=True, eq=False)
class LoadReport:
    """Figures of one run. Rates are per second of `duration`; tokens are those of requests that succeeded."""

    duration: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    request_throughput: float
    goodput: float | None
    output_throughput: float
    total_token_throughput: float
    peak_output_throughput: float
    peak_concurrency: int
    summaries: Mapping[str, Summary]
    samples: Mapping[str, FloatArray]
    shown: tuple[str, ...]
    errors: tuple[tuple[str, int], ...]
    request_rate: float | None = None
    max_concurrency: int | None = None
    label: str = ""
    sections: tuple[Section, ...] = ()

    @classmethod
    def of(
        cls,
        timings: Sequence[RequestTiming],
        duration: float,
        *,
        metrics: Sequence[str] = ("ttft", "tpot", "itl", "e2el"),
        percentiles: Sequence[float] = (99.0,),
        goodput: Mapping[str, float] | None = None,
        request_rate: float | None = None,
        max_concurrency: int | None = None,
        label: str = "",
        sections: tuple[Section, ...] = (),
    ) -> LoadReport:
        """Sum up a run of `duration` seconds. `goodput` bounds latencies, in seconds; `metrics` are those shown.

        A request rate of infinity or None is not shown. Raises ConfigError for an unknown metric.
        """
        for name in metrics:
            if name not in METRICS:
                raise ConfigError(f"metric {name!r} is unknown; use {', '.join(METRICS)}.")
        for name in goodput or ():
            if name not in GOODPUT_METRICS:
                raise ConfigError(f"goodput cannot bound {name!r}; use {', '.join(GOODPUT_METRICS)}.")
        if not duration > 0:
            raise ConfigError(f"a run of {duration} s has no rates; it must take time.")
        good = [t for t in timings if t.ok]
        samples = _samples(good)
        tokens_in, tokens_out = sum(t.prompt_tokens for t in good), sum(t.output_tokens for t in good)
        counts: dict[str, int] = {}
        for t in timings:
            if t.error is not None:
                counts[t.error] = counts.get(t.error, 0) + 1
        return cls(
            duration=duration,
            completed=len(good),
            failed=len(timings) - len(good),
            input_tokens=tokens_in,
            output_tokens=tokens_out,
            request_throughput=len(good) / duration,
            goodput=None if not goodput else sum(t.meets(goodput) for t in good) / duration,
            output_throughput=tokens_out / duration,
            total_token_throughput=(tokens_in + tokens_out) / duration,
            peak_output_throughput=_peak_rate(good),
            peak_concurrency=_peak_concurrency(timings),
            summaries={name: Summary.of(values, percentiles) for name, values in samples.items()},
            samples=samples,
            shown=tuple(metrics),
            errors=tuple(sorted(counts.items(), key=lambda item: -item[1])),
            request_rate=None if request_rate is None or math.isinf(request_rate) else request_rate,
            max_concurrency=max_concurrency,
            label=label,
            sections=sections,
        )

    # -- for people -------------------------------------------------------------------------------

    def lines(self, title: str = "Serving Benchmark Result") -> list[str]:
        """The report as vLLM prints it."""
        found = [f"{f' {title} ':=^50}"]
        found += [_line(label, value) for label, value in self._rows()]
        for name in self.shown:
            metric, summary = METRICS[name], self.summaries[name]
            found.append(f"{metric.title:-^50}")
            found.append(_line(f"Mean {metric.short} (ms):", summary.mean * 1e3))
            found.append(_line(f"Median {metric.short} (ms):", summary.median * 1e3))
            found += [_line(f"P{p:g} {metric.short} (ms):", value * 1e3) for p, value in summary.percentiles]
        for section in self.sections:
            found.append(f"{section.title:-^50}")
            found += [_line(f"{label}:", value) for label, _, value in section.rows]
        found.append("=" * 50)
        return found

    def _rows(self) -> list[tuple[str, float]]:
        rows: list[tuple[str, float | None]] = [
            ("Successful requests:", self.completed),
            ("Failed requests:", self.failed),
            ("Maximum request concurrency:", self.max_concurrency),
            ("Request rate configured (RPS):", self.request_rate),
            ("Benchmark duration (s):", self.duration),
            ("Total input tokens:", self.input_tokens),
            ("Total generated tokens:", self.output_tokens),
            ("Request throughput (req/s):", self.request_throughput),
            ("Request goodput (req/s):", self.goodput),
            ("Output token throughput (tok/s):", self.output_throughput),
            ("Peak output token throughput (tok/s):", self.peak_output_throughput),
            ("Peak concurrent requests:", self.peak_concurrency),
            ("Total token throughput (tok/s):", self.total_token_throughput),
        ]
        return [(label, value) for label, value in rows if value is not None]

    # -- for programs -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Figures by vLLM's keys; what has no sample is None."""
        found: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.request_throughput,
            "request_goodput": self.goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_output_tokens_per_s": self.peak_output_throughput,
            "max_concurrent_requests": self.peak_concurrency,
            "request_rate": "inf" if self.request_rate is None else self.request_rate,
            "max_concurrency": self.max_concurrency,
        }
        for name in self.shown:
            summary = self.summaries[name]
            found[f"mean_{name}_ms"] = summary.mean * 1e3
            found[f"median_{name}_ms"] = summary.median * 1e3
            found[f"std_{name}_ms"] = summary.std * 1e3
            found |= {f"p{p:g}_{name}_ms": value * 1e3 for p, value in summary.percentiles}
        for section in self.sections:
            found |= {key: value for _, key, value in section.rows}
        if self.label:
            found["label"] = self.label
        return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in found.items()}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())


def write_csv(reports: Sequence[LoadReport], path: Path) -> None:
    """One row per run of a sweep; columns are the keys of `to_dict`."""
    rows = [report.to_dict() for report in reports]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


# -- plots ----------------------------------------------------------------------------------------


def plot_sweep(curves: Mapping[str, Sequence[LoadReport]], path: Path, title: str = "") -> None:
    """Latency over throughput: one panel per latency, one line per curve (e.g. an engine), a point per run.

    The full line is the median, the broken one the highest percentile that was asked for. Raises ConfigError
    without matplotlib.
    """
    shown = _shown(report for reports in curves.values() for report in reports)
    figure, panels = _figure(len(shown), title)
    for panel, name in zip(panels, shown, strict=True):
        for number, (curve, reports) in enumerate(curves.items()):
            runs = [r for r in reports if r.summaries[name].count]
            x = [r.output_throughput for r in runs]
            color = f"C{number}"
            median = [r.summaries[name].median * 1e3 for r in runs]
            panel.plot(x, median, "o-", color=color, label=f"{curve}, median" if curve else "median")
            if runs and runs[0].summaries[name].percentiles:
                p = max(runs[0].summaries[name].percentiles)[0]
                high = [r.summaries[name].at(p) * 1e3 for r in runs]
                panel.plot(x, high, "o--", color=color, alpha=0.6, label=f"{curve}, p{p:g}" if curve else f"p{p:g}")
            for report, px, py in zip(runs, x, median, strict=True):
                panel.annotate(
                    report.label, (px, py), xytext=(4, 4), textcoords="offset points", fontsize=7, color="0.4"
                )
        panel.set_title(METRICS[name].title, fontsize=10)
        panel.set_xlabel("output tokens per second")
        panel.set_ylabel(f"{METRICS[name].short} (ms)")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    _save(figure, path)


def plot_cdfs(reports: Mapping[str, LoadReport], path: Path, title: str = "") -> None:
    """Which share of requests (of gaps, for ITL) stays below a latency: one panel per latency, a line per report."""
    shown = _shown(reports.values())
    figure, panels = _figure(len(shown), title)
    for panel, name in zip(panels, shown, strict=True):
        for label, report in reports.items():
            values = np.sort(report.samples[name]) * 1e3
            if not len(values):
                continue
            share = np.arange(1, len(values) + 1) / len(values)
            if len(values) > _POINTS:  # a million gaps are no clearer than a few thousand points
                keep = np.unique(np.linspace(0, len(values) - 1, _POINTS).astype(np.int64))
                values, share = values[keep], share[keep]
            panel.step(values, share, where="post", label=label)
        panel.set_title(METRICS[name].title, fontsize=10)
        panel.set_xlabel(f"{METRICS[name].short} (ms)")
        panel.set_ylabel("share of samples")
        panel.set_ylim(0, 1.02)
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
    if any(reports):
        panels[0].legend(fontsize=8)
    _save(figure, path)


_POINTS = 4000


def _shown(reports: Iterable[LoadReport]) -> list[str]:
    """The latencies that some report shows, in their usual order."""
    names = {name for report in reports for name in report.shown}
    if not names:
        raise ConfigError("there is nothing to plot; give at least one report that shows a metric.")
    return [name for name in METRICS if name in names]


def _figure(num_panels: int, title: str) -> tuple[Any, list[Any]]:
    try:
        figures = import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("plots need matplotlib; install it with `pip install matplotlib`.") from error
    columns = min(num_panels, 2) if num_panels != 3 else 3
    rows = -(-num_panels // columns)
    figure = figures.Figure(figsize=(5.2 * columns, 3.8 * rows), layout="constrained")
    if title:
        figure.suptitle(title)
    panels = [figure.add_subplot(rows, columns, k + 1) for k in range(num_panels)]
    return figure, panels


def _save(figure: Any, path: Path) -> None:
    import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120)


# -- figures --------------------------------------------------------------------------------------


def _line(label: str, value: float | int) -> str:
    if isinstance(value, float):
        return f"{label:<40} {'-' if math.isnan(value) else f'{value:.2f}':<10}"
    return f"{label:<40} {value:<10}"


def _samples(good: Sequence[RequestTiming]) -> dict[str, FloatArray]:
    found = {}
    for name in METRICS:
        if name == "itl":
            values = np.concatenate([t.gaps for t in good]) if good else NO_GAPS
        else:
            values = np.array([getattr(t, name) for t in good], dtype=np.float64)
        found[name] = values[~np.isnan(values)]
    return found


def _peak_rate(good: Sequence[RequestTiming]) -> float:
    """Most output tokens in one second, counted in whole seconds from the first arrival.

    A request's tokens are spread evenly over its token events, which may bring several each.
    """
    if not good:
        return 0.0
    origin = min(t.arrival for t in good)
    totals = np.zeros(int(max(t.finish for t in good) - origin) + 1)
    for t in good:
        if t.output_tokens and not math.isnan(t.first_token):
            times = t.first_token - origin + np.concatenate((np.zeros(1), np.cumsum(t.gaps)))
            seconds = np.minimum(times.astype(np.int64), len(totals) - 1)
            np.add.at(totals, seconds, t.output_tokens / len(times))
    return float(totals.max())


def _peak_concurrency(timings: Sequence[RequestTiming]) -> int:
    """Most requests between sending and end at any moment; one that ends as another begins does not count twice."""
    if not timings:
        return 0
    moments = np.array([t.finish for t in timings] + [t.arrival for t in timings])
    steps = np.repeat([-1, 1], len(timings))
    order = np.lexsort((steps, moments))
    return int(np.cumsum(steps[order]).max())
