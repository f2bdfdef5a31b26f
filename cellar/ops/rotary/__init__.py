"""Rotary embedding and the write of K and V into the cache; what they mean stands in `definition.py`."""

from __future__ import annotations

from torch import Tensor

from cellar.ops.registry import Op, Variant
from cellar.ops.rotary import cases
from cellar.ops.rotary.cpu import rotary_kv_cpu, write_kv_cpu
from cellar.ops.rotary.definition import rotary_definition, rotary_kv_definition, write_kv_definition
from cellar.ops.rotary.table import attention_factor, inverse_frequencies, rope_table
from cellar.ops.rotary.triton import rotary_kernel, rotary_kv_kernel, write_kv_kernel

__all__ = [
    "OPS",
    "attention_factor",
    "inverse_frequencies",
    "rope_table",
    "rotary",
    "rotary_kv",
    "write_kv",
]

_ROTARY = Op("rotary", rotary_definition, (Variant("triton", rotary_kernel),), cases.ROTARY)
_WRITE_KV = Op(
    "write_kv",
    write_kv_definition,
    (Variant("triton", write_kv_kernel), Variant("cpu", write_kv_cpu)),
    cases.WRITE_KV,
    changes=("k_cache", "v_cache"),
)
_ROTARY_KV = Op(
    "rotary_kv",
    rotary_kv_definition,
    (Variant("triton", rotary_kv_kernel), Variant("cpu", rotary_kv_cpu)),
    cases.ROTARY_KV,
    changes=("k_cache", "v_cache", "turned"),
)
OPS = (_ROTARY, _WRITE_KV, _ROTARY_KV)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q: [t, h, D] and k: [t, hk, D] by positions: int64 [t]; cos_sin from `rope_table`. -> like q and k."""
    return (_ROTARY.on_cpu if q.is_cpu else _ROTARY.on_gpu)(q, k, positions, cos_sin)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put k, v: [tokens, kv_heads, head_dim] at slot * chunk_size + offset of the caches: int64 [tokens]."""
    (_WRITE_KV.on_cpu if k.is_cpu else _WRITE_KV.on_gpu)(k, v, k_cache, v_cache, slot_mapping)


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
    """`rotary`, then `write_kv`, in one launch: -> the queries, rotated; `turned` receives the rotated keys, too."""
    run = _ROTARY_KV.on_cpu if q.is_cpu else _ROTARY_KV.on_gpu
    return run(q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping, turned)
