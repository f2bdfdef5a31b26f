"""StarCoder and SantaCoder (model_type gpt_bigcode): LayerNorm, learned positions, one KV head for all query heads.

The blocks are OPT's with norms first, so the forward is, too; positions count from 0.

What it costs, with E = n_embd, F = n_inner, D = E / n_head, L layers, V words, P positions, t new tokens with c tokens
of context each, b bytes per element:

    parameters of a layer   2 E^2 + 2 E D + 2 E F + 7 E + 2 D + F   (q and out, k and v, two matrices, biases, norms)
    parameters              L (layer) + V E + P E + 2 E
    KV bytes per token      2 L D b
    FLOPs of a step         t L (4 E^2 + 4 E D + 4 E F + 4 E c) + 2 V E per sampled token

StarCoder has E 6144, F 24576, 48 heads of D 128, L 40, V 49152, P 8192: 1.55e10 parameters, and 20,480 bytes of KV per
token in two bytes an element, where a KV head for each head would take 983,040.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellar.core.errors import CheckpointError
from cellar.core.specs import HeadRows, LayerSpec, ModelSpec, TensorSpec
from cellar.models.decoder import kv_spec
from cellar.models.fields import Fields
from cellar.models.opt import OPT
from cellar.models.rope import context_length
from cellar.models.tensors import LayerTensors, head_matrix

ARCHITECTURE = "GPTBigCodeForCausalLM"


def spec(config: Mapping[str, Any], dtype: str, chunk_size: int, max_model_len: int | None) -> ModelSpec:
    """Everything static about the model that a config.json defines."""
    fields = Fields(config, ARCHITECTURE)
    e, heads, num_layers = fields.integer("n_embd", 768), fields.integer("n_head", 12), fields.layers("n_layer", 12)
    f, vocab = fields.integer("n_inner", 4 * e), fields.integer("vocab_size", 50257)
    positions = fields.integer("n_positions", 1024)
    if e % heads:
        raise CheckpointError(f"n_embd {e} in config.json is not a multiple of n_head {heads}.")
    if not fields.flag("scale_attn_weights", True):
        raise fields.refusal("scale_attn_weights", "only scaled scores are supported; use a checkpoint with true")
    shared, tied, dim = fields.flag("multi_query", True), fields.flag("tie_word_embeddings", True), e // heads
    kv_heads = 1 if shared else heads
    rows = None if shared else HeadRows(heads, heads, dim, by_head=True)

    def layer(prefix: str) -> tuple[TensorSpec, ...]:
        found = LayerTensors(prefix, e, dtype, rows)
        found.norm("input_norm", "ln_1", bias=True)
        found.matrix("qkv", ((heads + 2 * kv_heads) * dim, e), ("qkv", "embed"), "attn.c_attn", bias=True)
        found.matrix("out", (e, e), ("embed", "heads"), "attn.c_proj", bias=True)
        found.norm("post_norm", "ln_2", bias=True)
        found.matrix("up", (f, e), ("mlp", "embed"), "mlp.c_fc", bias=True)
        found.matrix("down", (e, f), ("embed", "mlp"), "mlp.c_proj", bias=True)
        return tuple(found.tensors)

    embed = TensorSpec("embed", (vocab, e), dtype, ("vocab", "embed"), ("transformer.wte.weight",))
    table = TensorSpec("positions", (positions, e), dtype, ("position", "embed"), ("transformer.wpe.weight",))
    last = LayerTensors("transformer.", e, dtype)
    last.norm("norm", "ln_f", bias=True)
    return ModelSpec(
        model_type="gpt_bigcode",
        dtype=dtype,
        hidden_size=e,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=f,
        vocab_size=vocab,
        max_position=context_length(positions, positions, max_model_len),
        embedding=(embed, table),
        layers=tuple(LayerSpec(j, layer(f"transformer.h.{j}."), heads, kv_heads, dim) for j in range(num_layers)),
        head=(*last.tensors, head_matrix(embed, tied)),
        kv=kv_spec((None,) * num_layers, kv_heads, dim, dtype, chunk_size),
        eos_token_ids=fields.token_ids("eos_token_id", 50256),
        bos_token_id=fields.first_token_id("bos_token_id", 50256),
        tied_head=tied,
        options={
            "activation": fields.activation("activation_function", "gelu_pytorch_tanh"),
            "norm_first": True,
            "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
            "norm_mean": True,
            "position_offset": 0,
        },
    )


def model(spec: ModelSpec) -> OPT:
    """The forward of a spec that this file made."""
    return OPT(spec)
