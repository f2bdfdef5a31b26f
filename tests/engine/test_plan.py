"""A plan is obeyed to the chunk, or refused in one sentence; a run with it ends with prediction beside measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from cellar import LLM, SamplingParams
from cellar.cli.main import build
from cellar.core.config import EngineConfig
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.hardware import Device, Link, Measure, Profile
from cellar.engine.plan import with_plan
from cellar.planner.saved import SavedPlan, load_plan
from tests.tiny_checkpoint import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9] * 40, [11, 12]]


def profile(path: Path) -> Path:
    """A processor with figures of its own."""
    cpu = Device(
        "cpu",
        "cpu",
        Measure(1e9, "bytes", "measured"),
        Measure(1e10, "bytes/s", "measured"),
        {"float32": Measure(5e10, "FLOP/s", "measured")},
        Measure(1e-6, "s", "measured"),
        1,
    )
    Profile("some-cpu", (cpu,)).save(path)
    return path


def cellar(*arguments: str) -> Result:
    return CliRunner().invoke(build(), list(arguments))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plan(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the tiny model on a processor: 64 + 32 tokens."""
    folder = tmp_path_factory.mktemp("plan")
    machine = profile(folder / "profile.json")
    options = ("--machine", str(machine), "--prompt", "64", "--generate", "32", "--block-size", "16")
    result = cellar("plan", str(tiny), *options, "-o", str(folder / "plan.json"))
    assert result.exit_code == 0, result.output
    return folder / "plan.json"


def changed(plan: Path, target: Path, **values: Any) -> str:
    """The plan with other values, as a file."""
    saved: SavedPlan = replace(load_plan(plan), **values)
    target.write_text(saved.to_json())
    return str(target)


def test_an_engine_is_what_its_plan_says(plan: Path, tiny: Path) -> None:
    saved = load_plan(plan)
    assert saved.limits is not None
    with LLM(plan=plan, num_threads=1, device="cpu") as llm:
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        config, stats = llm.config, llm.stats()
    assert stats.total_chunks == saved.placement.num_chunks >= saved.limits.max_num_seqs * 6
    assert config.model.model == str(tiny)
    assert (config.model.dtype, config.cache.block_size) == ("float32", 16)
    assert config.schedule.max_num_seqs == saved.limits.max_num_seqs
    assert config.schedule.max_num_batched_tokens == 2048
    with LLM(str(tiny), num_threads=1, device="cpu", block_size=16, kv_cache_memory_bytes=10**6) as llm:
        plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in plain]


def test_the_whole_batch_of_a_plan_runs_at_once(plan: Path, tmp_path: Path) -> None:
    """Also the last of it, for which the scheduler's reserve must be free."""
    saved = load_plan(plan)
    assert saved.limits is not None
    batch, each = saved.limits.max_num_seqs, -(-64 // 16)
    assert saved.placement.num_chunks - batch * each >= 0.1 * saved.placement.num_chunks - 1


def test_twice_is_as_good_as_once(plan: Path) -> None:
    once, saved = with_plan(EngineConfig.of(plan=str(plan)))
    again, same = with_plan(once)
    assert (once, saved) == (again, same)
    assert with_plan(EngineConfig()) == (EngineConfig(), None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "bfloat16"}, "dtype is bfloat16, but the plan .* says float32; leave dtype out"),
        ({"block_size": 64}, "block_size is 64, but the plan .* says 16"),
        ({"max_num_seqs": 3}, "max_num_seqs is 3, but the plan"),
        ({"max_num_batched_tokens": 77}, "max_num_batched_tokens is 77, but the plan .* says 2048"),
        ({"kv_cache_memory_bytes": 10**6}, "kv_cache_memory_bytes is given, but the plan"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization is given, but the plan"),
        ({"max_model_len": 10**6}, "max_model_len is 1000000, but the KV of the plan"),
        ({"device_memory": 1.0, "latency": 3.0}, "latency bounds a plan that is made at the start, but the plan"),
        ({"plan": "/nowhere/plan.json"}, "the plan /nowhere/plan.json cannot be read"),
        ({"plan": __file__}, "the file is not a plan; make one with `cellar plan"),
    ],
)
def test_options_that_contradict_a_plan(plan: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        with_plan(EngineConfig.of(**{"plan": str(plan), **options}))


def test_options_that_agree_with_a_plan_are_taken(plan: Path) -> None:
    config, _ = with_plan(EngineConfig.of(plan=plan, dtype="float32", block_size=16, max_model_len=100, seed=3))
    assert (config.model.max_model_len, config.model.seed) == (100, 3)


def test_another_model_is_refused(plan: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"the plan is for .*tiny.*, but .*other has tensors of other shapes"):
        LLM(str(other), plan=plan, device="cpu")


def test_a_plan_for_an_accelerator_is_refused_on_a_processor(plan: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan is for an accelerator .* runs on a processor; plan with"):
        LLM(plan=changed(plan, tmp_path / "gpu.json", device="gpu"), device="cpu")


def test_a_machine_that_is_too_small_is_refused(plan: Path, tmp_path: Path) -> None:
    saved = load_plan(plan)
    huge = replace(saved.placement, kv=(replace(saved.placement.kv[0], units=10**12),))
    with pytest.raises(CapacityError, match=r"plan has 1,000,000,000,000 chunks of KV .* has .* free; plan for"):
        LLM(plan=changed(plan, tmp_path / "huge.json", placement=huge), device="cpu")


@pytest.mark.parametrize(("machine", "kind"), [("t4", "offload"), ("4xh200", "partition")])
def test_plans_that_do_not_run_here_are_named(tmp_path: Path, machine: str, kind: str) -> None:
    """Through the same door as those that do."""
    file = tmp_path / "plan.json"
    model = "llama-3-8b" if kind == "offload" else "llama-3-70b"
    result = cellar("plan", model, "--machine", machine, "--objective", "latency", "-o", str(file))
    assert result.exit_code == 0, result.output
    result = cellar("generate", "--plan", str(file), "--device", "cpu", "--load-format", "dummy")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    if kind == "offload":
        assert "is of kind offload" in said
        assert "only plans whose weights stay on one device or lie over several" in said
    else:
        assert "the plan is for an accelerator" in said


def test_plans_of_cells_are_refused(plan: Path) -> None:
    result = cellar("serve", "--cells", "cells.py", "--plan", str(plan))
    assert result.exit_code == 2
    assert "plan has no effect with --cells" in result.output


def test_generate_and_bench_end_with_the_prediction(plan: Path) -> None:
    small = ("--plan", str(plan), "--num-threads", "1", "--device", "cpu")
    result = cellar("generate", "Once", *small, "--max-tokens", "5", "--ignore-eos")
    assert result.exit_code == 0, result.output
    assert "predicted by the plan for some-cpu" in result.output
    assert result.output.split("decode")[1].split()[0] == "4"
    lengths = ("--num-prompts", "6", "--input-len", "8-64", "--output-len", "4-32")
    result = cellar("bench", "offline", *small, *lengths)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.splitlines()[-1])
    forecast = found["forecast"]
    assert forecast["tokens"] == found["output_tokens"]
    assert sum(phase["num_steps"] for phase in forecast["phases"]) == sum(p["num_steps"] for p in found["phases"])
    assert forecast["measured"] == pytest.approx(sum(phase["seconds"] for phase in found["phases"]))
    assert 0 < forecast["predicted"] < 10
    assert forecast["measured_rate"] == pytest.approx(found["output_rate"])


def test_batch_obeys_a_plan_and_ends_with_the_prediction(plan: Path, tmp_path: Path) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line))
    small = ("--plan", str(plan), "--num-threads", "1", "--device", "cpu", "--served-model-name", "m")
    result = cellar("batch", str(source), "-o", str(tmp_path / "out.jsonl"), *small)
    assert result.exit_code == 0, result.output
    assert "predicted by the plan for some-cpu" in result.output
    assert result.output.split("  decode")[1].split()[0] == "5"


def test_a_profile_plans_for_its_accelerator(tmp_path: Path) -> None:
    """Not for the processor beside it."""
    gpu = Device(
        "gpu",
        "gpu",
        Measure(8e10, "bytes", "datasheet"),
        Measure(3e12, "bytes/s", "measured"),
        {"bfloat16": Measure(7e14, "FLOP/s", "measured")},
    )
    known = Profile.load(profile(tmp_path / "cpu.json"))
    links = (
        Link("cpu", "gpu", Measure(5e10, "bytes/s", "measured")),
        Link("gpu", "cpu", Measure(5e10, "bytes/s", "measured")),
    )
    replace(known, devices=(*known.devices, gpu), links=links).save(tmp_path / "gpu.json")
    file = tmp_path / "plan.json"
    result = cellar("plan", "llama-3-8b", "--machine", str(tmp_path / "gpu.json"), "-o", str(file))
    assert result.exit_code == 0, result.output
    saved = load_plan(file)
    assert (saved.device, saved.dtype, saved.placement.kind) == ("gpu", "bfloat16", "resident")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device")
def test_a_plan_runs_on_an_accelerator(tiny: Path, tmp_path: Path) -> None:
    """Slots to the chunk, whatever memory would allow; the same tokens as without the plan."""
    gpu = Device(
        "gpu",
        "gpu",
        Measure(8e9, "bytes", "datasheet"),
        Measure(1e12, "bytes/s", "measured"),
        {"float32": Measure(2e13, "FLOP/s", "measured")},
    )
    known = Profile.load(profile(tmp_path / "cpu.json"))
    links = tuple(Link(a, b, Measure(2e10, "bytes/s", "measured")) for a, b in (("cpu", "gpu"), ("gpu", "cpu")))
    replace(known, devices=(*known.devices, gpu), links=links).save(tmp_path / "gpu.json")
    options = ("--machine", str(tmp_path / "gpu.json"), "--prompt", "64", "--generate", "32", "--objective", "latency")
    file = tmp_path / "plan.json"
    assert cellar("plan", str(tiny), *options, "-o", str(file)).exit_code == 0
    saved = load_plan(file)
    with LLM(plan=file, device="cuda") as llm:
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.stats().total_chunks == saved.placement.num_chunks
    with LLM(str(tiny), device="cuda", kv_cache_memory_bytes=10**7, max_num_seqs=1) as llm:
        plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in plain]
