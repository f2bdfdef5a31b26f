"""The product of bfloat16 tokens with codes of 4 or 8 bits, in whole numbers.

A token becomes whole numbers of 23 bits, in units of a power of two that its largest number sets, and those three bytes
each: its planes. What is lost is 2^-23 of the largest number, as a sum in float32 would lose it. The codes' bytes are
multiplied by each plane as they stand in memory; sums of bytes are exact, and have an order by the columns alone.

The matrix's arguments are those of `quantized.py`. Columns are taken 128 at a time, so a row has a multiple of that.
What a row reads is asked for some rows ahead: a processor does not see by itself where four rows go on.
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
    fetch_element,
    front_bytes,
    front_sixteen,
    high_nibbles,
    larger,
    largest_of,
    low_nibbles,
    nearest,
    nearest_256th,
    number_of,
    numbers,
    of_pairs,
    quarter_store,
    raised,
    shares,
    sixteen,
    size_bits,
    times_256,
    whole_chosen,
    whole_load,
    whole_minus,
    whole_plus,
    whole_splat,
    whole_store,
    whole_times,
)
from cellar.ops.cpu.lanes import brains, floats, get, halves, like, longs, next_of, put, stack
from cellar.ops.cpu.pieces import piece
from cellar.ops.cpu.wide import int4s, int8s, wide_fma, wide_splat, wide_times, wide_total

BYTES = 64
"""Of a register."""

PLANES = 7
"""Registers for COLUMNS numbers of a token: two for each of three bytes, and one more."""

_ONES, _HIGHEST = 0x01010101, 0x80808080
_BITS = 22
_AHEAD = 4096
"""Bytes that are asked for before they are needed, at least."""


@piece
def _exponent(x, at, columns):  # type: ignore[no-untyped-def]
    """Its bits, of the largest of a token's numbers."""
    most = whole_splat(0)
    for c in range(0, columns, SIZE):
        most = larger(most, size_bits(bits(sixteen(x, at + c))))
    return largest_of(most) >> 23


@piece
def up_to(exponent, bits):  # type: ignore[no-untyped-def]
    """What numbers are multiplied by to become whole ones below 2^bits, the largest of which has this exponent; 0 where
    all are next to nothing, or one is no number.
    """
    return number_of((254 + bits - 1 - exponent) << 23 if bits < exponent < 255 else 0)


@piece
def unit_of(exponent, bits):  # type: ignore[no-untyped-def]
    """The other way: no number where there was one that is none."""
    if exponent == 255:
        return number_of(0x7FC00000)
    return number_of((exponent - bits + 1) << 23 if exponent > bits else 0)


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
    up, ones = wide_splat(up_to(exponent, _BITS)), whole_splat(_ONES)
    for c in range(0, columns, COLUMNS):
        for k in range(0, BYTES, SIZE):
            first, second = of_pairs(x, at + c + 2 * k)
            _into_bytes(first, up, planes, to + k)
            _into_bytes(second, up, planes, to + BYTES + k)
        whole_store(planes, to + 6 * BYTES, _whole_sums(ones, ones, planes, to))
        to += PLANES * BYTES
    return unit_of(exponent, _BITS)


@piece
def _put_singles(x, at, columns, planes, to, sums, where):  # type: ignore[no-untyped-def]
    """A token's planes as codes of 8 bits want them -> its unit. `sums` of each plane's bytes, times 128."""
    exponent = _exponent(x, at, columns)
    up, eights = wide_splat(up_to(exponent, _BITS)), whole_splat(_HIGHEST)
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
    return unit_of(exponent, _BITS)


@piece
def _ask(codes, scales, zeros, is_there, row, count, length, groups):  # type: ignore[no-untyped-def]
    """Have `count` rows' scales and zero points come into the cache, and `length` bytes of codes of each."""
    for k in range(0, count * groups, SIZE):
        fetch_element(scales, row * groups + k)
    if is_there:
        for k in range(0, count * groups, BYTES):
            fetch_byte(zeros, row * groups + k)
    for k in range(0, count * length, BYTES):
        fetch_byte(codes, row * length + k)


@piece
def _added(sum, codes, at, ahead, planes, to, zeros, scales, share, lifted):  # type: ignore[no-untyped-def]
    """The products of 128 codes of a row."""
    fetch_byte(codes, ahead)
    both = whole_load(codes, at)
    found = _whole_sums(low_nibbles(both), high_nibbles(both), planes, to)
    found = whole_minus(found, whole_times(whole_chosen(zeros, share), lifted))
    return wide_fma(numbers(found), chosen(scales, share), sum)


@piece
def _four_rows(  # type: ignore[no-untyped-def]
    planes, at, codes, row, steps, ahead, scales, zeros, is_there, grid, groups, per
):
    """-> the products of a token with four rows of 4 bits, in its unit. `grid`: where each one's scales begin."""
    g0, g1, g2, g3 = grid
    row1, row2, row3 = row + steps[0], row + steps[1], row + steps[2]
    s0 = s1 = s2 = s3 = wide_splat(0.0)
    z0 = z1 = z2 = z3 = whole_splat(0)
    for table in range(0, groups, SIZE):
        count = min(SIZE, groups - table)
        t0, t1 = front_sixteen(scales, g0 + table, count), front_sixteen(scales, g1 + table, count)
        t2, t3 = front_sixteen(scales, g2 + table, count), front_sixteen(scales, g3 + table, count)
        if is_there:
            z0, z1 = front_bytes(zeros, g0 + table, count), front_bytes(zeros, g1 + table, count)
            z2, z3 = front_bytes(zeros, g2 + table, count), front_bytes(zeros, g3 + table, count)
        share, first = shares(per), table // per
        for block in range(first, first + count // per):
            byte = block * BYTES
            to, there = at + PLANES * byte, ahead + ROWS * byte
            lifted = whole_load(planes, to + 6 * BYTES)
            s0 = _added(s0, codes, row + byte, there, planes, to, z0, t0, share, lifted)
            s1 = _added(s1, codes, row1 + byte, there + 1 * BYTES, planes, to, z1, t1, share, lifted)
            s2 = _added(s2, codes, row2 + byte, there + 2 * BYTES, planes, to, z2, t2, share, lifted)
            s3 = _added(s3, codes, row3 + byte, there + 3 * BYTES, planes, to, z3, t3, share, lifted)
            share = whole_plus(share, whole_splat(per))
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
def _four_rows_of_eight(planes, at, codes, row, steps, ahead, length, lifted, where):  # type: ignore[no-untyped-def]
    """-> the products of a token with four rows of 8 bits, in its unit, without their scales."""
    row1, row2, row3 = row + steps[0], row + steps[1], row + steps[2]
    none = whole_splat(0)
    s0 = s1 = s2 = s3 = (none, none, none)
    for byte in range(0, length, COLUMNS):
        to, there = at + byte // COLUMNS * PLANES * BYTES, ahead + ROWS * byte
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


@piece
def _give(out, is_short, at, number, bias, is_raised, row):  # type: ignore[no-untyped-def]
    """A product, with the bias of its row, into float32 or bfloat16."""
    if is_raised:
        number += get(bias, row)
    if is_short:
        put(brains(out), at, number)
    else:
        put(floats(out), at, number)


# x (bfloat16), bias (float32; 0: none), codes, scales, zeros (0: none), out; tokens, out in bfloat16, rows, groups,
# blocks of a group, rows that share scales; rows per turn


@piece
def _product(words, kind, codes_kind, is_eight):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    x, bias, is_raised = brains(get(a, 0)), floats(get(a, 1)), get(a, 1) != 0
    codes, scales = like(codes_kind, get(a, 2)), like(kind, get(a, 3))
    zeros, is_there, out = like(codes_kind, get(a, 4)), get(a, 4) != 0, get(a, 5)
    tokens, is_short, rows, groups, size = get(a, 6), get(a, 7) != 0, get(a, 8), get(a, 9), get(a, 10)
    sharing, step = get(a, 11), get(a, 12)
    columns = groups * size * BLOCK
    length, one = columns if is_eight else columns // 2, columns // COLUMNS * PLANES * BYTES
    per = max(1, COLUMNS // (size * BLOCK))
    planes, lifted, units = stack(tokens * one // 4), stack(tokens * 3 * SIZE), stack(tokens)
    lead = ROWS * (1 + _AHEAD // (ROWS * length))
    is_ready = False
    begin = next_of(words) * step
    while begin < rows:
        # The next turn is taken before this one begins: what is asked for goes on there.
        end, following = min(begin + step, rows), next_of(words) * step
        if not is_ready:
            _ask(codes, scales, zeros, is_there, begin, min(lead, rows - begin), length, groups)
            for m in range(tokens):
                if is_eight:
                    unit = _put_singles(x, m * columns, columns, planes, m * one, lifted, m * 3 * BYTES)
                else:
                    unit = _put_pairs(x, m * columns, columns, planes, m * one)
                put(units, m, unit)
            is_ready = True
        for n in range(begin, end, ROWS):
            then = min(n + lead if n + lead < end else following + n + lead - end, rows - 1)
            _ask(codes, scales, zeros, is_there, then, ROWS, 0, groups)
            # The last row again where there are no more.
            last = rows - 1 - n
            n1, n2, n3 = min(1, last), min(2, last), min(3, last)
            steps = n1 * length, n2 * length, n3 * length
            if sharing == 1:  # a division takes as long as a twentieth of a row
                grid = (n * groups, (n + n1) * groups, (n + n2) * groups, (n + n3) * groups)
            else:
                grid = (
                    n // sharing * groups,
                    (n + n1) // sharing * groups,
                    (n + n2) // sharing * groups,
                    (n + n3) // sharing * groups,
                )
            for m in range(tokens):
                unit = get(units, m)
                if is_eight:
                    s0, s1, s2, s3 = _four_rows_of_eight(
                        planes, m * one, codes, n * length, steps, then * length, length, lifted, m * 3 * BYTES
                    )
                    s0, s1 = s0 * get(scales, grid[0]), s1 * get(scales, grid[1])
                    s2, s3 = s2 * get(scales, grid[2]), s3 * get(scales, grid[3])
                else:
                    s0, s1, s2, s3 = _four_rows(
                        planes, m * one, codes, n * length, steps, then * length, scales, zeros, is_there, grid, groups,
                        per,
                    )  # fmt: skip
                at = m * rows + n
                _give(out, is_short, at, s0 * unit, bias, is_raised, n)
                if last > 0:
                    _give(out, is_short, at + 1, s1 * unit, bias, is_raised, n + 1)
                if last > 1:
                    _give(out, is_short, at + 2, s2 * unit, bias, is_raised, n + 2)
                if last > 2:
                    _give(out, is_short, at + 3, s3 * unit, bias, is_raised, n + 3)
        begin = following


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
