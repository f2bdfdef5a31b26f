"""Rotary embedding and the write into the cache on the CPU, in one kernel."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from cellar.ops.cpu.launch import kernel, rows_at_a_time, with_unit_stride
from cellar.ops.kv_format import format_of
from cellar.ops.rotary.definition import rotary_kv_definition, write_kv_definition

_ARGUMENTS = struct.Struct("25q")


def rotary_kv_cpu(
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
    """`rotary_kv` for CPU tensors; by the definition where the rotated keys are needed, too, or are quantized."""
    if turned is not None or format_of(k_cache) != "plain":
        return rotary_kv_definition(q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping, turned)
    q = with_unit_stride(q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _launch(q, k, v, out, positions, cos_sin, k_cache, v_cache, slot_mapping)
    return out


def write_kv_cpu(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """`write_kv` for CPU tensors; by the definition if the cache is quantized."""
    if format_of(k_cache) != "plain":
        return write_kv_definition(k, v, k_cache, v_cache, slot_mapping)
    return _launch(None, k, v, None, slot_mapping, None, k_cache, v_cache, slot_mapping)


def _launch(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    k, v = with_unit_stride(k), with_unit_stride(v)
    positions, slot_mapping = positions.contiguous(), slot_mapping.contiguous()
    tokens, kv_heads, dim = k.shape
    heads = 0 if q is None else q.shape[1]
    width = (heads + 2 * kv_heads) * dim
    arguments = _ARGUMENTS.pack(
        0 if q is None else q.data_ptr(),
        0 if q is None else q.stride(0),
        0 if q is None else q.stride(1),
        k.data_ptr(),
        k.stride(0),
        k.stride(1),
        v.data_ptr(),
        v.stride(0),
        v.stride(1),
        0 if out is None else out.data_ptr(),
        positions.data_ptr(),
        0 if cos_sin is None else cos_sin.data_ptr(),
        0 if cos_sin is None else cos_sin.shape[1],
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.stride(0),
        v_cache.stride(0),
        k_cache.stride(1),
        slot_mapping.data_ptr(),
        tokens,
        heads,
        kv_heads,
        dim,
        k_cache.shape[2],
        rows_at_a_time(width),
    )
    kernel("rotary_kv", k.dtype)(arguments, tokens * width)
