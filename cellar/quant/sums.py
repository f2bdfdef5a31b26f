"""Whole sums of products in int8, as the library leaves them, times both scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cellar.ops.registry import Case, Op, Variant
from cellar.ops.triton_support import dependent_launch, kernel

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 1024


def scaled_sums(sums: Tensor, x_scales: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """sums: int32 [t, n]; x_scales: float32 [t, 1]; scales: float32 [n]; bias: [n] or None -> bfloat16 [t, n]."""
    return (_OP.on_cpu if sums.is_cpu else _OP.on_gpu)(sums, x_scales, scales, bias)


def scaled_sums_definition(sums: Tensor, x_scales: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """sums x_scales scales + bias in float32, rounded once."""
    out = sums.float() * (x_scales * scales)
    return (out if bias is None else out + bias).bfloat16()


def scaled_sums_kernel(sums: Tensor, x_scales: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """In Triton: one pass."""
    t, n = sums.shape
    out = torch.empty((t, n), dtype=torch.bfloat16, device=sums.device)
    if t:
        _scaled_kernel[(t, -(-n // _BLOCK))](
            sums,
            x_scales,
            scales,
            scales if bias is None else bias,
            out,
            n,
            HAS_BIAS=bias is not None,
            BLOCK=_BLOCK,
            **dependent_launch(sums),
        )
    return out


@kernel
def _scaled_kernel(  # type: ignore[no-untyped-def]
    sums,  # [t, n] int32
    x_scales,  # [t]
    scales,  # [n]
    bias,  # [n]
    out,  # [t, n]
    n,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    scale = tl.load(scales + column, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(sums + token * n + column, mask=mask, other=0).to(tl.float32) * (tl.load(x_scales + token) * scale)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * n + column, value.to(out.dtype.element_ty), mask=mask)


def _case(t: int, n: int, *, bias: bool) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(n)
        sums = torch.randint(-(1 << 22), 1 << 22, (t, n), generator=generator, dtype=torch.int32)
        x_scales, scales = torch.rand((t, 1), generator=generator), torch.rand((n,), generator=generator)
        added = torch.randn((n,), generator=generator).bfloat16().to(device) if bias else None
        given = {"sums": sums.to(device), "x_scales": x_scales.to(device), "scales": scales.to(device) / (1 << 20)}
        return {**given, "bias": added}

    return Case(f"{t}x{n}", make, dtypes=(torch.bfloat16,))


_OP = Op(
    "scaled_sums",
    scaled_sums_definition,
    (Variant("triton", scaled_sums_kernel),),
    (_case(3, 1100, bias=True), _case(1, 64, bias=False)),
)

OPS = (_OP,)
