"""Activations in 8 bits: each token's numbers as whole ones or as short floats, by its own range.

`Format.activations` says which. A token is rounded from its own numbers alone, whatever stands beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.quant.matrix import FP8_MOST

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


def float_codes(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """x: floats [t, in] -> codes e4m3 [t, in], scales float32 [t, in / group], or [t, 1] for group 0.

    A scale is the largest magnitude of a token, or of so many neighbours of it, / 448, the largest number of e4m3: by
    token as vLLM and compressed-tensors round them, by 128 as DeepSeek-V3 (arXiv 2412.19437, §3.3.2). Zeros have scale
    1; what is infinite or not a number makes its scale so, and with it all that the token is multiplied to.
    """
    t, columns = x.shape
    grouped = x.float().view(t, -1, group or columns)
    scales = grouped.abs().amax(2) / FP8_MOST
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (grouped / scales[:, :, None]).clamp_(-FP8_MOST, FP8_MOST)
    return codes.view(t, columns).to(torch.float8_e4m3fn), scales


def codes_of(x: Tensor, activations: str, group: int) -> tuple[Tensor, Tensor]:
    """`token_codes` for int8, `float_codes` for fp8."""
    return token_codes(x) if activations == "int8" else float_codes(x, group)


def rounded(x: Tensor, format: Format) -> Tensor:
    """What the codes of x stand for, in a format that rounds activations: float32 [t, in]."""
    codes, scales = codes_of(x, format.activations, format.group)
    return (codes.float().view(*scales.shape, -1) * scales[:, :, None]).view(x.shape)
