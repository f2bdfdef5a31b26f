"""Rotary position embedding and the write of new keys and values into their chunks of the cache, which follows it.

Su et al., arXiv 2104.09864; halves are rotated, as Hugging Face's checkpoints expect.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.ops.kv_format import format_of, pieces, quantized


def rotary_definition(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions, in float32.

    With (a, b) the halves of the first rotary_dim dimensions of a head: (a cos - b sin, b cos + a sin); dimensions
    beyond stay. q: [t, h, D], k: [t, hk, D], any strides; positions: int64 [t]; cos_sin: float32
    [max_position, rotary_dim] from `rope_table`. -> like q and k.
    """
    x = torch.cat((q, k), dim=1).float()
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    out = torch.empty_like(x)
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out[..., half : 2 * half]).addcmul_(a, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    out = out.to(q.dtype)
    return out[:, : q.shape[1]], out[:, q.shape[1] :]


def write_kv_definition(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put token i's K and V at slot m // chunk_size, offset m % chunk_size, with m = slot_mapping[i].

    k, v: [tokens, kv_heads, head_dim], any stride of tokens and heads. k_cache, v_cache: [slots, kv_heads, chunk_size,
    head_dim], any stride of slots; changed in place; or in fewer bits (`ops/kv_format.py`), the last dimension being a
    row's bytes. slot_mapping: int64 [tokens], no place twice.
    """
    kv_heads, size, dim = k_cache.shape[1:]
    # Chunk sizes are powers of two, and shifting costs half of what dividing does: it matters for single tokens.
    slot, offset = slot_mapping >> (size.bit_length() - 1), slot_mapping & (size - 1)
    if format_of(k_cache) != "plain":
        for x, cache in ((k, k_cache), (v, v_cache)):
            for there, found in zip(pieces(cache, x.shape[-1]), quantized(x, format_of(cache)), strict=True):
                there[slot, :, offset] = found
    elif k_cache.is_contiguous() and v_cache.is_contiguous():
        # By rows of one head, which torch copies several times faster than it assigns by two indices.
        heads = torch.arange(kv_heads, device=k.device) * size
        place = (slot * (kv_heads * size) + offset).unsqueeze(1).add(heads).view(-1)
        k_cache.view(-1, dim).index_copy_(0, place, k.reshape(-1, dim))
        v_cache.view(-1, dim).index_copy_(0, place, v.reshape(-1, dim))
    else:
        k_cache[slot, :, offset] = k
        v_cache[slot, :, offset] = v


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
    """`rotary` of queries and keys, then `write_kv` of keys and values: -> the queries, rotated.

    q: [t, h, D]; k, v: [t, hk, D], any stride of tokens and heads; positions: int64 [t]; cos_sin: float32
    [max_position, rotary_dim] from `rope_table`; k_cache, v_cache: as in `write_kv`, changed in place;
    slot_mapping: int64 [t], slot * chunk_size + offset of each token, no place twice. turned: like k,
    contiguous, for the rotated keys; None: they are needed in the cache alone.
    """
    q, k = rotary_definition(q, k, positions, cos_sin)
    if turned is not None:
        turned.copy_(k)
    write_kv_definition(k, v, k_cache, v_cache, slot_mapping)
    return q
