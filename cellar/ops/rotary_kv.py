"""Rotary embedding and the write into the cache, which always follow each other, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cellar.core.specs import RopeSpec
from cellar.ops.kv import write_kv_definition
from cellar.ops.registry import Case, Op
from cellar.ops.rotary import rope_table, rotary_definition
from cellar.ops.rotary_kv_cpu import rotary_kv_cpu
from cellar.ops.triton_support import dependent_launch, kernel

if TYPE_CHECKING:
    import triton.language as tl


def rotary_kv(
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
    """`rotary` of queries and keys, then `write_kv` of keys and values: -> the queries, rotated.

    q: [t, h, D]; k, v: [t, hk, D], any stride of tokens and heads; positions: int64 [t]; cos_sin: float32
    [max_position, rotary_dim] from `rope_table`; k_cache, v_cache: [slots, hk, chunk_size, D], any stride of slots,
    changed in place; slot_mapping: int64 [t], slot * chunk_size + offset of each token, no place twice. turned: like k,
    contiguous, for the rotated keys; None: they are wanted in the cache alone.
    """
    if q.is_cuda:
        return rotary_kv_kernel(q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping, turned)
    if turned is not None:
        return rotary_kv_definition(q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping, turned)
    return rotary_kv_cpu(q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping)


def rotary_kv_definition(
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
    """The two definitions, one after the other."""
    q, k = rotary_definition(q, k, positions, cos_sin)
    if turned is not None:
        turned.copy_(k)
    write_kv_definition(k, v, k_cache, v_cache, slot_mapping)
    return q


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
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            k_cache.stride(0),
            v_cache.stride(0),
            k_cache.stride(1),
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


def _case(
    name: str, t: int, heads: int, kv_heads: int, dim: int, rotary_dim: int, chunk: int = 32, keep: bool = False
) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        noise = torch.Generator().manual_seed(t + heads)
        qkv = torch.randn((t, (heads + 2 * kv_heads) * dim), generator=noise).to(dtype).to(device)
        vectors = qkv.view(t, heads + 2 * kv_heads, dim)
        slots = t // chunk + 3
        arena = torch.randn(slots, 2, kv_heads, chunk, dim, generator=noise).to(device, dtype)
        turned = torch.zeros(t, kv_heads, dim, dtype=dtype, device=device)
        return {
            "q": vectors[:, :heads],
            "k": vectors[:, heads : heads + kv_heads],
            "v": vectors[:, heads + kv_heads :],
            "positions": torch.randint(0, 50, (t,), generator=noise).to(device),
            "cos_sin": rope_table(RopeSpec(dim, rotary_dim, 10_000.0, max_position=50), device),
            "k_cache": arena[:, 0],
            "v_cache": arena[:, 1],
            "slot_mapping": torch.randperm(slots * chunk, generator=noise)[:t].to(device),
            "turned": turned if keep else None,
        }

    return Case(name, make)


OPS = (
    Op(
        "rotary_kv",
        rotary_kv,
        rotary_kv_definition,
        rotary_kv_kernel,
        (
            _case("grouped", 3, 4, 2, 64, 64),
            _case("partial, odd dim", 2, 3, 3, 20, 12, chunk=16),
            _case("many heads", 1, 40, 2, 64, 64, chunk=64),
            _case("keys kept", 5, 4, 2, 32, 32, keep=True),
        ),
        changes=("k_cache", "v_cache", "turned"),
    ),
)
