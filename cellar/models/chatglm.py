"""ChatGLM2, ChatGLM3 and GLM-4 in their own format (model_type chatglm): the common decoder under other names.

What differs from Llama: q, k and v are one stored matrix with a bias, gate and up are one, the head is never tied,
and only half of each head is rotated. The checkpoint rotates neighbours (2i, 2i + 1) where `rotary` rotates halves:
the rows of q and k are put in that order when they are loaded (`HeadRows`), which no product of a q with a k notices.

What it costs: see `decoder.py`, plus D (H + 2 K) biases a layer. ChatGLM2-6B has E 4096, F 13696, H 32, K 2, D 128,
L 28, V 65024: 6.24e9 parameters, 28,672 bytes of KV per token in two bytes an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellar.core.errors import CheckpointError
from cellar.core.specs import HeadRows, LayerSpec, ModelSpec, RopeSpec, TensorSpec
from cellar.models.decoder import Decoder, kv_spec
from cellar.models.fields import Fields
from cellar.models.rope import context_length
from cellar.models.tensors import LayerTensors

ARCHITECTURE = "ChatGLMModel"

# Newer files name the class that the older ones leave to `auto_map`.
_ALSO = "ChatGLMForConditionalGeneration"
_THETA = 10_000.0
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "rmsnorm": (True,),
    "original_rope": (True,),
    "apply_residual_connection_post_layernorm": (False,),
    "tie_word_embeddings": (False,),
    "quantization_bit": (0,),
    "pre_seq_len": (),
}


def spec(config: Mapping[str, Any], dtype: str, chunk_size: int, max_model_len: int | None) -> ModelSpec:
    """Everything static about the model that a config.json defines."""
    fields = Fields(_readable(config), ARCHITECTURE)
    _refuse(fields)
    e, f = fields.integer("hidden_size", 4096), fields.integer("ffn_hidden_size", 13696)
    heads, dim = fields.integer("num_attention_heads", 32), fields.integer("kv_channels", 128)
    grouped = fields.flag("multi_query_attention", False)
    kv_heads = fields.integer("multi_query_group_num", 1) if grouped else heads
    if heads % kv_heads:
        raise fields.refusal("multi_query_group_num", f"num_attention_heads {heads} must be a multiple of it")
    if dim % 4:
        raise fields.refusal("kv_channels", "half of it is rotated in pairs, so it must be a multiple of 4")
    vocab, num_layers = fields.integer("padded_vocab_size", 65024), fields.layers("num_layers", 28)
    biased = fields.flag("add_bias_linear", False)
    rope = _rope(fields, dim, max_model_len)
    kv = kv_spec((None,) * num_layers, kv_heads, dim, dtype, chunk_size)
    rows = HeadRows(heads, kv_heads, dim, interleaved=dim // 2, by_head=not grouped)

    def layer(prefix: str) -> tuple[TensorSpec, ...]:
        found = LayerTensors(prefix, e, dtype, rows)
        attention, qkv_bias = "self_attention.", biased or fields.flag("add_qkv_bias", False)
        size = (heads + 2 * kv_heads) * dim, e
        found.norm("input_norm", "input_layernorm")
        found.matrix("qkv", size, ("qkv", "embed"), attention + "query_key_value", bias=qkv_bias)
        found.matrix("out", (e, heads * dim), ("embed", "heads"), attention + "dense", bias=biased)
        found.norm("post_norm", "post_attention_layernorm")
        found.matrix("gate_up", (2 * f, e), ("gate_up", "embed"), "mlp.dense_h_to_4h", bias=biased)
        found.matrix("down", (e, f), ("embed", "mlp"), "mlp.dense_4h_to_h", bias=biased)
        return tuple(found.tensors)

    def words(name: str, stored: str) -> TensorSpec:
        return TensorSpec(name, (vocab, e), dtype, ("vocab", "embed"), ("transformer." + stored,))

    last = LayerTensors("transformer.", e, dtype)
    if fields.flag("post_layer_norm", True):
        last.norm("norm", "encoder.final_layernorm")
    return ModelSpec(
        model_type="chatglm",
        dtype=dtype,
        hidden_size=e,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=f,
        vocab_size=vocab,
        max_position=rope.max_position,
        embedding=(words("embed", "embedding.word_embeddings.weight"),),
        layers=tuple(
            LayerSpec(j, layer(f"transformer.encoder.layers.{j}."), heads, kv_heads, dim) for j in range(num_layers)
        ),
        head=(*last.tensors, words("lm_head", "output_layer.weight")),
        kv=kv,
        rope=rope,
        eos_token_ids=fields.token_ids("eos_token_id", 2),
        bos_token_id=fields.first_token_id("bos_token_id", None),
        options={"activation": "silu", "norm_eps": fields.number("layernorm_epsilon", 1e-5)},
    )


def model(spec: ModelSpec) -> Decoder:
    """The forward of a spec that this file made."""
    return Decoder(spec)


def _readable(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without `auto_map`: what the code that it names computes is what this file computes."""
    readable = {name: value for name, value in config.items() if name != "auto_map"}
    if isinstance(named := config.get("architectures"), list):
        readable["architectures"] = [ARCHITECTURE if name == _ALSO else name for name in named]
    return readable


def _refuse(fields: Fields) -> None:
    for name, neutral in _NEUTRAL.items():
        if fields.raw(name) is not None and fields.raw(name) not in neutral:
            raise fields.refusal(name, "this is not implemented; use a checkpoint without it")
    for name in ("inner_hidden_size", "position_encoding_2d"):
        if name in fields:
            raise fields.refusal(name, "the first ChatGLM is another model of the same type; use a ChatGLM2 or later")


def _rope(fields: Fields, head_dim: int, max_model_len: int | None) -> RopeSpec:
    """Half of each head. `rope_ratio` stretches positions in ChatGLM2, and the base in ChatGLM3 and GLM-4."""
    ratio = fields.number("rope_ratio", 1.0)
    longest = fields.integer("seq_length", 2048)
    context, half = context_length(longest, longest, max_model_len), head_dim // 2
    name = str(fields.raw("_name_or_path") or "").lower()
    if ratio == 1 or any(kind in name for kind in ("chatglm3", "glm-4")):
        return RopeSpec(head_dim, half, _THETA * ratio, max_position=context)
    if not any(kind in name for kind in ("chatglm2", "codegeex2")):
        raise CheckpointError(
            f"rope_ratio in config.json is {ratio:g}, which divides positions in ChatGLM2 and multiplies the rotary "
            "base in ChatGLM3 and GLM-4; say which by a _name_or_path that has chatglm2, chatglm3 or glm-4 in it."
        )
    scaling = {"factor": ratio, "original_max_position_embeddings": float(longest)}
    return RopeSpec(head_dim, half, _THETA, "linear", scaling, context)
