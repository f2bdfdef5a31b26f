"""Attention of decodes whose prompts are attended to elsewhere, as fast as a processor with AVX-512 reads K and V.

The form of a kernel is that of `kernels.py`. The sums of `attention.py` have the order of its tiles for prompts; these
have another, with twice as wide registers and each number of a key taken from memory once for all queries that share
it, so they serve who attends to decodes alone (`AttentionWork.alone`). Heads have a multiple of 128 dimensions, chunks
of 16 positions.

K and V in 4 bits: 64 bytes are a register of sixteen words, each with eight codes; a shift brings the next ones to the
lowest bits, and those choose their number among sixteen. So dimensions come in another order than they lie in, the same
for queries, keys and sums:

    turned[n, r, k, l] = x[n, k % 2 * dim / 2 + 64 r + 4 l + k // 2],    k < 8, l < 16

What halves of a head are multiplied by, and the least number of each, go onto sums of the codes: in scores onto two of
a query with a key, in sums of values onto a weight, and so do the powers of two of rows in FP8. The newest K and V are
rotated and written here, too, those in fewer bits byte for byte as `ops/kv_format.py` quantizes them. (A rotation has
one rounding less than by its definition, so of rotated keys a code is now and then its neighbour.)
"""

from __future__ import annotations

from typing import Any

import torch
from numba import types

from cellar.ops.cpu.blocks import SIZE
from cellar.ops.cpu.dots import (
    bits,
    chosen,
    code_of,
    e4m3_codes,
    e4m3_numbers,
    has_dots,
    larger,
    largest_of,
    next_codes,
    number_of,
    numbers,
    pair_of,
    put_byte,
    quarter_store,
    shares,
    sixteen,
    size_bits,
    whole_load,
    whole_splat,
)
from cellar.ops.cpu.fours import (
    BYTES,
    CODES,
    add_fours,
    back_from_fours,
    mix_fours,
    score_fours,
    split_query,
)
from cellar.ops.cpu.lanes import (
    WIDTH,
    brains,
    codes,
    doubles,
    exponents,
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
from cellar.ops.cpu.launch import DECODES, NIBBLES, SHORT_FLOATS
from cellar.ops.cpu.pieces import FP8, INT4, LEAST, PLAIN, ask, copy, piece, turn, weigh
from cellar.ops.cpu.wide import has, wide_fma, wide_load, wide_plus, wide_splat, wide_store, wide_times, wide_total

FOURS = has_dots()
"""Whether codes of 4 bits are multiplied in whole numbers where those who ask have 16 bits."""


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
def _numbers(digits, base, kind, at, form):  # type: ignore[no-untyped-def]
    """128 numbers as they are multiplied: of the codes at byte `at` behind an address, or the elements from `at` on."""
    if form == INT4:
        return _eight(digits, whole_load(codes(base), at))
    if form == FP8:
        raw = codes(base)
        return (
            e4m3_numbers(raw, at),
            e4m3_numbers(raw, at + 16),
            e4m3_numbers(raw, at + 32),
            e4m3_numbers(raw, at + 48),
            e4m3_numbers(raw, at + 64),
            e4m3_numbers(raw, at + 80),
            e4m3_numbers(raw, at + 96),
            e4m3_numbers(raw, at + 112),
        )
    rows = like(kind, base)
    return (
        sixteen(rows, at),
        sixteen(rows, at + 16),
        sixteen(rows, at + 32),
        sixteen(rows, at + 48),
        sixteen(rows, at + 64),
        sixteen(rows, at + 80),
        sixteen(rows, at + 96),
        sixteen(rows, at + 112),
    )


@piece
def _score_all(  # type: ignore[no-untyped-def]
    queries, group, halves_of, base, kind, form, sizes, ahead, begin, end, digits, scores, stride, tops_here
):
    """Write the scores of positions begin..end with each query of the group, and the largest of each."""
    dim, chunk, row, step = sizes
    zero, pairs, factors = wide_splat(types.float32(0.0)), brains(base + chunk * row), exponents(base + chunk * row)
    scale = least = later_scale = later_least = types.float32(0.0)
    for g in range(group):
        put(tops_here, g, types.float32(LEAST))
    for n in range(begin, end):
        ask(ahead, n, 1)
        if form == FP8:
            scale = get(factors, n)
        elif form == INT4:
            scale, least = get(pairs, 4 * n), get(pairs, 4 * n + 1)
            later_scale, later_least = get(pairs, 4 * n + 2), get(pairs, 4 * n + 3)
        found = _numbers(digits, base, kind, n * dim * step // 128, form)
        for g in range(group):
            low, high = _dots(queries, g * dim, found, zero, zero)
            for r in range(1, dim // CODES):
                more = _numbers(digits, base, kind, n * dim * step // 128 + r * step, form)
                low, high = _dots(queries, g * dim + r * CODES, more, low, high)
            if form == INT4:
                both = wide_fma(low, wide_splat(scale), wide_times(high, wide_splat(later_scale)))
                s = wide_total(both) + (get(halves_of, 2 * g) * least + get(halves_of, 2 * g + 1) * later_least)
            else:
                s = wide_total(wide_plus(low, high))
                if form == FP8:
                    s = s * scale + (scale - scale)  # of a row with numbers that are none, whatever their sign
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
def _add_two(  # type: ignore[no-untyped-def]
    weights, g, stride, base, kind, form, sizes, ahead, begin, end, digits, sums, shrinks
):
    """Of two queries: sums * shrink + the weighted sum of the values begin..end, in the order of the numbers."""
    dim, chunk, row, step = sizes
    at, then, pairs, factors = (
        g * stride,
        g * stride + stride,
        brains(base + chunk * row),
        exponents(base + chunk * row),
    )
    for r in range(dim // CODES):
        o = g * dim + r * CODES
        a, b = _loaded(sums, o, wide_splat(get(shrinks, g))), _loaded(sums, o + dim, wide_splat(get(shrinks, g + 1)))
        low = high = later_low = later_high = types.float32(0.0)
        x = y = types.float32(1.0)
        for n in range(begin, end):
            if r == 0:
                ask(ahead, n, 1)
            w, v = get(weights, at + n), get(weights, then + n)
            if form == FP8:
                x = y = get(factors, n)
            elif form == INT4:
                x, y = get(pairs, 4 * n), get(pairs, 4 * n + 2)
                less, more = get(pairs, 4 * n + 1), get(pairs, 4 * n + 3)
                low, high = low + w * less, high + w * more
                later_low, later_high = later_low + v * less, later_high + v * more
            found = _numbers(digits, base, kind, n * dim * step // 128 + r * step, form)
            a = _added(a, found, wide_splat(w * x), wide_splat(w * y))
            b = _added(b, found, wide_splat(v * x), wide_splat(v * y))
        _kept(sums, o, a, low, high)
        _kept(sums, o + dim, b, later_low, later_high)


@piece
def _add_one(  # type: ignore[no-untyped-def]
    weights, g, stride, base, kind, form, sizes, ahead, begin, end, digits, sums, shrinks
):
    """The same of one."""
    dim, chunk, row, step = sizes
    at, pairs, factors = g * stride, brains(base + chunk * row), exponents(base + chunk * row)
    for r in range(dim // CODES):
        o = g * dim + r * CODES
        a = _loaded(sums, o, wide_splat(get(shrinks, g)))
        low = high = types.float32(0.0)
        x = y = types.float32(1.0)
        for n in range(begin, end):
            if r == 0:
                ask(ahead, n, 1)
            w = get(weights, at + n)
            if form == FP8:
                x = y = get(factors, n)
            elif form == INT4:
                x, y = get(pairs, 4 * n), get(pairs, 4 * n + 2)
                low, high = low + w * get(pairs, 4 * n + 1), high + w * get(pairs, 4 * n + 3)
            found = _numbers(digits, base, kind, n * dim * step // 128 + r * step, form)
            a = _added(a, found, wide_splat(w * x), wide_splat(w * y))
        _kept(sums, o, a, low, high)


@piece
def _write(x, base, n, chunk, dim, form):  # type: ignore[no-untyped-def]
    """float32 [dim] as the n-th row of a head in a chunk at an address: `quantized` of `ops/kv_format.py`."""
    if form == FP8:
        _write_short_floats(x, base, n, chunk, dim)
    else:
        _write_nibbles(x, base, n, chunk, dim)


@piece
def _write_short_floats(x, base, n, chunk, dim):  # type: ignore[no-untyped-def]
    """Codes of e4m3, and the power of two that makes the largest number one of them."""
    most = whole_splat(0)
    for d in range(0, dim, SIZE):
        most = larger(most, size_bits(bits(wide_load(x, d))))
    largest_bits = largest_of(most)
    exponent = (largest_bits >> 23) - 8
    if largest_bits & 0x7FFFFF > 0x600000:  # 448 is 1.75 x 2^8
        exponent += 1
    exponent = max(1, exponent) if largest_bits < 0x7F800000 else 255
    put_byte(codes(base + chunk * dim), n, exponent)
    inverse = wide_splat(number_of(max(0, 254 - exponent) << 23))
    for d in range(0, dim, SIZE):
        quarter_store(codes(base), n * dim + d, e4m3_codes(wide_times(wide_load(x, d), inverse)))


@piece
def _write_nibbles(x, base, n, chunk, dim):  # type: ignore[no-untyped-def]
    half = dim // 2
    raw, pairs = codes(base + n * half), brains(base + chunk * half)
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
def _attend(words, kind, size, form):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    q, q_token, q_head = like(kind, get(a, 0)), get(a, 1), get(a, 2)
    k, k_token, k_head = like(kind, get(a, 3)), get(a, 4), get(a, 5)
    v, v_token, v_head = like(kind, get(a, 6)), get(a, 7), get(a, 8)
    cos_sin, turning = floats(get(a, 9)), get(a, 10) // 2
    # Strides of codes are in bytes.
    unit = size if form == PLAIN else 1
    k_cache, v_cache, k_slot, v_slot = get(a, 11), get(a, 12), get(a, 13) * unit, get(a, 14) * unit
    cache_head, table, table_stride = get(a, 15) * unit, ints(get(a, 16)), get(a, 17)
    out, out_token, out_head = like(kind, get(a, 18)), get(a, 19), get(a, 20)
    rows, starts, offsets = ints(get(a, 21)), ints(get(a, 22)), ints(get(a, 24))
    items, kv_heads, group = get(a, 27), get(a, 29), get(a, 30)
    dim, chunk, window = get(a, 31), get(a, 32), get(a, 33)
    scale = get(doubles(get(words, 1)), 34)
    one = types.float32(1.0)
    digits = numbers(shares(SIZE))
    # Bytes of a row (of codes alone), and of 128 codes, or that many elements.
    width = dim // 2 if form == INT4 else dim if form == FP8 else dim * size
    sizes = (dim, chunk, width, BYTES if form == INT4 else CODES)
    stride = chunk + WIDTH
    queries, sums, row = stack(group * dim), stack(group * dim), stack(dim)
    tops, weights_of, tops_here, shrinks, halves_of = (
        stack(group), stack(group), stack(group), stack(group), stack(2 * group),
    )  # fmt: skip
    scores = stack(group * stride)
    fours = False
    if FOURS:
        fours = form == INT4 and size == 2
    room = 1 if fours else 0
    planes, parts = stack(room * group * dim // 2), stack(room * chunk // 2)
    factors, scaled, mixed = stack(room * 4 * chunk), stack(room * chunk), stack(room * chunk * dim // 4)
    units = stack(room * group)
    while True:
        item = next_of(words)
        if item >= items * kv_heads:
            return
        head, span = item % kv_heads, item // kv_heads
        start, token = get(starts, span), get(offsets, span)
        slots = get(rows, span) * table_stride
        slot, n = get(table, slots + start // chunk), start % chunk
        newest_key, newest_value = slot * k_slot + head * cache_head, slot * v_slot + head * cache_head
        at, then = token * k_token + head * k_head, token * v_token + head * v_head
        if form != PLAIN:
            turn(k, at, row, 0, kind, cos_sin, start, turning, dim, one)
            _write(row, k_cache + newest_key, n, chunk, dim, form)
            copy(v, then, row, 0, dim, one)
            _write(row, v_cache + newest_value, n, chunk, dim, form)
        else:
            turn(k, at, like(kind, k_cache + newest_key), n * dim, kind, cos_sin, start, turning, dim, one)
            copy(v, then, like(kind, v_cache + newest_value), n * dim, dim, one)
        for g in range(group):
            at = token * q_token + (head * group + g) * q_head
            if form == INT4:
                turn(q, at, row, 0, kind, cos_sin, start, turning, dim, scale)
                if FOURS and fours:
                    unit_of, low, high = split_query(row, dim, planes, g)
                    put(units, g, unit_of)
                else:
                    low, high = _turned(row, 0, queries, g * dim, dim)
                put(halves_of, 2 * g, low)
                put(halves_of, 2 * g + 1, high)
            else:
                turn(q, at, queries, g * dim, kind, cos_sin, start, turning, dim, scale)
            put(tops, g, types.float32(LEAST))
            put(weights_of, g, types.float32(0.0))
        for d in range(0, group * dim, SIZE):
            wide_store(sums, d, wide_splat(types.float32(0.0)))
        least = max(0, start - window + 1) if window else 0
        last = start // chunk
        for j in range(least // chunk, last + 1):
            slot, next_slot = get(table, slots + j), get(table, slots + min(j + 1, last))
            keys, values = k_cache + slot * k_slot + head * cache_head, v_cache + slot * v_slot + head * cache_head
            begin, end = max(0, least - j * chunk), min(chunk, start + 1 - j * chunk)
            needed = max(0, min(chunk, start + 1 - j * chunk - chunk))
            ahead = (k_cache + next_slot * k_slot + head * cache_head, width, needed)
            if FOURS and fours:
                score_fours(
                    planes,
                    units,
                    halves_of,
                    group,
                    keys,
                    sizes,
                    ahead,
                    begin,
                    end,
                    factors,
                    mixed,
                    scores,
                    stride,
                    tops_here,
                )
            else:
                _score_all(
                    queries, group, halves_of, keys, kind, form, sizes, ahead, begin, end, digits, scores, stride,
                    tops_here,
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
            ahead = (v_cache + next_slot * v_slot + head * cache_head, width, needed)
            if FOURS and fours:
                mix_fours(values, sizes, ahead, begin, end, factors, mixed)
                for g in range(group):
                    add_fours(
                        scores, g * stride, mixed, sizes, begin, end, factors, parts, scaled, sums, g * dim,
                        get(shrinks, g),
                    )  # fmt: skip
                continue
            for g in range(0, group - 1, 2):
                _add_two(scores, g, stride, values, kind, form, sizes, ahead, begin, end, digits, sums, shrinks)
            if group % 2:
                _add_one(scores, group - 1, stride, values, kind, form, sizes, ahead, begin, end, digits, sums, shrinks)
        for g in range(group):
            at = token * out_token + (head * group + g) * out_head
            if FOURS and fours:
                back_from_fours(sums, g * dim, out, at, dim, one / get(weights_of, g))
            elif form == INT4:
                _back(sums, g * dim, out, at, dim, one / get(weights_of, g))
            else:
                copy(sums, g * dim, out, at, dim, one / get(weights_of, g))


def entries(source: str) -> dict[tuple[str, Any], Any]:
    """The kernels by name and element, as in `kernels.py`."""

    def plain_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attend(words, floats(0), 4, PLAIN)

    def plain_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attend(words, halves(0), 2, PLAIN)

    def plain_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attend(words, brains(0), 2, PLAIN)

    def short_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attend(words, floats(0), 4, FP8)

    def short_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attend(words, halves(0), 2, FP8)

    def short_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attend(words, brains(0), 2, FP8)

    def nibbles_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attend(words, floats(0), 4, INT4)

    def nibbles_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attend(words, halves(0), 2, INT4)

    def nibbles_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attend(words, brains(0), 2, INT4)

    return {
        (DECODES, torch.float32): plain_floats,
        (DECODES, torch.float16): plain_halves,
        (DECODES, torch.bfloat16): plain_brains,
        (SHORT_FLOATS, torch.float32): short_floats,
        (SHORT_FLOATS, torch.float16): short_halves,
        (SHORT_FLOATS, torch.bfloat16): short_brains,
        (NIBBLES, torch.float32): nibbles_floats,
        (NIBBLES, torch.float16): nibbles_halves,
        (NIBBLES, torch.bfloat16): nibbles_brains,
    }
