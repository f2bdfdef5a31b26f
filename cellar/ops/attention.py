"""Multi-token attention over non-contiguous chunks of KV cache (Pensieve, thesis 001 §3.4.4).

For the query of head h at position p of a sequence, with g = h // (heads / kv_heads) and n running over the positions
that it may see (0..p, or the last `window` of them):

    out = sum_n softmax_n(scale * q . K[n, g]) V[n, g]

Position n of table row r lies in slot table[r, n // chunk_size] at offset n % chunk_size. A decode is a span of one
token, a prompt chunk is longer, a request whose old KV was dropped has a span per hole: all are the same to this
operation, because the K and V of every span of the step are written before it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cellar.ops.attention_cpu import attention_cpu
from cellar.ops.attention_plan import (
    NARROW_TILE,
    AttentionBuffers,
    AttentionShape,
    AttentionWork,
    plan_attention,
)
from cellar.ops.registry import Case, Op
from cellar.ops.triton_support import interpreted, kernel

if TYPE_CHECKING:
    import triton.language as tl

__all__ = ["OPS", "AttentionBuffers", "AttentionShape", "AttentionWork", "attention", "plan_attention"]

LOG2E = 1.4426950408889634


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of all spans of a step.

    q: [tokens, heads, head_dim], any stride of tokens and heads. k_cache, v_cache: [slots, kv_heads, chunk_size,
    head_dim], any stride of slots. table: int32 [rows, chunks]; only entries that a query may see are read, and of
    those chunks only positions that are written: garbage elsewhere, NaN included, does no harm. out: [tokens, heads,
    head_dim], made if None, in q's dtype. Sums are in float32. All calls with one `work` must pass the same table.

    How a result depends on the rest of the batch: by rounding alone (float32: about 1e-6). On the GPU the cut of KV
    into pieces follows the load, unless the plan fixed `split`; on the CPU see `attention_cpu`.
    """
    if q.is_cuda:
        return attention_kernel(q, k_cache, v_cache, table, work, scale, out)
    return attention_cpu(q, k_cache, v_cache, table, work, scale, out)


def attention_definition(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """What `attention` means: span by span, gathered, with a mask, in float32 (float64 inputs: in float64)."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    wide = torch.promote_types(q.dtype, torch.float32)
    shape = work.shape
    for s in range(len(work.row)):
        start, stop = int(work.start[s]), int(work.stop[s])
        low = 0 if shape.window is None else max(0, start - shape.window + 1)
        first_chunk = low // shape.chunk_size
        slots = table[int(work.row[s]), first_chunk : -(-stop // shape.chunk_size)].long()
        seen = slice(low - first_chunk * shape.chunk_size, stop - first_chunk * shape.chunk_size)
        # [chunks, kv_heads, chunk_size, dim] -> [heads, positions, dim]
        k, v = (
            cache[slots].transpose(0, 1).flatten(1, 2)[:, seen].to(wide).repeat_interleave(shape.group, 0)
            for cache in (k_cache, v_cache)
        )
        tokens = slice(int(work.offset[s]), int(work.offset[s + 1]))
        scores = scale * (q[tokens].to(wide).transpose(0, 1) @ k.transpose(1, 2))
        query = torch.arange(start, stop, device=q.device)[:, None]
        position = torch.arange(low, stop, device=q.device)[None, :]
        hidden = position > query
        if shape.window is not None:
            hidden |= position <= query - shape.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[tokens] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out


def attention_kernel(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """`attention` in Triton: one launch per class of tiles that the plan has; no host synchronisation."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    buffers, shape = work.resident, work.shape
    for is_wide, tile, programs in work.launches:
        settings = launch_settings(tile, shape.head_dim, q.element_size())
        _attention_kernel[(programs,)](
            q,
            k_cache,
            v_cache,
            table,
            out,
            buffers.meta,
            buffers.partial,
            buffers.extents,
            buffers.counters,
            scale * LOG2E,
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            v_cache.stride(0),
            k_cache.stride(1),
            table.stride(0),
            out.stride(0),
            out.stride(1),
            KV_HEADS=shape.kv_heads,
            GROUP=shape.group,
            DIM=shape.head_dim,
            CHUNK=shape.chunk_size,
            WINDOW=shape.window or 0,
            WIDE=is_wide,
            TILE=tile,
            UPCAST=interpreted(q),
            **settings,
        )
    return out


def launch_settings(tile: int, head_dim: int, element_size: int) -> dict[str, Any]:
    """Compile-time sizes per class: KV positions per turn, padded head dimension, warps and stages.

    Chosen so that sm_90 compiles them without spills and within 227 KB of shared memory (a test asserts it).
    """
    block_dim = max(16, 1 << (head_dim - 1).bit_length())
    large = block_dim > 128
    if tile == NARROW_TILE:
        turn = 32 if large or element_size == 4 else 64
        warps, stages = 4, 2 if turn == 32 else 3
    elif element_size == 4:
        # Exact float32 products run on the CUDA cores, from registers: many warps share them.
        warps = 16 if large or tile == 128 else 8
        turn, stages = 16 if warps == 16 else 32, 1
    else:
        warps = 8 if large or tile == 128 else 4
        turn, stages = 32 if large else 64, 2
    return {"TURN": turn, "BLOCK_DIM": block_dim, "num_warps": warps, "num_stages": stages}


# The argument names of a kernel are pointers and strides; their shapes stand in the docstring.
@kernel
def _attention_kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    table,
    out,
    meta,
    partial,
    extents,
    counters,
    scale,
    q_token_stride,
    q_head_stride,
    k_slot_stride,
    v_slot_stride,
    kv_head_stride,
    table_stride,
    out_token_stride,
    out_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
    TURN: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """All items of one class: a fixed grid takes (item, KV head) pairs in turn, the number of items is read here.

    Tensors as in `attention`, list and scratch as in `attention_plan`; `scale` includes log2(e), powers are of 2.
    Softmax with a running maximum: with m' = max(m, max s), l' = l 2^(m - m') + sum 2^(s - m'), and the same for P V.
    Partial results combine by the same rule; the program that arrives last does it and sets the counter back to 0.
    """
    narrow = tl.load(meta)
    begin = narrow if WIDE else 0
    count = (tl.load(meta + 1) if WIDE else narrow) * KV_HEADS
    rows = tl.arange(0, TILE)
    dims = tl.arange(0, BLOCK_DIM)
    dim_ok = dims < DIM
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        head = index % KV_HEADS
        item = meta + 16 + (begin + index // KV_HEADS) * 16
        row = tl.load(item)
        token = tl.load(item + 1)
        first = tl.load(item + 2)
        last = tl.load(item + 3)
        start = tl.load(item + 4)
        kv_first = tl.load(item + 5)
        kv_last = tl.load(item + 6)
        parts = tl.load(item + 9)

        packed = first + rows
        row_ok = packed < last
        position = start + packed // GROUP
        q_token = (token + packed // GROUP).to(tl.int64)
        q_head = head * GROUP + packed % GROUP
        io_ok = row_ok[:, None] & dim_ok[None, :]
        q_at = q + q_token[:, None] * q_token_stride + q_head[:, None] * q_head_stride + dims[None, :]
        queries = tl.load(q_at, mask=io_ok, other=0.0)
        if UPCAST:
            queries = queries.to(tl.float32)

        top = tl.full([TILE], -1.0e30, tl.float32)
        total = tl.full([TILE], 0.0, tl.float32)
        acc = tl.full([TILE, BLOCK_DIM], 0.0, tl.float32)
        for turn in range(kv_first, kv_last, TURN):
            n = turn + tl.arange(0, TURN)
            n_ok = n < kv_last
            slot = tl.load(table + row * table_stride + n // CHUNK, mask=n_ok, other=0).to(tl.int64)
            inner = head * kv_head_stride + (n % CHUNK) * DIM
            k_at = k_cache + (slot * k_slot_stride + inner)[None, :] + dims[:, None]
            keys = tl.load(k_at, mask=n_ok[None, :] & dim_ok[:, None], other=0.0)
            v_at = v_cache + (slot * v_slot_stride + inner)[:, None] + dims[None, :]
            values = tl.load(v_at, mask=n_ok[:, None] & dim_ok[None, :], other=0.0)
            if UPCAST:
                keys = keys.to(tl.float32)
                values = values.to(tl.float32)
            scores = tl.dot(queries, keys, input_precision="ieee") * scale
            seen = row_ok[:, None] & n_ok[None, :] & (n[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -1.0e30)
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.where(seen, tl.exp2(scores - new_top[:, None]), 0.0)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            top = new_top

        arrived = 0
        if parts > 1:
            base = tl.load(item + 7)
            mine = ((base + tl.load(item + 8) * TILE + rows) * KV_HEADS + head).to(tl.int64)
            tl.store(partial + mine[:, None] * DIM + dims[None, :], acc, mask=io_ok)
            tl.store(extents + mine * 2, top, mask=row_ok)
            tl.store(extents + mine * 2 + 1, total, mask=row_ok)
            tl.debug_barrier()
            counter = counters + tl.load(item + 10) * KV_HEADS + head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
            if arrived == parts:
                tl.store(counter, 0)
                top = tl.full([TILE], -1.0e30, tl.float32)
                total = tl.full([TILE], 0.0, tl.float32)
                acc = tl.full([TILE, BLOCK_DIM], 0.0, tl.float32)
                for part in range(parts):
                    other = ((base + part * TILE + rows) * KV_HEADS + head).to(tl.int64)
                    part_at = partial + other[:, None] * DIM + dims[None, :]
                    part_acc = tl.load(part_at, mask=io_ok, other=0.0, cache_modifier=".cg")
                    part_top = tl.load(extents + other * 2, mask=row_ok, other=-1.0e30, cache_modifier=".cg")
                    part_total = tl.load(extents + other * 2 + 1, mask=row_ok, other=0.0, cache_modifier=".cg")
                    new_top = tl.maximum(top, part_top)
                    shrink = tl.exp2(top - new_top)
                    grow = tl.exp2(part_top - new_top)
                    total = total * shrink + part_total * grow
                    acc = acc * shrink[:, None] + part_acc * grow[:, None]
                    top = new_top
        if (parts == 1) | (arrived == parts):
            result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            out_at = out + q_token[:, None] * out_token_stride + q_head[:, None] * out_head_stride + dims[None, :]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=io_ok)


def _case(
    name: str,
    spans: tuple[tuple[int, int, int], ...],
    heads: tuple[int, int, int] = (6, 2, 64),
    chunk: int = 32,
    window: int | None = None,
    programs: int = 8,
    split: int | None = None,
    heavy: bool = False,
) -> Case:
    """A case with the given spans (row, start, stop), slots in any order, and NaN wherever nothing was written."""

    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        noise = torch.Generator().manual_seed(len(name))
        num_heads, kv_heads, dim = heads
        length: dict[int, int] = {}
        for row, _, stop in spans:
            length[row] = max(length.get(row, 0), stop)
        widest = -(-max(length.values()) // chunk)
        num_rows = max(length) + 1
        order = torch.randperm(num_rows * widest + 2, generator=noise)
        table = torch.full((num_rows, widest), -1, dtype=torch.int32)
        arena = torch.full((len(order), 2, kv_heads, chunk, dim), torch.nan)
        for row, positions in length.items():
            for j in range(-(-positions // chunk)):
                slot = int(order[row * widest + j])
                table[row, j] = slot
                written = min(chunk, positions - j * chunk)
                arena[slot, :, :, :written] = torch.randn(2, kv_heads, written, dim, generator=noise)
        tokens = sum(stop - start for _, start, stop in spans)
        q = torch.randn(tokens, num_heads + 2 * kv_heads, dim, generator=noise)[:, :num_heads]
        arena = arena.to(device, dtype)
        span_rows, starts, stops = (list(column) for column in zip(*spans, strict=True))
        work = plan_attention(
            span_rows,
            starts,
            stops,
            heads=num_heads,
            kv_heads=kv_heads,
            head_dim=dim,
            chunk_size=chunk,
            window=window,
            device=device,
            programs=programs,
            split=split,
        )
        return {
            "q": q.to(device, dtype),
            "k_cache": arena[:, 0],
            "v_cache": arena[:, 1],
            "table": table.to(device),
            "work": work,
            "scale": dim**-0.5,
        }

    return Case(name, make, heavy=heavy)


OPS = (
    Op(
        name="attention",
        function=attention,
        definition=attention_definition,
        kernel=attention_kernel,
        cases=(
            _case("one decode", ((0, 40, 41),)),
            _case("decodes", ((0, 99, 100), (1, 31, 32), (2, 0, 1), (3, 32, 33))),
            _case("even decodes", ((0, 50, 51), (2, 50, 51)), chunk=16),
            _case("prompt", ((0, 0, 70),), heads=(4, 4, 80)),
            _case("mixed", ((0, 130, 131), (1, 0, 45), (2, 70, 72), (3, 20, 61)), chunk=64),
            _case("holes and tail", ((0, 0, 20), (0, 64, 90), (0, 120, 121), (1, 7, 8)), heads=(8, 1, 96)),
            _case("window", ((0, 75, 76), (1, 10, 80), (2, 5, 6)), window=24, chunk=16),
            _case("split by load", ((0, 400, 401), (1, 200, 220)), heads=(2, 2, 72), programs=64),
            _case("split fixed", ((0, 150, 151), (1, 60, 61)), split=48, programs=3),
            _case("wide heads", ((0, 40, 41), (1, 0, 5)), heads=(2, 1, 256)),
            _case("many", tuple((i, 37 * i, 37 * i + 1) for i in range(40)), heads=(32, 8, 128), heavy=True),
            _case("long prompt", ((0, 1000, 1700), (1, 8000, 8001)), heads=(32, 8, 128), programs=264, heavy=True),
        ),
    ),
)
