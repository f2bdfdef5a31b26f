"""Root-mean-square and layer normalization, fused with the add of the residual that comes before.

Norms are computed in float32. RMSNorm is rounded to the activations' dtype before the weight is applied, as Llama's
reference implementation does, so that bfloat16 results agree closely with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from cellar.ops.norm_cpu import add_rms_norm_cpu, rms_norm_cpu
from cellar.ops.registry import Case, Op
from cellar.ops.triton_support import dependent_launch, kernel

if TYPE_CHECKING:
    import triton.language as tl


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467, eq. 4).

    x: [..., d], any strides; weight: [d]; -> like x.
    """
    return rms_norm_kernel(x, weight, eps) if x.is_cuda else rms_norm_cpu(x, weight, eps)


def rms_norm_definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in plain torch."""
    # A norm and a few operations on one number per row: fewer passes over x than pow, mean and rsqrt.
    scale: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        return (x * scale).mul_(weight)
    return (x.float() * scale).to(x.dtype) * weight


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


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add, then normalize: -> (rms_norm(residual + delta), residual + delta).

    residual, delta: [t, d] (delta None: nothing to add, and the second result is `residual` itself); weight: [d].
    """
    if residual.is_cuda:
        return add_rms_norm_kernel(residual, delta, weight, eps)
    return add_rms_norm_cpu(residual, delta, weight, eps)


def add_rms_norm_definition(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add and RMSNorm in plain torch; the sum is rounded to the dtype before it is normalized."""
    total = residual if delta is None else residual + delta
    return rms_norm_definition(total, weight, eps), total


def add_rms_norm_kernel(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and RMSNorm in Triton: one program per row."""
    if delta is None:
        return rms_norm_kernel(residual, weight, eps), residual
    return _launch_add_norm(residual, delta, weight, None, eps, center=False)


def add_layer_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add, then normalize: -> (layer_norm(residual + delta), residual + delta) (Ba et al., arXiv 1607.06450).

    residual, delta: [t, d] (delta None: nothing to add); weight: [d]; bias: [d] or None.
    """
    if residual.is_cuda:
        return add_layer_norm_kernel(residual, delta, weight, bias, eps)
    return add_layer_norm_definition(residual, delta, weight, bias, eps)


def add_layer_norm_definition(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add and LayerNorm in plain torch, whose layer_norm computes in float32 and rounds once."""
    total = residual if delta is None else residual + delta
    return functional.layer_norm(total, weight.shape, weight, bias, eps), total


def add_layer_norm_kernel(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add and LayerNorm in Triton: one program per row."""
    return _launch_add_norm(residual, delta, weight, bias, eps, center=True)


def _launch_add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, center: bool
) -> tuple[Tensor, Tensor]:
    t, d = residual.shape
    residual = residual.contiguous()
    delta = None if delta is None else delta.contiguous()
    normed = torch.empty_like(residual)
    total = residual if delta is None else torch.empty_like(residual)
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
            BLOCK=block,
            num_warps=min(16, max(4, block // 512)),
            **dependent_launch(residual),
        )
    return normed, total


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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    mask = column < d
    at = tl.program_id(0).to(tl.int64) * d + column
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
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


def _random(shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def _add_case(t: int, d: int, add: bool, bias: bool | None = None) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        arguments: dict[str, object] = {
            "residual": _random((t, d), 0, device, dtype),
            "delta": _random((t, d), 1, device, dtype) if add else None,
            "weight": _random((d,), 2, device, dtype),
            "eps": 1e-5,
        }
        if bias is not None:
            arguments["bias"] = _random((d,), 3, device, dtype) if bias else None
        return arguments

    return Case(f"{t}x{d}{'+' if add else ''}{'b' if bias else ''}", make)


def _norm_cases() -> tuple[Case, ...]:
    def heads(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        qkv = _random((5, 4 * 24), 0, device, dtype)
        return {"x": qkv.view(5, 4, 24)[:, 1:], "weight": _random((24,), 1, device, dtype), "eps": 1e-6}

    def rows(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        return {"x": _random((3, 100), 0, device, dtype), "weight": _random((100,), 1, device, dtype), "eps": 1e-5}

    return (Case("heads of a strided view", heads), Case("3x100", rows))


OPS = (
    Op("rms_norm", rms_norm, rms_norm_definition, rms_norm_kernel, _norm_cases()),
    Op(
        "add_rms_norm",
        add_rms_norm,
        add_rms_norm_definition,
        add_rms_norm_kernel,
        (_add_case(3, 96, True), _add_case(1, 130, True), _add_case(2, 64, False)),
    ),
    Op(
        "add_layer_norm",
        add_layer_norm,
        add_layer_norm_definition,
        add_layer_norm_kernel,
        (_add_case(3, 96, True, True), _add_case(1, 130, True, False), _add_case(2, 64, False, True)),
    ),
)
