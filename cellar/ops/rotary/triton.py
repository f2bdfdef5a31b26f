"""Rotary embedding and the write into the cache in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cellar.ops.kv_format import format_of
from cellar.ops.rotary.quantized import strides, write_quantized
from cellar.ops.triton_support import dependent_launch, kernel

if TYPE_CHECKING:
    import triton.language as tl


def rotary_kernel(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation in Triton: a program turns a block of heads of one token; queries and keys in one launch."""
    t, heads, dim = q.shape
    kv_heads = k.shape[1]
    q = q if q.stride(-1) == 1 else q.contiguous()
    k = k if k.stride(-1) == 1 else k.contiguous()
    out_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    block_dim = 1 << max(0, dim - 1).bit_length()
    block_heads = max(1, 2048 // block_dim)
    if t:
        _rotary_kernel[t, -(-(heads + kv_heads) // block_heads)](
            q,
            k,
            positions,
            cos_sin,
            out_q,
            out_k,
            heads,
            kv_heads,
            dim,
            cos_sin.shape[1],
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            HEADS=block_heads,
            DIM=block_dim,
        )
    return out_q, out_k


def write_kv_kernel(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """`write_kv` in Triton: one program per token."""
    tokens, kv_heads, dim = k.shape
    if tokens == 0:
        return
    if format_of(k_cache) != "plain":
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        write_quantized(None, k, v, None, None, k_cache, v_cache, slot_mapping, None)
        return
    _write_kv_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        *strides(k, v, k_cache, v_cache),
        KV_HEADS=kv_heads,
        DIM=dim,
        CHUNK=k_cache.shape[2],
        BLOCK_HEADS=1 << (kv_heads - 1).bit_length(),
        BLOCK_DIM=1 << (dim - 1).bit_length(),
        num_warps=4,
    )


def rotary_kv_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    turned: Tensor | None = None,
) -> Tensor:
    """`rotary_kv` in Triton: a program takes a block of heads of one token."""
    t, heads, dim = q.shape
    kv_heads = k.shape[1]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if format_of(k_cache) != "plain":
        assert turned is None, "attention over a quantized cache reads nothing else"
        write_quantized(q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping, out)
        return out
    block_dim = 1 << max(0, dim - 1).bit_length()
    # All heads of a token in one program, up to 8,192 values: smaller blocks are slower (docs/log/attention-gpu.md).
    block_heads = min(1 << (heads + 2 * kv_heads - 1).bit_length(), max(1, 8192 // block_dim))
    if t:
        _rotary_kv_kernel[t, -(-(heads + 2 * kv_heads) // block_heads)](
            q,
            k,
            v,
            positions,
            cos_sin,
            out,
            out if turned is None else turned,
            k_cache,
            v_cache,
            slot_mapping,
            cos_sin.shape[1],
            q.stride(0),
            q.stride(1),
            *strides(k, v, k_cache, v_cache),
            Q_HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            CHUNK=k_cache.shape[2],
            BLOCK_HEADS=block_heads,
            BLOCK_DIM=block_dim,
            KEEP=turned is not None,
            **dependent_launch(q),
        )
    return out


@kernel
def _rotary_kernel(  # type: ignore[no-untyped-def]
    q,  # [t, heads, dim]
    k,  # [t, kv_heads, dim]
    positions,  # [t]
    cos_sin,  # [max_position, rotary_dim]
    out_q,  # [t, heads, dim], contiguous
    out_k,  # [t, kv_heads, dim], contiguous
    heads,
    kv_heads,
    dim,
    rotary_dim,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    half = rotary_dim // 2
    turns = d < rotary_dim
    # Dimension d turns with its partner half a rotary_dim away, which enters with a minus in the first half.
    partner = tl.where(d < half, d + half, d - half)
    partner = tl.where(turns, partner, d)
    row = cos_sin + tl.load(positions + token) * rotary_dim
    pair = tl.where(d < half, d, d - half)
    cos = tl.load(row + pair, mask=turns, other=1.0)
    sin = tl.load(row + half + pair, mask=turns, other=0.0)
    sin = tl.where(d < half, -sin, sin)

    is_q = (head < heads)[:, None] & (d < dim)[None, :]
    at_q = q + token * stride_q_token + head[:, None] * stride_q_head
    x = tl.load(at_q + d[None, :], mask=is_q, other=0.0).to(tl.float32)
    y = tl.load(at_q + partner[None, :], mask=is_q, other=0.0).to(tl.float32)
    turned = x * cos[None, :] + y * sin[None, :]
    tl.store(out_q + (token * heads + head[:, None]) * dim + d[None, :], turned.to(out_q.dtype.element_ty), mask=is_q)

    other = head - heads
    is_k = ((other >= 0) & (other < kv_heads))[:, None] & (d < dim)[None, :]
    at_k = k + token * stride_k_token + other[:, None] * stride_k_head
    x = tl.load(at_k + d[None, :], mask=is_k, other=0.0).to(tl.float32)
    y = tl.load(at_k + partner[None, :], mask=is_k, other=0.0).to(tl.float32)
    turned = x * cos[None, :] + y * sin[None, :]
    at = (token * kv_heads + other[:, None]) * dim + d[None, :]
    tl.store(out_k + at, turned.to(out_k.dtype.element_ty), mask=is_k)


@kernel
def _write_kv_kernel(  # type: ignore[no-untyped-def]
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_slot_stride,
    v_slot_stride,
    cache_head_stride,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One token's K and V, all heads: [kv_heads, dim] each; tensors as in `write_kv`."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slot_mapping + token)
    slot = place // CHUNK
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    ok = (heads < KV_HEADS) & (dims < DIM)
    inner = heads * cache_head_stride + (place % CHUNK) * DIM + dims
    keys = tl.load(k + token * k_token_stride + heads * k_head_stride + dims, mask=ok)
    tl.store(k_cache + slot * k_slot_stride + inner, keys, mask=ok)
    values = tl.load(v + token * v_token_stride + heads * v_head_stride + dims, mask=ok)
    tl.store(v_cache + slot * v_slot_stride + inner, values, mask=ok)


@kernel
def _rotary_kv_kernel(  # type: ignore[no-untyped-def]
    q,  # [t, Q_HEADS, DIM]
    k,  # [t, KV_HEADS, DIM]
    v,  # [t, KV_HEADS, DIM]
    positions,  # [t]
    cos_sin,  # [max_position, rotary_dim]
    out,  # [t, Q_HEADS, DIM], contiguous
    turned,  # [t, KV_HEADS, DIM], contiguous
    k_cache,  # [slots, KV_HEADS, CHUNK, DIM]
    v_cache,  # [slots, KV_HEADS, CHUNK, DIM]
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
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Heads count through queries, keys, values. What the host gave is read while the kernel in front still runs."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_DIM)
    half = rotary_dim // 2
    turns = d < rotary_dim
    # Dimension d turns with its partner half a rotary_dim away, which enters with a minus in the first half.
    partner = tl.where(turns, tl.where(d < half, d + half, d - half), d)
    row = cos_sin + tl.load(positions + token) * rotary_dim
    pair = tl.where(d < half, d, d - half)
    cos = tl.load(row + pair, mask=turns, other=1.0)
    sin = tl.load(row + half + pair, mask=turns, other=0.0)
    sin = tl.where(d < half, -sin, sin)
    place = tl.load(slot_mapping + token)
    slot = place // CHUNK
    inner = place % CHUNK * DIM
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    inside = (d < DIM)[None, :]
    is_q = (head < Q_HEADS)[:, None] & inside
    at_q = q + token * q_token_stride + head[:, None] * q_head_stride
    x = tl.load(at_q + d[None, :], mask=is_q, other=0.0).to(tl.float32)
    y = tl.load(at_q + partner[None, :], mask=is_q, other=0.0).to(tl.float32)
    queries = x * cos[None, :] + y * sin[None, :]
    at_out = out + (token * Q_HEADS + head[:, None]) * DIM + d[None, :]
    tl.store(at_out, queries.to(out.dtype.element_ty), mask=is_q)

    key = head - Q_HEADS
    is_k = ((key >= 0) & (key < KV_HEADS))[:, None] & inside
    at_k = k + token * k_token_stride + key[:, None] * k_head_stride
    x = tl.load(at_k + d[None, :], mask=is_k, other=0.0).to(tl.float32)
    y = tl.load(at_k + partner[None, :], mask=is_k, other=0.0).to(tl.float32)
    keys = (x * cos[None, :] + y * sin[None, :]).to(k_cache.dtype.element_ty)
    at_cache = k_cache + slot * k_slot_stride + key[:, None] * cache_head_stride + inner + d[None, :]
    tl.store(at_cache, keys, mask=is_k)
    if KEEP:
        tl.store(turned + (token * KV_HEADS + key[:, None]) * DIM + d[None, :], keys, mask=is_k)

    value = key - KV_HEADS
    is_v = ((value >= 0) & (value < KV_HEADS))[:, None] & inside
    vs = tl.load(v + token * v_token_stride + value[:, None] * v_head_stride + d[None, :], mask=is_v)
    tl.store(v_cache + slot * v_slot_stride + value[:, None] * cache_head_stride + inner + d[None, :], vs, mask=is_v)
