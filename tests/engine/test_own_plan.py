"""What an engine that plans for itself takes a machine to be able to."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellar.core.config import EngineConfig
from cellar.engine import own_plan
from cellar.models import registry
from cellar.planner.passes import LINK_READS, LINK_READS_OF_CODES, Rates
from cellar.runtime.offload.rates import MeasuredRates
from tests.tiny_checkpoint import write_checkpoint

FOUND = MeasuredRates(
    alone=60e9, link=50e9, disk=0.0, multiply=70e9, attention=57e9, flops=1e12, exchange=2e-4, threads=11
)


@pytest.mark.parametrize(
    ("kept", "sparse_v", "share"), [("auto", None, LINK_READS), ("fp8", None, LINK_READS_OF_CODES), ("auto", 0.1, 0.0)]
)
def test_the_device_reads_over_the_link_unless_values_are_left_out(
    kept: str, sparse_v: float | None, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellar.runtime.offload.rates.measured_rates", lambda *_: FOUND)
    raw = registry.read_config(write_checkpoint(tmp_path))
    spec = registry.open_model(raw, "float32", 16, 64, None, kept).spec
    config = EngineConfig.of(model=str(tmp_path), device="cpu", device_memory=1.0, sparse_v=sparse_v)
    rates, threads = own_plan._rates(config, spec, "gpu")
    assert threads == 11
    assert (rates.link, rates.attention, rates.reads) == (50e9, 57e9, share * 50e9)


def test_an_engine_gets_the_threads_that_its_plan_was_measured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_plan, "_rates", lambda *_: (Rates(), 5))
    monkeypatch.setattr(own_plan, "fits", lambda *_: False)
    config = EngineConfig.of(
        model=str(write_checkpoint(tmp_path)), device="cpu", device_memory=1.0, max_model_len=64, max_num_seqs=2
    ).on("cpu")
    planned, plan = own_plan.with_own_plan(config, tmp_path)
    assert plan is not None
    assert planned.device.num_threads == 5
    assert config.device.num_threads is None
