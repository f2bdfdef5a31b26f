"""Root-mean-square and layer normalization, fused with the add of the residual that comes before.

Norms are computed in float32. RMSNorm is rounded to the activations' dtype before the weight is applied, as Llama's
reference implementation does, so that bfloat16 results agree closely with it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm_definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467, eq. 4).

    x: [..., d], any strides; weight: [d]; -> like x.
    """
    # A norm and a few operations on one number per row: fewer passes over x than pow, mean and rsqrt.
    scale: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        return (x * scale).mul_(weight)
    return (x.float() * scale).to(x.dtype) * weight


def add_rms_norm_definition(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add, then normalize: -> (rms_norm(residual + delta), residual + delta).

    residual, delta: [t, d] (delta None: nothing to add, and the second result is `residual` itself); weight: [d]. The
    sum is rounded to the dtype before it is normalized.
    """
    total = residual if delta is None else residual + delta
    return rms_norm_definition(total, weight, eps), total


def add_layer_norm_definition(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add, then normalize: -> (layer_norm(residual + delta), residual + delta) (Ba et al., arXiv 1607.06450).

    residual, delta: [t, d] (delta None: nothing to add); weight: [d]; bias: [d] or None. torch's layer_norm computes in
    float32 and rounds once.
    """
    total = residual if delta is None else residual + delta
    return functional.layer_norm(total, weight.shape, weight, bias, eps), total
