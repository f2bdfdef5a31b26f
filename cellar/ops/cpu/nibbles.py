"""Attention of decodes over K and V in 4 bits, as fast as a processor with AVX-512 reads them.

The form of a kernel is that of `kernels.py`, which decodes such rows to float32 before it multiplies. Here 64 bytes are
a register of sixteen words, each with eight codes: a shift brings the next ones to the lowest bits, and those choose
their number among sixteen. So dimensions come in another order than they lie in, the same for queries, keys and sums:

    turned[n, r, k, l] = x[n, k % 2 * dim / 2 + 64 r + 4 l + k // 2],    k < 8, l < 16

What halves of a head are multiplied by, and the least number of each, go onto sums of the codes: in scores onto two of
a query with a key, in sums of values onto a weight. Another order of sums than in `kernels.py`, so this serves who
attends to decodes alone (`AttentionWork.alone`). Heads have a multiple of 128 dimensions.

The newest K and V are rotated and written here, too, byte for byte as `ops/kv_format.py` has them.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import types

from cellar.ops.cpu.blocks import SIZE
from cellar.ops.cpu.dots import (
    chosen,
    code_of,
    fetch_byte,
    next_codes,
    numbers,
    pair_of,
    quarter_store,
    shares,
    whole_load,
)
from cellar.ops.cpu.lanes import (
    WIDTH,
    brains,
    codes,
    doubles,
    first_of,
    floats,
    get,
    greater,
    halves,
    ints,
    largest,
    like,
    load,
    longs,
    next_of,
    power,
    put,
    splat,
    stack,
    total,
)
from cellar.ops.cpu.launch import NIBBLES
from cellar.ops.cpu.pieces import LEAST, copy, piece, turn, weigh
from cellar.ops.cpu.wide import has, wide_fma, wide_load, wide_plus, wide_splat, wide_store, wide_times, wide_total

BYTES = 64
"""Of a register."""
CODES = 128
"""In them."""


def runs_here() -> bool:
    """True if what is compiled here may use registers of 64 bytes."""
    return has("avx512f") and has("avx512bw")


@piece
def _eight(digits, register):  # type: ignore[no-untyped-def]
    """The numbers of all codes of 64 bytes: those of the lower and of the upper half of a head in turn."""
    a0 = chosen(digits, register)
    register = next_codes(register)
    a1 = chosen(digits, register)
    register = next_codes(register)
    a2 = chosen(digits, register)
    register = next_codes(register)
    a3 = chosen(digits, register)
    register = next_codes(register)
    a4 = chosen(digits, register)
    register = next_codes(register)
    a5 = chosen(digits, register)
    register = next_codes(register)
    a6 = chosen(digits, register)
    return a0, a1, a2, a3, a4, a5, a6, chosen(digits, next_codes(register))


@piece
def _turned(source, at, target, to, dim):  # type: ignore[no-untyped-def]
    """float32 [dim] into the order of the codes; -> the sums of both halves."""
    for r in range(dim // CODES):
        for k in range(8):
            first = at + k % 2 * (dim // 2) + r * BYTES + k // 2
            for lane in range(SIZE):
                put(target, to + r * CODES + k * SIZE + lane, get(source, first + 4 * lane))
    low = high = types.float32(0.0)
    for d in range(dim // 2):
        low += get(source, at + d)
        high += get(source, at + dim // 2 + d)
    return low, high


@piece
def _back(source, at, target, to, dim, scale):  # type: ignore[no-untyped-def]
    """From that order into the dimensions' own, times `scale`."""
    for r in range(dim // CODES):
        for k in range(8):
            first = to + k % 2 * (dim // 2) + r * BYTES + k // 2
            for lane in range(SIZE):
                put(target, first + 4 * lane, get(source, at + r * CODES + k * SIZE + lane) * scale)


@piece
def _dots(queries, at, found, low, high):  # type: ignore[no-untyped-def]
    """Products with the numbers of one register added to two sums, one of each half."""
    low = wide_fma(wide_load(queries, at), found[0], low)
    high = wide_fma(wide_load(queries, at + 16), found[1], high)
    low = wide_fma(wide_load(queries, at + 32), found[2], low)
    high = wide_fma(wide_load(queries, at + 48), found[3], high)
    low = wide_fma(wide_load(queries, at + 64), found[4], low)
    high = wide_fma(wide_load(queries, at + 80), found[5], high)
    low = wide_fma(wide_load(queries, at + 96), found[6], low)
    return low, wide_fma(wide_load(queries, at + 112), found[7], high)


@piece
def _score_all(  # type: ignore[no-untyped-def]
    queries, group, halves_of, raw, pairs, ahead, begin, end, dim, digits, scores, stride, tops_here
):
    """Write the scores of positions begin..end with each query of the group, and the largest of each."""
    half, zero = dim // 2, wide_splat(types.float32(0.0))
    for g in range(group):
        put(tops_here, g, types.float32(LEAST))
    for n in range(begin, end):
        fetch_byte(ahead, n * half)
        scale, least, later_scale, later_least = (
            get(pairs, 4 * n), get(pairs, 4 * n + 1), get(pairs, 4 * n + 2), get(pairs, 4 * n + 3),
        )  # fmt: skip
        found = _eight(digits, whole_load(raw, n * half))
        for g in range(group):
            low, high = _dots(queries, g * dim, found, zero, zero)
            for r in range(1, dim // CODES):
                more = _eight(digits, whole_load(raw, n * half + r * BYTES))
                low, high = _dots(queries, g * dim + r * CODES, more, low, high)
            both = wide_fma(low, wide_splat(scale), wide_times(high, wide_splat(later_scale)))
            s = wide_total(both) + (get(halves_of, 2 * g) * least + get(halves_of, 2 * g + 1) * later_least)
            put(scores, g * stride + n, s)
            if s > get(tops_here, g):
                put(tops_here, g, s)


@piece
def _loaded(sums, o, f):  # type: ignore[no-untyped-def]
    """128 sums times a number."""
    return (
        wide_times(wide_load(sums, o), f),
        wide_times(wide_load(sums, o + 16), f),
        wide_times(wide_load(sums, o + 32), f),
        wide_times(wide_load(sums, o + 48), f),
        wide_times(wide_load(sums, o + 64), f),
        wide_times(wide_load(sums, o + 80), f),
        wide_times(wide_load(sums, o + 96), f),
        wide_times(wide_load(sums, o + 112), f),
    )


@piece
def _added(a, found, low, high):  # type: ignore[no-untyped-def]
    """128 sums and the numbers of a register, each half times its own."""
    return (
        wide_fma(found[0], low, a[0]),
        wide_fma(found[1], high, a[1]),
        wide_fma(found[2], low, a[2]),
        wide_fma(found[3], high, a[3]),
        wide_fma(found[4], low, a[4]),
        wide_fma(found[5], high, a[5]),
        wide_fma(found[6], low, a[6]),
        wide_fma(found[7], high, a[7]),
    )


@piece
def _kept(sums, o, a, low, high):  # type: ignore[no-untyped-def]
    """128 sums stored, each half with a number added."""
    x, y = wide_splat(low), wide_splat(high)
    wide_store(sums, o, wide_plus(a[0], x))
    wide_store(sums, o + 16, wide_plus(a[1], y))
    wide_store(sums, o + 32, wide_plus(a[2], x))
    wide_store(sums, o + 48, wide_plus(a[3], y))
    wide_store(sums, o + 64, wide_plus(a[4], x))
    wide_store(sums, o + 80, wide_plus(a[5], y))
    wide_store(sums, o + 96, wide_plus(a[6], x))
    wide_store(sums, o + 112, wide_plus(a[7], y))


@piece
def _add_two(weights, g, stride, raw, pairs, ahead, begin, end, dim, digits, sums, shrinks):  # type: ignore[no-untyped-def]
    """Of two queries: sums * shrink + the weighted sum of the values begin..end, in the order of the codes."""
    half, at, then = dim // 2, g * stride, g * stride + stride
    for r in range(dim // CODES):
        o = g * dim + r * CODES
        a, b = _loaded(sums, o, wide_splat(get(shrinks, g))), _loaded(sums, o + dim, wide_splat(get(shrinks, g + 1)))
        low = high = later_low = later_high = types.float32(0.0)
        for n in range(begin, end):
            fetch_byte(ahead, n * half + r * BYTES)
            w, v = get(weights, at + n), get(weights, then + n)
            x, y = get(pairs, 4 * n), get(pairs, 4 * n + 2)
            less, more = get(pairs, 4 * n + 1), get(pairs, 4 * n + 3)
            low, high = low + w * less, high + w * more
            later_low, later_high = later_low + v * less, later_high + v * more
            found = _eight(digits, whole_load(raw, n * half + r * BYTES))
            a = _added(a, found, wide_splat(w * x), wide_splat(w * y))
            b = _added(b, found, wide_splat(v * x), wide_splat(v * y))
        _kept(sums, o, a, low, high)
        _kept(sums, o + dim, b, later_low, later_high)


@piece
def _add_one(weights, g, stride, raw, pairs, ahead, begin, end, dim, digits, sums, shrinks):  # type: ignore[no-untyped-def]
    """The same of one."""
    half, at = dim // 2, g * stride
    for r in range(dim // CODES):
        o = g * dim + r * CODES
        a = _loaded(sums, o, wide_splat(get(shrinks, g)))
        low = high = types.float32(0.0)
        for n in range(begin, end):
            fetch_byte(ahead, n * half + r * BYTES)
            w = get(weights, at + n)
            low, high = low + w * get(pairs, 4 * n + 1), high + w * get(pairs, 4 * n + 3)
            found = _eight(digits, whole_load(raw, n * half + r * BYTES))
            a = _added(a, found, wide_splat(w * get(pairs, 4 * n)), wide_splat(w * get(pairs, 4 * n + 2)))
        _kept(sums, o, a, low, high)


@piece
def _write(x, cache, at, n, chunk, dim):  # type: ignore[no-untyped-def]
    """float32 [dim] as the n-th row of a head in a chunk at byte `at`: `quantized` of `ops/kv_format.py`."""
    half = dim // 2
    raw, pairs = codes(cache + at + n * half), brains(cache + at + chunk * half)
    for h in range(2):
        most, least, whole = splat(types.float32(-3.0e38)), splat(types.float32(-3.0e38)), splat(types.float32(0.0))
        for d in range(h * half, h * half + half, WIDTH):
            v = load(x, d)
            most, least = greater(v, most), greater(splat(types.float32(0.0)) - v, least)
            whole = whole + v * splat(types.float32(0.0))  # none, if any of them is
        top, bottom = largest(most), types.float32(0.0) - largest(least)
        put(pairs, 4 * n + 2 * h, (top - bottom) * types.float32(1 / 15) + total(whole))
        put(pairs, 4 * n + 2 * h + 1, bottom)
    scale, later_scale = get(pairs, 4 * n), get(pairs, 4 * n + 2)
    inverse = types.float32(1.0) / scale if scale > 0 else types.float32(0.0)
    later = types.float32(1.0) / later_scale if later_scale > 0 else types.float32(0.0)
    less, later_less = wide_splat(-get(pairs, 4 * n + 1)), wide_splat(-get(pairs, 4 * n + 3))
    for d in range(0, half, SIZE):
        first = wide_times(wide_plus(wide_load(x, d), less), wide_splat(inverse))
        second = wide_times(wide_plus(wide_load(x, half + d), later_less), wide_splat(later))
        quarter_store(raw, d, pair_of(code_of(first), code_of(second)))


@piece
def _attend(words, kind):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    q, q_token, q_head = like(kind, get(a, 0)), get(a, 1), get(a, 2)
    k, k_token, k_head = like(kind, get(a, 3)), get(a, 4), get(a, 5)
    v, v_token, v_head = like(kind, get(a, 6)), get(a, 7), get(a, 8)
    cos_sin, turning = floats(get(a, 9)), get(a, 10) // 2
    k_cache, v_cache, k_slot, v_slot = get(a, 11), get(a, 12), get(a, 13), get(a, 14)
    cache_head, table, table_stride = get(a, 15), ints(get(a, 16)), get(a, 17)
    out, out_token, out_head = like(kind, get(a, 18)), get(a, 19), get(a, 20)
    rows, starts, offsets = ints(get(a, 21)), ints(get(a, 22)), ints(get(a, 24))
    items, kv_heads, group = get(a, 27), get(a, 29), get(a, 30)
    dim, chunk, window = get(a, 31), get(a, 32), get(a, 33)
    scale = get(doubles(get(words, 1)), 34)
    one, half = types.float32(1.0), dim // 2
    digits = numbers(shares(SIZE))
    stride = chunk + WIDTH
    queries, sums, row = stack(group * dim), stack(group * dim), stack(dim)
    tops, weights_of, tops_here, shrinks, halves_of = (
        stack(group), stack(group), stack(group), stack(group), stack(2 * group),
    )  # fmt: skip
    scores = stack(group * stride)
    while True:
        item = next_of(words)
        if item >= items * kv_heads:
            return
        head, span = item % kv_heads, item // kv_heads
        start, token = get(starts, span), get(offsets, span)
        slots = get(rows, span) * table_stride
        slot = get(table, slots + start // chunk)
        turn(k, token * k_token + head * k_head, row, 0, kind, cos_sin, start, turning, dim, one)
        _write(row, k_cache, slot * k_slot + head * cache_head, start % chunk, chunk, dim)
        copy(v, token * v_token + head * v_head, row, 0, dim, one)
        _write(row, v_cache, slot * v_slot + head * cache_head, start % chunk, chunk, dim)
        for g in range(group):
            turn(q, token * q_token + (head * group + g) * q_head, row, 0, kind, cos_sin, start, turning, dim, scale)
            low, high = _turned(row, 0, queries, g * dim, dim)
            put(halves_of, 2 * g, low)
            put(halves_of, 2 * g + 1, high)
            put(tops, g, types.float32(LEAST))
            put(weights_of, g, types.float32(0.0))
        for d in range(0, group * dim, SIZE):
            wide_store(sums, d, wide_splat(types.float32(0.0)))
        least = max(0, start - window + 1) if window else 0
        last = start // chunk
        for j in range(least // chunk, last + 1):
            slot, then = get(table, slots + j), get(table, slots + min(j + 1, last))
            keys, values = slot * k_slot + head * cache_head, slot * v_slot + head * cache_head
            begin, end = max(0, least - j * chunk), min(chunk, start + 1 - j * chunk)
            _score_all(
                queries, group, halves_of, codes(k_cache + keys), brains(k_cache + keys + chunk * half),
                codes(k_cache + then * k_slot + head * cache_head), begin, end, dim, digits, scores, stride, tops_here,
            )  # fmt: skip
            for g in range(group):
                old, top = get(tops, g), get(tops_here, g)
                put(shrinks, g, one)
                if top > old:
                    put(shrinks, g, first_of(power(splat(old - top))))
                    put(tops, g, top)
                else:
                    top = old
                weight = weigh(scores, g * stride + begin, g * stride + end, top)
                put(weights_of, g, get(weights_of, g) * get(shrinks, g) + weight)
            raw, pairs = codes(v_cache + values), brains(v_cache + values + chunk * half)
            ahead = codes(v_cache + then * v_slot + head * cache_head)
            for g in range(0, group - 1, 2):
                _add_two(scores, g, stride, raw, pairs, ahead, begin, end, dim, digits, sums, shrinks)
            if group % 2:
                _add_one(scores, group - 1, stride, raw, pairs, ahead, begin, end, dim, digits, sums, shrinks)
        for g in range(group):
            at = token * out_token + (head * group + g) * out_head
            _back(sums, g * dim, out, at, dim, one / get(weights_of, g))


def entries(source: str) -> dict[tuple[str, Any], Any]:
    """The kernels by name and element, as in `kernels.py`."""

    def nibbles_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attend(words, floats(0))

    def nibbles_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attend(words, halves(0))

    def nibbles_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attend(words, brains(0))

    return {
        (NIBBLES, torch.float32): nibbles_floats,
        (NIBBLES, torch.float16): nibbles_halves,
        (NIBBLES, torch.bfloat16): nibbles_brains,
    }
