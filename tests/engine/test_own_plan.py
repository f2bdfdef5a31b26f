"""What an engine that plans for itself takes a machine to be able to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cellar import LLM, SamplingParams
from cellar.bench.meter import MeteredRuntime
from cellar.core.config import EngineConfig, step_tokens
from cellar.core.messages import StepPlan, StepResult
from cellar.engine import own_plan
from cellar.engine.opened import open_front
from cellar.models import registry
from cellar.planner.moves import LINK_READS
from cellar.planner.passes import LINK_READS_OF_CODES, PROMPT_SHARE
from cellar.planner.rates import Rates
from cellar.planner.work import FEW_TOKENS
from cellar.runtime.offload.device_rates import DeviceRates
from cellar.runtime.offload.rates import MeasuredRates
from tests.tiny_checkpoint import write_checkpoint

FOUND = MeasuredRates(
    alone=60e9,
    link=50e9,
    disk=0.0,
    multiply=70e9,
    attention=57e9,
    flops=1e12,
    exchange=2e-4,
    threads=11,
    few_multiply=25e9,
)


@pytest.mark.parametrize(
    ("sequences", "units", "measured"),
    [(256, False, 16), (16, False, 16), (6, False, 6), (1, False, 16), (256, True, 64), (40, True, 40), (1, True, 64)],
)
def test_the_cpus_products_are_measured_of_as_many_tokens_as_it_may_get(
    sequences: int, units: bool, measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measured_rates(*how: Any) -> MeasuredRates:
        asked.append(how[-1])
        return FOUND

    monkeypatch.setattr("cellar.runtime.offload.host_rows.have_units", lambda dtype: units)
    monkeypatch.setattr("cellar.runtime.offload.rates.measured_rates", measured_rates)
    monkeypatch.setattr(
        "cellar.runtime.offload.device_rates.device_rates", lambda *_: DeviceRates(9e11, 8e13, 2e13, 7e11, 5e11)
    )
    spec = registry.open_model(registry.read_config(write_checkpoint(tmp_path)), "float32", 16, 64).spec
    config = EngineConfig.of(model=str(tmp_path), device="cpu", device_memory=1.0, max_num_seqs=sequences).on("cuda")
    rates, _ = own_plan._rates(config, spec, "gpu")
    assert asked == [measured]
    assert (rates.multiply, rates.few_multiply, rates.few_measured, rates.units) == (70e9, 25e9, measured, units)
    assert rates.shared(2, "gpu").few_multiply == 25e9 / 2


@pytest.mark.parametrize(
    ("cache", "free", "wanted"),
    [(2**25, 2**37, 2**30), (300 * 2**20, 2**37, 2400 * 2**20), (300 * 2**20, 2**34, 2**31)],
)
def test_a_host_is_measured_in_more_memory_than_its_caches_hold(
    cache: int, free: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eighth of what is free at most."""
    asked = []

    def measured_rates(spec: Any, device: Any, nbytes: int, *how: Any) -> MeasuredRates:
        asked.append(nbytes)
        return FOUND

    monkeypatch.setattr("cellar.runtime.offload.rates.measured_rates", measured_rates)
    monkeypatch.setattr("cellar.runtime.memory.last_cache", lambda: cache)
    monkeypatch.setattr("cellar.runtime.memory.host_available", lambda: free)
    monkeypatch.setattr(
        "cellar.runtime.offload.device_rates.device_rates", lambda *_: DeviceRates(9e11, 8e13, 2e13, 7e11, 5e11)
    )
    spec = registry.open_model(registry.read_config(write_checkpoint(tmp_path)), "float32", 16, 64).spec
    config = EngineConfig.of(model=str(tmp_path), device="cpu", device_memory=1.0).on("cuda")
    own_plan._rates(config, spec, "gpu")
    assert asked == [wanted]


@pytest.mark.parametrize(
    ("kept", "sparse_v", "share"), [("auto", None, LINK_READS), ("fp8", None, LINK_READS_OF_CODES), ("auto", 0.1, 0.0)]
)
def test_the_device_reads_over_the_link_unless_values_are_left_out(
    kept: str, sparse_v: float | None, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def device_rates(_: object, device: torch.device, few: int, many: int) -> DeviceRates:
        asked.append((device.type, few, many))
        return DeviceRates(9e11, 8e13, 2e13, 7e11, 5e11)

    monkeypatch.setattr("cellar.runtime.offload.rates.measured_rates", lambda *_: FOUND)
    monkeypatch.setattr("cellar.runtime.offload.device_rates.device_rates", device_rates)
    raw = registry.read_config(write_checkpoint(tmp_path))
    spec = registry.open_model(raw, "float32", 16, 64, None, kept).spec
    config = EngineConfig.of(model=str(tmp_path), device="cpu", device_memory=1.0, sparse_v=sparse_v).on("cuda")
    rates, threads = own_plan._rates(config, spec, "gpu")
    assert asked == [("cpu", FEW_TOKENS, step_tokens("cuda"))], "before the host's, once"
    assert threads == 11
    assert (rates.link, rates.attention, rates.reads) == (50e9, 57e9, share * 50e9)
    assert (rates.device, rates.flops, rates.few_flops) == (9e11, PROMPT_SHARE * 8e13, 2e13)
    assert (rates.device_attention, rates.copies) == (7e11, 5e11)


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


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_engine_that_streams_to_a_gpu_looks_at_the_environment(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("cellar.runtime.device.resolve_device", lambda name: torch.device(name))
    monkeypatch.setattr("cellar.runtime.memory.device_free", lambda _: 2**40)
    monkeypatch.setattr(own_plan, "_warn_of_few_threads", lambda config, where: asked.append(where))
    monkeypatch.setattr(own_plan, "_rates", lambda *_: (Rates(), 5))
    monkeypatch.setattr(own_plan, "fits", lambda *_: False)
    path = write_checkpoint(tmp_path)
    config = EngineConfig.of(model=str(path), device=kind, device_memory=1.0, max_model_len=64, max_num_seqs=2)
    assert own_plan.with_own_plan(config, path)[1] is not None
    assert asked == (["cuda"] if kind == "cuda" else [])


@pytest.mark.parametrize(
    ("said", "asked", "threads", "warns"),
    [("4", None, 4, True), ("8", None, 8, False), (None, None, 4, False), ("4", 4, 4, False)],
)
def test_an_environment_that_leaves_cores_out_is_said(
    said: str | None,
    asked: int | None,
    threads: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(own_plan, "num_cores", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    if said is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    own_plan._warn_of_few_threads(EngineConfig.of(device="cpu", num_threads=asked), "cuda:0")
    assert ("with 4 threads on 16 cores; unset it, or say --num-threads 15." in caplog.text) == warns
    assert len(caplog.records) == warns


def test_a_model_that_a_gpu_does_not_hold_is_streamed_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As within `gpu_memory_utilization` of what is free. One that fits stays as it is, and what a processor does not
    hold is not written to a disk that nobody named.
    """
    path, memory = write_checkpoint(tmp_path), "cellar.runtime.memory."
    weights = registry.open_model(registry.read_config(path), "float32", 32, 64).spec.nbytes()

    def config(device: str = "cuda", **more: Any) -> EngineConfig:
        return EngineConfig.of(model=str(path), device=device, max_model_len=64, dtype="float32", **more)

    monkeypatch.setattr("cellar.runtime.device.resolve_device", lambda name: torch.device(name))
    monkeypatch.setattr(memory + "device_free", lambda _: weights)
    assert own_plan.held_if_too_large(config(), path) == config(), "just fits"
    monkeypatch.setattr(memory + "device_free", lambda _: weights - 1)
    assert own_plan.held_if_too_large(config("cpu"), path) == config("cpu")
    assert own_plan.held_if_too_large(config(tensor_parallel_size=2), path) == config(tensor_parallel_size=2)
    assert not caplog.records
    held = own_plan.held_if_too_large(config(gpu_memory_utilization=0.75), path)
    assert held.offload.nbytes["device"] == pytest.approx(0.75 * weights, abs=2)
    assert held == replace(config(gpu_memory_utilization=0.75), offload=held.offload)
    assert "are streamed from host memory, as with --device-memory" in caplog.text


def test_opening_asks_whether_a_model_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody has said what the device may hold."""
    asked: list[EngineConfig] = []

    def held(config: EngineConfig, checkpoint: Path | None) -> EngineConfig:
        asked.append(config)
        return replace(config, offload=replace(config.offload, device_memory=0.03))

    monkeypatch.setattr("cellar.engine.opened.held_if_too_large", held)
    kv = {"kv_cache_memory_bytes": 6_000_000, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    config = EngineConfig.of(model=None, device="cpu", dtype="float32", **kv)
    for one, times in ((config, 1), (replace(config, offload=replace(config.offload, device_memory=0.03)), 1)):
        opened = open_front(one)
        opened.front.engine.close()
        assert opened.plan is not None
        assert len(asked) == times
    assert asked == [config]


@pytest.mark.parametrize("kv", [1_000_000, 4_200_000])
def test_as_many_sequences_run_at_once_as_a_plan_counts(kv: int) -> None:
    """All of full length, in chunks that hold these and no more; nobody is suspended."""
    config = EngineConfig.of(
        model=None,
        device="cpu",
        dtype="float32",
        device_memory=0.03,
        kv_cache_memory_bytes=kv,
        max_model_len=64,
        max_num_seqs=64,
        max_num_batched_tokens=256,
    )
    together: list[int] = []

    def observed(plan: StepPlan, _: StepResult) -> None:
        together.append(len(plan.spans.row))

    opened = open_front(config, wrap=lambda runtime: MeteredRuntime(runtime, observed))
    assert opened.plan is not None
    count, chunks = opened.plan.figures["predicted"]["sequences"], opened.plan.placement.num_chunks
    assert count == chunks // (64 // 32) < 64, "two chunks each"
    prompts = [[(7 * k + i) % 200 + 3 for i in range(40)] for k in range(2 * count)]
    with LLM.over(opened) as llm:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
        suspended = llm.stats().preemptions
    assert max(together) == count
    assert suspended == 0
