"""Linear layers: the one entry point, for plain matrices and for weights in any format (`weight.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cellar.ops.linear.dense import DenseWeight
from cellar.ops.linear.device import DeviceWeight
from cellar.ops.linear.weight import LinearWeight, Weight
from cellar.ops.registry import Case, Op, Variant


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x: [t, in]; weight: [out, in], in any format; bias: [out] or None -> [t, out] in x's dtype."""
    return as_linear(weight).multiply(x, bias)


def linear_definition(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x W^T + b in float32, rounded once."""
    out = functional.linear(x.float(), _matrix(weight).float(), None if bias is None else bias.float())
    return out.to(x.dtype)


def linear_kernel(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`linear` by the kernel that suits so few tokens on a GPU, which may be the library's; all of one dtype."""
    on_device = weight if isinstance(weight, DeviceWeight) else DeviceWeight(_matrix(weight))
    return on_device.multiply_by(on_device.kernel(x), x, bias)


def as_linear(weight: Weight) -> LinearWeight:
    """A plain matrix as a weight in the format of its device; other weights as they are."""
    if isinstance(weight, Tensor):
        return DenseWeight(weight) if weight.is_cpu else DeviceWeight(weight)
    return weight


def _matrix(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense()


def _case(name: str, t: int, n: int, k: int, bias: bool) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(n)
        return {
            "x": torch.randn((t, k), generator=generator).to(dtype).to(device),
            "weight": (torch.randn((n, k), generator=generator) / k**0.5).to(dtype).to(device),
            "bias": torch.randn((n,), generator=generator).to(dtype).to(device) if bias else None,
        }

    return Case(name, make)


OPS = (
    Op(
        "linear",
        linear_definition,
        (Variant("triton", linear_kernel),),
        (
            _case("one token", 1, 33, 48, True),
            _case("few tokens", 3, 64, 20, False),
            _case("eight tokens, split", 8, 40, 8200, True),
            _case("a padded batch", 20, 33, 300, False),
            _case("many tokens", 70, 16, 64, True),
        ),
    ),
)
