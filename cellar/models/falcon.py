"""Falcon-7B and its like (model_type falcon): parallel blocks, one KV head for all query heads, rotary positions.

What it costs, with E = hidden_size, F = ffn_hidden_size, D = E / heads, L layers, V words, t new tokens with c tokens
of context each, b bytes per element:

    parameters of a layer   2 E^2 + 2 E D + 2 E F + 2 E       (q and out, k and v, two matrices, one norm)
    parameters              L (layer) + V E + 2 E
    KV bytes per token      2 L D b
    FLOPs of a step         t L (4 E^2 + 4 E D + 4 E F + 4 E c) + 2 V E per sampled token

Falcon-7B has E 4544, F 18176, 71 heads of D 64, L 32, V 65024: 6.92e9 parameters, and 8,192 bytes of KV per token in
two bytes an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellar.core.errors import CheckpointError
from cellar.core.specs import HeadRows, LayerSpec, ModelSpec, TensorSpec
from cellar.models.decoder import kv_spec
from cellar.models.fields import Fields
from cellar.models.parallel import ParallelDecoder
from cellar.models.rope import rope_spec
from cellar.models.tensors import LayerTensors, head_matrix

ARCHITECTURE = "FalconForCausalLM"

_ONLY = {"new_decoder_architecture": False, "alibi": False, "parallel_attn": True}
"""Falcon-40B and 180B store q, k and v in groups and have two norms; the RW models have other positions and blocks."""


def spec(config: Mapping[str, Any], dtype: str, chunk_size: int, max_model_len: int | None) -> ModelSpec:
    """Everything static about the model that a config.json defines."""
    own = {name: value for name, value in config.items() if name != "auto_map"}  # what that code computes is below
    fields = Fields(own, ARCHITECTURE, computed=_ONLY)
    for name, neutral in _ONLY.items():
        if config.get(name) not in (None, neutral):
            raise fields.refusal(name, f"of Falcon the 7B and its like are supported ({str(neutral).lower()})")
    e, heads = fields.integer("hidden_size", 4544), fields.integer("num_attention_heads", 71)
    num_layers, vocab = fields.layers("num_hidden_layers", 32), fields.integer("vocab_size", 65024)
    f = fields.integer("ffn_hidden_size", 4 * e)
    if e % heads:
        raise CheckpointError(f"hidden_size {e} in config.json is not a multiple of num_attention_heads {heads}.")
    shared, biased = fields.flag("multi_query", True), fields.flag("bias", False)
    tied, dim = fields.flag("tie_word_embeddings", True), e // heads
    kv_heads = 1 if shared else heads
    rows = None if shared else HeadRows(heads, heads, dim, by_head=True)
    rope = rope_spec(fields, dim, fields.integer("max_position_embeddings", 2048), max_model_len)

    def layer(prefix: str) -> tuple[TensorSpec, ...]:
        found = LayerTensors(prefix, e, dtype, rows)
        found.norm("input_norm", "input_layernorm", bias=True)
        size = (heads + 2 * kv_heads) * dim, e
        found.matrix("qkv", size, ("qkv", "embed"), "self_attention.query_key_value", bias=biased)
        found.matrix("out", (e, e), ("embed", "heads"), "self_attention.dense", bias=biased)
        found.matrix("up", (f, e), ("mlp", "embed"), "mlp.dense_h_to_4h", bias=biased)
        found.matrix("down", (e, f), ("embed", "mlp"), "mlp.dense_4h_to_h", bias=biased)
        return tuple(found.tensors)

    embed = TensorSpec("embed", (vocab, e), dtype, ("vocab", "embed"), ("transformer.word_embeddings.weight",))
    last = LayerTensors("transformer.", e, dtype)
    last.norm("norm", "ln_f", bias=True)
    return ModelSpec(
        model_type="falcon",
        dtype=dtype,
        hidden_size=e,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=f,
        vocab_size=vocab,
        max_position=rope.max_position,
        embedding=(embed,),
        layers=tuple(LayerSpec(j, layer(f"transformer.h.{j}."), heads, kv_heads, dim) for j in range(num_layers)),
        head=(*last.tensors, head_matrix(embed, tied)),
        kv=kv_spec((None,) * num_layers, kv_heads, dim, dtype, chunk_size),
        rope=rope,
        eos_token_ids=fields.token_ids("eos_token_id", 11),
        bos_token_id=fields.first_token_id("bos_token_id", 11),
        tied_head=tied,
        options={
            "activation": fields.activation("activation", "gelu"),
            "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
            "norm_mean": True,
            "parallel_block": True,
        },
    )


def model(spec: ModelSpec) -> ParallelDecoder:
    """The forward of a spec that this file made."""
    return ParallelDecoder(spec)
