"""Activations in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cellar.ops.activation.definition import function_of
from cellar.ops.triton_support import dependent_launch, kernel

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 1024


def gated_kernel(x: Tensor, kind: str) -> Tensor:
    """The gate in Triton."""
    return _launch(x, x.shape[-1] // 2, kind, gate=True)


def activate_kernel(x: Tensor, kind: str) -> Tensor:
    """The activation in Triton."""
    return _launch(x, x.shape[-1], kind, gate=False)


def _launch(x: Tensor, n: int, kind: str, *, gate: bool) -> Tensor:
    function_of(kind)
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (x.shape[0], -(-n // _BLOCK))
        _activation_kernel[grid](x, out, n, x.stride(0), KIND=kind, GATE=gate, BLOCK=_BLOCK, **dependent_launch(x))
    return out


@kernel
def _activation_kernel(  # type: ignore[no-untyped-def]
    x,  # [t, 2n] or [t, n]
    out,  # [t, n]
    n,
    stride,
    KIND: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    v = tl.load(x + token * stride + column, mask=mask, other=0.0).to(tl.float32)
    if KIND == "silu":
        y = v * tl.sigmoid(v)
    elif KIND == "gelu":
        y = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # 0.5 (1 + tanh(z)) = sigmoid(2 z), with 2 z = 2 sqrt(2 / pi) (v + 0.044715 v^3).
        y = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    else:
        y = tl.maximum(v, 0.0)
    if GATE:
        up = tl.load(x + token * stride + n + column, mask=mask, other=0.0).to(tl.float32)
        y = y.to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + token * n + column, y.to(out.dtype.element_ty), mask=mask)
