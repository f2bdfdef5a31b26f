"""Reading config.json: each field with its type and default, and the refusal of what would change the function.

The function of a checkpoint is what `transformers` computes for its model_type. Fields that it does not read
for that type are ignored here too, with one exception: a field that is known to change the function of some
other implementation is refused unless it has its neutral value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cellar.core.errors import CheckpointError

MOST = 2**28
"""No dimension of a model, and no context, is larger."""

MOST_LAYERS = 4096

MOST_NUMBER = 1e30
"""No factor, base or epsilon is larger."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Field -> values at which it changes nothing; None (null) always changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "attention_chunk_size": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "partial_rotary_factor": (1,),
    "no_rope_layers": ([],),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "alibi": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "cross_attention_layers": ([],),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
}


class Fields:
    """config.json of one model. A field that is missing or null has its default; every refusal names the field.

    Raises CheckpointError if the architecture is not the one expected, or a field that changes the function
    in a way that Cellar does not compute is set. The model file reads those that are `computed` itself.
    """

    def __init__(self, config: Mapping[str, Any], architecture: str, computed: Collection[str] = ()) -> None:
        self._config = config
        named = self.names("architectures") or [architecture]
        if architecture not in named:
            raise CheckpointError(
                f"architecture {', '.join(named)} is not supported for model_type "
                f"{config.get('model_type')!r}; {architecture} is: use a checkpoint of the language model."
            )
        for name, neutral in _NEUTRAL.items():
            value = config.get(name)
            if name not in computed and value is not None and value not in neutral:
                raise self.refusal(name, "this is not implemented; use a checkpoint without it")
        code = config.get("auto_map")
        if isinstance(code, Mapping) and "AutoModelForCausalLM" in code:
            raise self.refusal("auto_map", "code from checkpoints is not run; use a checkpoint without it")

    def __contains__(self, name: str) -> bool:
        return name in self._config

    def raw(self, name: str) -> Any:
        """The value as it stands, None if missing."""
        return self._config.get(name)

    def refusal(self, name: str, remedy: str) -> CheckpointError:
        """The error for a field that cannot be obeyed."""
        value = repr(self._config.get(name))
        value = value if len(value) <= 120 else value[:117] + "..."
        return CheckpointError(f"{name} in config.json is {value}; {remedy}.")

    def names(self, name: str) -> list[str]:
        """A list of names, empty if it is missing."""
        value = self._config.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.refusal(name, "it must be a list of names")
        return value

    def integer(self, name: str, default: int, least: int = 1, most: int = MOST) -> int:
        """A whole number in [least, most]."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refusal(name, f"it must be a whole number from {least} to {most}")
        return value

    def layers(self, name: str, default: int) -> int:
        """How many layers there are."""
        return self.integer(name, default, most=MOST_LAYERS)

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MOST_NUMBER:
            raise self.refusal(name, "it must be a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "it must be true or false")
        return value

    def activation(self, name: str, default: str) -> str:
        """The kind of an activation function as `ops` names it: silu, gelu, gelu_tanh or relu."""
        value = self._given(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.refusal(name, f"supported are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def token_ids(self, name: str, default: int | None) -> tuple[int, ...]:
        """One id, a list of ids, or none (null)."""
        value = self._config.get(name, default)
        ids: Sequence[Any] = () if value is None else value if isinstance(value, list) else (value,)
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise self.refusal(name, "it must be a token id or a list of them")
        return tuple(i for i in ids if i >= 0)

    def first_token_id(self, name: str, default: int | None) -> int | None:
        """The first of `token_ids`, or None."""
        return next(iter(self.token_ids(name, default)), None)

    def _given(self, name: str, default: Any) -> Any:
        value = self._config.get(name)
        return default if value is None else value
