"""Tokens rounded to 8 bits on their way into a product: as they are, behind a norm, or behind a gate.

Each operation is one pass over memory: what is rounded is never written in 16 bits. Codes and scales are those of
`activations.py`: int8 by token, or e4m3 (fp8) by token or by groups of columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cellar.ops.activation.definition import function_of, gated_definition
from cellar.ops.norm.definition import add_rms_norm_definition
from cellar.ops.registry import Case, Op, Variant
from cellar.ops.triton_support import dependent_launch, kernel
from cellar.quant.activations import codes_of

if TYPE_CHECKING:
    import triton.language as tl

_PLAIN, _NORM, _GATE = 0, 1, 2


def byte_tokens(x: Tensor, activations: str, group: int) -> tuple[Tensor, Tensor]:
    """x: floats [t, in] -> codes [t, in], scales float32 [t, groups], one group of all columns for 0."""
    return (_TOKENS.on_cpu if x.is_cpu else _TOKENS.on_gpu)(x, activations, group)


def norm_byte_tokens(
    residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, activations: str, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """-> codes and scales of rms_norm(residual + delta), and residual + delta: arguments as `add_rms_norm`'s."""
    return (_NORMED.on_cpu if residual.is_cpu else _NORMED.on_gpu)(residual, delta, norm, eps, activations, group)


def gated_byte_tokens(x: Tensor, kind: str, activations: str, group: int) -> tuple[Tensor, Tensor]:
    """-> codes and scales of act(gate) * up: x: [t, 2n], gate then up; `kind` as in `gated`."""
    return (_GATED.on_cpu if x.is_cpu else _GATED.on_gpu)(x, kind, activations, group)


def byte_tokens_definition(x: Tensor, activations: str, group: int) -> tuple[Tensor, Tensor]:
    """As `codes_of` says."""
    return codes_of(x, activations, group)


def norm_byte_tokens_definition(
    residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, activations: str, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One operation after another."""
    normed, total = add_rms_norm_definition(residual, delta, norm, eps)
    return *codes_of(normed, activations, group), total


def gated_byte_tokens_definition(x: Tensor, kind: str, activations: str, group: int) -> tuple[Tensor, Tensor]:
    """One operation after another."""
    return codes_of(gated_definition(x, kind), activations, group)


def byte_tokens_kernel(x: Tensor, activations: str, group: int) -> tuple[Tensor, Tensor]:
    """In Triton: one program a token."""
    return _launch(x.contiguous(), None, None, x.shape[1], 0.0, activations, group, _PLAIN)[:2]


def norm_byte_tokens_kernel(
    residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, activations: str, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Add, norm and rounding in one launch."""
    delta = None if delta is None else delta.contiguous()
    return _launch(residual.contiguous(), delta, norm, residual.shape[1], eps, activations, group, _NORM)


def gated_byte_tokens_kernel(x: Tensor, kind: str, activations: str, group: int) -> tuple[Tensor, Tensor]:
    """Gate and rounding in one launch."""
    function_of(kind)
    return _launch(x.contiguous(), None, None, x.shape[1] // 2, 0.0, activations, group, _GATE, kind)[:2]


def _launch(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor | None,
    columns: int,
    eps: float,
    activations: str,
    group: int,
    before: int,
    kind: str = "silu",
) -> tuple[Tensor, Tensor, Tensor]:
    """-> codes, scales, and x + delta (x itself where nothing is added)."""
    t = x.shape[0]
    kept = torch.int8 if activations == "int8" else torch.float8_e4m3fn
    codes = torch.empty((t, columns), dtype=kept, device=x.device)
    groups = columns // group if group else 1
    # By groups: the library's product wants the scales of all tokens behind one another.
    scales = torch.empty((groups, t), dtype=torch.float32, device=x.device)
    total = x if delta is None else torch.empty_like(x)
    if t:
        block = 1 << max(0, columns - 1).bit_length()
        _tokens_kernel[(t,)](
            x,
            x if delta is None else delta,
            x if norm is None else norm,
            codes.view(torch.uint8),
            scales,
            total,
            t,
            columns,
            eps,
            BEFORE=before,
            ADD=delta is not None,
            KIND=kind,
            GROUP=group,
            WHOLE=activations == "int8",
            BLOCK=max(block, group),
            E4M3=_has_e4m3(x),
            num_warps=min(16, max(4, block // 512)),
            **dependent_launch(x),
        )
    return codes, scales.t(), total


def _has_e4m3(x: Tensor) -> bool:
    """True where the device turns floats into e4m3 by an instruction (NVIDIA's sm_89 and later)."""
    if x.is_meta:
        return True
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 9)


@kernel
def _e4m3(x, E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bytes of the nearest numbers of e4m3, of two equally near ones the even; |x| up to 448, or not a number."""
    if E4M3:
        found = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Normal numbers: three bits of the mantissa are kept; exponents have a bias of 7 instead of 127.
        near = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 in steps of 2^-9: adding 2^14 leaves just these bits.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
        code = tl.where(size < 0x3C800000, small, near)
        code = tl.where(size > 0x7F800000, 127, code)
        found = (code | ((bits >> 24) & 128)).to(tl.uint8)
    return found


@kernel
def _tokens_kernel(  # type: ignore[no-untyped-def]
    x,  # [t, columns], or [t, 2 columns] before a gate
    delta,  # [t, columns]
    norm,  # [columns]
    codes,  # [t, columns] bytes
    scales,  # [groups, t]
    total,  # [t, columns]
    t,
    columns,
    eps,
    BEFORE: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    E4M3: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: what is before the rounding, its largest magnitudes, codes."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if BEFORE == 2:
        at = x + token * 2 * columns + column
        v = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(at + columns, mask=mask, other=0.0).to(tl.float32)
        if KIND == "silu":
            y = v * tl.sigmoid(v)
        elif KIND == "gelu":
            y = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
        elif KIND == "gelu_tanh":
            y = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
        else:
            y = tl.maximum(v, 0.0)
        y = y.to(x.dtype.element_ty).to(tl.float32) * up
    else:
        y = tl.load(x + token * columns + column, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            y += tl.load(delta + token * columns + column, mask=mask, other=0.0).to(tl.float32)
            rounded = y.to(total.dtype.element_ty)
            tl.store(total + token * columns + column, rounded, mask=mask)
            y = rounded.to(tl.float32)
        if BEFORE == 1:
            w = tl.load(norm + column, mask=mask, other=0.0).to(tl.float32)
            y = y * (1.0 / tl.sqrt(tl.sum(y * y, 0) / columns + eps))
            y = y.to(x.dtype.element_ty).to(tl.float32) * w
    y = tl.where(mask, y.to(x.dtype.element_ty).to(tl.float32), 0.0)
    # As bits, numbers that are none are larger than all others.
    size = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    MOST: tl.constexpr = 127.5 if WHOLE else 448.0
    if GROUP == 0:
        scale = tl.max(size, 0).to(tl.float32, bitcast=True) / MOST
        scale = tl.where(scale == 0.0, 1.0, scale)
        tl.store(scales + token, scale)
        scaled = y / scale
    else:
        largest = tl.max(tl.reshape(size, [BLOCK // GROUP, GROUP]), 1)
        scale = largest.to(tl.float32, bitcast=True) / MOST
        scale = tl.where(scale == 0.0, 1.0, scale)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(scales + group * t + token, scale, mask=group * GROUP < columns)
        scaled = tl.reshape(tl.reshape(y, [BLOCK // GROUP, GROUP]) / scale[:, None], [BLOCK])
    if WHOLE:
        # In 2^23 and a half more a unit is the last bit: adding rounds to the nearest, of two to the even one.
        scaled = tl.minimum(tl.maximum(scaled, -128.0), 127.0) + 12582912.0
        code = (scaled.to(tl.int32, bitcast=True) & 255).to(tl.uint8)
    else:
        code = _e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0), E4M3)
    tl.store(codes + token * columns + column, code, mask=mask)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def _plain_case(t: int, k: int, group: int, activations: str = "fp8") -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        x = _random(device, dtype, t, k)
        x[0] = 0.0
        return {"x": x, "activations": activations, "group": group}

    return Case(f"{activations} {t}x{k}/{group}", make)


def _norm_case(t: int, k: int, group: int, activations: str = "fp8", *, add: bool) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        x, delta, norm = (_random(device, dtype, *shape) for shape in ((t, k), (t + 1, k), (k,)))
        added = {"residual": x, "delta": delta[1:] if add else None, "norm": norm, "eps": 1e-5}
        return {**added, "activations": activations, "group": group}

    return Case(f"{activations} {t}x{k}/{group}{'+' if add else ''}", make)


def _gate_case(t: int, n: int, group: int, kind: str, activations: str = "fp8") -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return {"x": _random(device, dtype, t, 2 * n), "kind": kind, "activations": activations, "group": group}

    return Case(f"{activations} {kind} {t}x{n}/{group}", make)


_TOKENS = Op(
    "byte_tokens",
    byte_tokens_definition,
    (Variant("triton", byte_tokens_kernel),),
    (
        *(_plain_case(3, 96, 0), _plain_case(1, 300, 0), _plain_case(5, 640, 128)),
        _plain_case(4, 320, 0, "int8"),
    ),
)
_NORMED = Op(
    "norm_byte_tokens",
    norm_byte_tokens_definition,
    (Variant("triton", norm_byte_tokens_kernel),),
    (
        *(_norm_case(2, 576, 0, add=True), _norm_case(3, 100, 0, add=False), _norm_case(4, 384, 128, add=True)),
        _norm_case(3, 512, 0, "int8", add=True),
    ),
)
_GATED = Op(
    "gated_byte_tokens",
    gated_byte_tokens_definition,
    (Variant("triton", gated_byte_tokens_kernel),),
    (
        *(_gate_case(3, 200, 0, "silu"), _gate_case(2, 256, 128, "silu")),
        *(_gate_case(2, 96, 0, "gelu"), _gate_case(1, 72, 0, "gelu_tanh"), _gate_case(2, 40, 0, "relu")),
        _gate_case(3, 240, 0, "silu", "int8"),
    ),
)

OPS = (_TOKENS, _NORMED, _GATED)
