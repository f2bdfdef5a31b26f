"""Norm and matrix in one: the first half of attention and of the feed-forward.

The weight's format says how: one operation after another, or some of them in a single launch (`device.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.ops.activation.definition import gated_definition
from cellar.ops.linear.choice import Fused
from cellar.ops.linear.definition import as_linear, linear_definition
from cellar.ops.linear.triton import norm_gemv
from cellar.ops.linear.weight import Weight
from cellar.ops.norm.definition import add_rms_norm_definition
from cellar.ops.registry import Case, Op, Variant

# Of the kernel that the conformance test runs.
_SIZES = Fused(2, 4)


def norm_linear(
    residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-> (rms_norm(residual + delta) W^T + b, residual + delta).

    residual, delta: [t, k] (delta None: nothing to add); norm: [k]; weight: [n, k], in any format; bias: [n] or None.
    """
    return as_linear(weight).norm_multiply(residual, delta, norm, eps, bias)


def norm_linear_definition(
    residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The parts' definitions, one after another."""
    normed, total = add_rms_norm_definition(residual, delta, norm, eps)
    return linear_definition(normed, weight, bias), total


def norm_linear_kernel(
    residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token in one launch."""
    return norm_gemv(residual, delta, norm, eps, weight, bias, _SIZES, gate=False)


def norm_gated_linear(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """-> (act(gate) * up, residual + delta) with gate and up the halves of rms_norm(residual + delta) W^T + b.

    weight: [2 n, k], gate rows first; `kind` as in `gated`.
    """
    return as_linear(weight).norm_gated_multiply(residual, delta, norm, eps, bias, kind)


def norm_gated_linear_definition(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """The parts' definitions, one after another."""
    product, total = norm_linear_definition(residual, delta, norm, eps, weight, bias)
    return gated_definition(product, kind), total


def norm_gated_linear_kernel(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """One token in one launch; SiLU only."""
    assert kind == "silu"
    return norm_gemv(residual, delta, norm, eps, weight, bias, _SIZES, gate=True)


def norm_feed_forward(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    kind: str,
    down: Weight,
    down_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """-> ((act(gate) * up) D^T + d, residual + delta), gate and up as in `norm_gated_linear`; down: D [k, n]."""
    return as_linear(weight).norm_feed_multiply(residual, delta, norm, eps, bias, kind, as_linear(down), down_bias)


def feed_forward(
    x: Tensor, weight: Weight, bias: Tensor | None, kind: str, down: Weight, down_bias: Tensor | None
) -> Tensor:
    """(act(gate) * up) D^T + d, gate and up the halves of x W^T + b; x: [t, k]."""
    return as_linear(down).multiply(as_linear(weight).gated_multiply(x, bias, kind), down_bias)


def norm_feed_forward_definition(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    kind: str,
    down: Weight,
    down_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The parts' definitions, one after another."""
    x, total = norm_gated_linear_definition(residual, delta, norm, eps, weight, bias, kind)
    return linear_definition(x, down, down_bias), total


def _feed_case(k: int, n: int) -> Case:
    inner = _case(k, 2 * n, True, True, "silu")

    def make(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        down = torch.randn((k, n), generator=torch.Generator().manual_seed(n)) / n**0.5
        return {**inner.make(device, dtype), "down": down.to(dtype).to(device), "down_bias": None}

    return Case(f"{n}x{k}", make)


def _case(k: int, n: int, add: bool, bias: bool, kind: str | None = None) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        generator = torch.Generator().manual_seed(k + n)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)

        arguments: dict[str, object] = {
            "residual": random(1, k),
            "delta": random(1, k) if add else None,
            "norm": random(k),
            "eps": 1e-5,
            "weight": random(n, k, scale=k**-0.5),
            "bias": random(n) if bias else None,
        }
        return arguments if kind is None else {**arguments, "kind": kind}

    return Case(f"{n}x{k}{'+' if add else ''}{'b' if bias else ''}", make)


OPS = (
    Op(
        "norm_linear",
        norm_linear_definition,
        (Variant("triton", norm_linear_kernel),),
        (_case(64, 33, True, False), _case(100, 40, False, True)),
    ),
    Op(
        "norm_gated_linear",
        norm_gated_linear_definition,
        (Variant("triton", norm_gated_linear_kernel),),
        (_case(64, 2 * 33, True, False, "silu"), _case(96, 2 * 20, False, True, "silu")),
    ),
    Op("norm_feed_forward", norm_feed_forward_definition, (), (_feed_case(64, 48),)),
)
