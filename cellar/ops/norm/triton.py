"""Norms in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cellar.ops.triton_support import dependent_launch, kernel

if TYPE_CHECKING:
    import triton.language as tl


def rms_norm_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in Triton: a program normalizes a few rows of one leading index."""
    d = x.shape[-1]
    rows = _as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    outer, inner = rows.shape[0], rows.shape[1]
    block = _next_power_of_2(d)
    per_program = min(_next_power_of_2(inner), max(1, 2048 // block))
    _rms_norm_kernel[outer, -(-inner // per_program)](
        rows, weight, out, inner, d, rows.stride(0), rows.stride(1), eps, ROWS=per_program, BLOCK=block
    )
    return out


def add_rms_norm_kernel(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and RMSNorm in Triton: one program per row."""
    if delta is None:
        return rms_norm_kernel(residual, weight, eps), residual
    return _launch_add_norm(residual, delta, weight, None, eps, center=False)


def add_rms_norm_behind_sum(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` whose `delta` is a sum over ranks, maybe still on its way: the product behind it asks for its
    weights meanwhile, since nothing else reads the memory then (docs/decisions/0111-norms-behind-sums.md).
    """
    return _launch_add_norm(residual, delta, weight, None, eps, center=False, early=True)


def add_layer_norm_kernel(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add and LayerNorm in Triton: one program per row."""
    return _launch_add_norm(residual, delta, weight, bias, eps, center=True)


def _launch_add_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    center: bool,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    t, d = residual.shape
    residual = residual.contiguous()
    delta = None if delta is None else delta.contiguous()
    normed = residual.new_empty(residual.shape)
    total = residual if delta is None else residual.new_empty(residual.shape)
    if t:
        block = _next_power_of_2(d)
        _add_norm_kernel[(t,)](
            residual,
            residual if delta is None else delta,
            weight,
            weight if bias is None else bias,
            normed,
            total,
            d,
            eps,
            ADD=delta is not None,
            CENTER=center,
            BIAS=bias is not None,
            EARLY=early,
            BLOCK=block,
            num_warps=min(16, max(4, block // 512)),
            **dependent_launch(residual),
        )
    return normed, total


@kernel
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # [outer, inner, d]
    weight,  # [d]
    out,  # [outer, inner, d], contiguous
    inner,
    d,
    stride_outer,
    stride_inner,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    outer = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < inner)[:, None] & (column < d)[None, :]
    values = tl.load(x + outer * stride_outer + row[:, None] * stride_inner + column[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / d + eps)
    normed = (values * scale[:, None]).to(out.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=column < d, other=0.0).to(tl.float32)
    at = (outer * inner + row[:, None]) * d + column[None, :]
    tl.store(out + at, (normed * w[None, :]).to(out.dtype.element_ty), mask=mask)


@kernel
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    residual,  # [t, d]
    delta,  # [t, d]
    weight,  # [d]
    bias,  # [d]
    normed,  # [t, d]
    total,  # [t, d]
    d,
    eps,
    ADD: tl.constexpr,
    CENTER: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    mask = column < d
    at = tl.program_id(0).to(tl.int64) * d + column
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta + at, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if CENTER:
        x = tl.where(mask, x - tl.sum(x, 0) / d, 0.0)
        y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / d + eps)) * w
        if BIAS:
            y += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    else:
        y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / d + eps))
        y = y.to(normed.dtype.element_ty).to(tl.float32) * w
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=mask)


def _as_rows(x: Tensor) -> Tensor:
    """x as [outer, inner, d] with unit stride in d; a copy only where no view does it."""
    if x.dim() == 2:
        x = x.unsqueeze(1)
    elif x.dim() != 3:
        x = x.reshape(1, -1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
