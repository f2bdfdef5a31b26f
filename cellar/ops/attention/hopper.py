"""Attention on Hopper by two kernels in CUDA C++; docs/decisions/0016-hopper-kernels.md says why.

`decode.cu`: few blocks that stay and work through the list, whose loads run ahead of what they compute; over plain K
and V, over those in FP8 (docs/decisions/0058-fp8-decodes.md), and in int4 (docs/decisions/0107-int4-decodes.md).
`prompt.cu`: a block for each tile, whose tensor cores work while the weights of the next turn are computed.
Both take the same work list and scratch as the Triton kernel (`plan.py`), and run side by side where a step has decodes
and prompts (docs/decisions/0099-decodes-beside-prompts.md).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from cellar.core.kv_formats import FP8_SCALES_NBYTES, INT4_SCALES_NBYTES, KVFormat
from cellar.core.kv_formats import row_nbytes as kv_row_nbytes
from cellar.ops.attention.contexts import contexts_fit, plain_contexts, written_out
from cellar.ops.attention.plan import FEW, AttentionShape, AttentionWork
from cellar.ops.attention.triton import LOG2E, launch_tiles
from cellar.ops.cuda.compiler import compile_cuda
from cellar.ops.cuda.driver import Function, TensorMap, tensor_map
from cellar.ops.cuda.hopper import (
    DTYPES,
    MAX_SHARED,
    hopper_available,
    hopper_source,
    multiply_turned,
    multiply_wide,
    multiprocessors,
)
from cellar.ops.linear.alone import room_of
from cellar.ops.linear.choice import MAX_FLAT_TOKENS

_SHARERS = (2, 4, 8)
_STAGES_OF_FEW = 3
_STAGES_OF_CODES: Mapping[KVFormat, tuple[int, ...]] = {"fp8": (3, 2), "int4": (4, 3)}
_STORED: Mapping[KVFormat, str] = {"plain": "bfloat16", "fp8": "fp8", "int4": "int4"}
_PROMPT_TURN = 128
_PARTS = "attention/parts.cuh"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of decodes: warps that compute, stages in flight, and blocks a multiprocessor runs at once.

    Four warps are a team, each with stages of its own: there are as many for each. Of a stage a warp has so many
    `tiles` of 16 tokens. So many `sharers` are a cluster, which has one token and KV head (`decode_few.cu`); 1: blocks
    work through the list (`decode.cu`).
    """

    warps: int
    stages: int
    at_once: int
    tiles: int = 1
    sharers: int = 1

    def shared(self, shape: AttentionShape) -> int:
        """Bytes of dynamic shared memory: the stages, and what is beside them (`Shared`)."""
        sums = 4 * self.warps * shape.group * (shape.head_dim + 6)
        newest = 4 * (2 * shape.head_dim + shape.group)
        queries = 2 * 8 * (shape.head_dim + 8) + (64 if shape.kv_format == "int4" else 0)
        row = kv_row_nbytes(_STORED[shape.kv_format], shape.head_dim)
        stages = self.stages * (2 * 64 * self.tiles * row + 16)
        found = 8 * shape.group * shape.head_dim if self.sharers > 1 else 0
        return 1024 + stages + sums + newest + queries + found + 256  # two items and their barriers, and alignment


def default_sizes(shape: AttentionShape) -> Sizes:
    """Two blocks a multiprocessor if three stages fit each of them, else one; of codes stages are twice as long."""
    if shape.kv_format != "plain":
        candidates: tuple[Sizes, ...] = tuple(Sizes(4, n, 2, 2) for n in _STAGES_OF_CODES[shape.kv_format])
    else:
        candidates = (*(Sizes(4, n, 2) for n in (4, 3)), *(Sizes(8, n, 1) for n in (6, 4, 2)))
    return next(sizes for sizes in candidates if sizes.shared(shape) <= MAX_SHARED[sizes.at_once])


def sizes_for(shape: AttentionShape, tokens: int, processors: int) -> Sizes:
    """Of steps with so many tokens: if they are few, a cluster for each and each KV head, all of which fill half of the
    multiprocessors. Not of FP8: long contexts want all of them there.
    """
    if tokens <= FEW and shape.window is None and shape.kv_format == "plain":
        pairs = tokens * shape.kv_heads
        for sharers in _SHARERS:
            few = Sizes(4, _STAGES_OF_FEW, 1, 1, sharers)
            if 0.48 * processors <= pairs * sharers <= processors and few.shared(shape) <= MAX_SHARED[1]:
                return few
    return default_sizes(shape)


class DecodeArguments(ctypes.Structure):
    """As the kernel declares them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos_sin", "k_cache", "v_cache", "table")),
        *((name, ctypes.c_void_p) for name in ("out", "meta", "partial", "extents", "counters", "claimed")),
        *((name, ctypes.c_longlong) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")),
        *((name, ctypes.c_longlong) for name in ("k_slot", "v_slot", "cache_head", "table_row")),
        *((name, ctypes.c_longlong) for name in ("out_token", "out_head")),
        ("scale", ctypes.c_float),
        ("rotary_dim", ctypes.c_int),
        ("early", ctypes.c_int),
        ("beside", ctypes.c_int),
    )


class PromptArguments(ctypes.Structure):
    """As the kernel declares them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "out", "meta", "partial", "extents", "counters")),
        *((name, ctypes.c_longlong) for name in ("table_row", "out_token", "out_head")),
        ("scale", ctypes.c_float),
        ("early", ctypes.c_int),
    )


def hopper_takes_decodes(q: Tensor, k_cache: Tensor, v_cache: Tensor, shape: AttentionShape) -> bool:
    """16-bit floats, and K and V of a shape that it has."""
    return shape.decodes_on_hopper and _takes(q, k_cache, v_cache)


def hopper_takes_prompts(q: Tensor, k_cache: Tensor, v_cache: Tensor, shape: AttentionShape) -> bool:
    """16-bit floats, heads of 64 or 128, groups that divide 64, no window; tokens and heads of q on 16 bytes."""
    return shape.suits_hopper and _on_16_bytes(q) and _takes(q, k_cache, v_cache)


def _on_16_bytes(q: Tensor) -> bool:
    strides = (s * q.element_size() % 16 == 0 for s in q.stride()[:2])
    return q.data_ptr() % 16 == 0 and all(strides) and q.stride(2) == 1


def _takes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    size = k_cache.element_size()
    return (
        hopper_available(q.device)
        and q.dtype in DTYPES
        and k_cache.dtype == v_cache.dtype
        and k_cache.dtype in (q.dtype, torch.float8_e4m3fn, torch.uint8)
        and all(c.data_ptr() % 16 == 0 and c.stride(0) * size % 16 == 0 for c in (k_cache, v_cache))
    )


def takes_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
) -> bool:
    """Whether `attention_hopper` has a kernel for prompts of such arguments, or for the decodes beside them."""
    return _takes_wide(q, k_cache, v_cache, work) or hopper_takes_decodes(q, k_cache, v_cache, work.shape)


def _takes_wide(q: Tensor, k_cache: Tensor, v_cache: Tensor, work: AttentionWork) -> bool:
    """K and V in fewer bits where they can be written out."""
    if work.shape.kv_format == "plain":
        return hopper_takes_prompts(q, k_cache, v_cache, work.shape)
    suits = replace(work.shape, kv_format="plain").suits_hopper
    return suits and hopper_available(q.device) and q.dtype in DTYPES and _on_16_bytes(q) and contexts_fit(work)


def takes_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
) -> bool:
    """Whether `decode_attention_hopper` takes such arguments."""
    return hopper_takes_decodes(q, k_cache, v_cache, work.shape)


def attention_hopper(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`attention`: prompts and decodes by the kernels here, what these do not take by Triton's.

    Prompts first: they are products and their blocks few, decodes are what memory sends, and run beside them.
    """
    out = q.new_empty(q.shape) if out is None else out
    plain, by_wide = work.shape.kv_format == "plain", _takes_wide(q, k_cache, v_cache, work)
    by_narrow = hopper_takes_decodes(q, k_cache, v_cache, work.shape)
    launches = work.launches
    beside = plain and by_wide and by_narrow and len(launches) == 2
    for tiles in reversed(launches):
        is_wide, tile, programs = tiles
        if is_wide and by_wide and plain:
            hopper_prompts(q, k_cache, v_cache, table, work, scale, out, tile, programs, early=beside)
        elif is_wide and by_wide:
            _prompts_written_out(q, k_cache, v_cache, table, work, scale, out)
        elif not is_wide and by_narrow:
            _decodes_in_cache(q, k_cache, v_cache, table, work, scale, out, programs, beside=beside)
        else:
            launch_tiles(q, k_cache, v_cache, table, work, scale, out, tiles, fresh=new)
    return out


def _prompts_written_out(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor,
) -> None:
    """`hopper_prompts` over K and V in fewer bits, by a plan of its own."""
    contexts = plain_contexts(work, table)
    k, v = written_out(k_cache, v_cache, contexts.sources, work.shape.head_dim, q.dtype).unbind(0)
    for _, tile, programs in contexts.work.launches:
        hopper_prompts(q, k, v, contexts.table, contexts.work, scale, out, tile, programs)


def _decodes_in_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor,
    programs: int,
    *,
    beside: bool,
) -> None:
    """`attention` of the narrow items alone, in so many blocks at most; `beside` the prompts launched just before."""
    sizes = default_sizes(work.shape)
    blocks = min(programs, sizes.at_once * multiprocessors(q.device))
    arguments = decode_arguments(q, None, None, None, k_cache, v_cache, table, work, scale, out, beside=beside)
    _launch_decodes(q, k_cache, v_cache, work, sizes, blocks, arguments)


def decode_attention_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
) -> Tensor:
    """`decode_attention` by the kernel here."""
    return hopper_decode(q, k, v, cos_sin, k_cache, v_cache, table, work, scale)


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
    if sizes is None and work.split is None:
        sizes = sizes_for(shape, len(q), multiprocessors(q.device))
    sizes = sizes or default_sizes(shape)  # who asks for cuts at fixed places gets them
    few = sizes.sharers > 1
    arguments = decode_arguments(q, k, v, cos_sin, k_cache, v_cache, table, work, scale, out, few=few)
    programs = sum(count for _, _, count in work.launches)
    if programs:
        blocks = min(programs, sizes.at_once * multiprocessors(q.device))
        _launch_decodes(q, k_cache, v_cache, work, sizes, len(q) * shape.kv_heads if few else blocks, arguments)
    return out


def _launch_decodes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    work: AttentionWork,
    sizes: Sizes,
    clusters: int,
    arguments: DecodeArguments,
) -> None:
    _decode_function(work.shape, sizes, q.dtype, q.device).launch(
        clusters,
        (_mapped(k_cache, cache_map(k_cache)), _mapped(v_cache, cache_map(v_cache)), arguments),
        torch.cuda.current_stream(q.device).cuda_stream,
        dependent=True,
    )


def decode_arguments(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor,
    *,
    few: bool = False,
    beside: bool = False,
) -> DecodeArguments:
    """Of one launch, `few`: of `decode_few.cu`; the tensors must outlive it. Without k and v all are in the cache, and
    the kernel in front wrote them, or is that of the prompts `beside` them.
    """
    buffers = work.resident
    pointers = (
        *(q, k, v, cos_sin, k_cache, v_cache, table),
        *(out, buffers.meta, buffers.partial, buffers.extents, buffers.counters, buffers.claimed),
    )
    strides = (
        *(0 if x is None else x.stride(i) for x in (q, k, v) for i in (0, 1)),
        *(k_cache.stride(0), v_cache.stride(0), k_cache.stride(1), table.stride(0), out.stride(0), out.stride(1)),
    )
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    addresses = (0 if x is None else x.data_ptr() for x in pointers)
    # Of so many tokens the next product is a wide one, a block a multiprocessor, or the library's, which waits. Smaller
    # blocks would gather on the multiprocessors that are free first, but those of a product for few tokens behind
    # attention of few are made for it (decision 0086).
    early = len(q) > MAX_FLAT_TOKENS or (few and len(q) <= work.early)
    return DecodeArguments(*addresses, *strides, scale * LOG2E, rotary_dim, early, beside)


def hopper_prompts(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor,
    tile: int,
    programs: int,
    *,
    early: bool = False,
) -> None:
    """`attention` of the wide items alone, tiles of so many rows (64 or 128), in so many blocks; `early`: what is
    launched next is the narrow ones' kernel, which begins beside it.
    """
    _prompt_function(work.shape, tile, q.dtype, q.device).launch(
        programs,
        (
            _mapped(q, query_map(q, work.shape, tile)),
            _mapped(k_cache, cache_map(k_cache)),
            _mapped(v_cache, cache_map(v_cache)),
            prompt_arguments(table, work, scale, out, early=early),
        ),
        torch.cuda.current_stream(q.device).cuda_stream,
        dependent=True,
    )


def prompt_arguments(
    table: Tensor, work: AttentionWork, scale: float, out: Tensor, *, early: bool = False
) -> PromptArguments:
    """Of one launch; the tensors must outlive it."""
    buffers = work.resident
    pointers = (table, out, buffers.meta, buffers.partial, buffers.extents, buffers.counters)
    strides = (table.stride(0), out.stride(0), out.stride(1))
    return PromptArguments(*(x.data_ptr() for x in pointers), *strides, scale * LOG2E, early)


def decode_source(shape: AttentionShape, sizes: Sizes, dtype: torch.dtype) -> tuple[str, dict[str, int]]:
    """CUDA C++, and the constants that it is compiled with."""
    form = shape.kv_format
    constants = {**_constants(shape, dtype), "WARPS": sizes.warps, "STAGES": sizes.stages, "TILES": sizes.tiles}
    constants |= {"AT_ONCE": sizes.at_once, "FP8": int(form == "fp8"), "INT4": int(form == "int4")}
    if sizes.sharers > 1:
        constants["CLUSTER"] = sizes.sharers
    return hopper_source(*decode_files(form, sizes)), constants


def decode_files(form: KVFormat, sizes: Sizes) -> tuple[str, ...]:
    """What the kernel for decodes consists of."""
    codes = () if form == "plain" else ("attention/decode_codes.cuh",)
    kernel = "attention/decode.cu" if sizes.sharers == 1 else "attention/decode_few.cu"
    both = "attention/decode_both.cuh"
    return _PARTS, "attention/decode.cuh", *codes, f"attention/decode_{form}.cuh", both, kernel


def decode_name(sizes: Sizes) -> str:
    """Of the kernel."""
    return "decode_attention" if sizes.sharers == 1 else "decode_attention_of_few"


def prompt_source(shape: AttentionShape, tile: int, dtype: torch.dtype) -> tuple[str, dict[str, int]]:
    """CUDA C++, and the constants that it is compiled with."""
    products = (multiply_wide(_PROMPT_TURN, dtype), multiply_turned(shape.head_dim, dtype))
    constants = {**_constants(shape, dtype), "TILE": tile, "STAGES": prompt_stages(shape, tile)}
    return hopper_source(_PARTS, "attention/prompt.cu", instructions=products), constants


def prompt_stages(shape: AttentionShape, tile: int) -> int:
    """As many stages of 128 tokens as fit, up to four."""
    return next(n for n in (4, 3, 2) if prompt_shared(shape, tile, n) <= MAX_SHARED[1])


def prompt_shared(shape: AttentionShape, tile: int, stages: int) -> int:
    """Bytes of dynamic shared memory: the queries, the stages, and barriers."""
    return 1024 + 2 * tile * shape.head_dim + stages * (4 * _PROMPT_TURN * shape.head_dim + 32) + 16


def _constants(shape: AttentionShape, dtype: torch.dtype) -> dict[str, int]:
    return {
        "DIM": shape.head_dim,
        "CHUNK": shape.chunk_size,
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "BF16": int(dtype == torch.bfloat16),
    }


@functools.cache
def _decode_function(shape: AttentionShape, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Function:
    cubin = compile_cuda(*decode_source(shape, sizes, dtype))
    with torch.cuda.device(device):
        shared = sizes.shared(shape)
        room = None if sizes.sharers == 1 else room_of(shared, sizes.at_once, few=True)
        return Function(cubin, decode_name(sizes), 32 * sizes.warps + 32, shared, sizes.sharers, room)


@functools.cache
def _prompt_function(shape: AttentionShape, tile: int, dtype: torch.dtype, device: torch.device) -> Function:
    cubin = compile_cuda(*prompt_source(shape, tile, dtype))
    shared = prompt_shared(shape, tile, prompt_stages(shape, tile))
    with torch.cuda.device(device):
        return Function(cubin, "prompt_attention", 2 * tile + 128, shared, 1)


# What `tensor_map` wants to know of a tensor: sizes, strides and the box, the innermost dimension first. There are five
# of each, for the copy engine's instruction and the tensor must agree in that.
Map: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def query_map(q: Tensor, shape: AttentionShape, tile: int) -> Map:
    """Of [tokens, heads, head_dim]: boxes of a group of heads for the tokens of a tile, 64 dimensions wide."""
    tokens, heads, dim = q.shape
    strides = (q.stride(1), q.stride(0), q.stride(0), q.stride(0))
    return (dim, heads, tokens, 1, 1), strides, (64, shape.group, tile // shape.group, 1, 1)


def cache_map(cache: Tensor) -> Map:
    """Of [slots, kv_heads, chunk_size, head_dim]: boxes of one chunk of one head, 64 dimensions wide.

    Of one in codes, whose last dimension has a row's scales, too: the codes alone, two bytes of them for one element.
    """
    slots, heads, chunk, dim = cache.shape
    if cache.element_size() == 1:
        scales = FP8_SCALES_NBYTES if cache.dtype == torch.float8_e4m3fn else INT4_SCALES_NBYTES
        lines = chunk * (dim - scales) // 128
        sizes, strides = (64, 1, lines, heads, slots), (64, 64, cache.stride(1) // 2, cache.stride(0) // 2)
        return sizes, strides, (64, 1, lines, 1, 1)
    sizes, strides = (64, dim // 64, chunk, heads, slots), (64, dim, cache.stride(1), cache.stride(0))
    return sizes, strides, (64, 1, chunk, 1, 1)


def _mapped(tensor: Tensor, of: Map) -> TensorMap:
    dtype = tensor.dtype if tensor.element_size() == 2 else torch.bfloat16  # what is copied is bits
    return tensor_map(tensor.data_ptr(), dtype, *of)
