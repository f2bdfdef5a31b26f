"""Several ranks, none of whose devices holds its share: each streams it by a plan of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cellar import LLM, SamplingParams
from cellar.core.config import EngineConfig
from cellar.core.errors import ConfigError, DeviceError
from cellar.engine.own_plan import with_rank_plans
from cellar.models.registry import open_model, read_config
from cellar.models.sharding import shard
from cellar.planner.passes import Rates
from cellar.runtime.offload.layout import placed_rows, planned_nbytes
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


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_stream_their_shares_give_the_tokens_of_one(size: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", **SHAPE)
    held = HELD | {"device_memory": {2: 300_000, 4: 240_000}[size] / GIB}
    assert tokens(path, size, **held, disk_path=tmp_path / "disk") == tokens(path, 1, kv_cache_memory_bytes=400_000)
    assert not list((tmp_path / "disk").iterdir())


def test_each_rank_has_its_part_of_the_host(tmp_path: Path) -> None:
    """What all ranks have in host memory is what there is of it; they take the same sequences."""
    path = write_checkpoint(tmp_path / "model", **SHAPE)
    given = EngineConfig.of(model=str(path), tensor_parallel_size=2, **SMALL | HELD | {"disk_path": str(tmp_path)})
    config, plans = with_rank_plans(given, path)
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


def test_a_share_that_fits_is_told(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", **SHAPE)
    with pytest.raises(ConfigError, match="a share of the model fits device_memory, but on 2 ranks that is for shares"):
        LLM(str(path), tensor_parallel_size=2, **SMALL, device_memory=1.0)


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
