"""Qwen 2 and 2.5 (model_type qwen2): the common decoder with biases on q, k and v; later layers may have a window.

What it costs: see `decoder.py`, plus D (H + 2 K) biases a layer. Qwen2.5-7B has E 3584, F 18944, H 28, K 4, D 128,
L 28, V 152064: 7.62e9 parameters, 57,344 bytes of KV per token in two bytes an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellar.core.specs import ModelSpec
from cellar.models.decoder import Decoder, DecoderShape, decoder_spec, head_dim_of, layer_windows
from cellar.models.fields import Fields

ARCHITECTURE = "Qwen2ForCausalLM"


def spec(config: Mapping[str, Any], dtype: str, chunk_size: int, max_model_len: int | None) -> ModelSpec:
    """Everything static about the model that a config.json defines."""
    fields = Fields(config, ARCHITECTURE)
    hidden_size = fields.integer("hidden_size", 4096)
    num_heads = fields.integer("num_attention_heads", 32)
    shape = DecoderShape(
        model_type="qwen2",
        vocab_size=fields.integer("vocab_size", 151936),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 22016),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads if "num_key_value_heads" in fields else 32),
        head_dim=head_dim_of(fields, hidden_size, num_heads),
        max_position=fields.integer("max_position_embeddings", 32768),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        tied_head=fields.flag("tie_word_embeddings", False),
        windows=layer_windows(fields, fields.layers("num_hidden_layers", 32)),
        eos_token_ids=fields.token_ids("eos_token_id", None),
        bos_token_id=fields.first_token_id("bos_token_id", None),
        qkv_bias=True,
    )
    return decoder_spec(fields, shape, dtype, chunk_size, max_model_len)


def model(spec: ModelSpec) -> Decoder:
    """The forward of a spec that this file made."""
    return Decoder(spec)
