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

    def tensor(name: str, shape: tuple[int, ...], axes: tuple[str, ...], stored: str) -> TensorSpec:
        stored = "transformer." + stored
        return TensorSpec(name, shape, dtype, axes, (stored,), heads=rows if axes[0] == "qkv" else None)

    def layer(prefix: str) -> tuple[TensorSpec, ...]:
        tensors = [
            tensor("input_norm", (e,), ("embed",), prefix + "input_layernorm.weight"),
            tensor("input_norm_bias", (e,), ("embed",), prefix + "input_layernorm.bias"),
        ]

        def matrix(name: str, shape: tuple[int, int], axes: tuple[str, str], stored: str) -> None:
            tensors.append(tensor(name, shape, axes, f"{prefix}{stored}.weight"))
            if biased:
                tensors.append(tensor(name + "_bias", shape[:1], axes[:1], f"{prefix}{stored}.bias"))

        matrix("qkv", ((heads + 2 * kv_heads) * dim, e), ("qkv", "embed"), "self_attention.query_key_value")
        matrix("out", (e, e), ("embed", "heads"), "self_attention.dense")
        matrix("up", (f, e), ("mlp", "embed"), "mlp.dense_h_to_4h")
        matrix("down", (e, f), ("embed", "mlp"), "mlp.dense_4h_to_h")
        return tuple(tensors)

    embed = tensor("embed", (vocab, e), ("vocab", "embed"), "word_embeddings.weight")
    source = embed.stored if tied else ("lm_head.weight",)
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
        layers=tuple(LayerSpec(j, layer(f"h.{j}."), heads, kv_heads, dim) for j in range(num_layers)),
        head=(
            tensor("norm", (e,), ("embed",), "ln_f.weight"),
            tensor("norm_bias", (e,), ("embed",), "ln_f.bias"),
            TensorSpec("lm_head", embed.shape, dtype, ("vocab", "embed"), source),
        ),
        kv=kv_spec((None,) * num_layers, kv_heads, dim, dtype, chunk_size),
        rope=rope,
        eos_token_ids=fields.token_ids("eos_token_id", 11),
        bos_token_id=fields.first_token_id("bos_token_id", 11),
        tied_head=tied,
        options={
            "activation": fields.activation("activation", "gelu"),
            "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
            "parallel_block": True,
        },
    )


def model(spec: ModelSpec) -> ParallelDecoder:
    """The forward of a spec that this file made."""
    return ParallelDecoder(spec)
