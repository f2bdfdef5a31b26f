"""Several ranks, none of whose devices holds its share: each streams it by a plan of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cellar import LLM, SamplingParams
from cellar.core.config import EngineConfig
from cellar.core.errors import BuffersError, ConfigError, DeviceError
from cellar.engine.own_plan import with_rank_plans
from cellar.models.registry import open_model, read_config
from cellar.models.sharding import shard
from cellar.models.staging import stage
from cellar.planner.passes import block_seconds, longest, predicted_line, predicted_rate
from cellar.planner.rates import Rates
from cellar.planner.saved import Limits, SavedPlan
from cellar.runtime.offload.layout import placed_rows, planned_nbytes
from cellar.runtime.ranks.opened import open_ranks
from tests.e2e.test_ranks import ranks_of
from tests.tiny_checkpoint import write_checkpoint

SHAPE: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 80,
    "num_hidden_layers": 12,
}
GIB = 2**30
HOST = 30_000
HELD: dict[str, Any] = {"device_memory": 300_000 / GIB, "host_memory": HOST / GIB, "disk": 1.0}
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 16,
    "kv_cache_memory_bytes": 100_000,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 40,
    "max_model_len": 128,
    "num_threads": 2,
    "skip_tokenizer_init": True,
}
PROMPTS = [[5, 6, 7], list(range(20, 60)), [9] * 30, [3], [20, 21, 22, 23]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def tokens(path: Path, size: int, **options: Any) -> list[list[int]]:
    with LLM(str(path), tensor_parallel_size=size, **SMALL | options) as llm:
        return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def planned(path: Path, held: dict[str, Any], tmp_path: Path, **options: Any) -> tuple[EngineConfig, list[SavedPlan]]:
    given = SMALL | held | {"disk_path": str(tmp_path)} | options
    return with_rank_plans(EngineConfig.of(model=str(path), **given), path)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_stream_their_shares_give_the_tokens_of_one(size: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", **SHAPE)
    held = HELD | {"device_memory": {2: 300_000, 4: 240_000}[size] / GIB}
    assert tokens(path, size, **held, disk_path=tmp_path / "disk") == tokens(path, 1, kv_cache_memory_bytes=400_000)
    assert not list((tmp_path / "disk").iterdir())


STAGED = HELD | {"device_memory": 280_000 / GIB}


@pytest.mark.long
@pytest.mark.parametrize(
    ("stages", "tensor", "quantization", "nbytes"),
    [
        (2, 1, None, 280_000),
        (3, 1, None, 280_000),
        (2, 2, None, 240_000),
        (2, 1, "int8", 220_000),
        (3, 1, "int8", 210_000),
    ],
)
def test_stages_that_stream_their_layers_give_the_tokens_of_one(
    stages: int, tensor: int, quantization: str | None, nbytes: int, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path / "model", **SHAPE)
    held = STAGED | {"device_memory": nbytes / GIB, "quantization": quantization}
    options = {"pipeline_parallel_size": stages, "disk_path": tmp_path / "disk"}
    found = tokens(path, tensor, **held, **options)
    assert found == tokens(path, 1, kv_cache_memory_bytes=400_000, quantization=quantization)
    assert not list((tmp_path / "disk").iterdir())


def test_each_stage_places_its_layers(tmp_path: Path) -> None:
    """All have as many chunks; a pass has an equal part of the sequences and of the tokens."""
    path = write_checkpoint(tmp_path / "model", **SHAPE)
    many: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_memory_bytes": 450_000, "pipeline_parallel_size": 3}
    config, plans = planned(path, HELD | {"device_memory": 640_000 / GIB}, tmp_path, **many)
    whole = open_model(read_config(path), "float32", 16, 128).spec
    for rank, plan in enumerate(plans):
        own = stage(whole, rank, 3)
        found = planned_nbytes(placed_rows(plan.placement, own))
        assert sum(found.values()) == own.nbytes()
        assert found["disk"] > 0 or rank == 1  # which has neither table nor head
        assert plan.limits == Limits(config.schedule.max_num_seqs, -(-40 // 3), 128)
        assert plan.placement.num_chunks == plans[0].placement.num_chunks
    said = plans[0].figures["predicted"]
    assert said["passes"] == 3
    each, rate = said["sequences"], said["tokens_per_second"]
    assert each == 2
    assert predicted_rate(plans[0], 3 * each) == pytest.approx(rate)
    assert "3 passes at once" in predicted_line(plans[0])
    whole_pass = block_seconds(plans[0].cost, longest(plans[0].limits), each, plans[0].limits)
    assert said["request_seconds"] == pytest.approx(3 * whole_pass)
    assert rate == pytest.approx(each * said["generate"] / whole_pass)


@pytest.mark.parametrize(("name", "value"), [("latency", 9.0), ("schedule", "diagonal")])
def test_what_plans_of_stages_cannot_say_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", **SHAPE)
    with pytest.raises(ConfigError, match=rf"{name} {value} does not work on pipeline stages with device_memory yet"):
        planned(path, STAGED, tmp_path, pipeline_parallel_size=2, **{name: value})


def test_each_rank_has_its_part_of_the_host(tmp_path: Path) -> None:
    """What all ranks have in host memory is what there is of it; they take the same sequences."""
    path = write_checkpoint(tmp_path / "model", **SHAPE)
    config, plans = planned(path, HELD, tmp_path, tensor_parallel_size=2)
    whole = open_model(read_config(path), "float32", 16, 128).spec
    found = []
    for rank, plan in enumerate(plans):
        share = shard(whole, rank, 2)
        found.append(planned_nbytes(placed_rows(plan.placement, share)))
        assert sum(found[-1].values()) == share.nbytes()
        assert plan.limits is not None
        assert plan.limits.max_num_seqs == config.schedule.max_num_seqs == 3
    assert all(one["disk"] > 0 and HOST / 4 < one["host"] <= HOST / 2 for one in found)


def test_ranks_share_the_rates_of_memory_and_disk() -> None:
    whole = Rates(link=8.0, multiply=6.0, attention=4.0, device=2.0, disk=1.0, flops=5.0)
    assert whole.shared(2) == Rates(link=4.0, multiply=3.0, attention=2.0, device=1.0, disk=0.5, flops=5.0)
    assert whole.shared(2, "gpu") == Rates(link=8.0, multiply=3.0, attention=2.0, device=2.0, disk=0.5, flops=5.0)


@pytest.mark.long
@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_shares_that_fit_stay_where_they_are(option: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", **SHAPE)
    config, plans = planned(path, {"device_memory": 0.01}, tmp_path, **{option: 2, "kv_cache_memory_bytes": None})
    assert not plans
    assert config.cache.kv_cache_memory_bytes == int(0.01 * GIB / 4)
    given = {option: 2, "device_memory": 0.01, "kv_cache_memory_bytes": None}
    with LLM(str(path), **SMALL | given) as llm:
        found = [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert found == tokens(path, 1, kv_cache_memory_bytes=400_000)
    with pytest.raises(ConfigError, match="latency bounds plans that stream weights, but on 2 ranks each device holds"):
        planned(path, {"device_memory": 1.0}, tmp_path, tensor_parallel_size=2, latency=5.0)


def test_ranks_whose_buffers_take_more_are_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one device, with as much spared on each."""
    path = write_checkpoint(tmp_path / "model", **SHAPE)
    spared: list[int] = []

    def plans(config: EngineConfig, checkpoint: Path | None, more: int = 0) -> tuple[EngineConfig, list[SavedPlan]]:
        spared.append(more)
        return with_rank_plans(config, checkpoint, more)

    def opens(first: Any, *rest: Any, **named: Any) -> Any:
        if len(spared) == 1:
            raise BuffersError("buffers take more.", 10_000)
        return open_ranks(first, *rest, **named)

    monkeypatch.setattr("cellar.engine.opened.SPARED", 1000)
    monkeypatch.setattr("cellar.engine.opened.with_rank_plans", plans)
    monkeypatch.setattr("cellar.runtime.ranks.opened.open_ranks", opens)
    found = tokens(path, 2, **HELD, disk_path=tmp_path)
    assert spared == [0, 11_000]
    assert len(found) == len(PROMPTS)


@pytest.mark.long
def test_a_disk_that_fails_on_one_rank_ends_all(tmp_path: Path) -> None:
    """One rank's file is cut short: nobody waits for the rank that has stopped in the middle of a layer."""
    path = write_checkpoint(tmp_path / "model", **SHAPE)
    with LLM(str(path), tensor_parallel_size=2, **SMALL, **HELD, disk_path=tmp_path) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        for link in Path(f"/proc/{ranks_of(llm)[1]}/fd").iterdir():
            if ".cellar-weights-" in os.readlink(link):
                os.truncate(link, 0)
        with pytest.raises(DeviceError, match=r"rank 1 .*cannot be read \(it is cut short: 0 of \d+ bytes\)"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
