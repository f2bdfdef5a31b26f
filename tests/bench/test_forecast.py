"""Each step is priced by its own counts, and the sums stand beside what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from cellar.bench.forecast import Forecast
from cellar.bench.offline import Bench
from cellar.bench.workload import Workload
from cellar.core.hardware import Device, Measure, Profile
from cellar.core.messages import Emit, Source, Spans, StepPlan, StepResult, TableUpdate
from cellar.planner.saved import SavedPlan
from cellar.planner.work import StepCost
from tests.tiny_checkpoint import write_checkpoint

# A token costs 1 s, a position attended to 0.01 s, one read nothing, logits 100 s, a step 1,000 s, one with prompts
# 5,000 s at least.
COST = StepCost(
    token_flops=1.0,
    token_bytes=0.0,
    weights=0.0,
    attended=0.01,
    resident=0.0,
    sampled=0.0,
    head=100.0,
    launches=1000.0,
    eager=5000.0,
)
NONE = np.zeros(0, np.int32)


def step(*spans: tuple[int, int, Source, Emit]) -> StepPlan:
    start, stop, source, emit = (np.array(values, np.int32) for values in zip(*spans, strict=True))
    table = TableUpdate(NONE, NONE, NONE)
    return StepPlan(0, Spans(np.arange(len(spans), dtype=np.int32), start, stop, source, emit), NONE, table)


def result(seconds: float, error: str | None = None) -> StepResult:
    return StepResult(0, NONE, NONE, NONE, seconds=seconds, error=error)


def test_steps_are_priced_by_their_own_counts() -> None:
    forecast = Forecast(COST, "hand")
    forecast.observe(step((0, 10, Source.HOST, Emit.NONE)), result(4000.0))
    forecast.observe(step((20, 21, Source.DEVICE, Emit.LAST), (0, 4, Source.HOST, Emit.LAST)), result(6000.0))
    forecast.observe(step((21, 22, Source.DEVICE, Emit.LAST)), result(2000.0))
    forecast.observe(step((22, 23, Source.DEVICE, Emit.LAST)), result(1000.0))
    forecast.observe(step((23, 24, Source.DEVICE, Emit.LAST)), result(9.0, "failed"))
    report = forecast.report(tokens=4, seconds=20_000.0)
    assert report is not None
    assert [(p.phase, p.num_steps, p.measured) for p in report.phases] == [
        ("prefill", 1, 4000.0),
        ("mixed", 1, 6000.0),
        ("decode", 2, 3000.0),
    ]
    prefill, mixed, decode = (phase.predicted for phase in report.phases)
    assert (prefill, mixed) == (5000.0, 5000.0)  # the launches of prompts
    assert decode == pytest.approx(2 * (1000 + 100 + 1) + 0.01 * (22 + 23))
    assert report.predicted == prefill + mixed + decode
    found = report.to_dict()
    assert found["predicted_rate"] == 4 / report.predicted
    assert found["measured_rate"] == 4 / 20_000
    assert "predicted by the hand" in report.lines()[0]
    forecast.clear()
    assert forecast.report(1, 1.0) is None


@pytest.mark.parametrize("attends", [False, True])
def test_channels_are_predicted_and_measured_each(attends: bool) -> None:
    """Sums over the steps, beside what channels have been busy since the run began; a step of few tokens has rates of
    its own.
    """
    moves = {"disk": 7.0, "link": 3.0, "few_link": 2.0, "few_rows": 1.0, "attends": attends}
    busy = {"disk": 50.0, "link": 1.0, "cpu": 0.0, "device": 10.0}
    plan = SimpleNamespace(cost=replace(COST, streamed=1e6), machine="hand", figures={"moves": moves})
    forecast = Forecast()
    forecast.follow(cast(SavedPlan, plan), lambda: dict(busy))
    forecast.observe(step((0, 100, Source.HOST, Emit.NONE)), result(1.0))
    forecast.observe(step((100, 101, Source.DEVICE, Emit.LAST)), result(1.0))
    busy |= {"disk": 66.0, "link": 5.5, "device": 2010.0}
    report = forecast.report(1, 10.0)
    assert report is not None
    attention = 0.01 * (5050 + 101)
    products = 1000.0 + 100 + 1000 + 1 + 100
    cpu, device = (1 + attention, products) if attends else (1, products + attention)
    found = {way.channel: (way.predicted, way.measured) for way in report.channels}
    assert found == {
        "disk": (14.0, 16.0),
        "link": (5.0, 4.5),
        "cpu": (pytest.approx(cpu), 0.0),
        "device": (pytest.approx(device), 2000.0),
    }
    assert [line.split()[:2] for line in report.lines()[4:8]] == [[name, "busy"] for name in found]
    assert report.to_dict()["channels"][0] == {"channel": "disk", "predicted": 14.0, "measured": 16.0}
    forecast.clear()
    forecast.observe(step((100, 101, Source.DEVICE, Emit.LAST)), result(1.0))
    again = forecast.report(1, 10.0)
    assert again is not None
    assert again.channels[0].measured == 0
    assert again.channels[0].predicted == 7.0


def test_windows_bound_what_is_attended_to() -> None:
    for windows, attended in (((), 1000.0), ((100, None), 550.0), ((100, 100), 100.0)):
        forecast = Forecast(replace(COST, windows=windows), "hand")
        forecast.observe(step((999, 1000, Source.DEVICE, Emit.NONE)), result(1.0))
        report = forecast.report(1, 1.0)
        assert report is not None
        assert report.predicted == pytest.approx(1000 + 1 + 0.01 * attended)


def test_without_a_cost_nothing_is_predicted() -> None:
    forecast = Forecast()
    forecast.observe(step((0, 10, Source.HOST, Emit.NONE)), result(1.0))
    assert forecast.report(1, 1.0) is None


def test_a_profile_predicts_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plan: the profile that was given; without one of this machine nothing is said."""
    monkeypatch.setattr("cellar.reports.forecast.default_path", lambda machine: tmp_path / "none.json")
    rates = {"float32": Measure(1e9, "FLOP/s", "measured")}
    memory = Measure(1e10, "bytes", "measured"), Measure(1e10, "bytes/s", "measured")
    profile = Profile("some-cpu", (Device("cpu", "cpu", *memory, rates, Measure(1e-3, "s", "measured")),))
    bench = Bench(
        {"model": str(write_checkpoint(tmp_path / "tiny")), "num_threads": 1, "device": "cpu",
         "kv_cache_memory_bytes": 10**6, "enable_prefix_caching": False}
    )  # fmt: skip
    try:
        work = Workload(([5] * 10,), (3,))
        report = bench.report(work, profile)
        assert report.forecast is not None
        assert "some-cpu, which has no measured steps" in report.forecast.source
        # Three steps of two layers with 12 launches of a millisecond each, and little else.
        assert report.forecast.predicted == pytest.approx(3 * 2 * 12e-3, rel=0.05)
        bench.forecast = Forecast()
        monkeypatch.setattr("cellar.bench.offline.limits_of", lambda *_: report.limits)
        assert bench.report(work, None).forecast is None
    finally:
        bench.close()
