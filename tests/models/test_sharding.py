"""Shards are pieces of the whole, and ranks together compute what one device computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.formats import Format
from cellar.core.specs import ModelSpec
from cellar.models import points
from cellar.models.decoder import Decoder
from cellar.models.loader import LoadedWeights, dummy, load
from cellar.models.model import Part
from cellar.models.quantization import is_linear
from cellar.models.registry import open_model, shipped_config, shipped_names
from cellar.models.sharding import shard
from cellar.ops.linear.pack import pack
from cellar.quant.bytes import ByteWeight
from cellar.quant.matrix import quantized
from tests.models.dense_context import logits_of
from tests.models.fake_comm import ThreadComm, on_ranks
from tests.models.test_halves import FAMILIES, SIZES, TOKENS

BIASED_OPT = SIZES | {"model_type": "opt", "ffn_dim": 320, "word_embed_proj_dim": 64, "num_attention_heads": 8}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    **{name: (config | {"ffn_dim": 192}, 2) for name, config in FAMILIES.items()},
    "opt on four": (BIASED_OPT | {"vocab_size": 300}, 4),
    "unequal shares": (
        SIZES | {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12},
        2,
    ),
    "unequal shares on three": (
        SIZES | {"model_type": "qwen3", "num_key_value_heads": 4, "intermediate_size": 97, "vocab_size": 190},
        3,
    ),
}


def stored_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Random tensors, biases and norms too, under the names that a checkpoint has."""
    generator = torch.Generator().manual_seed(5)
    made: dict[str, Tensor] = {}
    for tensor in spec.tensors():
        for part in tensor.stored_parts():
            scale = part.shape[-1] ** -0.5 if len(part.shape) == 2 else 0.3
            drawn = scale * torch.randn(part.shape, generator=generator)
            made.setdefault(part.name, drawn + 1 if tensor.name.endswith("norm") else drawn)
    return made


@pytest.mark.parametrize("case", CASES)
def test_ranks_together_compute_what_one_device_computes(case: str, tmp_path: Path) -> None:
    """From a checkpoint, every rank reading its own part; prompts whole and in pieces."""
    config, size = CASES[case]
    model = open_model(config, "float32")
    save_file(stored_tensors(model.spec), tmp_path / "model.safetensors")
    wanted = logits_of(model, load(model.spec, tmp_path), TOKENS, [30])
    assert wanted.std() > 0.1, "logits this flat would hide errors"

    def rank_logits(rank: int, comm: ThreadComm) -> Tensor:
        part = type(model)(shard(model.spec, rank, size))
        weights = load(part.spec, tmp_path, transform=lambda s, t: pack(t) if is_linear(s) else t)
        return logits_of(part, weights, TOKENS, [20, 1, 9], comm)

    found = on_ranks(size, rank_logits)
    for logits in found:
        assert torch.equal(logits, found[0]), "every rank has the same bits"
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("most", [1, 9, 20], ids="up to {} rows".format)
@pytest.mark.parametrize("case", [name for name in CASES if "opt" not in name])
def test_sums_that_go_with_the_norm_behind_them_change_nothing(
    case: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in pieces of 20, 1 and 9 tokens, of which some go so, to the last bit."""
    config, size = CASES[case]
    model = open_model(config, "float32")
    save_file(stored_tensors(model.spec), tmp_path / "model.safetensors")
    asked: list[str] = []

    def logits(rank: int, comm: ThreadComm) -> Tensor:
        part = type(model)(shard(model.spec, rank, size))
        return logits_of(part, load(part.spec, tmp_path), TOKENS, [20, 1, 9], comm)

    plain = on_ranks(size, logits)
    monkeypatch.setattr(ThreadComm, "most_rows", most)
    exchanged = ThreadComm._exchanged
    monkeypatch.setattr(ThreadComm, "_exchanged", lambda self, what, x: asked.append(what) or exchanged(self, what, x))
    for one, other in zip(plain, on_ranks(size, logits), strict=True):
        assert torch.equal(one, other)
    layers, pieces = len(model.spec.layers), sum(n <= most for n in (20, 1, 9))
    norms = isinstance(model, Decoder)  # others have no RMSNorm behind their sums
    # Of the last layer the second sum has no norm behind it in the loop over layers.
    assert asked.count("sum and norm") == size * pieces * (2 * layers - 1) * norms


@pytest.mark.parametrize("rounds", [True, False])
def test_a_norm_that_rounds_its_tokens_stays_with_its_product(rounds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a sum it would be one launch more."""
    monkeypatch.setattr(ThreadComm, "most_rows", 8)
    monkeypatch.setattr(ThreadComm, "take", lambda self, like, apart=True: apart)
    matrix = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight = ByteWeight(quantized(matrix, Format("fp8", activations="fp8"))) if rounds else matrix
    x = torch.ones(3, 64)

    def added(rank: int, comm: ThreadComm) -> bool:
        return not isinstance(points.parted_linear(x, weight, None, x, comm), Part)

    assert on_ranks(2, added) == [rounds] * 2


def test_a_missing_sum_shows() -> None:
    """The comparison above can fail: without its collectives a rank's logits are others'."""
    model = open_model(FAMILIES["llama"], "float32")
    part = type(model)(shard(model.spec, 0, 2))
    alone = logits_of(part, dummy(part.spec), TOKENS, [30])
    whole = logits_of(model, dummy(model.spec), TOKENS, [30])
    assert (alone - whole[:, : alone.shape[1]]).abs().max() > 0.1


def _pieces(spec: ModelSpec, weights: LoadedWeights) -> dict[str, Tensor]:
    found = {f"embedding.{name}": t for name, t in weights.embedding.items()}
    found |= {f"{j}.{name}": t for j, layer in enumerate(weights.layers) for name, t in layer.items()}
    found |= {f"head.{name}": t for name, t in weights.head.items()}
    assert all(isinstance(t, Tensor) for t in found.values())
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("case", CASES)
def test_random_shards_are_the_wholes(case: str) -> None:
    """f(seed, tensor, row, column): what a rank makes up is what the whole has there."""
    config, size = CASES[case]
    spec = open_model(config, "bfloat16").spec
    whole = _pieces(spec, dummy(spec, seed=4))
    shards = [_pieces(part, dummy(part, seed=4)) for part in (shard(spec, rank, size) for rank in range(size))]
    axes = {f"{layer.index}.{t.name}": t.axes for layer in spec.layers for t in layer.tensors}
    for name, tensor in whole.items():
        parts = [part[name] for part in shards if name in part]
        if parts[0].shape == tensor.shape:
            assert all(torch.equal(part, tensor) for part in parts)
        elif parts[0].shape[0] == tensor.shape[0]:
            assert torch.equal(torch.cat(parts, 1), tensor)
        elif name in axes and axes[name][0] in ("qkv", "gate_up"):
            # [q | k | v] of each rank: the same segments of all ranks stand together in the whole.
            split = [
                part.split(_segments(axes[name][0], shard(spec, rank, size), len(part)))
                for rank, part in enumerate(parts)
            ]
            assert torch.equal(torch.cat([s for segment in zip(*split, strict=True) for s in segment]), tensor)
        else:
            assert torch.equal(torch.cat(parts), tensor)


def _segments(axis: str, part: ModelSpec, rows: int) -> list[int]:
    if axis == "gate_up":
        return [rows // 2] * 2
    return [heads * part.head_dim for heads in (part.num_heads, part.num_kv_heads, part.num_kv_heads)]


@pytest.mark.parametrize("name", shipped_names())
@pytest.mark.parametrize("size", [2, 4, 8])
def test_shares_of_known_models_add_up(name: str, size: int) -> None:
    """Bytes, FLOPs and KV bytes of all ranks are the model's, what is repeated counted as often."""
    config = shipped_config(name)
    assert config is not None
    spec = open_model(config, "bfloat16").spec
    if spec.num_kv_heads < size:
        with pytest.raises(ConfigError, match=f"{size} ranks cannot share axis qkv"):
            shard(spec, 0, size)
        return
    parts = [shard(spec, rank, size) for rank in range(size)]
    for layer in spec.layers[:1]:
        matrices = sum(t.size for t in layer.tensors if len(t.shape) == 2)
        assert sum(t.size for p in parts for t in p.layers[layer.index].tensors if len(t.shape) == 2) == matrices
    heads = [t.size for p in parts for t in p.head if t.name == "lm_head"]
    assert sum(heads) == spec.vocab_size * next(t.shape[1] for t in spec.head if t.name == "lm_head")
    assert sum(p.kv.nbytes_per_token() for p in parts) == spec.kv.nbytes_per_token()
    assert len({p.layers[0].nbytes for p in parts}) <= 2, "equal but for biases that are added once"


def test_one_rank_has_the_model_and_too_many_are_refused() -> None:
    spec = open_model(FAMILIES["llama"], "float32").spec
    assert shard(spec, 0, 1) is spec
    with pytest.raises(ConfigError, match="3 ranks cannot share axis qkv, which has 2 units"):
        shard(spec, 0, 3)
    with pytest.raises(ConfigError, match="rank 2 is not one of 2"):
        shard(spec, 2, 2)
