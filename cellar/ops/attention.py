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

import numpy as np
import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.specs import RopeSpec
from cellar.ops.attention_cpu import attention_cpu, decode_attention_cpu
from cellar.ops.attention_hopper import hopper_decode, hopper_prompts, hopper_takes_decodes, hopper_takes_prompts
from cellar.ops.attention_plan import (
    NARROW_TILE,
    AttentionBuffers,
    AttentionShape,
    AttentionWork,
    plan_attention,
)
from cellar.ops.kv import write_kv_definition
from cellar.ops.registry import Case, Op
from cellar.ops.rotary import rope_table, rotary_definition
from cellar.ops.triton_support import dependent_launch, interpreted, kernel

if TYPE_CHECKING:
    import triton.language as tl

__all__ = [
    "OPS",
    "AttentionBuffers",
    "AttentionShape",
    "AttentionWork",
    "attention",
    "decode_attention",
    "plan_attention",
]

LOG2E = 1.4426950408889634

# Without a maximum a row is safe while its sum of 2^s stays in (2^-96, 2^96): float32's exponents, and room for P V.
UNIFIED_RANGE = 96


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of all spans of a step.

    q: [tokens, heads, head_dim], any stride of tokens and heads. k_cache, v_cache: [slots, kv_heads, chunk_size,
    head_dim], any stride of slots. table: int32 [rows, chunks]; only entries that a query may see are read, and of
    those chunks only positions that are written: garbage elsewhere, NaN included, does no harm. out: [tokens, heads,
    head_dim], made if None, in q's dtype. Sums are in float32. All calls with one `work` must pass the same table.
    new: the step's own K and V once more, [tokens, kv_heads, head_dim], as they were written to the cache. A span that
    begins at position 0 sees nothing else, and a kernel may read them there, where they lie in a row.

    How a result depends on the rest of the batch: on the CPU not at all, on the GPU by rounding alone (float32: about
    1e-6), for the cut of KV into pieces follows the load unless the plan fixed `split`.
    """
    if q.is_cuda:
        prompts_apart = hopper_takes_prompts(q, k_cache, v_cache, work.shape)
        return _launched(q, k_cache, v_cache, table, work, scale, out, fresh=new, prompts_apart=prompts_apart)
    return attention_cpu(q, k_cache, v_cache, table, work, scale, out)


def attention_definition(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
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
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`attention` in Triton: one launch per class of tiles that the plan has; no host synchronisation."""
    return _launched(q, k_cache, v_cache, table, work, scale, out, fresh=new)


def decode_attention(
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
    """Rotary embedding, the write of the new K and V, and `attention` at once, for steps of decodes alone.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], as they come from the projection; span s of `work`
    is one token at position start[s], whose chunk stands in the table already. cos_sin: float32 [max_position,
    rotary_dim], or None to turn nothing. The group must fit the narrow tile (16). -> [tokens, heads, head_dim].
    """
    if q.is_cuda:
        on_hopper = hopper_takes_decodes(q, k_cache, v_cache, work.shape)
        decode = hopper_decode if on_hopper else decode_attention_kernel
        return decode(q, k, v, cos_sin, k_cache, v_cache, table, work, scale)
    return decode_attention_cpu(q, k, v, cos_sin, k_cache, v_cache, table, work, scale)


def decode_attention_definition(
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
    """The definitions of the three, one after the other."""
    rows = torch.from_numpy(work.row).to(q.device, torch.int64)
    positions = torch.from_numpy(work.start).to(q.device, torch.int64)
    size = work.shape.chunk_size
    slots = table[rows, positions // size].long()
    if cos_sin is not None:
        q, k = rotary_definition(q, k, positions, cos_sin)
    write_kv_definition(k, v, k_cache, v_cache, slots * size + positions % size)
    return attention_definition(q, k_cache, v_cache, table, work, scale)


def decode_attention_kernel(
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
    """`decode_attention` in Triton: one launch. Raises ConfigError if the group does not fit the narrow tile."""
    if work.shape.group > NARROW_TILE:
        raise ConfigError(f"decode_attention takes up to {NARROW_TILE} heads per KV head, not {work.shape.group}.")
    return _launched(q, k_cache, v_cache, table, work, scale, None, decoded=(k, v, cos_sin))


def _launched(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None,
    *,
    decoded: tuple[Tensor, Tensor, Tensor | None] | None = None,
    fresh: tuple[Tensor, Tensor] | None = None,
    prompts_apart: bool = False,
) -> Tensor:
    """The launches of a plan in Triton; `prompts_apart`: wide tiles by the kernel for Hopper."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    buffers, shape = work.resident, work.shape
    k, v, cos_sin = (q, q, None) if decoded is None else decoded
    # A captured launch has programs to spare.
    many = (4 if work.captured is not None else 3) * work.programs // 2
    for is_wide, tile, programs in work.launches:
        if is_wide and prompts_apart:
            hopper_prompts(q, k_cache, v_cache, table, work, scale, out, tile, programs)
            continue
        settings = launch_settings(tile, shape.head_dim, q.element_size(), programs > many)
        rows = None
        if fresh is not None and is_wide and shape.reads_new and work.captured is None and settings["SKIP_TESTS"]:
            rows = [_by_rows(x, settings["TURN"]) for x in fresh]
        _attention_kernel[(programs,)](
            q,
            k,
            v,
            q if cos_sin is None else cos_sin,
            k_cache,
            v_cache,
            table,
            *(rows or (None, None)),
            out,
            buffers.meta,
            buffers.partial,
            buffers.extents,
            buffers.counters,
            scale * LOG2E,
            0 if cos_sin is None else cos_sin.shape[1],
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
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
            NEW=decoded is not None,
            FRESH=rows is not None,
            UNIFIED=work.unified and may_unify(q.dtype, is_wide),
            TILE=tile,
            UPCAST=interpreted(q),
            **dependent_launch(q),
            **settings,
        )
    return out


def _by_rows(x: Tensor, rows: int) -> Any:
    """[tokens, heads, head_dim] for the copy engine, which takes so many tokens of one head at a time."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    tokens, heads, dim = x.shape
    if x.stride()[1:] != (dim, 1) or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.contiguous()
    return TensorDescriptor(x, [tokens, heads * dim], [x.stride(0), 1], [rows, dim])


def may_unify(dtype: torch.dtype, is_wide: bool) -> bool:
    """Whether a kernel may leave the maximum out: half precision's powers overflow, and wide tiles of float32 spill."""
    return dtype == torch.bfloat16 or (dtype == torch.float32 and not is_wide)


def launch_settings(tile: int, head_dim: int, element_size: int, many: bool = False) -> dict[str, Any]:
    """Compile-time sizes per class: KV positions per turn, padded head dimension, warps and stages.

    `many`: there are several programs for each that runs at a time; smaller turns let more of them overlap.

    EARLY: a decode asks for its first turn before the kernel in front has ended; many programs would slow that one.
    SKIP_TESTS: turns of which every query sees every position run in a loop of their own that tests nothing.
    Chosen so that sm_90 compiles them without spills and within 227 KB of shared memory (a test asserts it).
    """
    block_dim = max(16, 1 << (head_dim - 1).bit_length())
    large = block_dim > 128
    if tile == NARROW_TILE:
        turn, stages = (32, 2) if large or element_size == 4 else (32, 4) if many else (64, 3)
        warps = 4
    elif element_size == 4:
        # Exact float32 products run on the CUDA cores, from registers: many warps share them.
        warps = 16 if large or tile == 128 else 8
        turn, stages = 16 if warps == 16 else 32, 1
    else:
        warps = 8 if large or tile == 128 else 4
        turn, stages = 32 if large else 64, 2 if large else 3
    # A second loop takes registers: not where sums and products fill them.
    skip = tile == NARROW_TILE or not (large or element_size == 4)
    return {
        "TURN": turn,
        "SKIP_TESTS": skip,
        "STAGES": stages,
        "EARLY": not many,
        "BLOCK_DIM": block_dim,
        "num_warps": warps,
        "num_stages": stages,
    }


# The argument names of a kernel are pointers and strides; their shapes stand in the docstring.
@kernel
def _attention_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    cos_sin,
    k_cache,
    v_cache,
    table,
    k_rows,
    v_rows,
    out,
    meta,
    partial,
    extents,
    counters,
    scale,
    rotary_dim,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
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
    NEW: tl.constexpr,
    FRESH: tl.constexpr,
    UNIFIED: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
    TURN: tl.constexpr,
    SKIP_TESTS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (item, KV head) of one class per program; how many items there are is read here.

    Tensors as in `attention`, list and scratch as in `attention_plan`; `scale` includes log2(e), powers are of 2.
    Partial results combine by the rule of the running maximum; the program that arrives last does it and sets the
    counter back to 0. NEW: as in `decode_attention`; the newest position comes from k and v, not from the cache, and
    the program whose range it ends writes it there. FRESH: spans that begin at position 0 read K and V from k_rows and
    v_rows, [tokens, KV_HEADS * DIM] for the copy engine, which needs no slots.

    UNIFIED (FlashDecoding++ §3): weights are 2^s, without a maximum; a tile with a row whose sum left [2^-96, 2^96] is
    computed once more with the running maximum.
    """
    rows = tl.arange(0, TILE)
    dims = tl.arange(0, BLOCK_DIM)
    lane = tl.arange(0, TURN)
    dim_ok = dims < DIM
    # What the host wrote before the step is read while the kernel in front still runs.
    index = tl.program_id(0)
    narrow = tl.load(meta)
    begin = narrow if WIDE else 0
    count = (tl.load(meta + 1) if WIDE else narrow) * KV_HEADS
    if index < count:
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
        slots_of = table + row * table_stride
        stop = tl.minimum(kv_last, start) if NEW else kv_last
        slot = tl.load(slots_of + (kv_first + lane) // CHUNK, mask=kv_first + lane < stop, other=0)
        packed = first + rows
        row_ok = packed < last
        position = start + packed // GROUP
        q_token = (token + packed // GROUP).to(tl.int64)
        q_head = head * GROUP + packed % GROUP
        io_ok = row_ok[:, None] & dim_ok[None, :]
        q_at = q + q_token[:, None] * q_token_stride + q_head[:, None] * q_head_stride
        if NEW:
            # Dimension d turns with its partner half a rotary_dim away, which enters with a minus in the first half.
            half = rotary_dim // 2
            turns = dims < rotary_dim
            partner = tl.where(turns, tl.where(dims < half, dims + half, dims - half), dims)
            pair = tl.where(dims < half, dims, dims - half)
            cos = tl.load(cos_sin + start * rotary_dim + pair, mask=turns, other=1.0)
            sin = tl.load(cos_sin + start * rotary_dim + half + pair, mask=turns, other=0.0)
            sin = tl.where(dims < half, -sin, sin)
            new_slot = tl.load(slots_of + start // CHUNK).to(tl.int64)
        if PDL:
            if NEW and EARLY:
                # Older K and V depend on nothing: the first turn's are on their way when the projection ends.
                line = tl.arange(0, (BLOCK_DIM + 63) // 64) * 64
                row_at = (kv_first + lane) % CHUNK * DIM
                k_line = k_cache + head * kv_head_stride + (slot.to(tl.int64) * k_slot_stride + row_at)[:, None]
                v_line = v_cache + head * kv_head_stride + (slot.to(tl.int64) * v_slot_stride + row_at)[:, None]
                _request(k_line + line[None, :])
                _request(v_line + line[None, :])
            tl.extra.cuda.gdc_wait()

        queries = tl.load(q_at + dims[None, :], mask=io_ok, other=0.0)
        if NEW:
            others = tl.load(q_at + partner[None, :], mask=io_ok, other=0.0).to(tl.float32)
            turned = queries.to(tl.float32) * cos[None, :] + others * sin[None, :]
            queries = turned.to(queries.dtype)
        if FRESH:
            # As a result, not as what was loaded, they stay in registers: two programs fit a multiprocessor.
            queries = tl.where(io_ok, queries, 0.0)
        if UPCAST:
            queries = queries.to(tl.float32)
        k_of = k_cache + head * kv_head_stride
        v_of = v_cache + head * kv_head_stride
        is_fresh = False
        if FRESH:
            is_fresh = start == 0
        if is_fresh:
            top, total, acc = _scan(
                queries,
                k_of,
                v_of,
                slots_of,
                slot,
                k_rows,
                v_rows,
                token,
                head,
                scale,
                kv_first,
                stop,
                row_ok,
                position,
                start + first // GROUP,
                k_slot_stride,
                v_slot_stride,
                DIM=DIM,
                CHUNK=CHUNK,
                WINDOW=WINDOW,
                UNIFIED=UNIFIED,
                TILE=TILE,
                UPCAST=UPCAST,
                TURN=TURN,
                FRESH=FRESH,
                SKIP_TESTS=SKIP_TESTS,
                STAGES=STAGES,
                BLOCK_DIM=BLOCK_DIM,
            )
        else:
            top, total, acc = _scan(
                queries,
                k_of,
                v_of,
                slots_of,
                slot,
                k_rows,
                v_rows,
                token,
                head,
                scale,
                kv_first,
                stop,
                row_ok,
                position,
                start + first // GROUP,
                k_slot_stride,
                v_slot_stride,
                DIM=DIM,
                CHUNK=CHUNK,
                WINDOW=WINDOW,
                UNIFIED=UNIFIED,
                TILE=TILE,
                UPCAST=UPCAST,
                TURN=TURN,
                FRESH=False,
                SKIP_TESTS=SKIP_TESTS,
                STAGES=STAGES,
                BLOCK_DIM=BLOCK_DIM,
            )
        if UNIFIED:
            sees = row_ok & (position >= kv_first) & (stop > kv_first)
            if WINDOW > 0:
                sees = sees & (position - WINDOW < stop - 1)
            safe = (total > 1.2621774e-29) & (total < 7.922816e28)
            if tl.max(tl.where(sees & (safe == 0), 1, 0), 0) > 0:
                slot = tl.load(slots_of + (kv_first + lane) // CHUNK, mask=kv_first + lane < stop, other=0)
                top, total, acc = _scan(
                    queries,
                    k_of,
                    v_of,
                    slots_of,
                    slot,
                    k_rows,
                    v_rows,
                    token,
                    head,
                    scale,
                    kv_first,
                    stop,
                    row_ok,
                    position,
                    start + first // GROUP,
                    k_slot_stride,
                    v_slot_stride,
                    DIM=DIM,
                    CHUNK=CHUNK,
                    WINDOW=WINDOW,
                    UNIFIED=False,
                    TILE=TILE,
                    UPCAST=UPCAST,
                    TURN=TURN,
                    FRESH=False,
                    SKIP_TESTS=False,
                    STAGES=1,
                    BLOCK_DIM=BLOCK_DIM,
                )
        if NEW:  # noqa: SIM102  known when this is compiled
            if kv_last > start:
                k_at = k + token.to(tl.int64) * k_token_stride + head * k_head_stride
                v_at = v + token.to(tl.int64) * v_token_stride + head * v_head_stride
                key = tl.load(k_at + dims, mask=dim_ok, other=0.0).to(tl.float32) * cos
                key += tl.load(k_at + partner, mask=dim_ok, other=0.0).to(tl.float32) * sin
                key = key.to(k_cache.dtype.element_ty)
                value = tl.load(v_at + dims, mask=dim_ok, other=0.0)
                inner = start % CHUNK * DIM + dims
                tl.store(k_of + new_slot * k_slot_stride + inner, key, mask=dim_ok)
                tl.store(v_of + new_slot * v_slot_stride + inner, value, mask=dim_ok)
                score = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
                new_top = tl.maximum(top, score)
                weight = tl.exp2(score - new_top)
                shrink = tl.exp2(top - new_top)
                total = total * shrink + weight
                acc = acc * shrink[:, None] + weight[:, None] * value.to(tl.float32)[None, :]
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
                top, total, acc = _combined(
                    partial, extents, base, head, parts, row_ok, KV_HEADS, DIM, TILE, BLOCK_DIM, 1 if WIDE else 4
                )
        if (parts == 1) | (arrived == parts):
            result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            out_at = out + q_token[:, None] * out_token_stride + q_head[:, None] * out_head_stride + dims[None, :]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=io_ok)
    elif PDL:  # noqa: SIM102  known when this is compiled
        # A launch of which no program waits would end, for the next kernel, before the one in front has. One is enough.
        if index == 0:
            tl.extra.cuda.gdc_wait()
    # Not earlier: the next kernel's weights would compete with the cache for memory's bandwidth.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@kernel
def _request(at):  # type: ignore[no-untyped-def]
    """Ask for the lines of memory with these addresses, which go to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1
    )


@kernel
def _scan(  # type: ignore[no-untyped-def]
    queries,  # [TILE, BLOCK_DIM]
    k_of,
    v_of,
    slots_of,
    slot,  # [TURN]: slots of the first turn's positions
    k_rows,
    v_rows,
    token,
    head,
    scale,
    kv_first,
    stop,
    row_ok,  # [TILE]
    position,  # [TILE]
    least_position,
    k_slot_stride,
    v_slot_stride,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    UNIFIED: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
    TURN: tl.constexpr,
    FRESH: tl.constexpr,
    SKIP_TESTS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Maxima [TILE], sums [TILE] and P V [TILE, BLOCK_DIM] of a tile over positions [kv_first, stop).

    With a running maximum: with m' = max(m, max s), l' = l 2^(m - m') + sum 2^(s - m'), and the same for P V. The slots
    of a turn are read during the turn before: a load that waits for another cannot be started several turns ahead.
    """
    dims = tl.arange(0, BLOCK_DIM)
    dim_ok = dims < DIM
    lane = tl.arange(0, TURN)
    top = tl.full([TILE], 0.0 if UNIFIED else -1.0e30, tl.float32)
    total = tl.full([TILE], 0.0, tl.float32)
    acc = tl.full([TILE, BLOCK_DIM], 0.0, tl.float32)
    edge = kv_first
    if SKIP_TESTS and WINDOW == 0:
        edge += tl.maximum(tl.minimum(stop, least_position + 1) - kv_first, 0) // TURN * TURN
        for turn in tl.range(kv_first, edge, TURN, num_stages=STAGES):
            if FRESH:
                keys = k_rows.load([token + turn, head * DIM]).T
                values = v_rows.load([token + turn, head * DIM])
            else:
                here = slot.to(tl.int64)
                ahead = turn + TURN + lane
                slot = tl.load(slots_of + ahead // CHUNK, mask=ahead < stop, other=0)
                inner = (turn + lane) % CHUNK * DIM
                k_at = k_of + (here * k_slot_stride + inner)[None, :] + dims[:, None]
                v_at = v_of + (here * v_slot_stride + inner)[:, None] + dims[None, :]
                if DIM == BLOCK_DIM:
                    keys = tl.load(k_at)
                    values = tl.load(v_at)
                else:
                    keys = tl.load(k_at, mask=dim_ok[:, None], other=0.0)
                    values = tl.load(v_at, mask=dim_ok[None, :], other=0.0)
            if UPCAST:
                keys = keys.to(tl.float32)
                values = values.to(tl.float32)
            scores = tl.dot(queries, keys, input_precision="ieee")
            if UNIFIED:
                weights = tl.exp2(scores * scale)
                total += tl.sum(weights, 1)
                acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
            else:
                new_top = tl.maximum(top, tl.max(scores, 1) * scale)
                weights = tl.exp2(scores * scale - new_top[:, None])
                shrink = tl.exp2(top - new_top)
                total = total * shrink + tl.sum(weights, 1)
                acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
                top = new_top
    for turn in tl.range(edge, stop, TURN, num_stages=1 if SKIP_TESTS and WINDOW == 0 else STAGES):
        n = turn + lane
        n_ok = n < stop
        if FRESH:
            keys = k_rows.load([token + turn, head * DIM]).T
            values = v_rows.load([token + turn, head * DIM])
            # What follows is another request's, and 0 times NaN is NaN.
            values = tl.where(n_ok[:, None], values, 0.0)
        else:
            here = slot.to(tl.int64)
            slot = tl.load(slots_of + (n + TURN) // CHUNK, mask=n + TURN < stop, other=0)
            inner = n % CHUNK * DIM
            k_at = k_of + (here * k_slot_stride + inner)[None, :] + dims[:, None]
            keys = tl.load(k_at, mask=n_ok[None, :] & dim_ok[:, None], other=0.0)
            v_at = v_of + (here * v_slot_stride + inner)[:, None] + dims[None, :]
            values = tl.load(v_at, mask=n_ok[:, None] & dim_ok[None, :], other=0.0)
        if UPCAST:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        seen = row_ok[:, None] & n_ok[None, :] & (n[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (n[None, :] > position[:, None] - WINDOW)
        if UNIFIED:
            weights = tl.where(seen, tl.exp2(scores), 0.0)
            total += tl.sum(weights, 1)
            acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        else:
            scores = tl.where(seen, scores, -1.0e30)
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.where(seen, tl.exp2(scores - new_top[:, None]), 0.0)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
            top = new_top
    return top, total, acc


@kernel
def _combined(  # type: ignore[no-untyped-def]
    partial,
    extents,
    base,
    head,
    parts,
    row_ok,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Maxima, sums and P V of a tile from those of its parts, in the order of the parts, AT_ONCE loads in flight."""
    rows = tl.arange(0, TILE)
    dims = tl.arange(0, BLOCK_DIM)
    top = tl.full([TILE], -1.0e30, tl.float32)
    total = tl.full([TILE], 0.0, tl.float32)
    acc = tl.full([TILE, BLOCK_DIM], 0.0, tl.float32)
    for begin in range(0, parts, AT_ONCE):
        tops = ()
        totals = ()
        accs = ()
        new_top = top
        for step in tl.static_range(AT_ONCE):
            ok = row_ok & (begin + step < parts)
            place = ((base + (begin + step) * TILE + rows) * KV_HEADS + head).to(tl.int64)
            io_ok = ok[:, None] & (dims < DIM)[None, :]
            at = partial + place[:, None] * DIM + dims[None, :]
            accs = accs + (tl.load(at, mask=io_ok, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]  # noqa: RUF005
            tops = tops + (tl.load(extents + place * 2, mask=ok, other=-1.0e30, cache_modifier=".cg"),)  # type: ignore[assignment]  # noqa: RUF005
            totals = totals + (tl.load(extents + place * 2 + 1, mask=ok, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]  # noqa: RUF005
        for step in tl.static_range(AT_ONCE):
            new_top = tl.maximum(new_top, tops[step])
        shrink = tl.exp2(top - new_top)
        total = total * shrink
        acc = acc * shrink[:, None]
        for step in tl.static_range(AT_ONCE):
            grow = tl.exp2(tops[step] - new_top)
            total += totals[step] * grow
            acc += accs[step] * grow[:, None]
        top = new_top
    return top, total, acc


def _case(
    name: str,
    spans: tuple[tuple[int, int, int], ...],
    heads: tuple[int, int, int] = (6, 2, 64),
    chunk: int = 32,
    window: int | None = None,
    programs: int = 8,
    split: int | None = None,
    heavy: bool = False,
    fresh: bool = False,
) -> Case:
    """A case with the given spans (row, start, stop), slots in any order, and NaN wherever nothing was written.

    `fresh`: K and V of the spans are given once more.
    """

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
        new = None
        if fresh:
            rows = np.repeat(work.row, work.stop - work.start)
            positions = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
            slots = table.numpy()[rows, positions // chunk]
            both = arena[slots, :, :, positions % chunk].contiguous()
            new = (both[:, 0], both[:, 1])
        return {
            "q": q.to(device, dtype),
            "k_cache": arena[:, 0],
            "v_cache": arena[:, 1],
            "table": table.to(device),
            "work": work,
            "scale": dim**-0.5,
            "new": new,
        }

    return Case(name, make, heavy=heavy)


def _decode_case(name: str, lengths: tuple[int, ...], rotary_dim: int, **options: Any) -> Case:
    """A row per length, whose last position is new."""
    spans = tuple((row, length - 1, length) for row, length in enumerate(lengths))
    plain = _case(name, spans, **options)

    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        found = plain.make(device, dtype)
        shape = found["work"].shape
        noise = torch.Generator().manual_seed(rotary_dim)
        new = torch.randn(len(lengths), 2 * shape.kv_heads + 1, shape.head_dim, generator=noise).to(device, dtype)
        rope = RopeSpec(shape.head_dim, rotary_dim, 10_000.0, max_position=max(lengths))
        order = ("q", "k", "v", "cos_sin", "k_cache", "v_cache", "table", "work", "scale")
        del found["new"]
        found |= {"k": new[:, : shape.kv_heads], "v": new[:, shape.kv_heads : -1]}
        found["cos_sin"] = rope_table(rope, device) if rotary_dim else None
        return {key: found[key] for key in order}

    return Case(name, make, heavy=options.get("heavy", False))


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
            _case("whole prompts", ((0, 0, 70), (1, 130, 131), (2, 0, 129)), heads=(4, 2, 64), fresh=True),
            _case("whole and later", ((0, 0, 90), (1, 64, 150), (2, 0, 7)), heads=(8, 1, 32), chunk=16, fresh=True),
            _case("a short whole prompt", ((0, 0, 40),), heads=(3, 1, 16), chunk=64, fresh=True),
            _case("wide heads", ((0, 40, 41), (1, 0, 5)), heads=(2, 1, 256)),
            _case("many", tuple((i, 37 * i, 37 * i + 1) for i in range(40)), heads=(32, 8, 128), heavy=True),
            _case("long whole prompt", ((0, 0, 3000), (1, 0, 777)), heads=(32, 8, 128), fresh=True, heavy=True),
            _case("long prompt", ((0, 1000, 1700), (1, 8000, 8001)), heads=(32, 8, 128), programs=264, heavy=True),
        ),
    ),
    Op(
        name="decode_attention",
        function=decode_attention,
        definition=decode_attention_definition,
        kernel=decode_attention_kernel,
        changes=("k_cache", "v_cache"),
        cases=(
            _decode_case("first tokens", (1, 2, 33), 64),
            _decode_case("cut", (400, 7, 129), 32, programs=64),
            _decode_case("cut before the newest", (161,), 64, split=32),
            _decode_case("no rotation, odd dim", (40, 65), 0, heads=(4, 4, 80), chunk=16),
            _decode_case("window", (75, 11), 64, window=24, chunk=16),
            _decode_case("many", tuple(37 * i + 1 for i in range(40)), 128, heads=(32, 8, 128), heavy=True),
        ),
    ),
)
