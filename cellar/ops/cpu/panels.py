"""The product of many bfloat16 tokens with codes of 4 or 8 bits, in whole numbers, a panel of the matrix at a time.

128 numbers of a token become whole numbers of 15 bits, in units of a power of two that the largest of them sets, and
those two bytes each; a third byte keeps 23 bits where that number is much larger than the others (`_MUCH`). A panel is
32 rows of codes: four columns of sixteen rows fill a register, which is multiplied by four bytes of a token. Sums of
128 columns are exact, those of a row are added in the order of the columns: a token has the same bits in any company.

The matrix's arguments are those of `quantized.py`, and what a token's bytes are like is said in `planes.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from cellar.ops.cpu.blocks import BLOCK, COLUMNS, PANEL, PLACE, SIZE
from cellar.ops.cpu.dots import (
    bits,
    dot,
    larger,
    largest_of,
    nearest,
    nearest_256th,
    number_of,
    numbers,
    of_pairs,
    quarter_store,
    sixteen,
    size_bits,
    times_256,
    turn_raised,
    turn_words,
    whole_load,
    whole_minus,
    whole_plus,
    whole_splat,
    whole_times,
    word_splat,
)
from cellar.ops.cpu.lanes import brains, floats, get, halves, like, longs, next_of, put, stack
from cellar.ops.cpu.pieces import piece
from cellar.ops.cpu.planes import BYTES, unit_of, up_to
from cellar.ops.cpu.wide import (
    byte_of,
    int4s,
    int8s,
    wide_fma,
    wide_load,
    wide_splat,
    wide_store,
    wide_times,
    wide_total,
)

_BITS, _MORE_BITS = 14, 22
_MUCH = 8.0
"""How many times the root of its block's mean square a number is at most, or the block keeps 23 bits: of 15 what is
lost is 2^-11 of that root at most, as much as bfloat16 loses of a number in the middle."""

# Of a token's block, in float32: its unit, whether it has a third byte, and sums of its groups, of the first two bytes
# and of the third.
_UNIT, _HAS_THIRD, _SUMS, _THIRD_SUMS = 96, 97, 100, 104

_CHUNK = 16
"""Blocks of a panel that are turned at once: 64 KB."""

_TILE = SIZE * COLUMNS
_ONES = 0x01010101


# -- tokens --------------------------------------------------------------------------------------


@piece
def _into_bytes(v, up, has_third, planes, to):  # type: ignore[no-untyped-def]
    """Sixteen numbers into two or three bytes each, the highest first."""
    q = nearest(wide_times(v, up))
    if has_third:
        whole = q
        q = nearest_256th(whole)
        quarter_store(planes, to + 4 * BYTES, whole_minus(whole, times_256(q)))
    top = nearest_256th(q)
    quarter_store(planes, to, top)
    quarter_store(planes, to + 2 * BYTES, whole_minus(q, times_256(top)))


@piece
def _sums_of(planes, at, here, per, to):  # type: ignore[no-untyped-def]
    """Sums of the groups of the bytes that `here` has, sixteen numbers of them."""
    each = SIZE // per
    for g in range(per):
        total = get(here, g * each)
        for k in range(g * each + 1, (g + 1) * each):
            total += get(here, k)
        put(planes, at // 4 + to + g, total)


@piece
def _put_block(x, at, planes, to, is_eight, per, here):  # type: ignore[no-untyped-def]
    """128 numbers of a token."""
    most, squares = whole_splat(0), wide_splat(0.0)
    for k in range(0, COLUMNS, SIZE):
        most = larger(most, size_bits(bits(sixteen(x, at + k))))
    found = largest_of(most)
    exponent, few = found >> 23, up_to(found >> 23, _BITS)
    for k in range(0, COLUMNS, SIZE):
        v = wide_times(sixteen(x, at + k), wide_splat(few))  # whose squares are numbers, as those of x need not be
        squares = wide_fma(v, v, squares)
    largest = number_of(found) * few
    has_third = exponent > _MORE_BITS and largest * largest * COLUMNS > _MUCH * _MUCH * wide_total(squares)
    up = wide_splat(up_to(exponent, _MORE_BITS) if has_third else few)
    if is_eight:
        for k in range(0, COLUMNS, SIZE):
            _into_bytes(sixteen(x, at + k), up, has_third, planes, to + k)
    else:
        for k in range(0, BYTES, SIZE):
            first, second = of_pairs(x, at + 2 * k)
            _into_bytes(first, up, has_third, planes, to + k)
            _into_bytes(second, up, has_third, planes, to + BYTES + k)
    ones, none = whole_splat(_ONES), whole_splat(0)
    top = dot(dot(none, ones, whole_load(planes, to)), ones, whole_load(planes, to + BYTES))
    low = dot(times_256(top), ones, whole_load(planes, to + 2 * BYTES))
    wide_store(here, 0, numbers(dot(low, ones, whole_load(planes, to + 3 * BYTES))))
    _sums_of(planes, to, here, per, _SUMS)
    if has_third:
        third = dot(none, ones, whole_load(planes, to + 4 * BYTES))
        wide_store(here, 0, numbers(dot(third, ones, whole_load(planes, to + 5 * BYTES))))
        _sums_of(planes, to, here, per, _THIRD_SUMS)
    put(planes, to // 4 + _UNIT, unit_of(exponent, _BITS))
    put(planes, to // 4 + _HAS_THIRD, 1.0 if has_third else 0.0)


# x (bfloat16), planes; tokens, blocks, groups of a block; tokens per turn


@piece
def _tokens(words, is_eight):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    x, planes, tokens, blocks = brains(get(a, 0)), floats(get(a, 1)), get(a, 2), get(a, 3)
    per, step = get(a, 4), get(a, 5)
    here = stack(SIZE)
    while True:
        begin = next_of(words) * step
        if begin >= tokens:
            return
        for b in range(begin * blocks, min(begin + step, tokens) * blocks):
            _put_block(x, b * COLUMNS, planes, b * PLACE, is_eight, per, here)


# -- products ------------------------------------------------------------------------------------


@piece
def _two(sums, a, b, planes, at):  # type: ignore[no-untyped-def]
    """Four columns of 32 rows by four first, and four second, bytes of a token."""
    first_a, first_b, second_a, second_b = sums
    x, y = word_splat(planes, at), word_splat(planes, at + 2 * BYTES)
    return dot(first_a, a, x), dot(first_b, b, x), dot(second_a, a, y), dot(second_b, b, y)


@piece
def _third(sums, a, b, planes, at):  # type: ignore[no-untyped-def]
    """By four third ones."""
    x = word_splat(planes, at + 4 * BYTES)
    return dot(sums[0], a, x), dot(sums[1], b, x)


@piece
def _added(sums, a, b, planes, at, lifted, group, unit):  # type: ignore[no-untyped-def]
    """A token's sums and those of a group, whose zero points and scales are `group`; `lifted`: where its sum is."""
    zeros_a, zeros_b, scales_a, scales_b = group
    raised = nearest(wide_splat(get(planes, at // 4 + lifted)))
    units = wide_splat(unit)
    a = numbers(whole_minus(a, whole_times(zeros_a, raised)))
    b = numbers(whole_minus(b, whole_times(zeros_b, raised)))
    return wide_fma(a, wide_times(scales_a, units), sums[0]), wide_fma(b, wide_times(scales_b, units), sums[1])


@piece
def _added_two(sums, found, planes, at, g, group):  # type: ignore[no-untyped-def]
    first_a, first_b, second_a, second_b = found
    a, b = whole_plus(times_256(first_a), second_a), whole_plus(times_256(first_b), second_b)
    return _added(sums, a, b, planes, at, _SUMS + g, group, get(planes, at // 4 + _UNIT))


@piece
def _added_third(sums, found, planes, at, g, group):  # type: ignore[no-untyped-def]
    """Nothing is added for a token without third bytes, whatever stands in their place."""
    if get(planes, at // 4 + _HAS_THIRD) == 0:
        return sums
    unit = get(planes, at // 4 + _UNIT) * (1.0 / 256)
    return _added(sums, found[0], found[1], planes, at, _THIRD_SUMS + g, group, unit)


@piece
def _of_group(sums, tile, at, first, last, planes, places, g, group):  # type: ignore[no-untyped-def]
    """The sums of four tokens with 32 rows, and a group's: registers `first` to `last` of each half, at a block."""
    p0, p1, p2, p3 = places
    none = whole_splat(0)
    q0 = q1 = q2 = q3 = (none, none, none, none)
    for w in range(first, last):
        here, byte = at + 2 * BYTES * w, 4 * w
        a, b = whole_load(tile, here), whole_load(tile, here + _CHUNK * _TILE)
        q0, q1 = _two(q0, a, b, planes, p0 + byte), _two(q1, a, b, planes, p1 + byte)
        q2, q3 = _two(q2, a, b, planes, p2 + byte), _two(q3, a, b, planes, p3 + byte)
        here, byte = here + BYTES, byte + BYTES
        a, b = whole_load(tile, here), whole_load(tile, here + _CHUNK * _TILE)
        q0, q1 = _two(q0, a, b, planes, p0 + byte), _two(q1, a, b, planes, p1 + byte)
        q2, q3 = _two(q2, a, b, planes, p2 + byte), _two(q3, a, b, planes, p3 + byte)
    s0, s1, s2, s3 = sums
    return (
        _added_two(s0, q0, planes, p0, g, group),
        _added_two(s1, q1, planes, p1, g, group),
        _added_two(s2, q2, planes, p2, g, group),
        _added_two(s3, q3, planes, p3, g, group),
    )


@piece
def _of_third(sums, tile, at, first, last, planes, places, g, group):  # type: ignore[no-untyped-def]
    """The same of third bytes."""
    p0, p1, p2, p3 = places
    none = whole_splat(0)
    q0 = q1 = q2 = q3 = (none, none)
    for w in range(first, last):
        for half in range(2):
            here, byte = at + 2 * BYTES * w + BYTES * half, 4 * w + BYTES * half
            a, b = whole_load(tile, here), whole_load(tile, here + _CHUNK * _TILE)
            q0, q1 = _third(q0, a, b, planes, p0 + byte), _third(q1, a, b, planes, p1 + byte)
            q2, q3 = _third(q2, a, b, planes, p2 + byte), _third(q3, a, b, planes, p3 + byte)
    s0, s1, s2, s3 = sums
    return (
        _added_third(s0, q0, planes, p0, g, group),
        _added_third(s1, q1, planes, p1, g, group),
        _added_third(s2, q2, planes, p2, g, group),
        _added_third(s3, q3, planes, p3, g, group),
    )


@piece
def _has_third(planes, at):  # type: ignore[no-untyped-def]
    return get(planes, at // 4 + _HAS_THIRD) != 0


@piece
def _pair(table, at):  # type: ignore[no-untyped-def]
    return wide_load(table, at), wide_load(table, at + SIZE)


@piece
def _keep(table, at, pair):  # type: ignore[no-untyped-def]
    wide_store(table, at, pair[0])
    wide_store(table, at + SIZE, pair[1])


@piece
def _four_tokens(  # type: ignore[no-untyped-def]
    planes, blocks, m, last, chunk, count, tile, scales, zeros, is_eight, per, sums
):
    """Add the products of four tokens, from the m-th on, with `count` blocks of a panel to their sums."""
    m1, m2, m3 = min(m + 1, last), min(m + 2, last), min(m + 3, last)
    t = (_pair(sums, m * PANEL), _pair(sums, m1 * PANEL), _pair(sums, m2 * PANEL), _pair(sums, m3 * PANEL))
    z, s = whole_splat(128), wide_splat(1.0)
    group = (z, z, s, s)
    words = SIZE // per
    for b in range(count):
        places = (
            (m * blocks + chunk + b) * PLACE,
            (m1 * blocks + chunk + b) * PLACE,
            (m2 * blocks + chunk + b) * PLACE,
            (m3 * blocks + chunk + b) * PLACE,
        )
        p0, p1, p2, p3 = places
        is_third = _has_third(planes, p0) | _has_third(planes, p1) | _has_third(planes, p2) | _has_third(planes, p3)
        for g in range(per):
            if not is_eight:
                row = (b * per + g) * PANEL
                group = (
                    nearest(wide_load(zeros, row)),
                    nearest(wide_load(zeros, row + SIZE)),
                    wide_load(scales, row),
                    wide_load(scales, row + SIZE),
                )
            t = _of_group(t, tile, b * _TILE, g * words, (g + 1) * words, planes, places, g, group)
            if is_third:
                t = _of_third(t, tile, b * _TILE, g * words, (g + 1) * words, planes, places, g, group)
    _keep(sums, m * PANEL, t[0])
    _keep(sums, m1 * PANEL, t[1])
    _keep(sums, m2 * PANEL, t[2])
    _keep(sums, m3 * PANEL, t[3])


@piece
def _turn(codes, n, length, chunk, count, is_eight, tile):  # type: ignore[no-untyped-def]
    """32 rows, from the n-th on, of `count` blocks."""
    for half in range(2):
        row = (n + SIZE * half) * length
        for b in range(count):
            to = (half * _CHUNK + b) * _TILE
            if is_eight:
                at = row + (chunk + b) * COLUMNS
                turn_raised(codes, at, length, tile, to)
                turn_raised(codes, at + BYTES, length, tile, to + BYTES)
            else:
                turn_words(codes, row + (chunk + b) * BYTES, length, tile, to)


@piece
def _tables(scales, zeros, is_there, n, sharing, groups, first, count, to_scales, to_zeros):  # type: ignore[no-untyped-def]
    """Scales and zero points of 32 rows and `count` groups, those of a group side by side."""
    for r in range(PANEL):
        at = (n + r) // sharing * groups + first
        for g in range(count):
            put(to_scales, g * PANEL + r, get(scales, at + g))
        for g in range(count):
            put(to_zeros, g * PANEL + r, float(byte_of(zeros, (n + r) * groups + first + g)) if is_there else 0.0)


# planes, bias (float32; 0: none), codes, scales, zeros (0: none), out; tokens, out in bfloat16, rows, groups, blocks of
# 32 columns of a group, rows that share scales; rows per turn


@piece
def _product(words, kind, codes_kind, is_eight):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    planes, bias, is_raised = floats(get(a, 0)), floats(get(a, 1)), get(a, 1) != 0
    codes, scales = like(codes_kind, get(a, 2)), like(kind, get(a, 3))
    zeros, is_there, out = like(codes_kind, get(a, 4)), get(a, 4) != 0, get(a, 5)
    tokens, is_short, rows, groups, size = get(a, 6), get(a, 7) != 0, get(a, 8), get(a, 9), get(a, 10)
    sharing, step = get(a, 11), get(a, 12)
    columns = groups * size * BLOCK
    blocks, length = columns // COLUMNS, columns if is_eight else columns // 2
    per = 1 if is_eight else COLUMNS // (size * BLOCK)
    tile, sums = stack(2 * _CHUNK * _TILE // 4), stack(tokens * PANEL)
    to_scales, to_zeros = stack(_CHUNK * per * PANEL), stack(_CHUNK * per * PANEL)
    none = wide_splat(0.0)
    while True:
        begin = next_of(words) * step
        if begin >= rows:
            return
        for first in range(begin, min(begin + step, rows), PANEL):
            # The last panel begins where it has rows enough: some are computed once more, and are the same.
            n = min(first, rows - PANEL)
            for m in range(0, tokens * PANEL, SIZE):
                wide_store(sums, m, none)
            for chunk in range(0, blocks, _CHUNK):
                count = min(_CHUNK, blocks - chunk)
                _turn(codes, n, length, chunk, count, is_eight, tile)
                if not is_eight:
                    _tables(scales, zeros, is_there, n, sharing, groups, chunk * per, count * per, to_scales, to_zeros)
                for m in range(0, tokens, 4):
                    _four_tokens(
                        planes, blocks, m, tokens - 1, chunk, count, tile, to_scales, to_zeros, is_eight, per, sums
                    )
            for r in range(PANEL):
                put(to_zeros, r, get(bias, n + r) if is_raised else 0.0)
                put(to_scales, r, get(scales, (n + r) // sharing) if is_eight else 1.0)
            for m in range(tokens):
                for r in range(0, PANEL, SIZE):
                    v = wide_fma(wide_load(sums, m * PANEL + r), wide_load(to_scales, r), wide_load(to_zeros, r))
                    if is_short:
                        wide_store(brains(out), m * rows + n + r, v)
                    else:
                        wide_store(floats(out), m * rows + n + r, v)


# -- entries -------------------------------------------------------------------------------------


def entries(source: str) -> dict[tuple[str, Any], Any]:
    """As in `kernels.py`; the dtype is that of the scales, or of the tokens."""

    def tokens_int8(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _tokens(words, True)

    def tokens_int4(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _tokens(words, False)

    def panels_int8_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, floats(0), int8s(0), True)

    def panels_int8_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, halves(0), int8s(0), True)

    def panels_int8_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, brains(0), int8s(0), True)

    def panels_int4_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, floats(0), int4s(0), False)

    def panels_int4_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, halves(0), int4s(0), False)

    def panels_int4_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, brains(0), int4s(0), False)

    return {
        ("tokens_int8", torch.bfloat16): tokens_int8,
        ("tokens_int4", torch.bfloat16): tokens_int4,
        ("panels_int8", torch.float32): panels_int8_floats,
        ("panels_int8", torch.float16): panels_int8_halves,
        ("panels_int8", torch.bfloat16): panels_int8_brains,
        ("panels_int4", torch.float32): panels_int4_floats,
        ("panels_int4", torch.float16): panels_int4_halves,
        ("panels_int4", torch.bfloat16): panels_int4_brains,
    }
