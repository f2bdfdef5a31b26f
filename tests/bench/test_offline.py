"""Offline benchmark: workloads, the meter, and the peer that it is compared with."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cellar import LLM, SamplingParams
from cellar.bench.meter import MeteredRuntime, StepRecord, record, totals
from cellar.bench.offline import Bench, compare_with_transformers
from cellar.bench.transformers_peer import ORDERS, TransformersPeer
from cellar.bench.workload import LengthRange, Workload, random_workload
from cellar.core.errors import ConfigError
from cellar.core.hardware import Device, Measure, Profile
from cellar.reports.limits import limits_of
from cellar.runtime.probes.context import ProbeContext
from cellar.runtime.steps.fake import FakeRuntime
from tests.fake_front import open_fake
from tests.tiny_checkpoint import write_checkpoint

ENGINE = {"kv_cache_memory_bytes": 4_000_000, "num_threads": 1, "device": "cpu", "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_lengths() -> None:
    assert LengthRange.parse("128", "x") == LengthRange(128, 128)
    assert str(LengthRange.parse("16-512", "x")) == "16-512"
    for bad in ("", "a", "5-", "0", "9-3", "-4", "1.5"):
        with pytest.raises(ConfigError, match="input_len"):
            LengthRange.parse(bad, "input_len")


def test_a_workload_is_a_function_of_its_seed() -> None:
    def make(seed: int) -> Workload:
        return random_workload(200, LengthRange(3, 9), LengthRange(1, 4), 50, 20, seed)

    assert make(1) == make(1) != make(2)
    assert {len(p) for p in make(1).prompts} == set(range(3, 10))
    assert set(make(1).output_lengths) == {1, 2, 3, 4}
    assert make(1).num_prompt_tokens == sum(len(p) for p in make(1).prompts)
    with pytest.raises(ConfigError, match="context of 12"):
        random_workload(1, LengthRange(9, 9), LengthRange(4, 4), 50, 12, 0)
    with pytest.raises(ConfigError, match="num_prompts"):
        random_workload(0, LengthRange(9, 9), LengthRange(4, 4), 50, 20, 0)


def test_the_meter_counts_by_hand() -> None:
    records: list[StepRecord] = []

    def wrap(runtime: FakeRuntime) -> MeteredRuntime:
        return MeteredRuntime(runtime, lambda plan, result: records.append(record(plan, result)))

    opened, _ = open_fake(wrap=wrap)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    LLM.over(opened).generate([[1] * 10, [2] * 20], params, use_tqdm=False)
    prefill, *decodes = records
    assert (prefill.phase, prefill.num_tokens, prefill.num_sampled) == ("prefill", 30, 2)
    assert prefill.context == 10 * 11 // 2 + 20 * 21 // 2
    assert prefill.resident == 30
    assert [(d.phase, d.num_tokens, d.context, d.resident) for d in decodes] == [
        ("decode", 2, 11 + 21, 11 + 21),
        ("decode", 2, 12 + 22, 12 + 22),
    ]


def test_totals_need_the_flops_that_the_spec_says(tiny: Path) -> None:
    bench = Bench({"model": str(tiny), **ENGINE})
    work = Workload(([5] * 10,), (3,))
    bench.run(work)
    rate = Measure(1e9, "1/s", "assumed")
    report = bench.report(work, Profile("here", (Device("cpu", "cpu", rate, rate, {"float32": rate}),)))
    spec = bench.llm.spec
    bench.close()
    prefill, decode = report.phases
    assert (prefill.num_steps, decode.num_steps) == (1, 2)
    assert prefill.flops == spec.flops(10, 5, 1)
    assert decode.flops == spec.flops(1, 11, 1) + spec.flops(1, 12, 1)
    assert decode.nbytes == spec.step_nbytes(11) + spec.step_nbytes(12)
    assert totals([], spec) == []


def test_limits_come_from_a_profile_or_a_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rate = Measure(5.0, "1/s", "measured")
    profile = Profile("here", (Device("cpu", "cpu", rate, rate, {"float32": rate}),))
    assert limits_of("cpu", "float32", profile).flops == 5.0
    with pytest.raises(ConfigError, match="bfloat16 on cpu"):
        limits_of("cpu", "bfloat16", profile)
    own = tmp_path / "profile.json"
    monkeypatch.setattr("cellar.reports.limits.default_path", lambda machine: own)
    monkeypatch.setattr("cellar.reports.limits.ProbeContext", partial(ProbeContext, nbytes=2**22, seconds=0.01))
    probed = limits_of("cpu", "float32")
    assert probed.source == "quick probe"
    assert probed.bandwidth > 1e8
    assert probed.flops > 1e8
    profile.save(own)
    assert limits_of("cpu", "float32").bandwidth == 5.0


def test_the_peer_does_the_same_work(tiny: Path) -> None:
    """Left padding and positions are right if a padded batch gives our tokens."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(3)
    prompts = tuple(rng.integers(3, 420, n).tolist() for n in (3, 40, 17, 9))
    peer = TransformersPeer(tiny, "float32", "cpu")
    theirs = peer.tokens(list(prompts), 12)
    with LLM(str(tiny), **ENGINE) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        ours = [o.outputs[0].token_ids for o in llm.generate(list(prompts), params, use_tqdm=False)]
    assert theirs == ours
    for order in ORDERS:
        whole = peer.run(Workload(prompts, (3, 9, 1, 4)), 2, order)
        assert (whole.num_tokens, whole.complete) == (17, True)


def test_a_time_limit_cuts_the_peer_at_what_it_has_reached(tiny: Path) -> None:
    peer = TransformersPeer(tiny, "float32", "cpu")
    work = Workload(([5] * 8, [6] * 8), (300, 300))
    cut = peer.run(work, 1, "given", 0.2)
    assert 0 < cut.num_tokens < 600
    assert not cut.complete
    assert cut.rate == cut.num_tokens / cut.seconds


def test_a_comparison_ends_at_its_limit_and_says_so(tiny: Path) -> None:
    said: list[str] = []
    options = {"model": str(tiny), **ENGINE}
    lengths = LengthRange(200, 200)
    found = compare_with_transformers(
        options, 50, 0, said.append, one=(8, 200), many=(2, LengthRange(8, 8), lengths), limit=0.02
    )
    for part in ("one_prompt", "batch"):
        assert 1 <= found[part]["rounds"] < 50
        assert not found[part]["complete"]
    assert any("cut after" in line for line in said)
    assert any("time limit of 0.02 s" in line for line in said)


def test_comparing_gives_ratios_of_medians(tiny: Path) -> None:
    options = {"model": str(tiny), **ENGINE}
    said: list[str] = []
    found = compare_with_transformers(
        options, 1, 0, said.append, one=(8, 6), many=(9, LengthRange(2, 9), LengthRange(2, 5))
    )
    assert found["one_prompt"]["ratio"] == found["one_prompt"]["cellar"] / found["one_prompt"]["transformers"]
    assert found["batch"]["static_batch"] in (8, 9)
    assert any("ratio" in line for line in said)
    assert found["batch"]["complete"]
    assert found["batch"]["search_complete"]


def test_without_transformers_one_clear_sentence(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="not installed"):
        TransformersPeer(tiny, "float32", "cpu")
    options = {"model": str(tiny), "load_format": "dummy", **ENGINE}
    with pytest.raises(ConfigError, match="load_format auto"):
        compare_with_transformers(options, 1, 0, lambda text: None)
