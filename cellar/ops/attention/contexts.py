"""What prompts see of K and V in fewer bits, written out as plain rows, for a kernel that reads plain ones.

A prompt reads each position for many queries: its products grow with both, so that to write its context out once in
each layer costs little beside them. Decodes read a position once, and do so from its codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cellar.core.kv_formats import codes_nbytes
from cellar.ops.attention.plan import AttentionWork, IntArray, narrow_rows
from cellar.ops.attention.triton import FP8, INT4, int4_numbers
from cellar.ops.kv_format import as_bytes
from cellar.ops.triton_support import kernel

if TYPE_CHECKING:
    import triton.language as tl

MOST_NBYTES = 256 * 2**20
"""Of the plain rows of one layer, which stay until its attention is done: 65,536 tokens of Llama-3-8B."""

_KEY = "plain contexts"


@dataclass(frozen=True, slots=True)
class PlainContexts:
    """Of a step's wide spans: their plan, with rows of `table`, int32 [rows, chunks], which names plain chunks. Plain
    chunk n is slot `sources`[n] of the cache, int32 [chunks].
    """

    work: AttentionWork
    table: Tensor
    sources: Tensor


def contexts_fit(work: AttentionWork) -> bool:
    """Whether there are wide spans, in a step that is not captured, and what they see is within MOST_NBYTES."""
    if work.captured is not None:
        return False
    wide = _wide(work)
    if not wide.any():
        return False
    shape = work.shape
    _, _, chunks = _rows(work, wide)
    return int(chunks.sum()) * shape.chunk_size * shape.kv_heads * shape.head_dim * 4 <= MOST_NBYTES


def plain_contexts(work: AttentionWork, table: Tensor) -> PlainContexts:
    """Made once for a step, kept in what it has `prepared`."""
    found = work.prepared.get(_KEY)
    if not isinstance(found, PlainContexts):
        found = work.prepared[_KEY] = _made(work, table)
    return found


def _wide(work: AttentionWork) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    most_narrow = narrow_rows(work.shape, work.device)
    wide: np.ndarray[tuple[int], np.dtype[np.bool_]] = (work.stop - work.start) * work.shape.group > most_narrow
    return wide


def _rows(work: AttentionWork, wide: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[IntArray, IntArray, IntArray]:
    """The rows of wide spans, each once; which of them a span has; and how many chunks of each are seen."""
    rows, of_span = np.unique(work.row[wide], return_inverse=True)
    longest = np.zeros(len(rows), np.int32)
    np.maximum.at(longest, of_span, work.stop[wide])
    return rows, of_span.astype(np.int32), -(-longest // work.shape.chunk_size)


def _made(work: AttentionWork, table: Tensor) -> PlainContexts:
    wide = _wide(work)
    rows, of_span, chunks = _rows(work, wide)
    first = np.cumsum(chunks) - chunks
    places = first[:, None] + np.arange(int(chunks.max()))[None, :]
    number = np.arange(int(chunks.sum())) - np.repeat(first, chunks)
    own = AttentionWork(
        replace(work.shape, kv_format="plain"),
        of_span,
        work.start[wide],
        work.stop[wide],
        np.append(work.offset[:-1][wide], work.offset[-1]),
        work.device,
        work.programs,
        work.split,
        upload=work.upload,
    )
    of_chunk = np.repeat(rows, chunks).astype(np.int64)
    row, column, plain = work.sent([of_chunk, number.astype(np.int64), places.astype(np.int32)])
    return PlainContexts(own, plain, table[row, column])


def written_out(k_cache: Tensor, v_cache: Tensor, sources: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Plain K and V of some slots of a quantized cache: [2, slots, kv_heads, chunk_size, head_dim].

    Heads and chunks of a power of two. Numbers beyond float16's largest, which rounding to a code makes of nearly so
    large ones, become that.
    """
    heads, chunk = k_cache.shape[1:3]
    out = torch.empty((2, len(sources), heads, chunk, head_dim), dtype=dtype, device=k_cache.device)
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    codes = codes_nbytes("fp8" if fp8 else "int4", head_dim)
    _written_kernel[len(sources) * heads, 2](
        as_bytes(k_cache),
        as_bytes(v_cache),
        sources,
        out,
        k_cache.stride(0),
        v_cache.stride(0),
        k_cache.stride(1),
        out.stride(0),
        KV_HEADS=heads,
        CHUNK=chunk,
        DIM=head_dim,
        CODES=codes,
        KV=FP8 if fp8 else INT4,
        num_warps=4,
    )
    return out


@kernel
def _written_kernel(  # type: ignore[no-untyped-def]
    k_cache,  # bytes
    v_cache,
    sources,
    out,
    k_slot_stride,
    v_slot_stride,
    head_stride,
    out_stride,
    KV_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    CODES: tl.constexpr,
    KV: tl.constexpr,
):
    """One slot and head of K (program 0 of the second number) or of V (1)."""
    index = tl.program_id(0)
    head = index % KV_HEADS
    slot = tl.load(sources + index // KV_HEADS).to(tl.int64)
    if tl.program_id(1) == 0:
        piece = k_cache + slot * k_slot_stride + head * head_stride
    else:
        piece = v_cache + slot * v_slot_stride + head * head_stride
    token = tl.arange(0, CHUNK)
    dims = tl.arange(0, DIM)
    codes = tl.load(piece + token[:, None] * CODES + (dims % CODES)[None, :])
    if KV == 1:
        power = (tl.load(piece + CHUNK * CODES + token).to(tl.uint32) << 23).to(tl.float32, bitcast=True)
        # In float16 the bits are numbers times 2^-8.
        half = codes.to(tl.uint16)
        small = (((half & 0x80) << 8) | ((half & 0x7F) << 7)).to(tl.float16, bitcast=True)
        nothing = (codes & 0x7F) == 0x7F
        numbers = tl.where(nothing, float("nan"), small.to(tl.float32) * 256.0) * power[:, None]
    else:
        scales = tl.load((piece + CHUNK * CODES).to(tl.pointer_type(tl.uint64)) + token)
        numbers = int4_numbers(codes, (dims >= CODES)[None, :], scales[:, None])
    if out.dtype.element_ty == tl.float16:
        numbers = tl.where(tl.abs(numbers) > 65504.0, tl.where(numbers > 0.0, 65504.0, -65504.0), numbers)
    at = out + tl.program_id(1).to(tl.int64) * out_stride + index.to(tl.int64) * CHUNK * DIM
    tl.store(at + token[:, None] * DIM + dims[None, :], numbers.to(out.dtype.element_ty))
