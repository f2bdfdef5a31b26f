"""From config.json to a RopeSpec, and to the longest context that a model may be used with.

Both spellings are read: `rope_theta` beside `rope_scaling`, and `rope_parameters`, which holds both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from cellar.core.errors import CheckpointError, ConfigError
from cellar.core.specs import RopeSpec
from cellar.models.fields import MOST_NUMBER, Fields

Kind = Literal["plain", "llama3", "linear", "yarn", "dynamic"]

_KINDS: dict[str, Kind] = {
    "default": "plain",
    "llama3": "llama3",
    "linear": "linear",
    "yarn": "yarn",
    "dynamic": "dynamic",
}


def rope_spec(
    fields: Fields, head_dim: int, trained: int, max_model_len: int | None, theta: float = 10_000.0
) -> RopeSpec:
    """The rotary embedding of a model whose `max_position_embeddings` is `trained`; `theta`: if config.json has none.

    `max_position` of the result is the context: `max_model_len` if given, else what the model was made for
    (with YaRN the extended length; with linear and dynamic scaling `trained`, which may be raised up to
    factor times as much). Raises CheckpointError for a rotary embedding that is not supported, ConfigError
    if `max_model_len` is too large.
    """
    given = _parameters(fields)
    name = given.get("rope_type", given.get("type", "default"))
    if not isinstance(name, str) or name not in _KINDS:
        raise CheckpointError(f"rotary embedding of type {name!r} is not supported; supported are {', '.join(_KINDS)}.")
    if given.get("partial_rotary_factor", 1) not in (1, None) or "mrope_section" in given:
        raise CheckpointError(
            "a rotary embedding of part of each head, or of several axes, is not supported for this model_type; "
            "use a checkpoint without partial_rotary_factor and mrope_section."
        )
    if head_dim % 2:
        raise CheckpointError(f"head_dim is {head_dim}, but a rotary embedding needs an even one.")
    kind = _KINDS[name]
    scaling = _scaling(kind, given, fields, trained)
    default, limit = trained, trained
    if kind == "yarn":
        default = limit = max(trained, math.floor(scaling["factor"] * scaling["original_max_position_embeddings"]))
    elif kind in ("linear", "dynamic"):
        limit = max(trained, math.floor(scaling["factor"] * trained))
    return RopeSpec(
        head_dim=head_dim,
        rotary_dim=head_dim,
        theta=_number(given, "rope_theta", fields.number("rope_theta", theta)),
        kind=kind,
        scaling=scaling,
        max_position=context_length(default, limit, max_model_len),
    )


def context_length(default: int, limit: int, max_model_len: int | None) -> int:
    """`max_model_len`, or the model's default. Raises ConfigError if it is over the model's limit or below 2."""
    if max_model_len is None:
        return default
    if not 2 <= max_model_len <= limit:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but this model allows from 2 to {limit}; choose one of these."
        )
    return max_model_len


def _parameters(fields: Fields) -> Mapping[str, Any]:
    """The dict of rotary parameters; `rope_scaling`, the older name, wins as it does in transformers."""
    name = "rope_scaling" if fields.raw("rope_scaling") else "rope_parameters"
    given = fields.raw(name) or {}
    if not isinstance(given, Mapping):
        raise fields.refusal(name, "it must be an object")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise fields.refusal(name, "only one rotary embedding for all layers is supported, not one per layer type")
    return given


def _scaling(kind: Kind, given: Mapping[str, Any], fields: Fields, trained: int) -> dict[str, float]:
    """All parameters that the kind needs, defaults filled in; `original_max_position_embeddings` too."""
    if kind == "plain":
        return {}
    # Of the kinds that stretch a shorter training length only some may name it; for the others it is `trained`.
    original = float(trained)
    if kind in ("llama3", "yarn"):
        original = _number(given, "original_max_position_embeddings", original)
        original = fields.number("original_max_position_embeddings", original)
    ratio = trained / original if kind == "yarn" else None
    scaling = {"factor": _number(given, "factor", ratio), "original_max_position_embeddings": original}
    if kind == "llama3":
        scaling["low_freq_factor"] = _number(given, "low_freq_factor", None)
        scaling["high_freq_factor"] = _number(given, "high_freq_factor", None)
    if kind == "yarn":
        scaling["beta_fast"] = _number(given, "beta_fast", 32.0)
        scaling["beta_slow"] = _number(given, "beta_slow", 1.0)
        scaling["truncate"] = float(given.get("truncate", True) is not False)
        scaling["attention_factor"] = _yarn_attention_factor(given, scaling["factor"])
    return scaling


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """What cosines and sines are multiplied by (YaRN, arXiv 2309.00071, §3.4); mscale is DeepSeek's variant."""
    if given.get("attention_factor") is not None:
        return _number(given, "attention_factor", None)

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return temperature(_number(given, "mscale", None)) / temperature(_number(given, "mscale_all_dim", None))
    return temperature(1.0)


def _number(given: Mapping[str, Any], name: str, default: float | None) -> float:
    value = given.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MOST_NUMBER:
        raise CheckpointError(
            f"{name} of the rotary embedding in config.json is {value!r}; it must be a positive number."
        )
    return float(value)
