"""Mistral (model_type mistral): the common decoder without biases, every layer with the same sliding window.

What it costs: see `decoder.py`; a layer's attention sees min(context, sliding_window) positions.
Mistral-7B has E 4096, F 14336, H 32, K 8, D 128, L 32, V 32000: 7.24e9 parameters, 131,072 bytes of KV per token in
two bytes an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellar.core.specs import ModelSpec
from cellar.models.decoder import Decoder, DecoderShape, decoder_spec, head_dim_of, uniform_layers
from cellar.models.fields import Fields

ARCHITECTURE = "MistralForCausalLM"


def spec(config: Mapping[str, Any], dtype: str, chunk_size: int, max_model_len: int | None) -> ModelSpec:
    """Everything static about the model that a config.json defines."""
    fields = Fields(config, ARCHITECTURE)
    # A missing window has its default, a null one means that there is none.
    windowed = fields.raw("sliding_window") is not None or "sliding_window" not in fields
    window = fields.integer("sliding_window", 4096) if windowed else None
    uniform_layers(fields, "sliding_attention" if windowed else "full_attention")
    hidden_size = fields.integer("hidden_size", 4096)
    num_heads = fields.integer("num_attention_heads", 32)
    shape = DecoderShape(
        model_type="mistral",
        vocab_size=fields.integer("vocab_size", 32000),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 14336),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads if "num_key_value_heads" in fields else 8),
        head_dim=head_dim_of(fields, hidden_size, num_heads),
        max_position=fields.integer("max_position_embeddings", 4096 * 32),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        tied_head=fields.flag("tie_word_embeddings", False),
        windows=(window,) * fields.layers("num_hidden_layers", 32),
        eos_token_ids=fields.token_ids("eos_token_id", 2),
        bos_token_id=fields.first_token_id("bos_token_id", 1),
    )
    return decoder_spec(fields, shape, dtype, chunk_size, max_model_len)


def model(spec: ModelSpec) -> Decoder:
    """The forward of a spec that this file made."""
    return Decoder(spec)
