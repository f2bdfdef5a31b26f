"""A plan for several devices is run by as many processes, or refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cellar import LLM, SamplingParams
from cellar.core.config import EngineConfig
from cellar.core.errors import ConfigError
from cellar.core.hardware import Device, Measure, Profile
from cellar.core.messages import Placement
from cellar.core.pieces import format_name
from cellar.engine.plan import with_plan
from cellar.models.registry import open_model, read_config
from cellar.models.stored import stored
from cellar.planner.cost import dimensions
from cellar.planner.machines import Machine, machine, processor
from cellar.planner.offload import Job
from cellar.planner.partition import FLOAT32, Formats
from cellar.planner.plans import Plan
from cellar.planner.resident import resident_plans
from cellar.planner.saved import load_plan
from cellar.planner.saving import saved_plan
from cellar.runtime.ranks.group import RankGroup
from cellar.runtime.ranks.opened import open_rank, open_ranks
from cellar.runtime.ranks.place import LaidPlace, Place, TensorPlace
from cellar.runtime.ranks.rank import ThreadRank
from tests.tiny_checkpoint import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9] * 40, [11, 12], list(range(20, 90)), [9] * 40 + [3]]


def processors(count: int) -> Machine:
    """So many processors, joined by the network of some accelerators."""
    cpu = Device(
        "cpu",
        "cpu",
        Measure(1e9, "bytes", "measured"),
        Measure(1e10, "bytes/s", "measured"),
        {"float32": Measure(5e10, "FLOP/s", "measured")},
        Measure(1e-6, "s", "measured"),
        1,
    )
    one = replace(processor(Profile("some-cpu", (cpu,))), networks=machine("4xh200").networks, per_host=8)
    return one.with_devices(count)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_key_value_heads": 1, "intermediate_size": 64}
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), **shape)


def planned(tiny: Path, count: int, form: Formats = FLOAT32) -> list[Plan]:
    d = dimensions(open_model(read_config(tiny), "float32", 16).spec)
    found = resident_plans(d, processors(count), Job(96, 32), (form,), batches=(4, 8))
    return [plan for plan in found if plan.stages == plan.replicas == 1]


def saved(plan: Plan, tiny: Path, folder: Path, quantization: str | None = None, **split: Any) -> Path:
    spec = open_model(read_config(tiny), "float32", 16, quantization=quantization).spec
    found = saved_plan(plan, spec, str(tiny))
    if split:
        assert found.placement.partition is not None
        other = replace(found.placement.partition, **split)
        found = replace(found, placement=replace(found.placement, partition=other))
    file = folder / "plan.json"
    file.write_text(found.to_json())
    return file


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_processes_run_a_plan(count: int, tiny: Path, tmp_path: Path) -> None:
    """Attention by batch, for a model that tensor parallelism by heads refuses: one head of K and V for all ranks."""
    plan = planned(tiny, count)[-1]
    assert plan.decode is not None
    assert plan.decode.layout.attention == "batch"
    assert plan.decode.layout.mesh.count(plan.decode.layout.batch_axes) == count
    file = saved(plan, tiny, tmp_path)
    promised = load_plan(file)
    with LLM(plan=str(file), device="cpu", num_threads=1) as llm:
        assert isinstance(llm._front.engine.runtime, RankGroup)  # type: ignore[attr-defined]
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.config.schedule.max_num_seqs == plan.batch
        assert llm.stats().total_chunks == count * promised.placement.num_chunks, "what all have adds up"
    with LLM(str(tiny), device="cpu", num_threads=1, block_size=16, kv_cache_memory_bytes=10**6) as llm:
        plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in plain]


HEADS = {"prefill_gather": "", "prefill_heads": "zyx", "decode_gather": "", "decode_heads": "zyx"}


@pytest.mark.parametrize(
    ("kv_heads", "split", "place"),
    [
        (2, {}, TensorPlace),
        (2, {"looped": True}, TensorPlace),
        (2, {"prefill_gather": "x", "prefill_heads": "zy"}, TensorPlace),  # over the one chip along x
        (2, {"prefill_heads": "", "decode_heads": ""}, LaidPlace),
        (2, {"prefill_gather": "xyz", "prefill_heads": "", "decode_heads": ""}, LaidPlace),
        (1, {}, LaidPlace),
    ],
    ids=["1D by heads", "looped", "gathered over one", "by batch", "gathered", "one KV head"],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_plan_of_1d_by_heads_runs_as_tensor_parallelism(
    kv_heads: int, split: dict[str, Any], place: type, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured on a GPU, with its sums; no other plan does. 420 words are no equal shares in groups of 64."""
    shape = {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    path = write_checkpoint(tmp_path / "model", **shape)
    plan = next(plan for plan in planned(path, 2) if plan.decode is not None and plan.decode.layout.mesh.x == 1)
    file = saved(plan, path, tmp_path, mesh=(1, 1, 2), **(HEADS | split))
    seen: list[Place] = []

    def opened_rank(config: EngineConfig, directory: Path | None, placement: Placement | None, own: Place) -> Any:
        seen.append(own)
        return open_rank(config, directory, placement, own)

    monkeypatch.setattr("cellar.runtime.ranks.opened.open_rank", opened_rank)
    monkeypatch.setattr("cellar.runtime.ranks.opened.open_ranks", partial(open_ranks, make=ThreadRank))
    with LLM(plan=str(file), device="cpu", num_threads=1) as llm:
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        homes = 1 if "zyx" in (HEADS | split)["decode_heads"] else 2
        assert llm.stats().total_chunks == homes * load_plan(file).placement.num_chunks
    assert {type(own) for own in seen} == {place}
    assert len(seen) == 2
    with LLM(str(path), device="cpu", num_threads=1, block_size=16, kv_cache_memory_bytes=10**6) as llm:
        plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in plain]


def test_a_plan_of_1d_by_heads_is_of_its_model(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    plan = next(plan for plan in planned(path, 2) if plan.decode is not None and plan.decode.layout.mesh.x == 1)
    placement = load_plan(saved(plan, path, tmp_path, mesh=(1, 1, 2), **HEADS)).placement
    config = with_plan(EngineConfig.of(plan=str(tmp_path / "plan.json"), device="cpu"))[0]
    other = write_checkpoint(tmp_path / "wide", intermediate_size=64)
    with pytest.raises(ConfigError, match=r"the placement has rows 0 to .* of layers\.0\..*; plan this model again"):
        open_ranks(config, other, placement, ThreadRank)


def quantized(tiny: Path, name: str) -> Plan:
    """Of two devices, decodes by batch."""
    found = planned(tiny, 2, replace(FLOAT32, name=name, weight_bytes=1.0))
    return next(plan for plan in found if plan.decode is not None and plan.decode.layout.attention == "batch")


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_quantized_plan_names_what_ranks_store(name: str, tmp_path: Path) -> None:
    """Shares of every tensor, the head in 8 bits."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    wide = write_checkpoint(tmp_path, num_key_value_heads=1, **shape)
    raw = read_config(wide)
    plan = quantized(wide, name)
    assert plan.decode is not None
    spec = open_model(raw, "float32", 16, quantization=name).spec
    found = saved_plan(plan, spec, str(wide))
    share = stored(spec, plan.decode.layout.mesh, 0)
    wanted = {tensor: (piece.shape[0], format_name(piece)) for tensor, piece in share.named_tensors()}
    assert {part.tensor: (part.stop, part.format) for part in found.placement.weights} == wanted


@pytest.mark.long
def test_a_plan_of_quantized_weights_runs(tiny: Path, tmp_path: Path) -> None:
    """Shares in int8, of what is gathered for prompts, too: tokens of one device in int8. Without it, it is refused."""
    plan = quantized(tiny, "int8")
    assert plan.decode is not None
    file = saved(plan, tiny, tmp_path, "int8", prefill_gather="xyz", prefill_heads="")
    with pytest.raises(ConfigError, match=r"rows 0 to \d+ in int8 of .*, but the model has rows .* in float32"):
        LLM(plan=str(file), device="cpu", num_threads=1)
    with LLM(plan=str(file), device="cpu", num_threads=1, quantization="int8") as llm:
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    one: dict[str, Any] = {"block_size": 16, "kv_cache_memory_bytes": 10**6}
    with LLM(str(tiny), device="cpu", num_threads=1, quantization="int8", **one) as llm:
        plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in plain]


def test_every_plan_for_several_devices_says_what_runs(tiny: Path, tmp_path: Path) -> None:
    """As many chunks on each as the batch needs at its homes, and the options that it decides."""
    for count in (2, 4):
        for plan in planned(tiny, count):
            assert plan.decode is not None
            file = saved(plan, tiny, tmp_path)
            config, found = with_plan(EngineConfig.of(plan=str(file)))
            assert found is not None
            assert found.limits is not None
            homes = plan.decode.layout.mesh.count(plan.decode.layout.batch_axes)
            assert found.placement.num_chunks >= -(-plan.batch // homes) * (128 // 16)
            assert config.schedule.max_num_seqs == plan.batch


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        (
            {"prefill_gather": "", "prefill_heads": "zyx", "decode_gather": "", "decode_heads": ""},
            "prompts as .* heads and decodes as .* batch, between which K and V would move; what runs are layouts that",
        ),
        ({"mesh": (64, 1, 1)}, "hidden size of 32 has no equal shares for 64 chips; take a divisor"),
    ],
    ids=["moves", "shape"],
)
def test_layouts_that_do_not_run_are_named(tiny: Path, tmp_path: Path, split: dict[str, Any], sentence: str) -> None:
    file = saved(planned(tiny, 2)[-1], tiny, tmp_path, **split)
    with pytest.raises(ConfigError, match=sentence):
        LLM(plan=str(file), device="cpu", num_threads=1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size is 4, but the plan .* is for 2 devices; leave"),
        ({"kv_offloading_size": 0.1}, "kv_offloading_size does not work on several ranks yet, but the plan is for 2"),
        ({"max_num_seqs": 3}, "max_num_seqs is 3, but the plan"),
    ],
    ids=str,
)
def test_options_that_do_not_go_with_it(tiny: Path, tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    file = saved(planned(tiny, 2)[-1], tiny, tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        LLM(plan=str(file), device="cpu", num_threads=1, **options)


def test_more_devices_than_there_are(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellar.runtime.ranks.opened.resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    config, plan = with_plan(EngineConfig.of(plan=str(saved(planned(tiny, 2)[-1], tiny, tmp_path))))
    assert plan is not None
    with pytest.raises(ConfigError, match=r"the plan is for 2 devices, but this machine has 1 GPU; plan for at most 1"):
        open_ranks(config, tiny, plan.placement)
    with pytest.raises(ConfigError, match="size is 2, but this machine has 1 GPU; set it to at most 1"):
        open_ranks(EngineConfig.of(model=str(tiny), tensor_parallel_size=2), tiny)


def test_a_plan_whose_mesh_is_not_that_of_its_shares(tiny: Path, tmp_path: Path) -> None:
    plan = load_plan(saved(planned(tiny, 2)[-1], tiny, tmp_path, mesh=(2, 1, 1)))
    with pytest.raises(
        ConfigError, match=r"the placement has rows 0 to \d+ .* but the model has rows .* plan this model"
    ):
        open_ranks(with_plan(EngineConfig.of(plan=str(tmp_path / "plan.json")))[0], tiny, plan.placement, ThreadRank)


def every_plan(path: Path, count: int) -> list[Plan]:
    d = dimensions(open_model(read_config(path), "float32", 16).spec)
    return resident_plans(d, processors(count), Job(96, 32), (FLOAT32,), batches=(8,))


def test_plans_with_copies_or_wide_stages_are_named(tiny: Path, tmp_path: Path) -> None:
    refused = [plan for plan in every_plan(tiny, 4) if plan.stages * plan.replicas > 1]
    assert {(plan.tensor, plan.stages, plan.replicas) for plan in refused} == {
        (2, 2, 1),
        (2, 1, 2),
        (1, 2, 2),
        (1, 1, 4),
    }
    for plan in refused:
        assert "serve" in plan.obstacle
        file = saved(plan, tiny, tmp_path)
        with pytest.raises(ConfigError, match="runs only plans whose weights stay on one device or lie over several"):
            with_plan(EngineConfig.of(plan=str(file)))


@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_of_stages_runs(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage has what the plan says of its layers, and as many chunks; the engine as many sequences."""
    monkeypatch.setattr("cellar.runtime.ranks.opened.open_ranks", partial(open_ranks, make=ThreadRank))
    path = write_checkpoint(tmp_path, num_hidden_layers=4, tie_word_embeddings=tied)
    plan = next(plan for plan in every_plan(path, 4) if plan.stages == 4)
    assert not plan.obstacle
    file = saved(plan, path, tmp_path)
    with LLM(plan=str(file), device="cpu", num_threads=1) as llm:
        assert llm.config.device.pipeline_parallel_size == 4
        assert llm.stats().total_chunks == load_plan(file).placement.num_chunks >= 8 * 128 // 16
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    with LLM(str(path), device="cpu", num_threads=1, block_size=16, kv_cache_memory_bytes=10**6) as llm:
        plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in plain]
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is 2, but the plan .* has 4 stages; leave"):
        with_plan(EngineConfig.of(plan=str(file), pipeline_parallel_size=2))
    wrong = saved(plan, path, tmp_path, stages=2)
    with pytest.raises(ConfigError, match="plan this model again"):
        open_ranks(
            with_plan(EngineConfig.of(plan=str(wrong), device="cpu"))[0],
            write_checkpoint(tmp_path / "wide", hidden_size=64),
            load_plan(wrong).placement,
            ThreadRank,
        )
