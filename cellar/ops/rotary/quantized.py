"""Rotary embedding and the write of quantized K and V in Triton; the bytes are those of `ops/kv_format.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cellar.core.kv_formats import codes_nbytes
from cellar.ops.kv_format import as_bytes, format_of
from cellar.ops.triton_support import dependent_launch, kernel

if TYPE_CHECKING:
    import triton.language as tl

# What a kernel's KV says.
FP8, INT4 = 1, 2


def write_quantized(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    out: Tensor | None,
) -> None:
    """Rotate q into `out` and k, unless there is no `cos_sin`; write k and v. One program a token and kind."""
    t, kv_heads, dim = k.shape
    if not t:
        return
    heads = 0 if q is None else q.shape[1]
    queries = k if q is None else q
    form = format_of(k_cache)
    width = codes_nbytes(form, dim)
    k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
    _quantized_kernel[t, 2 if q is None else 3](
        queries,
        k,
        v,
        slot_mapping if positions is None else positions,
        k if cos_sin is None else cos_sin,
        queries if out is None else out,
        k_cache,
        v_cache,
        slot_mapping,
        0 if cos_sin is None else cos_sin.shape[1],
        queries.stride(0),
        queries.stride(1),
        *strides(k, v, k_cache, v_cache),
        Q_HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        CHUNK=k_cache.shape[2],
        CODES=width,
        KV=FP8 if form == "fp8" else INT4,
        BLOCK_Q_HEADS=1 << max(heads - 1, 0).bit_length(),
        BLOCK_HEADS=1 << (kv_heads - 1).bit_length(),
        BLOCK_DIM=1 << (dim - 1).bit_length(),
        BLOCK_CODES=1 << (width - 1).bit_length(),
        **dependent_launch(k),
        num_warps=4,
    )


def strides(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[int, ...]:
    """What all kernels that write a cache are told last: from token to token and head to head of k and of v, from slot
    to slot of both caches, from head to head of the caches.
    """
    within = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    return *within, k_cache.stride(0), v_cache.stride(0), k_cache.stride(1)


@kernel
def _turned(at, stride, first, heads, d, half, cos_sin, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Dimensions d of some heads with their embedding, float32 rounded to the tensor's type; 0 beyond."""
    inside = first + d < DIM
    d = first + d
    turns = d < 2 * half
    partner = tl.where(turns, tl.where(d < half, d + half, d - half), d)
    pair = tl.where(d < half, d, d - half)
    cos = tl.load(cos_sin + pair, mask=turns & inside, other=1.0)
    sin = tl.load(cos_sin + half + pair, mask=turns & inside, other=0.0)
    sin = tl.where(d < half, -sin, sin)
    ok = heads & inside[None, :]
    x = tl.load(at + stride + d[None, :], mask=ok, other=0.0)
    y = tl.load(at + stride + partner[None, :], mask=ok, other=0.0).to(tl.float32)
    turned = x.to(tl.float32) * cos[None, :] + y * sin[None, :]
    return turned.to(x.dtype).to(tl.float32)


@kernel
def _rounded(x):  # type: ignore[no-untyped-def]
    """The upper 16 bits of the nearest bfloat16."""
    bits = x.to(tl.uint32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, near).to(tl.uint32)


@kernel
def _group(x, ok):  # type: ignore[no-untyped-def]
    """Codes [heads, numbers] and scales [heads] of a half of each row, as 32 bits: the scale, above it the least."""
    least = tl.min(tl.where(ok, x, float("inf")), 1)
    largest = tl.max(tl.where(ok, x, -float("inf")), 1)
    size = tl.max(tl.where(ok, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 1)
    none = size >= 0x7F800000
    step = tl.where(none, 0x7FC0, _rounded((largest - least) * (1.0 / 15)))
    floor = tl.where(none, 0x7FC0, _rounded(least))
    scale = (step << 16).to(tl.float32, bitcast=True)
    some = scale > 0.0
    inverse = tl.where(some, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(some, scale, 1.0)), 0.0)
    codes = (x - (floor << 16).to(tl.float32, bitcast=True)[:, None]) * inverse[:, None]
    codes = tl.minimum(tl.maximum(codes, 0.0), 15.0)
    # In 2^23 a unit is the last bit: adding rounds to the nearest, and to the even one of two.
    return (codes + 8388608.0).to(tl.uint32, bitcast=True) & 15, step | floor << 16


@kernel
def _written(  # type: ignore[no-untyped-def]
    at,  # [KV_HEADS, DIM] of one token's keys or values
    head_stride,
    half,
    row,
    to,  # its slot's bytes
    cache_head_stride,
    offset,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    CODES: tl.constexpr,
    KV: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_CODES: tl.constexpr,
):
    """Codes and scales of one token at `offset` of its slot."""
    head = tl.arange(0, BLOCK_HEADS)
    is_head = head < KV_HEADS
    ok = is_head[:, None]
    stride = head[:, None] * head_stride
    to += head * cache_head_stride
    code = tl.arange(0, BLOCK_CODES)
    ok_code = ok & (code < CODES)[None, :]
    code_at = to[:, None] + offset * CODES + code[None, :]
    if KV == 1:
        x = _turned(at, stride, 0, ok, code, half, row, DIM)
        largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        # 448 is 1.75 x 2^8: the exponent, less 8, one more beyond 1.75.
        power = tl.maximum((largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32), 1)
        power = tl.where(largest < 0x7F800000, power, 255)
        inverse = (tl.maximum(254 - power, 0) << 23).to(tl.float32, bitcast=True)
        y = x * inverse[:, None]
        bits = y.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        # In 2^14 the last bit is 2^-9, the least code.
        small = (tl.abs(y) + 16384.0).to(tl.uint32, bitcast=True) & 15
        codes = tl.where(size < 0x3C800000, small, normal)
        codes = tl.where(size < 0x7F800000, codes, 0x7F) | ((bits >> 24) & 0x80)
        tl.store(code_at, codes.to(tl.uint8), mask=ok_code)
        tl.store(to + CHUNK * CODES + offset, power.to(tl.uint8), mask=is_head)
    else:
        in_half = (code < CODES)[None, :]
        x = _turned(at, stride, 0, ok & in_half, code, half, row, DIM)
        y = _turned(at, stride, CODES, ok & in_half, code, half, row, DIM)
        low, first = _group(x, in_half)
        high, second = _group(y, in_half)
        tl.store(code_at, (low | high << 4).to(tl.uint8), mask=ok_code)
        scales = (to + CHUNK * CODES + offset * 8).to(tl.pointer_type(tl.uint32))
        tl.store(scales, first, mask=is_head)
        tl.store(scales + 1, second, mask=is_head)


@kernel
def _quantized_kernel(  # type: ignore[no-untyped-def]
    q,  # [t, Q_HEADS, DIM]
    k,  # [t, KV_HEADS, DIM]
    v,  # [t, KV_HEADS, DIM]
    positions,  # [t]
    cos_sin,  # [max_position, rotary_dim]
    out,  # [t, Q_HEADS, DIM], contiguous
    k_cache,  # bytes [slots, KV_HEADS, CHUNK * (CODES + scales)]
    v_cache,  # the same
    slot_mapping,  # [t]
    rotary_dim,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_slot_stride,
    v_slot_stride,
    cache_head_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    CODES: tl.constexpr,
    KV: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_CODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keys (program 0 of a token), values (1), queries (2)."""
    token = tl.program_id(0).to(tl.int64)
    what = tl.program_id(1)
    half = rotary_dim // 2
    place = tl.load(slot_mapping + token)
    row = cos_sin + tl.load(positions + token, mask=rotary_dim > 0, other=0) * rotary_dim
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if what == 2:
        d = tl.arange(0, BLOCK_DIM)
        q_head = tl.arange(0, BLOCK_Q_HEADS)
        q_ok = (q_head < Q_HEADS)[:, None]
        turned = _turned(q + token * q_token_stride, q_head[:, None] * q_head_stride, 0, q_ok, d, half, row, DIM)
        out_at = out + (token * Q_HEADS + q_head[:, None]) * DIM + d[None, :]
        tl.store(out_at, turned.to(out.dtype.element_ty), mask=q_ok & (d < DIM)[None, :])
    elif what == 0:
        to = k_cache + place // CHUNK * k_slot_stride
        at = k + token * k_token_stride
        _written(
            at,
            k_head_stride,
            half,
            row,
            to,
            cache_head_stride,
            place % CHUNK,
            KV_HEADS,
            DIM,
            CHUNK,
            CODES,
            KV,
            BLOCK_HEADS,
            BLOCK_CODES,
        )
    else:
        to = v_cache + place // CHUNK * v_slot_stride
        at = v + token * v_token_stride
        _written(
            at,
            v_head_stride,
            0,
            row,
            to,
            cache_head_stride,
            place % CHUNK,
            KV_HEADS,
            DIM,
            CHUNK,
            CODES,
            KV,
            BLOCK_HEADS,
            BLOCK_CODES,
        )
