"""Parts of a sum that ranks have exchanged, added in their order: in float32, rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cellar.ops.norm.definition import add_rms_norm_definition
from cellar.ops.registry import Case, Op, Variant
from cellar.ops.triton_support import dependent_launch, kernel

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 2048


def added(parts: Tensor) -> Tensor:
    """Parts [ranks, ...] -> the sum [...], first to last."""
    return (_ADDED.on_cpu if parts.is_cpu else _ADDED.on_gpu)(parts)


def added_rms_norm(
    own: Tensor,
    others: Tensor,
    rank: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-> (rms_norm(residual + s), residual + s), s the sum of own [t, d], the part of rank `rank`, and of those of the
    others [ranks - 1, t, d], in the order of ranks; residual: [t, d], weight: [d]. `normed`: the first result's place.
    """
    run = _ADDED_RMS_NORM.on_cpu if own.is_cpu else _ADDED_RMS_NORM.on_gpu
    return run(own, others, rank, residual, weight, eps, normed)


def joined(own: Tensor, others: Tensor, rank: int) -> Tensor:
    """Own part [...] and the others' [ranks - 1, ...] in the order of ranks: [ranks, ...]."""
    return torch.cat([others[:rank], own[None], others[rank:]])


def added_definition(parts: Tensor) -> Tensor:
    """In float32 for narrower types."""
    if len(parts) == 2:
        return parts[0] + parts[1]  # one rounding, as below, in one operation
    narrow = parts.dtype in (torch.bfloat16, torch.float16)
    total = parts[0].to(torch.float32 if narrow else parts.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def added_rms_norm_definition(
    own: Tensor,
    others: Tensor,
    rank: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum, rounded, and then the norm of what it is added to."""
    found, total = add_rms_norm_definition(residual, added_definition(joined(own, others, rank)), weight, eps)
    return found if normed is None else normed.copy_(found), total


def added_kernel(parts: Tensor) -> Tensor:
    """In Triton: one pass."""
    parts = parts.contiguous()
    out = torch.empty_like(parts[0])
    n = out.numel()
    if n:
        _added_kernel[(-(-n // _BLOCK),)](parts, out, n, PARTS=len(parts), BLOCK=_BLOCK, **dependent_launch(parts))
    return out


def added_rms_norm_kernel(
    own: Tensor,
    others: Tensor,
    rank: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """In Triton: one program per row, one pass."""
    t, d = own.shape
    own, residual, total = own.contiguous(), residual.contiguous(), torch.empty_like(own)
    normed = torch.empty_like(own) if normed is None else normed
    assert normed.is_contiguous(), "rows lie behind one another"
    if t:
        block = 1 << max(0, d - 1).bit_length()
        _added_rms_norm_kernel[(t,)](
            own,
            others,
            residual,
            weight,
            normed,
            total,
            d,
            others.stride(0),
            eps,
            RANK=rank,
            PARTS=len(others) + 1,
            BLOCK=block,
            num_warps=min(16, max(4, block // 512)),
            **dependent_launch(own),
        )
    return normed, total


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


@kernel
def _added_rms_norm_kernel(  # type: ignore[no-untyped-def]
    own,  # [t, d]
    others,  # [PARTS - 1, t, d], of any stride between parts
    residual,  # [t, d]
    weight,  # [d]
    normed,  # [t, d]
    total,  # [t, d]
    d,
    stride,
    eps,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
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
    part = others + at
    x = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(PARTS):
        if r == RANK:
            x += tl.load(own + at, mask=mask, other=0.0).to(tl.float32)
        else:
            x += tl.load(part, mask=mask, other=0.0).to(tl.float32)
            part += stride
    x = x.to(total.dtype.element_ty).to(tl.float32)
    x += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    rounded = x.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=mask)
    x = rounded.to(tl.float32)
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / d + eps))
    y = y.to(normed.dtype.element_ty).to(tl.float32) * w
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=mask)


def _random(shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def _case(*shape: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return {"parts": _random(shape, shape[0], device, dtype)}

    return Case("x".join(map(str, shape)), make)


def _norm_case(ranks: int, rank: int, t: int, d: int, gap: int = 0, *, given: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        room = _random((ranks - 1, t * d + gap), 1, device, dtype)
        return {
            "own": _random((t, d), 0, device, dtype),
            "others": room[:, : t * d].view(ranks - 1, t, d),
            "rank": rank,
            "residual": _random((t, d), 2, device, dtype),
            "weight": _random((d,), 3, device, dtype),
            "eps": 1e-5,
            "normed": torch.full((t, d), torch.nan, dtype=dtype, device=device) if given else None,
        }

    return Case(f"{ranks}x{t}x{d} of rank {rank}", make)


_ADDED = Op(
    "added",
    added_definition,
    (Variant("triton", added_kernel),),
    (_case(2, 3, 700), _case(4, 5, 1000), _case(3, 1), _case(8, 2, 2048)),
)
_ADDED_RMS_NORM = Op(
    "added_rms_norm",
    added_rms_norm_definition,
    (Variant("triton", added_rms_norm_kernel),),
    (
        _norm_case(2, 0, 3, 96),
        _norm_case(2, 1, 1, 130, 14),
        _norm_case(4, 2, 2, 700, 8, given=True),
        _norm_case(3, 2, 5, 64),
    ),
)

OPS = (_ADDED, _ADDED_RMS_NORM)
