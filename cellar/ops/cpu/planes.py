"""The product of bfloat16 tokens with codes of 4 or 8 bits, in whole numbers.

A token becomes whole numbers of 23 bits, in units of a power of two that its largest number sets, and those three bytes
each: its planes. What is lost is 2^-23 of the largest number, as a sum in float32 would lose it. The codes' bytes are
multiplied by each plane as they stand in memory; sums of bytes are exact, and have an order by the columns alone.

The arguments are those of `quantized.py`. Columns are taken 128 at a time, so a row has a multiple of that.
"""

from __future__ import annotations

from typing import Any

import torch

from cellar.ops.cpu.blocks import BLOCK, COLUMNS, ROWS, SIZE
from cellar.ops.cpu.dots import (
    bits,
    chosen,
    dot,
    fetch_byte,
    high_nibbles,
    larger,
    largest_of,
    low_nibbles,
    nearest,
    nearest_256th,
    number_of,
    numbers,
    of_pairs,
    put_int,
    quarter_store,
    raised,
    shares,
    sixteen,
    sixteen_bytes,
    size_bits,
    times_256,
    whole_chosen,
    whole_load,
    whole_minus,
    whole_splat,
    whole_store,
    whole_times,
)
from cellar.ops.cpu.lanes import brains, floats, get, halves, like, longs, next_of, put, stack
from cellar.ops.cpu.pieces import piece
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

BYTES = 64
"""Of a register."""

PLANES = 7
"""Registers for COLUMNS numbers of a token: two for each of three bytes, and one more."""

_ONES, _HIGHEST = 0x01010101, 0x80808080
_BITS = 22
_AHEAD = 8192
"""Bytes that are asked for before they are needed, at least."""


@piece
def _exponent(x, at, columns):  # type: ignore[no-untyped-def]
    """Its bits, of the largest of a token's numbers."""
    most = whole_splat(0)
    for c in range(0, columns, SIZE):
        most = larger(most, size_bits(bits(sixteen(x, at + c))))
    return largest_of(most) >> 23


@piece
def _up(exponent):  # type: ignore[no-untyped-def]
    """What numbers are multiplied by to become whole ones; 0 where all are next to nothing, or one is no number."""
    return number_of((254 + _BITS - 1 - exponent) << 23 if _BITS < exponent < 255 else 0)


@piece
def _unit(exponent):  # type: ignore[no-untyped-def]
    """The other way: no number where there was one that is none."""
    if exponent == 255:
        return number_of(0x7FC00000)
    return number_of((exponent - _BITS + 1) << 23 if exponent > _BITS else 0)


@piece
def _into_bytes(v, up, planes, to):  # type: ignore[no-untyped-def]
    """Sixteen numbers into three bytes each, the highest first."""
    q = nearest(wide_times(v, up))
    high = nearest_256th(q)
    top = nearest_256th(high)
    quarter_store(planes, to, top)
    quarter_store(planes, to + 2 * BYTES, whole_minus(high, times_256(top)))
    quarter_store(planes, to + 4 * BYTES, whole_minus(q, times_256(high)))


@piece
def _tops(sums, a, b, planes, at):  # type: ignore[no-untyped-def]
    """128 codes by the highest bytes of as many numbers; 2 and 4 registers further on are the others."""
    return dot(dot(sums, a, whole_load(planes, at)), b, whole_load(planes, at + BYTES))


@piece
def _whole_sums(a, b, planes, at):  # type: ignore[no-untyped-def]
    """128 codes of 4 bits by as many numbers."""
    sums = times_256(_tops(whole_splat(0), a, b, planes, at))
    sums = times_256(_tops(sums, a, b, planes, at + 2 * BYTES))
    return _tops(sums, a, b, planes, at + 4 * BYTES)


@piece
def _three_sums(sums, a, b, planes, at):  # type: ignore[no-untyped-def]
    """128 codes of 8 bits by each byte of as many numbers."""
    top, high, low = sums
    top = _tops(top, a, b, planes, at)
    return top, _tops(high, a, b, planes, at + 2 * BYTES), _tops(low, a, b, planes, at + 4 * BYTES)


@piece
def _put_pairs(x, at, columns, planes, to):  # type: ignore[no-untyped-def]
    """A token's planes as codes of 4 bits want them, with the sums of sixteen eights -> its unit."""
    exponent = _exponent(x, at, columns)
    up, ones = wide_splat(_up(exponent)), whole_splat(_ONES)
    for c in range(0, columns, COLUMNS):
        for k in range(0, BYTES, SIZE):
            first, second = of_pairs(x, at + c + 2 * k)
            _into_bytes(first, up, planes, to + k)
            _into_bytes(second, up, planes, to + BYTES + k)
        whole_store(planes, to + 6 * BYTES, _whole_sums(ones, ones, planes, to))
        to += PLANES * BYTES
    return _unit(exponent)


@piece
def _put_singles(x, at, columns, planes, to, sums, where):  # type: ignore[no-untyped-def]
    """A token's planes as codes of 8 bits want them -> its unit. `sums` of each plane's bytes, times 128."""
    exponent = _exponent(x, at, columns)
    up, eights = wide_splat(_up(exponent)), whole_splat(_HIGHEST)
    all_sums = whole_splat(0), whole_splat(0), whole_splat(0)
    for c in range(0, columns, COLUMNS):
        for k in range(0, 2 * BYTES, SIZE):
            _into_bytes(sixteen(x, at + c + k), up, planes, to + k)
        all_sums = _three_sums(all_sums, eights, eights, planes, to)
        to += PLANES * BYTES
    top, high, low = all_sums
    whole_store(sums, where, top)
    whole_store(sums, where + BYTES, high)
    whole_store(sums, where + 2 * BYTES, low)
    return _unit(exponent)


@piece
def _ahead(length):  # type: ignore[no-untyped-def]
    """How far before its use a byte is asked for: rows are too short for the processor to see where it goes on."""
    return ROWS * length * (1 + _AHEAD // (ROWS * length))


@piece
def _take(scales, at, zeros, is_there, zero_at, here, to, gap, count):  # type: ignore[no-untyped-def]
    """A row's scales, and `gap` numbers further on its zero points as whole numbers."""
    whole = count - count % SIZE
    for g in range(0, whole, SIZE):
        wide_store(here, to + g, sixteen(scales, at + g))
        if is_there:
            whole_store(here, 4 * (gap + to + g), sixteen_bytes(zeros, zero_at + g))
    for g in range(whole, count):
        put(here, to + g, get(scales, at + g))
        if is_there:
            put_int(here, gap + to + g, byte_of(zeros, zero_at + g))


@piece
def _added(sum, codes, at, ahead, planes, to, zeros, scales, share, g, lifted):  # type: ignore[no-untyped-def]
    """The products of 128 codes of a row."""
    fetch_byte(codes, ahead)
    both = whole_load(codes, at)
    found = _whole_sums(low_nibbles(both), high_nibbles(both), planes, to)
    found = whole_minus(found, whole_times(whole_chosen(zeros, share, g), lifted))
    return wide_fma(numbers(found), chosen(scales, share, g), sum)


@piece
def _four_rows(planes, at, codes, row, steps, here, stride, groups, per, length):  # type: ignore[no-untyped-def]
    """-> the products of a token with four rows of 4 bits, in its unit."""
    row1, row2, row3 = row + steps[0], row + steps[1], row + steps[2]
    ahead, share, gap = _ahead(length), shares(per), ROWS * stride
    s0 = s1 = s2 = s3 = wide_splat(0.0)
    for table in range(0, groups, SIZE):
        n1, n2, n3 = stride + table, 2 * stride + table, 3 * stride + table
        t0, t1, t2, t3 = wide_load(here, table), wide_load(here, n1), wide_load(here, n2), wide_load(here, n3)
        z0, z1 = whole_load(here, 4 * (gap + table)), whole_load(here, 4 * (gap + n1))
        z2, z3 = whole_load(here, 4 * (gap + n2)), whole_load(here, 4 * (gap + n3))
        for g in range(0, min(SIZE, groups - table), per):
            byte = (table + g) // per * BYTES
            to, there = at + PLANES * byte, row + ahead + ROWS * byte
            lifted = whole_load(planes, to + 6 * BYTES)
            s0 = _added(s0, codes, row + byte, there, planes, to, z0, t0, share, g, lifted)
            s1 = _added(s1, codes, row1 + byte, there + 1 * BYTES, planes, to, z1, t1, share, g, lifted)
            s2 = _added(s2, codes, row2 + byte, there + 2 * BYTES, planes, to, z2, t2, share, g, lifted)
            s3 = _added(s3, codes, row3 + byte, there + 3 * BYTES, planes, to, z3, t3, share, g, lifted)
    return wide_total(s0), wide_total(s1), wide_total(s2), wide_total(s3)


@piece
def _of_eight(sums, codes, at, ahead, planes, to):  # type: ignore[no-untyped-def]
    """The products of 128 codes of a row."""
    fetch_byte(codes, ahead)
    fetch_byte(codes, ahead + BYTES)
    return _three_sums(sums, raised(whole_load(codes, at)), raised(whole_load(codes, at + BYTES)), planes, to)


@piece
def _number(sums, lifted, where):  # type: ignore[no-untyped-def]
    top, high, low = sums
    v = numbers(whole_minus(low, whole_load(lifted, where + 2 * BYTES)))
    v = wide_fma(numbers(whole_minus(high, whole_load(lifted, where + BYTES))), wide_splat(256.0), v)
    return wide_total(wide_fma(numbers(whole_minus(top, whole_load(lifted, where))), wide_splat(65536.0), v))


@piece
def _four_rows_of_eight(planes, at, codes, row, steps, length, lifted, where):  # type: ignore[no-untyped-def]
    """-> the products of a token with four rows of 8 bits, in its unit, without their scales."""
    row1, row2, row3, ahead = row + steps[0], row + steps[1], row + steps[2], _ahead(length)
    none = whole_splat(0)
    s0 = s1 = s2 = s3 = (none, none, none)
    for byte in range(0, length, COLUMNS):
        to, there = at + byte // COLUMNS * PLANES * BYTES, row + ahead + ROWS * byte
        s0 = _of_eight(s0, codes, row + byte, there, planes, to)
        s1 = _of_eight(s1, codes, row1 + byte, there + 2 * BYTES, planes, to)
        s2 = _of_eight(s2, codes, row2 + byte, there + 4 * BYTES, planes, to)
        s3 = _of_eight(s3, codes, row3 + byte, there + 6 * BYTES, planes, to)
    return (
        _number(s0, lifted, where),
        _number(s1, lifted, where),
        _number(s2, lifted, where),
        _number(s3, lifted, where),
    )


# x (bfloat16), codes, scales, zeros (0: none), out; tokens, rows, groups, blocks of a group, rows that share scales;
# rows per turn


@piece
def _product(words, kind, codes_kind, is_eight):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    x, codes, scales = brains(get(a, 0)), like(codes_kind, get(a, 1)), like(kind, get(a, 2))
    zeros, is_there, out = like(codes_kind, get(a, 3)), get(a, 3) != 0, floats(get(a, 4))
    tokens, rows, groups, size = get(a, 5), get(a, 6), get(a, 7), get(a, 8)
    sharing, step = get(a, 9), get(a, 10)
    columns = groups * size * BLOCK
    length, one = columns if is_eight else columns // 2, columns // COLUMNS * PLANES * BYTES
    per, stride = max(1, COLUMNS // (size * BLOCK)), (groups + SIZE - 1) // SIZE * SIZE
    planes, lifted, units = stack(tokens * one // 4), stack(tokens * 3 * SIZE), stack(tokens)
    here = stack(2 * ROWS * stride)
    for g in range(0, 2 * ROWS * stride, SIZE):
        wide_store(here, g, wide_splat(0.0))
    is_ready = False
    while True:
        begin = next_of(words) * step
        if begin >= rows:
            return
        if not is_ready:
            for m in range(tokens):
                if is_eight:
                    unit = _put_singles(x, m * columns, columns, planes, m * one, lifted, m * 3 * BYTES)
                else:
                    unit = _put_pairs(x, m * columns, columns, planes, m * one)
                put(units, m, unit)
            is_ready = True
        for n in range(begin, min(begin + step, rows), ROWS):
            # The last row again where there are no more.
            last = rows - 1 - n
            for r in range(ROWS):
                row = n + min(r, last)
                _take(
                    scales, row // sharing * groups, zeros, is_there, row * groups, here, r * stride, ROWS * stride,
                    groups,
                )  # fmt: skip
            steps = min(1, last) * length, min(2, last) * length, min(3, last) * length
            for m in range(tokens):
                unit = get(units, m)
                if is_eight:
                    s0, s1, s2, s3 = _four_rows_of_eight(
                        planes, m * one, codes, n * length, steps, length, lifted, m * 3 * BYTES
                    )
                    s0, s1 = s0 * get(here, 0), s1 * get(here, stride)
                    s2, s3 = s2 * get(here, 2 * stride), s3 * get(here, 3 * stride)
                else:
                    s0, s1, s2, s3 = _four_rows(
                        planes, m * one, codes, n * length, steps, here, stride, groups, per, length
                    )
                put(out, m * rows + n, s0 * unit)
                if last > 0:
                    put(out, m * rows + n + 1, s1 * unit)
                if last > 1:
                    put(out, m * rows + n + 2, s2 * unit)
                if last > 2:
                    put(out, m * rows + n + 3, s3 * unit)


# -- entries -------------------------------------------------------------------------------------


def entries(source: str) -> dict[tuple[str, Any], Any]:
    """As in `kernels.py`; the dtype is that of the scales."""

    def whole_int8_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, floats(0), int8s(0), True)

    def whole_int8_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, halves(0), int8s(0), True)

    def whole_int8_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, brains(0), int8s(0), True)

    def whole_int4_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, floats(0), int4s(0), False)

    def whole_int4_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, halves(0), int4s(0), False)

    def whole_int4_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, brains(0), int4s(0), False)

    return {
        ("whole_int8", torch.float32): whole_int8_floats,
        ("whole_int8", torch.float16): whole_int8_halves,
        ("whole_int8", torch.bfloat16): whole_int8_brains,
        ("whole_int4", torch.float32): whole_int4_floats,
        ("whole_int4", torch.float16): whole_int4_halves,
        ("whole_int4", torch.bfloat16): whole_int4_brains,
    }
