"""Rotary embedding and the write into the cache on the CPU: what the layers of a step share is worked out once.

Between two layers' weights and keys nothing else stays in the processor's cache, so an operation costs 20 us whatever
it computes (docs/log/cpu-engine.md): of a layer's 22 operations here 5 are left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.ops.kv import write_kv_definition
from cellar.ops.rotary import rotary_definition


class RotaryKV:
    """One step's `rotary_kv`, to be called for each layer.

    positions: int64 [t]; cos_sin: float32 [max_position, rotary_dim] from `rope_table`, or None if no layer turns
    anything; slot_mapping: int64 [t].
    """

    __slots__ = ("_cos_sin", "_factors", "_places", "_positions", "_slot_mapping")

    def __init__(self, positions: Tensor, cos_sin: Tensor | None, slot_mapping: Tensor) -> None:
        self._positions = positions
        self._cos_sin = cos_sin
        self._slot_mapping = slot_mapping
        self._factors: tuple[Tensor, Tensor] | None = None
        self._places: dict[tuple[int, int], Tensor] = {}

    def rotated(self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Turn, then `write`. q: [t, h, D], other tensors as there. -> the queries, rotated."""
        assert self._cos_sin is not None
        q, k = self._rotated(q, k, self._cos_sin)
        self.write(k, v, k_cache, v_cache)
        return q

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """k, v: [t, hk, D] into the caches [slots, hk, chunk_size, D], which are changed in place."""
        kv_heads, size, dim = k_cache.shape[1:]
        if k_cache.is_contiguous() and v_cache.is_contiguous():
            # By rows of one head: several times faster than assigning by two indices.
            place = (self._place(kv_heads, size),)
            k_cache.view(-1, dim).index_put_(place, k)
            v_cache.view(-1, dim).index_put_(place, v)
        else:
            write_kv_definition(k, v, k_cache, v_cache, self._slot_mapping)

    def _rotated(self, q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        heads, dim = q.shape[1:]
        if dim != cos_sin.shape[1]:
            return rotary_definition(q, k, self._positions, cos_sin)
        if self._factors is None:
            cos, sin = cos_sin.index_select(0, self._positions).unsqueeze(1).chunk(2, dim=-1)
            self._factors = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        cos, sin = self._factors
        # (a, b) turned is (a cos - b sin, b cos + a sin): the halves change places for the second terms.
        x = _together(q, k).float()
        x = x.roll(dim // 2, -1).mul_(sin).addcmul_(x, cos).to(q.dtype)
        return x[:, :heads], x[:, heads:]

    def _place(self, kv_heads: int, size: int) -> Tensor:
        """Row of the cache as a table [slots * kv_heads * size, D] for each token and head: int64 [t, kv_heads]."""
        place = self._places.get((kv_heads, size))
        if place is None:
            # Chunk sizes are powers of two.
            slot, offset = self._slot_mapping >> (size.bit_length() - 1), self._slot_mapping & (size - 1)
            place = (slot * (kv_heads * size) + offset).unsqueeze(1) + torch.arange(kv_heads) * size
            self._places[kv_heads, size] = place
        return place


def _together(q: Tensor, k: Tensor) -> Tensor:
    """[t, h + hk, D]: a view where q and k lie side by side, as they come from one projection."""
    heads, dim = q.shape[1:]
    beside = k.storage_offset() - q.storage_offset() == heads * dim and q.stride() == k.stride()
    if beside and q.stride()[1:] == (dim, 1) and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr():
        return q.as_strided((q.shape[0], heads + k.shape[1], dim), q.stride())
    return torch.cat((q, k), 1)
