"""Qwen 3, dense (model_type qwen3): the common decoder with an RMSNorm over each head's q and k before the rotation.

What it costs: see `decoder.py`, plus 2 D for these norms a layer; H D need not be E. Qwen3-8B has E 4096, F 12288,
H 32, K 8, D 128, L 36, V 151936: 8.19e9 parameters, 147,456 bytes of KV per token in two bytes an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellar.core.specs import ModelSpec
from cellar.models.decoder import Decoder, DecoderShape, decoder_spec, layer_windows
from cellar.models.fields import Fields

ARCHITECTURE = "Qwen3ForCausalLM"


def spec(config: Mapping[str, Any], dtype: str, chunk_size: int, max_model_len: int | None) -> ModelSpec:
    """Everything static about the model that a config.json defines."""
    fields = Fields(config, ARCHITECTURE)
    num_heads = fields.integer("num_attention_heads", 32)
    attention_bias = fields.flag("attention_bias", False)
    shape = DecoderShape(
        model_type="qwen3",
        vocab_size=fields.integer("vocab_size", 151936),
        hidden_size=fields.integer("hidden_size", 4096),
        intermediate_size=fields.integer("intermediate_size", 22016),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads if "num_key_value_heads" in fields else 32),
        head_dim=fields.integer("head_dim", 128),
        max_position=fields.integer("max_position_embeddings", 32768),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        tied_head=fields.flag("tie_word_embeddings", False),
        windows=layer_windows(fields, fields.layers("num_hidden_layers", 32)),
        eos_token_ids=fields.token_ids("eos_token_id", None),
        bos_token_id=fields.first_token_id("bos_token_id", None),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        qk_norm=True,
    )
    return decoder_spec(fields, shape, dtype, chunk_size, max_model_len)


def model(spec: ModelSpec) -> Decoder:
    """The forward of a spec that this file made."""
    return Decoder(spec)
