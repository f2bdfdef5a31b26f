"""Activations in 8 bits: each token's numbers as whole ones, by its own range."""

from __future__ import annotations

import torch
from torch import Tensor

_RANGE = 127.5
"""Half of what lies between the least and the largest code."""


def token_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: floats [t, in] -> codes int8 [t, in], scales float32 [t, 1]; a token is about codes x scale.

    A scale is the token's largest magnitude / 127.5, codes are the nearest whole numbers, from -128 to 127, as
    compressed-tensors rounds activations (symmetric, dynamic, by token). A token of zeros has scale 1. What is infinite
    or not a number makes the scale so, and with it all that the token is multiplied to.
    """
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True) / _RANGE
    scales = torch.where(scales == 0, 1.0, scales)
    return (wide / scales).round_().clamp_(-128, 127).to(torch.int8), scales


def rounded(x: Tensor) -> Tensor:
    """What the codes of x stand for: float32 [t, in]."""
    codes, scales = token_codes(x)
    return codes * scales
