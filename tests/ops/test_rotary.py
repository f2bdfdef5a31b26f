"""Frequency tables and rotation against transformers, kind by kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from cellar.core.errors import ConfigError
from cellar.core.specs import RopeSpec
from cellar.ops.rotary import attention_factor, inverse_frequencies, rope_table, rotary
from cellar.ops.rotary.triton import rotary_kernel

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}

KINDS: list[tuple[str, dict[str, float]]] = [
    ("plain", {}),
    ("linear", {"factor": 2.5}),
    ("llama3", LLAMA3),
    ("llama3", {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}),
    ("yarn", YARN),
    ("yarn", {**YARN, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": 0.0}),
    ("yarn", {**YARN, "attention_factor": 1.25}),
    ("dynamic", {"factor": 3.0, "original_max_position_embeddings": 128}),
]


def config(kind: str, scaling: dict[str, float], head_dim: int, theta: float) -> LlamaConfig:
    parameters: dict[str, Any] = {"rope_type": "default" if kind == "plain" else kind, "rope_theta": theta, **scaling}
    if "truncate" in parameters:
        parameters["truncate"] = bool(parameters["truncate"])
    trained = int(scaling.get("original_max_position_embeddings", 512))
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=trained,
        rope_parameters=parameters,
    )


def spec(kind: str, scaling: dict[str, float], head_dim: int, theta: float, max_position: int = 512) -> RopeSpec:
    return RopeSpec(head_dim, head_dim, theta, kind, scaling, max_position)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "scaling"), KINDS)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10_000.0), (128, 500_000.0), (20, 1_000.0)])
def test_frequencies_are_those_of_transformers(
    kind: str, scaling: dict[str, float], head_dim: int, theta: float
) -> None:
    mine = spec(kind, scaling, head_dim, theta)
    theirs = config(kind, scaling, head_dim, theta)
    if kind == "plain":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=mine.max_position)
    torch.testing.assert_close(inverse_frequencies(mine), expected, rtol=2e-6, atol=0)
    assert attention_factor(mine) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(("kind", "scaling"), [k for k in KINDS if k[0] != "dynamic"])
def test_rotation_is_that_of_transformers(kind: str, scaling: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn((9, 4, 64), generator=generator), torch.randn((9, 2, 64), generator=generator)
    positions = torch.tensor([0, 1, 2, 17, 100, 101, 255, 256, 511])
    embedding = LlamaRotaryEmbedding(config(kind, scaling, 64, 10_000.0))
    cos, sin = embedding(q, positions.unsqueeze(0))
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    got = rotary(q, k, positions, rope_table(spec(kind, scaling, 64, 10_000.0), "cpu"))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_dynamic_frequencies_do_not_change_with_length() -> None:
    """They are those of max_position, and plain ones where the context is no longer than the trained one."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 512.0}
    plain = inverse_frequencies(spec("plain", {}, 64, 10_000.0))
    torch.testing.assert_close(inverse_frequencies(spec("dynamic", scaling, 64, 10_000.0, 512)), plain)
    torch.testing.assert_close(inverse_frequencies(spec("dynamic", scaling, 64, 10_000.0, 100)), plain)
    assert (inverse_frequencies(spec("dynamic", scaling, 64, 10_000.0, 2048))[1:] < plain[1:]).all()


def test_dimensions_beyond_rotary_dim_stay() -> None:
    table = rope_table(RopeSpec(32, 12, 10_000.0, max_position=64), "cpu")
    assert table.shape == (64, 12)
    q, k = torch.randn(3, 2, 32), torch.randn(3, 1, 32)
    for turn in (rotary, rotary_kernel):
        turned, _ = turn(q, k, torch.tensor([5, 6, 7]), table)
        assert turned[..., 12:].equal(q[..., 12:])
        assert not turned[..., :12].isclose(q[..., :12]).all()


def test_scores_depend_on_distance_only() -> None:
    table = rope_table(spec("plain", {}, 64, 10_000.0), "cpu")
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned_q, _ = rotary(q, k, torch.tensor([at_q]), table)
        _, turned_k = rotary(q, k, torch.tensor([at_k]), table)
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(10, 3), score(400, 393), rtol=1e-3, atol=1e-3)


def test_inputs_are_not_changed() -> None:
    table = rope_table(spec("plain", {}, 8, 10_000.0), "cpu")
    q, k = torch.randn(2, 2, 8), torch.randn(2, 1, 8)
    before = q.clone(), k.clone()
    rotary(q, k, torch.tensor([3, 4]), table)
    assert q.equal(before[0])
    assert k.equal(before[1])


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="longrope"):
        inverse_frequencies(spec("longrope", {}, 64, 10_000.0))
