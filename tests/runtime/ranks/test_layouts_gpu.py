"""Engines over layouts on two GPUs, NCCL between them: the tokens of one GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellar import LLM, CompletionOutput, SamplingParams
from cellar.core.config import EngineConfig
from cellar.core.layouts import Layout, Layouts, Mesh
from cellar.planner.partition import distinct_layouts
from cellar.runtime.ranks import opened
from cellar.runtime.ranks.opened import open_ranks
from cellar.runtime.ranks.place import LaidPlace, TensorPlace
from cellar.runtime.steps.local import open_local
from tests.runtime.ranks.test_layouts import CHUNK, LONGEST, ROWS, answers, name, placed, scheduler_of, some_requests
from tests.runtime.ranks.test_ranks_gpu import close_enough
from tests.tiny_checkpoint import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: this machine has no two CUDA devices"),
]

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "falcon": SHAPE
    | {"model_type": "falcon", "architectures": ["FalconForCausalLM"], "bias": True, "num_key_value_heads": 1},
}


def pairs(kv_heads: int) -> list[Layouts]:
    """Over y and z, then over x: a few that keep K and V where they are."""
    found = []
    for mesh in (Mesh(1, 1, 2), Mesh(2, 1, 1)):
        every = distinct_layouts(mesh, kv_heads)
        allowed = [Layouts(a, b) for a in every for b in every if not Layouts(a, b).moves(kv_heads)]
        found += allowed[:: max(1, len(allowed) // 3)]
    return found


def options(path: Path) -> EngineConfig:
    return EngineConfig.of(
        model=str(path),
        device="cuda",
        dtype="float32",
        kv_cache_memory_bytes=2**26,
        block_size=CHUNK,
        max_num_seqs=ROWS,
        max_model_len=LONGEST,
    )


@pytest.mark.parametrize(
    ("family", "layouts"),
    [("llama", pair) for pair in pairs(2)[::2]] + [("falcon", pair) for pair in pairs(1)[2::6]],
    ids=name,
)
def test_layouts_on_two_gpus_give_the_tokens_of_one(family: str, layouts: Layouts, tmp_path: Path) -> None:
    """Few chunks, so that requests are suspended and begin again with holes; the second time finds prefixes."""
    check(family, layouts, tmp_path)


LOOPED = {
    "1D": Layouts(Layout(Mesh(1, 1, 2), "", "zyx"), Layout(Mesh(1, 1, 2), "", "zyx"), looped=True),
    "2D": Layouts(Layout(Mesh(2, 1, 1), "", "zyx"), Layout(Mesh(2, 1, 1), "", "zyx"), looped=True),
    "XYZ": Layouts(Layout(Mesh(1, 1, 2), "xyz"), Layout(Mesh(1, 1, 2))),
}


@pytest.mark.parametrize("layouts", LOOPED.values(), ids=LOOPED)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_weights_a_layer_ahead_give_the_tokens_of_one(
    family: str, layouts: Layouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of eight tokens, through NCCL on streams of their own; 1D by heads as well, not as tensor parallelism."""
    monkeypatch.setattr(opened, "LaidPlace", partial(LaidPlace, loop_tokens=8))
    monkeypatch.setattr(opened, "_are_tensor_parallel", lambda layouts, spec: False)
    check(family, layouts, tmp_path)


def test_tensor_parallelism_in_chunks_gives_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 600 tokens in chunks of 150, whose sums are too large for boxes; and again, to the same tokens."""
    wide = {"hidden_size": 2048, "head_dim": 64, "max_position_embeddings": 1024}
    write_checkpoint(tmp_path, **FAMILIES["llama"] | wide)
    prompt = np.random.default_rng(3).integers(3, 420, 600).tolist()
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)

    def run(size: int) -> list[CompletionOutput]:
        options: dict[str, Any] = {"max_model_len": 640, "max_num_seqs": 4, "max_num_batched_tokens": 640}
        options |= {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False}
        with LLM(str(tmp_path), device="cuda", tensor_parallel_size=size, **options) as llm:
            return [llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0] for _ in range(2)]

    alone, _ = run(1)
    monkeypatch.setattr(opened, "TensorPlace", partial(TensorPlace, loop_tokens=150))
    first, again = run(2)
    assert close_enough(alone, first)
    assert first.token_ids == again.token_ids


def check(family: str, layouts: Layouts, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **FAMILIES[family])
    config = options(path)
    alone = open_local(config, path).runtime
    try:
        one = scheduler_of(alone, 40, ROWS, 64)
        wanted = [answers(alone, one, some_requests(3, 8, 40), frozenset())[0] for _ in range(2)]
    finally:
        alone.close()
    ranks = open_ranks(config, path, placed(path, layouts, 24)).runtime
    try:
        homes = ranks.capacity.homes
        many = scheduler_of(ranks, 8 * homes, max(ROWS, 3 * homes), 64)
        found = [answers(ranks, many, some_requests(3, 8, 40), frozenset()) for _ in range(2)]
    finally:
        ranks.close()
    assert [tokens for tokens, _ in found] == wanted
    assert found[1][1].prefix_hits > 0
