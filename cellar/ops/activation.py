"""Activations of feed-forward layers, plain and gated: silu, gelu (by erf), gelu_tanh, relu."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from cellar.core.errors import ConfigError
from cellar.ops.activation_cpu import silu_gate_cpu
from cellar.ops.registry import Case, Op
from cellar.ops.triton_support import dependent_launch, kernel

if TYPE_CHECKING:
    import triton.language as tl

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

_BLOCK = 1024


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
}


def gated(x: Tensor, kind: str) -> Tensor:
    """act(gate) * up (Shazeer, arXiv 2002.05202): x: [t, 2n], gate then up -> [t, n].

    Raises ConfigError for an activation that is not known.
    """
    if x.is_cuda:
        return gated_kernel(x, kind)
    return silu_gate_cpu(x) if kind == "silu" else gated_definition(x, kind)


def gated_definition(x: Tensor, kind: str) -> Tensor:
    """The gate in plain torch; the activation is rounded to x's dtype before the product."""
    gate, up = x.chunk(2, dim=-1)
    return _function(kind)(gate).mul_(up)


def gated_kernel(x: Tensor, kind: str) -> Tensor:
    """The gate in Triton."""
    return _launch(x, x.shape[-1] // 2, kind, gate=True)


def activate(x: Tensor, kind: str) -> Tensor:
    """act(x) of every element: x: [t, n] -> [t, n]. Raises ConfigError for an activation that is not known."""
    return activate_kernel(x, kind) if x.is_cuda else activate_definition(x, kind)


def activate_definition(x: Tensor, kind: str) -> Tensor:
    """The activation in plain torch."""
    return _function(kind)(x)


def activate_kernel(x: Tensor, kind: str) -> Tensor:
    """The activation in Triton."""
    return _launch(x, x.shape[-1], kind, gate=False)


def _function(kind: str) -> Callable[[Tensor], Tensor]:
    function = _FUNCTIONS.get(kind)
    if function is None:
        raise ConfigError(f"activation {kind!r} is not known; known are {', '.join(_FUNCTIONS)}.")
    return function


def _launch(x: Tensor, n: int, kind: str, *, gate: bool) -> Tensor:
    _function(kind)
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


def _case(kind: str, t: int, n: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        generator = torch.Generator().manual_seed(n)
        return {"x": (3 * torch.randn((t, n), generator=generator)).to(dtype).to(device), "kind": kind}

    return Case(f"{kind} {t}x{n}", make)


def kinds() -> tuple[Activation, ...]:
    """The names of all activations."""
    return cast(tuple[Activation, ...], tuple(_FUNCTIONS))


OPS = (
    Op("gated", gated, gated_definition, gated_kernel, tuple(_case(kind, 3, 2 * 70) for kind in kinds())),
    Op("activate", activate, activate_definition, activate_kernel, tuple(_case(kind, 2, 1100) for kind in kinds())),
)
