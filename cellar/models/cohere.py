"""Command-R (model_type cohere): parallel blocks with a gated feed-forward, grouped queries, norms without a bias.

Rotary pairs lie side by side in the checkpoint and are put in halves when they are loaded (`HeadRows`); logits are
multiplied by `logit_scale`.

What it costs: as `decoder.py` says, less one norm a layer. Command-R has E 8192, F 22528, H 64, K 64, D 128, L 40,
V 256000: 3.50e10 parameters, and 1,310,720 bytes of KV per token in two bytes an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellar.core.errors import CheckpointError
from cellar.core.specs import HeadRows, LayerSpec, ModelSpec, TensorSpec
from cellar.models.decoder import head_dim_of, kv_spec, uniform_layers
from cellar.models.fields import Fields
from cellar.models.parallel import ParallelDecoder
from cellar.models.rope import rope_spec
from cellar.models.tensors import LayerTensors, head_matrix

ARCHITECTURE = "CohereForCausalLM"


def spec(config: Mapping[str, Any], dtype: str, chunk_size: int, max_model_len: int | None) -> ModelSpec:
    """Everything static about the model that a config.json defines."""
    fields = Fields(config, ARCHITECTURE, computed=("logit_scale",))
    uniform_layers(fields, "full_attention")
    e, f = fields.integer("hidden_size", 8192), fields.integer("intermediate_size", 22528)
    heads, num_layers = fields.integer("num_attention_heads", 64), fields.layers("num_hidden_layers", 40)
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads {heads} in config.json is not a multiple of num_key_value_heads {kv_heads}; every KV "
            "head must serve as many heads."
        )
    dim, vocab = head_dim_of(fields, e, heads), fields.integer("vocab_size", 256000)
    biased, tied = fields.flag("attention_bias", False), fields.flag("tie_word_embeddings", True)
    rope = rope_spec(fields, dim, fields.integer("max_position_embeddings", 8192), max_model_len, 500_000.0)
    q, kv = heads * dim, kv_heads * dim

    def layer(prefix: str) -> tuple[TensorSpec, ...]:
        found = LayerTensors(prefix, e, dtype, HeadRows(heads, kv_heads, dim, interleaved=dim))
        found.norm("input_norm", "input_layernorm")
        qkv = (f"self_attn.{name}_proj" for name in "qkv")
        found.matrix("qkv", (q + 2 * kv, e), ("qkv", "embed"), *qkv, bias=biased, parts=(q, kv, kv))
        found.matrix("out", (e, q), ("embed", "heads"), "self_attn.o_proj", bias=biased)
        found.matrix("gate_up", (2 * f, e), ("gate_up", "embed"), "mlp.gate_proj", "mlp.up_proj", bias=False)
        found.matrix("down", (e, f), ("embed", "mlp"), "mlp.down_proj", bias=False)
        return tuple(found.tensors)

    embed = TensorSpec("embed", (vocab, e), dtype, ("vocab", "embed"), ("model.embed_tokens.weight",))
    last = LayerTensors("model.", e, dtype)
    last.norm("norm", "norm")
    return ModelSpec(
        model_type="cohere",
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
        layers=tuple(LayerSpec(j, layer(f"model.layers.{j}."), heads, kv_heads, dim) for j in range(num_layers)),
        head=(*last.tensors, head_matrix(embed, tied)),
        kv=kv_spec((None,) * num_layers, kv_heads, dim, dtype, chunk_size),
        rope=rope,
        eos_token_ids=fields.token_ids("eos_token_id", 255001),
        bos_token_id=fields.first_token_id("bos_token_id", 5),
        tied_head=tied,
        options={
            "activation": fields.activation("hidden_act", "silu"),
            "norm_eps": fields.number("layer_norm_eps", 1e-5),
            "norm_mean": True,
            "parallel_block": True,
            "logit_scale": fields.number("logit_scale", 0.0625),
        },
    )


def model(spec: ModelSpec) -> ParallelDecoder:
    """The forward of a spec that this file made."""
    return ParallelDecoder(spec)
