"""Norm and matrix in one: the first half of attention and of the feed-forward.

On a GPU one token goes through in a single launch (`linear_cuda.norm_gemv`), unless the matrix's choice says that this
is slower; on Hopper the gate is in the epilogue of the wide product. More tokens, and the CPU, take the operations one
after another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.ops.activation import gated, gated_definition
from cellar.ops.linear import linear, linear_definition
from cellar.ops.linear_choice import Fused, Wide
from cellar.ops.linear_cuda import choice_of, kernel_of, norm_gemv
from cellar.ops.linear_wide import wide
from cellar.ops.norm import add_rms_norm, add_rms_norm_definition
from cellar.ops.registry import Case, Op


def norm_linear(
    residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-> (rms_norm(residual + delta) W^T + b, residual + delta).

    residual, delta: [t, k] (delta None: nothing to add); norm: [k]; weight: [n, k], plain or packed; bias: [n] or None.
    """
    if _is_one_token(residual) and (sizes := choice_of(weight).fused) is not None:
        return norm_gemv(residual, delta, norm, eps, weight, bias, sizes, gate=False)
    normed, total = add_rms_norm(residual, delta, norm, eps)
    return linear(normed, weight, bias), total


def norm_linear_definition(
    residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The parts' definitions, one after another."""
    normed, total = add_rms_norm_definition(residual, delta, norm, eps)
    return linear_definition(normed, weight, bias), total


def norm_linear_kernel(
    residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token in one launch."""
    return norm_gemv(residual, delta, norm, eps, weight, bias, _sizes(weight), gate=False)


def norm_gated_linear(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """-> (act(gate) * up, residual + delta) with gate and up the halves of rms_norm(residual + delta) W^T + b.

    weight: [2 n, k], gate rows first; `kind` as in `gated`.
    """
    one = _is_one_token(residual)
    if kind == "silu" and one and (sizes := choice_of(weight).fused) is not None:
        return norm_gemv(residual, delta, norm, eps, weight, bias, sizes, gate=True)
    normed, total = add_rms_norm(residual, delta, norm, eps)
    if kind == "silu" and normed.is_cuda and isinstance(kernel := kernel_of(normed, weight), Wide):
        return wide(normed, weight, bias, kernel, gate=True), total
    return gated(linear(normed, weight, bias), kind), total


def norm_gated_linear_definition(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Tensor,
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
    return norm_gemv(residual, delta, norm, eps, weight, bias, _sizes(weight), gate=True)


def _is_one_token(x: Tensor) -> bool:
    return x.is_cuda and x.shape[0] == 1


def _sizes(weight: Tensor) -> Fused:
    return choice_of(weight).fused or Fused(2, 4)


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
        norm_linear,
        norm_linear_definition,
        norm_linear_kernel,
        (_case(64, 33, True, False), _case(100, 40, False, True)),
    ),
    Op(
        "norm_gated_linear",
        norm_gated_linear,
        norm_gated_linear_definition,
        norm_gated_linear_kernel,
        (_case(64, 2 * 33, True, False, "silu"), _case(96, 2 * 20, False, True, "silu")),
    ),
)
