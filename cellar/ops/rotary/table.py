"""Cosines and sines of every position, with frequencies scaled as the checkpoint asks.

llama3, linear, YaRN, or NTK with a base fixed once by the longest context, so that a cached key stays true however long
its sequence grows. All tables are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.specs import RopeSpec


def rope_table(spec: RopeSpec, device: torch.device | str) -> Tensor:
    """cos and sin of every position: float32 [max_position, rotary_dim], cosines in the first half of the columns.

    YaRN's attention factor is folded in.
    """
    angles = torch.outer(torch.arange(spec.max_position, dtype=torch.float32), inverse_frequencies(spec))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return (table * attention_factor(spec)).to(device)


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Radians per position of each pair of dimensions: float32 [rotary_dim / 2], on the CPU.

    Raises ConfigError for a kind that is not known.
    """
    if spec.kind not in _FREQUENCIES:
        raise ConfigError(f"rotary embedding {spec.kind!r} is not supported; supported are {', '.join(_FREQUENCIES)}.")
    return _FREQUENCIES[spec.kind](spec)


def attention_factor(spec: RopeSpec) -> float:
    """YaRN's factor on cosines and sines (arXiv 2309.00071, eq. 22: 0.1 ln(s) + 1 unless given); 1 for other kinds."""
    if spec.kind != "yarn":
        return 1.0
    given = spec.scaling.get("attention_factor")
    if given is not None:
        return given
    factor = spec.scaling["factor"]
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _plain(spec: RopeSpec, theta: float | None = None) -> Tensor:
    exponent = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    return 1.0 / ((spec.theta if theta is None else theta) ** exponent)


def _linear(spec: RopeSpec) -> Tensor:
    """Position interpolation (Chen et al., arXiv 2306.15595)."""
    return _plain(spec) / spec.scaling["factor"]


def _dynamic(spec: RopeSpec) -> Tensor:
    """NTK-aware scaling: the base that fits `max_position`, not the length of each sequence."""
    original = spec.scaling["original_max_position_embeddings"]
    stretch = spec.scaling["factor"] * max(spec.max_position / original, 1.0) - (spec.scaling["factor"] - 1.0)
    return _plain(spec, spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2)))


def _llama3(spec: RopeSpec) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    scaling = spec.scaling
    frequencies = _plain(spec)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling["factor"] + keep * frequencies


def _yarn(spec: RopeSpec) -> Tensor:
    """NTK by parts (YaRN, arXiv 2309.00071, §3.2): a ramp over dimensions between beta_fast and beta_slow turns."""
    scaling = spec.scaling
    original = scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """The (fractional) pair of dimensions that makes `turns` full turns within the original context."""
        return spec.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(scaling.get("beta_fast", 32.0)), dimension(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    frequencies = _plain(spec)
    return frequencies / scaling["factor"] * stretched + frequencies * (1 - stretched)


_FREQUENCIES: dict[str, Callable[[RopeSpec], Tensor]] = {
    "plain": _plain,
    "llama3": _llama3,
    "linear": _linear,
    "yarn": _yarn,
    "dynamic": _dynamic,
}
