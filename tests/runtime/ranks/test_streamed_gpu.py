"""Two GPUs, each of which streams its share of a model: the tokens of one that holds all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cellar import LLM
from cellar.core.config import EngineConfig
from cellar.engine.opened import open_front
from cellar.models.registry import open_model, read_config
from cellar.models.sharding import shard
from cellar.models.staging import stage
from cellar.planner.saved import SavedPlan
from tests.runtime.offload.placements import plan_of, random_placement
from tests.runtime.offload.test_offloaded_gpu import (
    FAMILIES,
    LIMITS,
    OPTIONS,
    SHAPE,
    equal_but_for_ties,
    requests,
    resident,
    tokens_of,
)
from tests.tiny_checkpoint import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: this machine has no two CUDA devices"),
]

SHARED = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("option", "kind", "quantization", "kv"),
    [
        ("tensor_parallel_size", "llama", None, ("device", "device")),
        ("tensor_parallel_size", "llama", None, ("host", "both")),
        ("pipeline_parallel_size", "llama", None, ("device", "device")),
        ("pipeline_parallel_size", "llama", None, ("host", "both")),
        ("pipeline_parallel_size", "opt", None, ("host", "host")),
        ("pipeline_parallel_size", "llama", "int4", ("host", "host")),
    ],
)
def test_two_gpus_that_stream_give_the_tokens_of_one(
    option: str,
    kind: str,
    quantization: str | None,
    kv: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of each rank's tensors anywhere, some multiplied by the CPU; K and V on the device or in host memory."""
    path = write_checkpoint(tmp_path / "model", **({"model_type": kind} | FAMILIES[kind] | SHAPE | SHARED))
    spec = open_model(read_config(path), "float32", 16, LIMITS.max_model_len, quantization).spec
    staged = option == "pipeline_parallel_size"
    shares = [stage(spec, k, 2) if staged else shard(spec, k, 2) for k in range(2)]
    found = [plan_of(share, random_placement(share, 3 + k, kv=kv), LIMITS, "gpu") for k, share in enumerate(shares)]
    plans = [replace(plan, figures={"predicted": {"tokens_per_second": 1.0}}) for plan in found]

    def planned(config: EngineConfig, checkpoint: Path | None, spared: int) -> tuple[EngineConfig, list[SavedPlan]]:
        return config, plans

    monkeypatch.setattr("cellar.engine.opened.with_rank_plans", planned)
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 40, "max_model_len": LIMITS.max_model_len}
    held = {"device_memory": 8.0, "disk": 1.0, "disk_path": str(tmp_path), "block_size": 16, "dtype": "float32"}
    wanted = resident(path, "float32", quantization)
    with LLM(path, **OPTIONS, **limits, **held, **{option: 2}, quantization=quantization) as llm:
        answers = [llm.generate(*requests(), use_tqdm=False) for _ in range(2)]
    if staged:
        assert tokens_of(answers[0]) == tokens_of(answers[1]) == tokens_of(wanted)
    else:
        equal = [equal_but_for_ties(a.outputs[0], b.outputs[0], 1e-2) for a, b in zip(answers[0], wanted, strict=True)]
        assert sum(equal) >= 8, "of 9"


def test_stages_plan_by_themselves_within_their_budgets() -> None:
    """A model of 2.3 GiB as two stages on GPUs held to 1.6 GiB each, planned by itself: link and CPU are measured."""
    options = OPTIONS | {"dtype": "bfloat16", "load_format": "dummy", "max_model_len": 256, "max_num_seqs": 8}
    options |= {"device_memory": 1.6, "max_num_batched_tokens": 512, "pipeline_parallel_size": 2}
    opened = open_front(EngineConfig.of(model="llama-3.2-1b", **options))
    with LLM.over(opened) as llm:
        assert opened.plan is not None
        rates = opened.plan.figures["rates"]
        assert rates["link"] > 5e9
        assert rates["multiply"] > 1e9
        placed = opened.offloads
        assert len(placed) == 2
        for one in placed:
            assert one.weights["host"] > 0.05 * 2**30
            kv = one.kv if one.kv_place == "device" else 0
            assert one.weights["device"] + one.ring + kv <= one.device == int(1.6 * 2**30)
        prompts = [[5 + k, 9, 100 + k] * 20 for k in range(8)]
        answers = llm.generate(prompts, use_tqdm=False)
    assert len(answers) == 8
