"""Llama 2, 3, 3.1 and 3.2 (model_type llama): the common decoder, biases optional.

What it costs: see `decoder.py`. Llama-3-8B has E 4096, F 14336, H 32, K 8, D 128, L 32, V 128256: 8.03e9 parameters,
218,112,000 of them in each layer, and 131,072 bytes of KV per token in two bytes an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellar.core.specs import ModelSpec
from cellar.models.decoder import Decoder, DecoderShape, decoder_spec, head_dim_of, uniform_layers
from cellar.models.fields import Fields

ARCHITECTURE = "LlamaForCausalLM"


def spec(config: Mapping[str, Any], dtype: str, chunk_size: int, max_model_len: int | None) -> ModelSpec:
    """Everything static about the model that a config.json defines."""
    fields = Fields(config, ARCHITECTURE)
    uniform_layers(fields, "full_attention")
    if fields.raw("sliding_window") is not None:
        raise fields.refusal("sliding_window", "model_type llama has no window; remove it, or use model_type mistral")
    hidden_size = fields.integer("hidden_size", 4096)
    num_heads = fields.integer("num_attention_heads", 32)
    attention_bias = fields.flag("attention_bias", False)
    shape = DecoderShape(
        model_type="llama",
        vocab_size=fields.integer("vocab_size", 32000),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 11008),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim_of(fields, hidden_size, num_heads),
        max_position=fields.integer("max_position_embeddings", 2048),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        tied_head=fields.flag("tie_word_embeddings", False),
        windows=(None,) * fields.layers("num_hidden_layers", 32),
        eos_token_ids=fields.token_ids("eos_token_id", 2),
        bos_token_id=fields.first_token_id("bos_token_id", 1),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    return decoder_spec(fields, shape, dtype, chunk_size, max_model_len)


def model(spec: ModelSpec) -> Decoder:
    """The forward of a spec that this file made."""
    return Decoder(spec)
