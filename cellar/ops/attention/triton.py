"""Attention in Triton: one kernel for decodes and prompts, over the work list of a step (`plan.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.kv_formats import KVFormat
from cellar.ops.attention.plan import NARROW_TILE, AttentionWork, Softmax
from cellar.ops.kv_format import as_bytes
from cellar.ops.room import Room, is_out_of_resources, room_of, room_on
from cellar.ops.triton_support import dependent_launch, interpreted, kernel

if TYPE_CHECKING:
    import triton.language as tl

LOG2E = 1.4426950408889634

# Without a maximum a row is safe while its sum of 2^s stays in (2^-96, 2^96): float32's exponents, and room for P V.
UNIFIED_RANGE = 96

# What a kernel's UNIFIED says: weights are 2^s; or 2^(s - m) with m the maximum of the first positions.
NO_MAXIMUM, FIRST_MAXIMUM = 1, 2

# What a kernel's KV says.
PLAIN, FP8, INT4 = 0, 1, 2
_KV: Mapping[KVFormat, int] = {"plain": PLAIN, "fp8": FP8, "int4": INT4}

HOPPER_ROOM = room_on(90)


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
    return launched(q, k_cache, v_cache, table, work, scale, out, fresh=new)


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
    """`decode_attention` in Triton: one launch.

    Raises ConfigError if the group does not fit the narrow tile, or K and V are quantized: they are written first.
    """
    if work.shape.kv_format != "plain":
        raise ConfigError("decode_attention writes plain K and V; write quantized ones first, then call attention.")
    if work.shape.group > NARROW_TILE:
        raise ConfigError(f"decode_attention takes up to {NARROW_TILE} heads per KV head, not {work.shape.group}.")
    return launched(q, k_cache, v_cache, table, work, scale, None, decoded=(k, v, cos_sin))


def launched(
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
) -> Tensor:
    """The launches of a plan."""
    out = q.new_empty(q.shape) if out is None else out
    for tiles in work.launches:
        launch_tiles(q, k_cache, v_cache, table, work, scale, out, tiles, decoded=decoded, fresh=fresh)
    return out


def launch_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor,
    tiles: tuple[bool, int, int],
    *,
    decoded: tuple[Tensor, Tensor, Tensor | None] | None = None,
    fresh: tuple[Tensor, Tensor] | None = None,
) -> None:
    """One launch of a plan, as `AttentionWork.launches` has it, in sizes that the device has room for."""
    _, tile, programs = tiles
    # A captured launch has programs to spare.
    many = (4 if work.captured is not None else 3) * work.programs // 2
    settings: dict[str, Any] | None = launch_settings(
        tile, work.shape.head_dim, q.element_size(), programs > many, room_of(q.device), work.shape.kv_format
    )
    while settings is not None:
        try:
            _launch(q, k_cache, v_cache, table, work, scale, out, decoded, fresh, tiles, settings)
            return
        except Exception as error:
            settings = smaller_settings(settings) if is_out_of_resources(error) else None
            if settings is None:
                raise


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor,
    decoded: tuple[Tensor, Tensor, Tensor | None] | None,
    fresh: tuple[Tensor, Tensor] | None,
    tiles: tuple[bool, int, int],
    settings: dict[str, Any],
) -> None:
    """One class of tiles: (wide, rows of a tile, programs), in these sizes."""
    is_wide, tile, programs = tiles
    buffers, shape = work.resident, work.shape
    k, v, cos_sin = (q, q, None) if decoded is None else decoded
    form = work.shape.kv_format
    if form != "plain":
        k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
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
        KV=_KV[form],
        BY_FOURS=settings["TURN"] * settings["BLOCK_DIM"] >= 128 * settings["num_warps"] and takes_ptx(q),
        WINDOW=shape.window or 0,
        WIDE=is_wide,
        NEW=decoded is not None,
        FRESH=rows is not None,
        UNIFIED=0
        if form != "plain"
        else unified_by(work.softmax, q.dtype, is_wide, shape.window, rows is not None and shape.head_dim > 64),
        TILE=tile,
        UPCAST=interpreted(q),
        **dependent_launch(q),
        **settings,
    )


def takes_ptx(x: Tensor) -> bool:
    """NVIDIA's GPUs, and kernels that are only listed (for one of them, unless this torch is AMD's)."""
    return not interpreted(x) and torch.version.hip is None


def _by_rows(x: Tensor, rows: int) -> Any:
    """[tokens, heads, head_dim] for the copy engine, which takes so many tokens of one head at a time."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    tokens, heads, dim = x.shape
    if x.stride()[1:] != (dim, 1) or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.contiguous()
    return TensorDescriptor(x, [tokens, heads * dim], [x.stride(0), 1], [rows, dim])


def unified_by(
    softmax: Softmax, dtype: torch.dtype, is_wide: bool, window: int | None = None, crowded: bool = False
) -> int:
    """How far a launch leaves the maximum out: NO_MAXIMUM, FIRST_MAXIMUM, or 0: not at all.

    In bfloat16 and float32 powers have the range to do without. Those of half precision overflow at 2^16, so a row's
    are taken relative to the maximum of its first positions, which with a window not all rows of a tile see. Wide tiles
    of float32 would spill, and those of half precision where heads beyond 64 come by the copy engine (`crowded`).
    Left to itself (`auto`) a launch does so where it is faster: in prompts. A decode waits for memory, and there the
    test whether a tile is safe costs more than a maximum (docs/decisions/0019-any-gpu.md).
    """
    if softmax == "maximum" or (softmax == "auto" and not is_wide):
        return 0
    if dtype == torch.float16:
        return FIRST_MAXIMUM if window is None and not crowded else 0
    return NO_MAXIMUM if dtype == torch.bfloat16 or not is_wide else 0


def launch_settings(
    tile: int,
    head_dim: int,
    element_size: int,
    many: bool = False,
    room: Room = HOPPER_ROOM,
    kv_format: KVFormat = "plain",
) -> dict[str, Any]:
    """Compile-time sizes per class: KV positions per turn, padded head dimension, warps and stages.

    `many`: there are several programs for each that runs at a time; smaller turns let more of them overlap.

    EARLY: a decode asks for its first turn before the kernel in front has ended; many programs would slow that one.
    SKIP_TESTS: turns of which every query sees every position run in a loop of their own that tests nothing.
    Chosen so that sm_90 compiles them without spills; on devices with less shared memory there are fewer stages, then
    smaller turns (tests assert both).
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
    while _shared(tile, turn, stages, block_dim, element_size, room) > room.shared and (stages > 1 or turn > 16):
        turn, stages = (turn, stages - 1) if stages > 1 else (turn // 2, stages)
    warps = min(warps, room.warps)
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


def smaller_settings(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The next sizes to try where a device refuses these; None: no smaller ones."""
    if settings["STAGES"] > 1:
        return {**settings, "STAGES": settings["STAGES"] - 1, "num_stages": settings["num_stages"] - 1}
    return {**settings, "TURN": settings["TURN"] // 2} if settings["TURN"] > 16 else None


def _shared(tile: int, turn: int, stages: int, block_dim: int, element_size: int, room: Room) -> int:
    """Bytes of shared memory, at most: keys and values of the turns in flight, queries, and weights of a turn."""
    kept = stages if room.keeps_all_stages else max(1, stages - 1)
    return element_size * (2 * kept * turn * block_dim + tile * (block_dim + turn))


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
    KV: tl.constexpr,
    BY_FOURS: tl.constexpr,
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

    Tensors as in `attention`, list and scratch as in `plan.py`; `scale` includes log2(e), powers are of 2.
    Partial results combine by the rule of the running maximum; the program that arrives last does it and sets the
    counter back to 0. NEW: as in `decode_attention`; the newest position comes from k and v, not from the cache, and
    the program whose range it ends writes it there. FRESH: spans that begin at position 0 read K and V from k_rows and
    v_rows, [tokens, KV_HEADS * DIM] for the copy engine, which needs no slots.

    UNIFIED (FlashDecoding++ §3): 1: weights are 2^s, without a maximum; a tile with a row whose sum left [2^-96, 2^96]
    is computed once more with the running maximum. 2: weights are 2^(s - m), m the maximum of the row's first 16
    positions. Of half precision a weight is at most 2^15 if the sum is, and what it loses of small ones is what the
    ordinary softmax loses too, for the sum is at least 1: so the bounds are 1/2 and 2^15.

    KV: 1: fp8, 2: int4 (`ops/kv_format.py`). Of fp8 the products are with codes, whose bits are put where a 16-bit
    float has its own: they are numbers times 2^-120 (bfloat16, float32) or 2^-8 (float16). Scales, and what that leaves
    out, go to scores and weights. BY_FOURS: so many codes a thread has that four are taken at a time.
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
        item = meta + 32 + (begin + index // KV_HEADS) * 16
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
        if KV == 1 and queries.dtype != tl.float16:
            # Products with keys that are 2^-120 too small are to be normal numbers.
            queries = (queries.to(tl.float32) * 1152921504606846976.0).to(queries.dtype)
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
                KV=KV,
                BY_FOURS=BY_FOURS,
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
                KV=KV,
                BY_FOURS=BY_FOURS,
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
            if UNIFIED == 2:
                safe = (total > 0.5) & (total < 32768.0)
            else:
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
                    KV=KV,
                    BY_FOURS=BY_FOURS,
                    WINDOW=WINDOW,
                    UNIFIED=0,
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
                if UNIFIED:
                    # Where nothing came before, there is no maximum yet.
                    top = tl.where(total > 0.0, top, -1.0e30)
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
    KV: tl.constexpr,
    BY_FOURS: tl.constexpr,
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
    # Bytes, or numbers, that a row's codes take, and where each dimension's stands.
    WIDTH: tl.constexpr = DIM // 2 if KV == 2 else DIM
    at = dims % WIDTH if KV == 2 else dims
    if KV:
        k_scales = _scales(k_of, slot, k_slot_stride, kv_first + lane, stop, CHUNK, WIDTH, KV)
        v_scales = _scales(v_of, slot, v_slot_stride, kv_first + lane, stop, CHUNK, WIDTH, KV)
    top = tl.full([TILE], 0.0 if UNIFIED else -1.0e30, tl.float32)
    total = tl.full([TILE], 0.0, tl.float32)
    acc = tl.full([TILE, BLOCK_DIM], 0.0, tl.float32)
    edge = kv_first
    if UNIFIED == 2:
        # From the cache, where the step's own keys have been written, too.
        place = kv_first + tl.arange(0, 16)
        few = tl.load(slots_of + place // CHUNK, mask=place < stop, other=0).to(tl.int64)
        key_at = k_of + (few * k_slot_stride + place % CHUNK * DIM)[None, :] + dims[:, None]
        first_keys = tl.load(key_at, mask=(place < stop)[None, :] & dim_ok[:, None], other=0.0)
        if UPCAST:
            first_keys = first_keys.to(tl.float32)
        first_scores = tl.dot(queries, first_keys, input_precision="ieee") * scale
        visible = row_ok[:, None] & (place < stop)[None, :] & (place[None, :] <= position[:, None])
        top = tl.max(tl.where(visible, first_scores, -1.0e30), 1)
        top = tl.where(top > -1.0e29, top, 0.0)
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
                inner = (turn + lane) % CHUNK * WIDTH
                k_at = k_of + (here * k_slot_stride + inner)[None, :] + at[:, None]
                v_at = v_of + (here * v_slot_stride + inner)[:, None] + at[None, :]
                if DIM == BLOCK_DIM:
                    keys = tl.load(k_at)
                    values = tl.load(v_at)
                else:
                    keys = tl.load(k_at, mask=dim_ok[:, None], other=0.0)
                    values = tl.load(v_at, mask=dim_ok[None, :], other=0.0)
            if KV:
                keys, values = _numbers(keys, values, k_scales, v_scales, queries, dims, DIM, KV, BY_FOURS)
            elif UPCAST:
                keys = keys.to(tl.float32)
                values = values.to(tl.float32)
            scores = tl.dot(queries, keys, input_precision="ieee")
            if KV == 1:
                scores = scores * _factors(k_scales, queries.dtype)[None, :]
            if UNIFIED:
                weights = tl.exp2(scores * scale - top[:, None]) if UNIFIED == 2 else tl.exp2(scores * scale)
                total += tl.sum(weights, 1)
                acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
            else:
                new_top = tl.maximum(top, tl.max(scores, 1) * scale)
                weights = tl.exp2(scores * scale - new_top[:, None])
                shrink = tl.exp2(top - new_top)
                total = total * shrink + tl.sum(weights, 1)
                if KV == 1:
                    weights = weights * _factors(v_scales, values.dtype)[None, :]
                acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
                top = new_top
            if KV:
                k_scales = _scales(k_of, slot, k_slot_stride, ahead, stop, CHUNK, WIDTH, KV)
                v_scales = _scales(v_of, slot, v_slot_stride, ahead, stop, CHUNK, WIDTH, KV)
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
            inner = n % CHUNK * WIDTH
            k_at = k_of + (here * k_slot_stride + inner)[None, :] + at[:, None]
            keys = tl.load(k_at, mask=n_ok[None, :] & dim_ok[:, None], other=0.0)
            v_at = v_of + (here * v_slot_stride + inner)[:, None] + at[None, :]
            values = tl.load(v_at, mask=n_ok[:, None] & dim_ok[None, :], other=0.0)
        if KV:
            keys, values = _numbers(keys, values, k_scales, v_scales, queries, dims, DIM, KV, BY_FOURS)
        elif UPCAST:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        if KV == 1:
            scores = scores * _factors(k_scales, queries.dtype)[None, :]
        seen = row_ok[:, None] & n_ok[None, :] & (n[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (n[None, :] > position[:, None] - WINDOW)
        if UNIFIED:
            weights = tl.where(seen, tl.exp2(scores - top[:, None] if UNIFIED == 2 else scores), 0.0)
            total += tl.sum(weights, 1)
            acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        else:
            scores = tl.where(seen, scores, -1.0e30)
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.where(seen, tl.exp2(scores - new_top[:, None]), 0.0)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            if KV == 1:
                weights = weights * _factors(v_scales, values.dtype)[None, :]
            acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
            top = new_top
        if KV:
            k_scales = _scales(k_of, slot, k_slot_stride, n + TURN, stop, CHUNK, WIDTH, KV)
            v_scales = _scales(v_of, slot, v_slot_stride, n + TURN, stop, CHUNK, WIDTH, KV)
    if KV == 1:
        acc = acc * 1152921504606846976.0
    return top, total, acc


@kernel
def _scales(of, slot, slot_stride, n, stop, CHUNK: tl.constexpr, WIDTH: tl.constexpr, KV: tl.constexpr):  # type: ignore[no-untyped-def]
    """What turns the codes of positions n [TURN] into numbers, as it lies in the cache: a byte, or 64 bits."""
    behind = of + slot.to(tl.int64) * slot_stride + CHUNK * WIDTH
    if KV == 2:
        found = tl.load(behind.to(tl.pointer_type(tl.uint64)) + n % CHUNK, mask=n < stop, other=0)
    else:
        found = tl.load(behind + n % CHUNK, mask=n < stop, other=0)
    return found


@kernel
def _factors(scales, of: tl.constexpr):  # type: ignore[no-untyped-def]
    """What products with codes of fp8 are to be multiplied by, but for 2^60 that queries or sums have already."""
    power = (scales.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    return power * (256.0 if of == tl.float16 else 1152921504606846976.0)


@kernel
def _numbers(  # type: ignore[no-untyped-def]
    keys,  # uint8 [BLOCK_DIM, TURN]
    values,  # uint8 [TURN, BLOCK_DIM]
    k_scales,
    v_scales,
    queries,
    dims,
    DIM: tl.constexpr,
    KV: tl.constexpr,
    BY_FOURS: tl.constexpr,
):
    """Codes as operands of products: in the queries' type, but values of fp8 in bfloat16 where that is float16, because
    of the weights' range.
    """
    if KV == 1:
        wide: tl.constexpr = tl.float32 if queries.dtype == tl.float32 else tl.bfloat16
        key_numbers = _e4m3(keys, queries.dtype, BY_FOURS)
        value_numbers = _e4m3(values, wide, BY_FOURS)
    else:
        upper = dims >= DIM // 2
        inside = dims < DIM
        # Of dimensions that there are not the codes are 0, which is the least number.
        key_numbers = tl.where(inside[:, None], int4_numbers(keys, upper[:, None], k_scales[None, :]), 0.0).to(
            queries.dtype
        )
        value_numbers = tl.where(inside[None, :], int4_numbers(values, upper[None, :], v_scales[:, None]), 0.0)
        value_numbers = value_numbers.to(queries.dtype)
    return key_numbers, value_numbers


@kernel
def int4_numbers(codes, upper, scales):  # type: ignore[no-untyped-def]
    """scale x code + least of the lower or the upper four bits; scales: 64 bits, of the lower half first."""
    pair = tl.where(upper, scales >> 32, scales & 0xFFFFFFFF).to(tl.uint32)
    scale = (pair << 16).to(tl.float32, bitcast=True)
    least = (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    code = tl.where(upper, codes >> 4, codes & 15)
    return code.to(tl.float32) * scale + least


@kernel
def _e4m3(raw, to: tl.constexpr, BY_FOURS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes with their bits where `to` has its own: numbers times 2^-8 (float16) or 2^-120. Integers alone."""
    if to == tl.float32:
        wide = raw.to(tl.uint32)
        numbers = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True)
    elif BY_FOURS and to == tl.float16:
        # Two codes are spread to the upper bytes of two halves; their bits but the sign's move down.
        numbers = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 1;
            shr.u32 d, b, 1;
            and.b32 c, c, 0x3f803f80;
            and.b32 d, d, 0x3f803f80;
            lop3.b32 $0, a, 0x80008000, c, 0xea;
            lop3.b32 $1, b, 0x80008000, d, 0xea;
            }""",
            "=r,=r,r",
            [raw],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    elif BY_FOURS:
        numbers = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            and.b32 c, c, 0x07f007f0;
            and.b32 d, d, 0x07f007f0;
            lop3.b32 $0, a, 0x80008000, c, 0xea;
            lop3.b32 $1, b, 0x80008000, d, 0xea;
            }""",
            "=r,=r,r",
            [raw],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    elif to == tl.float16:
        half = raw.to(tl.uint16)
        numbers = (((half & 0x80) << 8) | ((half & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        half = raw.to(tl.uint16)
        numbers = (((half & 0x80) << 8) | ((half & 0x7F) << 4)).to(tl.bfloat16, bitcast=True)
    return numbers


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
