"""A layer in halves: attention may run anywhere between them, and collectives stand where the sums are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cellar.models.loader import dummy
from cellar.models.model import Projected, run_layer
from cellar.models.registry import open_model
from tests.conformance.chatglm import config_of
from tests.models.dense_context import DenseContext, logits_of

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
OPT = SIZES | {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": SIZES | {"model_type": "mistral", "sliding_window": 7},
    "qwen2": SIZES | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 24},
    "opt": OPT,
    "opt, norms last": OPT | {"word_embed_proj_dim": 24, "do_layer_norm_before": False},
    "falcon": SIZES | {"model_type": "falcon", "multi_query": False, "bias": True, "eos_token_id": 2},
    "cohere": SIZES | {"model_type": "cohere", "logit_scale": 0.5, "attention_bias": True, "eos_token_id": 2},
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "vocab_size": 101,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "multi_query": False,
        "eos_token_id": 2,
    },
    "chatglm": config_of(4, 2, 16, 64),
    "chatglm, own k and v of each head": config_of(4, 4, 16, 64, multi_query_attention=False),
}
TOKENS = torch.randint(0, 101, (30,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_first_halves_may_run_before_any_attention(family: str) -> None:
    """Two sequences in step: their halves run one after another, as block schedules want it; logits are the same."""
    model = open_model(FAMILIES[family], "float32")
    weights = dummy(model.spec, seed=2)
    pair = [TOKENS, TOKENS.flip(0)]
    contexts = [DenseContext(model.spec) for _ in pair]
    for ctx in contexts:
        ctx.positions = torch.arange(len(TOKENS))
    hidden = [model.embed(weights.embedding, tokens, ctx) for tokens, ctx in zip(pair, contexts, strict=True)]
    rotate = model.spec.rope is not None
    for j, layer in enumerate(weights.layers):
        first: list[Projected] = [
            model.before_attention(j, layer, h, ctx) for h, ctx in zip(hidden, contexts, strict=True)
        ]
        attended = [ctx.attend(j, p.q, p.k, p.v, rotate=rotate) for p, ctx in zip(first, contexts, strict=True)]
        hidden = [
            model.after_attention(j, layer, p.carried, a, ctx)
            for p, a, ctx in zip(first, attended, contexts, strict=True)
        ]
    for tokens, h in zip(pair, hidden, strict=True):
        assert torch.equal(model.head(weights.head, h), logits_of(model, weights, tokens, [len(tokens)]))


class CountingComm:
    """One rank of one, which keeps account of what is asked of it."""

    loop = None
    normed_sums = None

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.asked.append(("reduce", tuple(x.shape)))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self.asked.append(("gather", tuple(x.shape)))
        return x


@pytest.mark.parametrize("family", FAMILIES)
def test_there_are_two_sums_a_layer_or_one_if_it_is_parallel_and_one_gather_a_head(family: str) -> None:
    model = open_model(FAMILIES[family], "float32")
    weights = dummy(model.spec)
    comm = CountingComm()
    ctx = DenseContext(model.spec, comm)
    ctx.positions = torch.arange(5)
    h = model.embed(weights.embedding, TOKENS[:5], ctx)
    assert not comm.asked, "tables are whole on every rank"
    for j, layer in enumerate(weights.layers):
        h = run_layer(model, j, layer, h, ctx)
    model.head(weights.head, h, comm)
    sums = 1 if model.spec.options.get("parallel_block") else 2
    assert comm.asked == [("reduce", (5, 64))] * 3 * sums + [("gather", (5, 101))]
