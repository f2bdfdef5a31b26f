"""Writing new keys and values into their chunks of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cellar.ops.registry import Case, Op
from cellar.ops.rotary_kv_cpu import write_kv_cpu
from cellar.ops.triton_support import kernel

if TYPE_CHECKING:
    import triton.language as tl


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put token i's K and V at slot m // chunk_size, offset m % chunk_size, with m = slot_mapping[i].

    k, v: [tokens, kv_heads, head_dim], any stride of tokens and heads. k_cache, v_cache: [slots, kv_heads, chunk_size,
    head_dim], any stride of slots; changed in place. slot_mapping: int64 [tokens], no place twice.
    """
    (write_kv_kernel if k.is_cuda else write_kv_cpu)(k, v, k_cache, v_cache, slot_mapping)


def write_kv_definition(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """What `write_kv` means."""
    kv_heads, size, dim = k_cache.shape[1:]
    # Chunk sizes are powers of two, and shifting costs half of what dividing does: it matters for single tokens.
    slot, offset = slot_mapping >> (size.bit_length() - 1), slot_mapping & (size - 1)
    if k_cache.is_contiguous() and v_cache.is_contiguous():
        # By rows of one head, which torch copies several times faster than it assigns by two indices.
        heads = torch.arange(kv_heads, device=k.device) * size
        place = (slot * (kv_heads * size) + offset).unsqueeze(1).add(heads).view(-1)
        k_cache.view(-1, dim).index_copy_(0, place, k.reshape(-1, dim))
        v_cache.view(-1, dim).index_copy_(0, place, v.reshape(-1, dim))
    else:
        k_cache[slot, :, offset] = k
        v_cache[slot, :, offset] = v


def write_kv_kernel(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """`write_kv` in Triton: one program per token."""
    tokens, kv_heads, dim = k.shape
    if tokens == 0:
        return
    _write_kv_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        v_cache.stride(0),
        k_cache.stride(1),
        KV_HEADS=kv_heads,
        DIM=dim,
        CHUNK=k_cache.shape[2],
        BLOCK_HEADS=1 << (kv_heads - 1).bit_length(),
        BLOCK_DIM=1 << (dim - 1).bit_length(),
        num_warps=4,
    )


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


def _case(tokens: int, kv_heads: int, dim: int, chunk: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        noise = torch.Generator().manual_seed(tokens * dim)
        slots = tokens // chunk + 3
        k, v = (torch.randn(tokens, kv_heads + 2, dim, generator=noise)[:, 1:-1] for _ in range(2))
        arena = torch.randn(slots, 2, kv_heads, chunk, dim, generator=noise).to(device, dtype)
        mapping = torch.randperm(slots * chunk, generator=noise)[:tokens]
        return {
            "k": k.to(device, dtype),
            "v": v.to(device, dtype),
            "k_cache": arena[:, 0],
            "v_cache": arena[:, 1],
            "slot_mapping": mapping.to(device),
        }

    return Case(f"{tokens}x{kv_heads}x{dim} in {chunk}", make)


OPS = (
    Op(
        name="write_kv",
        function=write_kv,
        definition=write_kv_definition,
        kernel=write_kv_kernel,
        cases=(_case(7, 2, 64, 32), _case(1, 1, 128, 16), _case(12, 3, 80, 64), _case(9, 5, 72, 32)),
        changes=("k_cache", "v_cache"),
    ),
)
