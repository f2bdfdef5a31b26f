"""Attention on the CPU: one kernel for decodes and prompts, over the chunks as they lie.

Decoding is bound by memory: 64 sequences of 330 tokens read 22 MB of float32 a layer. An item of work is a KV head and
a few queries of one span, all heads of the group: each chunk of K and V is read once from memory, and then, from the
first cache, once per query and head; quantized rows, and those of 16 bits that several queries share, are made float32
in between. A decode asks for its next chunk, which lies anywhere, while it computes with one. A chunk that all queries
of an item see whole is used for four of them at a time (`ops/cpu/tiles.py`). Scores are worked out eight positions at a
time; largest score, sum of weights and sum of values go along from chunk to chunk (online softmax, Milakov and
Gimelshein, arXiv 1805.02867).

Decodes whose prompts are attended to elsewhere have kernels of their own, also over K and V in fewer bits
(`ops/cpu/decodes.py`).

With `sparse_v` all scores of an item are kept, and then the rows of V that belong to the largest are read
(`ops/cpu/sparse.py`).

A row's result depends on its own context alone, bit for bit: not on its company, and not on how its prompt was cut.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.kv_formats import KVFormat
from cellar.ops.attention.plan import AttentionWork, IntArray
from cellar.ops.cpu.launch import DECODES, NIBBLES, SHORT_FLOATS, SPARSE, attends_to_decodes, kernel, with_unit_stride
from cellar.ops.cpu.room import with_room
from cellar.ops.rotary.cpu import rotary_kv_cpu, write_kv_cpu

LOG2E = 1.4426950408889634

MOST_QUERIES = 16
BLOCK_NUMBERS = 4096
"""Queries of an item: so many, or as many as have so many numbers: they and their sums share the first cache with a
chunk of keys and values.
"""

SCORES = 2**17
"""Of an item that keeps its scores: at most so many numbers, unless one token has more."""

LANES = 8
"""Scores are written so many at a time."""

_FORMATS: Mapping[KVFormat, int] = {"plain": 0, "fp8": 1, "int4": 2}
"""As the kernel calls them."""

_ARGUMENTS = struct.Struct("34qdq")
_SPARSE_ARGUMENTS = struct.Struct("4q")


def attention_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`attention` for CPU tensors."""
    return _launch(q, None, None, None, k_cache, v_cache, table, work, scale, out)


def decode_attention_cpu(
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
    """`decode_attention` for CPU tensors."""
    shape = work.shape
    if _plan(work).apart and (shape.kv_format == "plain" or _alone(work) is not None) and shape.sparse_v is None:
        return _launch(q, k, v, cos_sin, k_cache, v_cache, table, work, scale, None)
    # A row's spans see each other's keys, so all of them are written first; and quantized ones are by the definition.
    size = shape.chunk_size
    slots = table.numpy()[work.row, work.start // size].astype(np.int64) * size + work.start % size
    mapping = torch.from_numpy(slots)
    if cos_sin is None:
        write_kv_cpu(k, v, k_cache, v_cache, mapping)
    else:
        positions = torch.from_numpy(work.start.astype(np.int64))
        q = rotary_kv_cpu(q, k, v, positions, cos_sin, k_cache, v_cache, mapping)
    return attention_cpu(q, k_cache, v_cache, table, work, scale)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of a step share.

    `spans` and `firsts` name the span and its first query of each item; None: every span is one token and one item.
    `tail` are the kernel's arguments about them. `apart`: no row has two spans. `numbers`: how many keys and values are
    read, about. `scores`: where they are kept, if values are sparse.
    """

    spans: IntArray | None
    firsts: IntArray | None
    held: tuple[IntArray, ...]
    tail: tuple[int, ...]
    apart: bool
    numbers: int
    scores: _Scores | None


def _alone(work: AttentionWork) -> str | None:
    """The kernel for decodes alone, if it serves these: its sums have another order than those of prompts."""
    shape = work.shape
    name = {"plain": DECODES, "fp8": SHORT_FLOATS, "int4": NIBBLES}[shape.kv_format]
    suits = shape.head_dim % 128 == 0 and shape.chunk_size % 16 == 0
    return name if work.alone and suits and attends_to_decodes() else None


class _Scores:
    """Room for the scores of a step's items, a part for each thread of a call: `width` numbers for each of `queries`,
    as many twice besides, and as many places.
    """

    def __init__(self, millionths: int, width: int, queries: int) -> None:
        self._millionths = millionths
        self._width = width
        self._numbers = width * (queries + 4)
        self._room = torch.empty(0)
        self._taken = torch.zeros(1, dtype=torch.int64)

    def arguments(self) -> bytes:
        """Of the next call, for as many threads as it has; nobody has taken a part."""
        needed = torch.get_num_threads() * self._numbers
        if len(self._room) < needed:
            self._room = torch.empty(needed)
        self._taken.zero_()
        return _SPARSE_ARGUMENTS.pack(self._millionths, self._room.data_ptr(), self._width, self._taken.data_ptr())


def _plan(work: AttentionWork) -> _Plan:
    """The work's plan, made by the first layer."""
    found = work.prepared.get(_Plan)
    if found is None:
        found = work.prepared[_Plan] = _planned(work)
    return found


def _planned(work: AttentionWork) -> _Plan:
    shape = work.shape
    length = work.stop - work.start
    spans = firsts = None
    count, block = len(length), 1
    scores = None
    if (length != 1).any():
        block = min(MOST_QUERIES, max(1, BLOCK_NUMBERS // (shape.group * shape.head_dim)))
        if shape.sparse_v is not None:
            block = min(block, max(1, SCORES // (shape.group * _seen_by_one(work, block))))
        blocks = -(-length // block)
        count = int(blocks.sum())
        spans = np.repeat(np.arange(len(length), dtype=np.int32), blocks)
        firsts = (np.arange(count) - np.repeat(np.cumsum(blocks) - blocks, blocks)).astype(np.int32) * np.int32(block)
        # Those that see most come first.
        order = np.argsort(-(work.start[spans] + firsts), kind="stable")
        spans, firsts = spans[order], firsts[order]
    held = tuple(np.ascontiguousarray(x, np.int32) for x in (work.row, work.start, work.stop, work.offset))
    lists = (0, 0) if spans is None or firsts is None else (_address(spans), _address(firsts))
    window = shape.window or 0
    tail = (*map(_address, held), *lists, count, block)
    tail += (shape.kv_heads, shape.group, shape.head_dim, shape.chunk_size, window)
    seen = int((length * work.stop).sum()) if spans is not None else int(work.stop.sum())
    apart = len(work.row) < 2 or len(np.unique(work.row)) == len(work.row)
    if shape.sparse_v is not None:
        width = -(-(_seen_by_one(work, block) + LANES) // 16) * 16
        scores = _Scores(shape.millionths, width, block * shape.group)
    return _Plan(spans, firsts, held, tail, apart, 2 * seen * shape.kv_heads * shape.head_dim, scores)


def _seen_by_one(work: AttentionWork, block: int) -> int:
    """Most positions of an item, from that of its first chunk on."""
    most, window = int(work.stop.max()), work.shape.window
    return most if window is None else min(most, window + work.shape.chunk_size + block)


def _address(array: NDArray[np.int32]) -> int:
    return int(array.__array_interface__["data"][0])


def _launch(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None,
) -> Tensor:
    plan = _plan(work)
    q = with_unit_stride(q)
    result = with_room(q, *q.shape) if out is None else with_unit_stride(out)
    q_strides, cache_strides, out_strides = q.stride(), k_cache.stride(), result.stride()
    new: tuple[int, ...] = (0,) * 6
    if k is not None and v is not None:
        k, v = with_unit_stride(k), with_unit_stride(v)
        new = (k.data_ptr(), *k.stride()[:2], v.data_ptr(), *v.stride()[:2])
    arguments = _ARGUMENTS.pack(
        q.data_ptr(),
        *q_strides[:2],
        *new,
        0 if cos_sin is None else cos_sin.data_ptr(),
        0 if cos_sin is None else cos_sin.shape[1],
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        cache_strides[0],
        v_cache.stride(0),
        cache_strides[1],
        table.data_ptr(),
        table.stride(0),
        result.data_ptr(),
        *out_strides[:2],
        *plan.tail,
        scale * LOG2E,
        _FORMATS[work.shape.kv_format],
    )
    if plan.scores is None:
        alone = _alone(work) if k is not None else None
        kernel(alone or "attention", q.dtype)(arguments, plan.numbers)
    else:
        kernel(SPARSE, q.dtype)(arguments + plan.scores.arguments(), plan.numbers)
    return result if out is None or out is result else out.copy_(result)
