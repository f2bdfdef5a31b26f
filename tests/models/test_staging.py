"""Stages are runs of layers of the whole, and one after another they compute what one device computes, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from cellar.core.errors import CheckpointError, ConfigError
from cellar.models.loader import LoadedWeights, dummy, load
from cellar.models.model import Hidden, Model, run_layer
from cellar.models.registry import open_model, read_config
from cellar.models.sharding import shard
from cellar.models.staging import stage, stage_layers
from tests.models.dense_context import DenseContext, logits_of
from tests.models.fake_comm import ThreadComm, on_ranks
from tests.models.test_halves import FAMILIES
from tests.models.test_quantized import CASES as QUANTIZED
from tests.models.test_quantized import TOKENS, written
from tests.models.test_quantized import opened as opened_quantized
from tests.models.test_sharding import stored_tensors

PIECES = [14, 1, 9]


def five_layers(family: str) -> dict[str, Any]:
    """A small config of the family that has five layers: no whole number a stage."""
    config = FAMILIES[family]
    name = next(name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in config)
    return config | {name: 5}


def staged(models: list[Model], weights: list[LoadedWeights], tokens: Tensor, comm: Any = None) -> Tensor:
    """Logits of a sequence in steps of PIECES tokens, each through all stages."""
    contexts = [DenseContext(model.spec, comm) for model in models]
    rows, start = [], 0
    for size in PIECES:
        h: Hidden | None = None
        for model, own, ctx in zip(models, weights, contexts, strict=True):
            ctx.positions = torch.arange(start, start + size)
            h = model.embed(own.embedding, tokens[start : start + size], ctx) if h is None else h
            for j, layer in enumerate(own.layers):
                h = run_layer(model, j, layer, h, ctx)
        assert h is not None
        rows.append(models[-1].head(weights[-1].head, h, comm))
        start += size
    return torch.cat(rows)


def stages_of(model: Model, count: int) -> list[Model]:
    kind: type = type(model)
    return [kind(stage(model.spec, index, count)) for index in range(count)]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_together_are_the_model(family: str, count: int, tmp_path: Path) -> None:
    """From a checkpoint, each stage reading its own tensors; made up, too."""
    model = open_model(five_layers(family), "float32")
    save_file(stored_tensors(model.spec), tmp_path / "model.safetensors")
    wanted = logits_of(model, load(model.spec, tmp_path), TOKENS, PIECES)
    assert wanted.std() > 0.1, "logits this flat would hide errors"
    parts = stages_of(model, count)
    assert torch.equal(staged(parts, [load(part.spec, tmp_path) for part in parts], TOKENS), wanted)
    made = logits_of(model, dummy(model.spec, seed=3), TOKENS, PIECES)
    assert torch.equal(staged(parts, [dummy(part.spec, seed=3) for part in parts], TOKENS), made)


def test_a_stage_that_is_left_out_shows() -> None:
    """The comparison above can fail."""
    model = open_model(five_layers("llama"), "float32")
    parts = stages_of(model, 4)
    weights = [dummy(part.spec) for part in parts]
    without = staged([*parts[:1], *parts[2:]], [*weights[:1], *weights[2:]], TOKENS)
    assert (without - logits_of(model, dummy(model.spec), TOKENS, PIECES)).abs().max() > 0.1


@pytest.mark.parametrize("family", ["llama", "qwen2", "falcon", "opt"])
def test_ranks_share_a_stage(family: str, tmp_path: Path) -> None:
    """Tensor parallelism inside of stages: two functions over specs, one after the other."""
    config = five_layers(family) | {"vocab_size": 190, "ffn_dim": 192}
    model = open_model(config, "float32")
    save_file(stored_tensors(model.spec), tmp_path / "model.safetensors")
    wanted = logits_of(model, load(model.spec, tmp_path), TOKENS, PIECES)

    def rank_logits(rank: int, comm: ThreadComm) -> Tensor:
        kind: type = type(model)
        parts = [kind(shard(part.spec, rank, 2)) for part in stages_of(model, 2)]
        return staged(parts, [load(part.spec, tmp_path) for part in parts], TOKENS, comm)

    for logits in on_ranks(2, rank_logits):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["awq 32", "gptq act-order", "compressed fp8, rows", "mxfp4"])
def test_stages_of_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    """What other stages read is none of a stage's business, under whatever names it is stored."""
    written(tmp_path, *QUANTIZED[name], num_hidden_layers=3)
    model = opened_quantized(tmp_path)[0]
    tokens = TOKENS
    wanted = logits_of(*opened_quantized(tmp_path), tokens, PIECES)
    for count in (2, 3):
        parts = stages_of(open_model(read_config(tmp_path), "float32"), count)
        assert torch.equal(staged(parts, [load(part.spec, tmp_path) for part in parts], tokens), wanted)
    assert model.spec.num_layers == 3


def test_a_tied_head_may_be_stored_under_either_name_or_both(tmp_path: Path) -> None:
    model = open_model(five_layers("qwen2"), "float32")
    save_file(stored_tensors(model.spec), tmp_path / "model.safetensors")
    stored = load_file(tmp_path / "model.safetensors")
    wanted = logits_of(model, load(model.spec, tmp_path), TOKENS, PIECES)
    embed = stored["model.embed_tokens.weight"]
    rest = {name: tensor for name, tensor in stored.items() if tensor is not embed}
    parts = stages_of(model, 3)
    for names in (("lm_head.weight",), ("model.embed_tokens.weight", "lm_head.weight")):
        save_file(rest | {name: embed.clone() for name in names}, tmp_path / "model.safetensors")
        assert torch.equal(staged(parts, [load(part.spec, tmp_path) for part in parts], TOKENS), wanted)
    save_file(stored | {"lm_head.weight": embed + 1}, tmp_path / "model.safetensors")
    for part in (parts[0], parts[2]):
        with pytest.raises(CheckpointError, match=r"differs from model\.embed_tokens\.weight"):
            load(part.spec, tmp_path)


@pytest.mark.parametrize("index", range(3))
def test_what_no_stage_reads_is_refused_by_all(index: int, tmp_path: Path) -> None:
    model = open_model(five_layers("llama"), "float32")
    save_file(stored_tensors(model.spec) | {"model.layers.7.other": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has 1 tensors that model_type llama does not use"):
        load(stage(model.spec, index, 3), tmp_path)


@given(st.integers(1, 90), st.integers(1, 90))
def test_every_layer_has_one_stage(layers: int, count: int) -> None:
    if count > layers:
        with pytest.raises(ConfigError, match=f"take at most {layers}"):
            stage_layers(layers, 0, count)
        return
    runs = [stage_layers(layers, index, count) for index in range(count)]
    assert [j for run in runs for j in run] == list(range(layers))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_bytes_of_the_stages_are_those_of_the_whole() -> None:
    """But for a tied head, which is there twice."""
    for family in FAMILIES:
        spec = open_model(five_layers(family), "bfloat16").spec
        parts = [stage(spec, index, 4) for index in range(4)]
        twice = next(t.nbytes for t in spec.head if t.name == "lm_head") if spec.tied_head else 0
        assert sum(part.nbytes() for part in parts) == spec.nbytes() + twice
        assert sum(part.kv.chunk_nbytes() for part in parts) == spec.kv.chunk_nbytes()
