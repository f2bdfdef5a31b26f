"""Parts of a sum that ranks have exchanged, added in their order: in float32, rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cellar.ops.registry import Case, Op, Variant
from cellar.ops.triton_support import dependent_launch, kernel

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 2048


def added(parts: Tensor) -> Tensor:
    """Parts [ranks, ...] -> the sum [...], first to last."""
    return (_OP.on_cpu if parts.is_cpu else _OP.on_gpu)(parts)


def added_definition(parts: Tensor) -> Tensor:
    """In float32 for narrower types."""
    if len(parts) == 2:
        return parts[0] + parts[1]  # one rounding, as below, in one operation
    narrow = parts.dtype in (torch.bfloat16, torch.float16)
    total = parts[0].to(torch.float32 if narrow else parts.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def added_kernel(parts: Tensor) -> Tensor:
    """In Triton: one pass."""
    parts = parts.contiguous()
    out = torch.empty_like(parts[0])
    n = out.numel()
    if n:
        _added_kernel[(-(-n // _BLOCK),)](parts, out, n, PARTS=len(parts), BLOCK=_BLOCK, **dependent_launch(parts))
    return out


@kernel
def _added_kernel(  # type: ignore[no-untyped-def]
    parts,  # [PARTS, n]
    out,  # [n]
    n,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.load(parts + at, mask=mask, other=0.0).to(tl.float32)
    base = at + n
    for _ in tl.static_range(1, PARTS):
        total += tl.load(parts + base, mask=mask, other=0.0).to(tl.float32)
        base += n
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def _case(*shape: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        parts = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))
        return {"parts": parts.to(dtype).to(device)}

    return Case("x".join(map(str, shape)), make)


_OP = Op(
    "added",
    added_definition,
    (Variant("triton", added_kernel),),
    (_case(2, 3, 700), _case(4, 5, 1000), _case(3, 1), _case(8, 2, 2048)),
)

OPS = (_OP,)
