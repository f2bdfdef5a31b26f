"""Attention of decodes on Hopper: few blocks that stay, whose loads run ahead of what they compute.

The kernel (`attention_hopper.cu`) takes the same work list as the Triton kernel (`attention_plan`). What it gains is
that no multiprocessor stops loading between two items; docs/decisions/0016-hopper-kernels.md says why it is CUDA C++.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from cellar.ops.attention_plan import AttentionShape, AttentionWork
from cellar.ops.cuda_compiler import compile_cuda, hopper_source
from cellar.ops.cuda_driver import Function, TensorMap, hopper_available, tensor_map

DTYPES = (torch.bfloat16, torch.float16)
MAX_GROUP = 8
LOG2E = 1.4426950408889634
# Bytes of shared memory for a block, by how many share a multiprocessor.
MAX_SHARED = {1: 231_424, 2: 114_688}
_TURN = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """Warps that compute, stages of 64 tokens in flight, and blocks a multiprocessor runs at once.

    Four warps are a team, each with stages of its own: there are as many for each.
    """

    warps: int
    stages: int
    at_once: int

    def shared(self, shape: AttentionShape) -> int:
        """Bytes of dynamic shared memory: the stages, and what is beside them (`Shared`)."""
        sums = 4 * self.warps * shape.group * (shape.head_dim + 6)
        newest = 4 * (2 * shape.head_dim + shape.group)
        queries = 2 * 8 * (shape.head_dim + 8)
        return 1024 + self.stages * 4 * _TURN * shape.head_dim + sums + newest + queries + 16 * self.stages + 64


def default_sizes(shape: AttentionShape) -> Sizes:
    """Two blocks a multiprocessor if three stages fit each of them, else one."""
    candidates = (*(Sizes(4, n, 2) for n in (4, 3)), *(Sizes(8, n, 1) for n in (6, 4, 2)))
    return next(sizes for sizes in candidates if sizes.shared(shape) <= MAX_SHARED[sizes.at_once])


class _Arguments(ctypes.Structure):
    _pointers = (
        "q",
        "k",
        "v",
        "cos_sin",
        "k_cache",
        "v_cache",
        "table",
        "out",
        "meta",
        "partial",
        "extents",
        "counters",
    )
    _strides = (
        *("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"),
        *("k_slot", "v_slot", "cache_head", "table_row", "out_token", "out_head"),
    )
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, ctypes.c_longlong) for name in _strides),
        ("scale", ctypes.c_float),
        ("rotary_dim", ctypes.c_int),
    )


def hopper_takes(q: Tensor, k_cache: Tensor, v_cache: Tensor, shape: AttentionShape) -> bool:
    """True if the kernel can compute decodes of this shape: 16-bit floats, heads of 64, 128 or 256, groups up to 8."""
    size = k_cache.element_size()
    return (
        hopper_available(q.device)
        and q.dtype in DTYPES
        and k_cache.dtype == v_cache.dtype == q.dtype
        and shape.head_dim in (64, 128, 256)
        and shape.group <= MAX_GROUP
        and all(c.data_ptr() % 16 == 0 and c.stride(0) * size % 16 == 0 for c in (k_cache, v_cache))
    )


def hopper_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    sizes: Sizes | None = None,
) -> Tensor:
    """`decode_attention`; arguments as there."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    shape = work.shape
    sizes = sizes or default_sizes(shape)
    arguments = arguments_of(q, k, v, cos_sin, k_cache, v_cache, table, work, scale, out)
    programs = sum(count for _, _, count in work.launches)
    if programs:
        _function(shape, sizes, q.dtype, q.device).launch(
            min(programs, sizes.at_once * _multiprocessors(q.device)),
            (_map(k_cache), _map(v_cache), arguments),
            torch.cuda.current_stream(q.device).cuda_stream,
            dependent=True,
        )
    return out


def arguments_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor,
) -> _Arguments:
    """As the kernel takes them; the tensors must outlive the launch."""
    buffers = work.resident
    pointers = (
        *(q, k, v, cos_sin, k_cache, v_cache, table),
        *(out, buffers.meta, buffers.partial, buffers.extents, buffers.counters),
    )
    strides = (
        *(x.stride(i) for x in (q, k, v) for i in (0, 1)),
        *(k_cache.stride(0), v_cache.stride(0), k_cache.stride(1), table.stride(0), out.stride(0), out.stride(1)),
    )
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    addresses = (0 if x is None else x.data_ptr() for x in pointers)
    return _Arguments(*addresses, *strides, scale * LOG2E, rotary_dim)


def decode_source(shape: AttentionShape, sizes: Sizes, dtype: torch.dtype) -> tuple[str, dict[str, int]]:
    """CUDA C++, and the constants that it is compiled with."""
    constants = {
        "DIM": shape.head_dim,
        "CHUNK": shape.chunk_size,
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "WARPS": sizes.warps,
        "STAGES": sizes.stages,
        "BF16": int(dtype == torch.bfloat16),
    }
    return hopper_source("attention_hopper.cu"), constants


@functools.cache
def _function(shape: AttentionShape, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Function:
    cubin = compile_cuda(*decode_source(shape, sizes, dtype))
    with torch.cuda.device(device):
        return Function(cubin, "decode_attention", 32 * sizes.warps + 32, sizes.shared(shape), 1)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _map(cache: Tensor) -> TensorMap:
    """Of [slots, kv_heads, chunk_size, head_dim]: boxes of one chunk of one head, 64 dimensions wide."""
    slots, heads, chunk, dim = cache.shape
    sizes, strides = (64, dim // 64, chunk, heads, slots), (64, dim, cache.stride(1), cache.stride(0))
    return tensor_map(cache.data_ptr(), cache.dtype, sizes, strides, (64, 1, chunk, 1, 1))
