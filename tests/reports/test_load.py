"""The report of a load test against figures worked out by hand."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.core.errors import ConfigError
from cellar.reports.load import (
    LoadReport,
    RequestTiming,
    Section,
    Summary,
    plot_cdfs,
    plot_sweep,
    write_csv,
)

PNG = b"\x89PNG\r\n\x1a\n"

# Three that succeed, and one that fails while two run.
A = RequestTiming.from_token_times(0.0, [1.0, 1.5, 2.0], 10)
B = RequestTiming.from_token_times(1.0, [1.5, 1.7, 1.9, 2.1, 2.5], 20, conversation=4, turn=2)
C = RequestTiming(1.2, math.nan, 1.4, 99, 0, error="HTTP 503: busy")
D = RequestTiming.from_token_times(3.0, [3.25], 30)


def report(**options: object) -> LoadReport:
    return LoadReport.of([A, B, C, D], 4.0, **options)  # type: ignore[arg-type]


def test_one_request() -> None:
    assert (A.ttft, A.tpot, A.e2el) == (1.0, 0.5, 2.0)
    assert A.norm == pytest.approx(2 / 3)
    assert (B.conversation, B.turn) == (4, 2)
    assert B.tpot == pytest.approx(0.25)
    assert math.isnan(D.tpot)
    assert not C.ok
    with pytest.raises(ValueError, match="at least one token"):
        RequestTiming.from_token_times(0.0, [], 1)


def test_counts_and_rates() -> None:
    found = report()
    assert (found.completed, found.failed) == (3, 1)
    assert (found.input_tokens, found.output_tokens) == (60, 9)
    assert found.request_throughput == 0.75
    assert found.output_throughput == 2.25
    assert found.total_token_throughput == 17.25
    assert found.peak_output_throughput == 5.0  # in the second second: 1.0, 1.5 and 1.5, 1.7, 1.9
    assert found.peak_concurrency == 3
    assert found.errors == (("HTTP 503: busy", 1),)
    assert found.goodput is None


def test_latencies() -> None:
    summary = report(percentiles=(50, 99)).summaries["ttft"]
    assert summary.count == 3
    assert summary.mean == pytest.approx(1.75 / 3)
    assert summary.median == 0.5
    assert summary.std == pytest.approx(math.sqrt((0.25**2 + 0.5**2 + 1) / 3 - (1.75 / 3) ** 2))
    assert summary.at(50) == 0.5
    assert summary.at(99) == pytest.approx(0.99)  # 98 % of the way from 0.5 to 1
    assert report().summaries["tpot"].count == 2  # a single token has none
    assert report().summaries["itl"].mean == pytest.approx((0.5 + 0.5 + 0.2 + 0.2 + 0.2 + 0.4) / 6)
    assert report().summaries["e2el"].median == 1.5
    with pytest.raises(KeyError):
        summary.at(90)


def test_goodput_counts_requests_within_all_bounds() -> None:
    assert report(goodput={"ttft": 0.6, "tpot": 0.3}).goodput == 0.5  # B and D of 4 s
    assert report(goodput={"ttft": 1.0}).goodput == 0.75  # a bound may be reached
    assert report(goodput={"e2el": 0.2}).goodput == 0.0


def test_lines_are_those_of_vllm() -> None:
    lines = report(request_rate=2.0, max_concurrency=3, goodput={"ttft": 1.0}, metrics=("ttft",)).lines()
    assert lines == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3         ",
        "Failed requests:                         1         ",
        "Maximum request concurrency:             3         ",
        "Request rate configured (RPS):           2.00      ",
        "Benchmark duration (s):                  4.00      ",
        "Total input tokens:                      60        ",
        "Total generated tokens:                  9         ",
        "Request throughput (req/s):              0.75      ",
        "Request goodput (req/s):                 0.75      ",
        "Output token throughput (tok/s):         2.25      ",
        "Peak output token throughput (tok/s):    5.00      ",
        "Peak concurrent requests:                3         ",
        "Total token throughput (tok/s):          17.25     ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          583.33    ",
        "Median TTFT (ms):                        500.00    ",
        "P99 TTFT (ms):                           990.00    ",
        "==================================================",
    ]


def test_titles_of_all_metrics() -> None:
    lines = report(percentiles=(99.9,), request_rate=math.inf).lines()
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "---------------Inter-token Latency----------------" in lines
    assert "----------------End-to-end Latency----------------" in lines
    assert any(line.startswith("P99.9 E2EL (ms):") for line in lines)
    assert not any("RPS" in line or "concurrency:" in line for line in lines)


def test_json_has_keys_of_vllm_and_no_nan() -> None:
    found = json.loads(report(sections=(Section("Client", (("Lag (ms)", "lag_ms", 2.0),)),), label="x").to_json())
    for key in ("duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput"):
        assert key in found
    for name in ("ttft", "tpot", "itl", "e2el"):
        for figure in ("mean", "median", "std", "p99"):
            assert f"{figure}_{name}_ms" in found
    assert found["mean_ttft_ms"] == pytest.approx(1750 / 3)
    assert (found["lag_ms"], found["label"], found["request_rate"]) == (2.0, "x", "inf")
    nothing = LoadReport.of([C], 1.0)
    assert json.loads(nothing.to_json())["mean_ttft_ms"] is None
    assert any(line.split()[-1] == "-" for line in nothing.lines())


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="metric 'x' is unknown"):
        report(metrics=("x",))
    with pytest.raises(ConfigError, match="goodput cannot bound 'itl'"):
        report(goodput={"itl": 1.0})
    with pytest.raises(ConfigError, match="must take time"):
        LoadReport.of([A], 0.0)
    with pytest.raises(ConfigError, match="nothing to plot"):
        plot_cdfs({}, Path("x.png"))


def test_files(tmp_path: Path) -> None:
    runs = [report(label=f"rate {k}", request_rate=float(k)) for k in (1, 2)] + [LoadReport.of([C], 1.0, label="none")]
    write_csv(runs, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["rate 1", "rate 2", "none"]
    assert float(rows[0]["p99_ttft_ms"]) == pytest.approx(990)
    assert rows[2]["p99_ttft_ms"] == ""
    plot_sweep({"cellar": runs, "other": runs[:1]}, tmp_path / "a.png", "a title")
    plot_cdfs({"a": runs[0], "none": runs[2]}, tmp_path / "b.png")
    for name in ("a.png", "b.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_tokens_that_come_together_share_their_moment() -> None:
    # Ten tokens in two events: five in second 0, five in second 2.
    timing = RequestTiming(0.0, 0.5, 2.5, 1, 10, gaps=np.array([2.0]))
    found = LoadReport.of([timing], 2.5)
    assert found.peak_output_throughput == 5.0
    assert found.summaries["tpot"].mean == pytest.approx(2.0 / 9)
    assert found.summaries["itl"].mean == 2.0


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 20)), min_size=1, max_size=40))
def test_peak_concurrency_is_that_of_the_worst_moment(spans: list[tuple[float, float]]) -> None:
    timings = [RequestTiming.from_token_times(start, [start + length], 1) for start, length in spans]
    moments = [t.arrival for t in timings]  # the count only ever rises at an arrival
    worst = max(sum(t.arrival <= m < t.finish for t in timings) for m in moments)
    assert LoadReport.of(timings, 100.0).peak_concurrency == worst


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_lie_between_the_samples_around_them(samples: list[float], percentile: float) -> None:
    summary = Summary.of(np.array(samples), [percentile])
    below = sum(s <= summary.at(percentile) + 1e-9 for s in samples)
    assert below >= math.floor(percentile / 100 * (len(samples) - 1)) + 1
    assert min(samples) <= summary.median <= max(samples)
