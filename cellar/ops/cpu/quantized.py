"""The product with a quantized matrix: its codes are read once, in their bits.

The form of a kernel is that of `kernels.py`. A row of x has the same sums whatever stands beside it: numbers are
added within a group in sixteen lanes, in the order of the columns, then times its scale to those of the groups before,
and the lanes by halves at the end. A few tokens are multiplied by numbers as they are decoded; for more these are
decoded into a tile first, of whole rows, or where sixteen lanes are two registers of parts (`eights.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from cellar.ops.cpu.blocks import BLOCK, FOUR, ROWS, SIZE
from cellar.ops.cpu.eights import TOGETHER, decode, part_size, rows_by_eights, zero_of
from cellar.ops.cpu.lanes import (
    WIDTH,
    brains,
    exponents,
    floats,
    get,
    halves,
    like,
    load,
    longs,
    next_of,
    put,
    stack,
    store,
)
from cellar.ops.cpu.pieces import piece
from cellar.ops.cpu.wide import (
    decoded,
    fetch,
    fp8s,
    int4s,
    int8s,
    is_one_register,
    mxfp4s,
    wide_fma,
    wide_load,
    wide_splat,
    wide_store,
    wide_times,
    wide_total,
)

AHEAD = 256
"""Blocks that are asked for before they are needed, at least."""


@piece
def _take_scales(source, at, target, to, count):  # type: ignore[no-untyped-def]
    whole = count - count % WIDTH
    for d in range(0, whole, WIDTH):
        store(target, to + d, load(source, at + d))
    for d in range(whole, count):
        put(target, to + d, get(source, at + d))


@piece
def _ahead(blocks):  # type: ignore[no-untyped-def]
    """How far before its use a block is asked for: rows are too short for the processor to see where it goes on."""
    return ROWS * blocks * (1 + AHEAD // (ROWS * blocks))


@piece
def _one_token(x, codes, at, step, scales, zeros, is_there, zero_at, zero_step, groups, size):  # type: ignore[no-untyped-def]
    """-> the products of x with four rows. at, zero_at: of the first row, in blocks and groups; step, zero_step: from
    there to the other three.
    """
    at1, at2, at3 = at + step[0], at + step[1], at + step[2]
    ahead = _ahead(groups * size)
    z1, z2, z3 = zero_at + zero_step[0], zero_at + zero_step[1], zero_at + zero_step[2]
    sum0 = sum1 = sum2 = sum3 = wide_splat(0.0)
    for g in range(groups):
        zero0, zero1 = zero_of(zeros, is_there, zero_at + g), zero_of(zeros, is_there, z1 + g)
        zero2, zero3 = zero_of(zeros, is_there, z2 + g), zero_of(zeros, is_there, z3 + g)
        s0 = s1 = s2 = s3 = wide_splat(0.0)
        for b in range(g * size, g * size + size):
            fetch(codes, ahead + at + b)
            fetch(codes, ahead + at1 + b)
            fetch(codes, ahead + at2 + b)
            fetch(codes, ahead + at3 + b)
            low, high = wide_load(x, BLOCK * b), wide_load(x, BLOCK * b + SIZE)
            v, w = decoded(codes, at + b, zero0)
            s0 = wide_fma(high, w, wide_fma(low, v, s0))
            v, w = decoded(codes, at1 + b, zero1)
            s1 = wide_fma(high, w, wide_fma(low, v, s1))
            v, w = decoded(codes, at2 + b, zero2)
            s2 = wide_fma(high, w, wide_fma(low, v, s2))
            v, w = decoded(codes, at3 + b, zero3)
            s3 = wide_fma(high, w, wide_fma(low, v, s3))
        sum0 = wide_fma(s0, wide_splat(get(scales, g)), sum0)
        sum1 = wide_fma(s1, wide_splat(get(scales, groups + g)), sum1)
        sum2 = wide_fma(s2, wide_splat(get(scales, 2 * groups + g)), sum2)
        sum3 = wide_fma(s3, wide_splat(get(scales, 3 * groups + g)), sum3)
    return wide_total(sum0), wide_total(sum1), wide_total(sum2), wide_total(sum3)


@piece
def _few_tokens(x, at0, at1, at2, at3, codes, at, zeros, is_there, zero_at, scales, row, groups, size):  # type: ignore[no-untyped-def]
    """-> the products of four rows of x with one row of the matrix, as `_one_token` has them."""
    ahead = _ahead(groups * size)
    a0 = a1 = a2 = a3 = wide_splat(0.0)
    for g in range(groups):
        zero = zero_of(zeros, is_there, zero_at + g)
        s0 = s1 = s2 = s3 = wide_splat(0.0)
        for b in range(g * size, g * size + size):
            fetch(codes, ahead + at + b)
            v, w = decoded(codes, at + b, zero)
            d, e = BLOCK * b, BLOCK * b + SIZE
            s0 = wide_fma(wide_load(x, at0 + e), w, wide_fma(wide_load(x, at0 + d), v, s0))
            s1 = wide_fma(wide_load(x, at1 + e), w, wide_fma(wide_load(x, at1 + d), v, s1))
            s2 = wide_fma(wide_load(x, at2 + e), w, wide_fma(wide_load(x, at2 + d), v, s2))
            s3 = wide_fma(wide_load(x, at3 + e), w, wide_fma(wide_load(x, at3 + d), v, s3))
        scale = wide_splat(get(scales, row * groups + g))
        a0, a1, a2, a3 = (
            wide_fma(s0, scale, a0),
            wide_fma(s1, scale, a1),
            wide_fma(s2, scale, a2),
            wide_fma(s3, scale, a3),
        )
    return wide_total(a0), wide_total(a1), wide_total(a2), wide_total(a3)


@piece
def _four_tokens(x, at0, at1, at2, at3, tile, first, second, scales, row, groups, size):  # type: ignore[no-untyped-def]
    """-> the products of four rows of x with two rows of the tile, as `_one_token` has them."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = wide_splat(0.0)
    for g in range(groups):
        s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = wide_splat(0.0)
        for d in range(g * size * BLOCK, (g + 1) * size * BLOCK, SIZE):
            v, w = wide_load(tile, first + d), wide_load(tile, second + d)
            y = wide_load(x, at0 + d)
            s0, t0 = wide_fma(y, v, s0), wide_fma(y, w, t0)
            y = wide_load(x, at1 + d)
            s1, t1 = wide_fma(y, v, s1), wide_fma(y, w, t1)
            y = wide_load(x, at2 + d)
            s2, t2 = wide_fma(y, v, s2), wide_fma(y, w, t2)
            y = wide_load(x, at3 + d)
            s3, t3 = wide_fma(y, v, s3), wide_fma(y, w, t3)
        one, other = wide_splat(get(scales, row * groups + g)), wide_splat(get(scales, (row + 1) * groups + g))
        a0, a1, a2, a3 = wide_fma(s0, one, a0), wide_fma(s1, one, a1), wide_fma(s2, one, a2), wide_fma(s3, one, a3)
        b0, b1, b2, b3 = (
            wide_fma(t0, other, b0), wide_fma(t1, other, b1), wide_fma(t2, other, b2), wide_fma(t3, other, b3)
        )  # fmt: skip
    return (
        wide_total(a0), wide_total(a1), wide_total(a2), wide_total(a3),
        wide_total(b0), wide_total(b1), wide_total(b2), wide_total(b3),
    )  # fmt: skip


# x (by eights as `rows_by_eights` has it), codes, scales, zeros (0: none), out; tokens, rows, groups, blocks of one,
# rows that share scales; rows per turn


@piece
def _product(words, kind, codes_kind):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    x, codes, scales = floats(get(a, 0)), like(codes_kind, get(a, 1)), like(kind, get(a, 2))
    zeros, is_there, out = like(codes_kind, get(a, 3)), get(a, 3) != 0, floats(get(a, 4))
    tokens, rows, groups, size = get(a, 5), get(a, 6), get(a, 7), get(a, 8)
    sharing, step = get(a, 9), get(a, 10)
    blocks = groups * size
    columns = blocks * BLOCK
    here = stack(ROWS * groups + WIDTH)  # the scales
    by_tile, by_eights = tokens > FOUR, tokens > FOUR and not is_one_register()
    tile = stack(ROWS * (part_size(groups, size) if by_eights else columns) if by_tile else WIDTH)
    sums = stack((min(tokens, TOGETHER) + FOUR - 1) * ROWS * SIZE if by_eights else WIDTH)
    while True:
        begin = next_of(words) * step
        if begin >= rows:
            return
        for n in range(begin, min(begin + step, rows), ROWS):
            # The last row again where there are no more.
            last = rows - 1 - n
            for r in range(ROWS):
                _take_scales(scales, (n + min(r, last)) // sharing * groups, here, r * groups, groups)
            if tokens == 1:
                r1, r2, r3 = min(1, last), min(2, last), min(3, last)
                # Zero points are each row's own (`takes`).
                to_rows = (r1 * blocks, r2 * blocks, r3 * blocks)
                to_zeros = (r1 * groups, r2 * groups, r3 * groups)
                s0, s1, s2, s3 = _one_token(
                    x, codes, n * blocks, to_rows, here, zeros, is_there, n * groups, to_zeros, groups, size
                )
                put(out, n, s0)
                if last > 0:
                    put(out, n + 1, s1)
                if last > 1:
                    put(out, n + 2, s2)
                if last > 2:
                    put(out, n + 3, s3)
            elif not by_tile:
                m1, m2, m3 = min(1, tokens - 1), min(2, tokens - 1), min(3, tokens - 1)
                for r in range(min(ROWS, last + 1)):
                    a0, a1, a2, a3 = _few_tokens(
                        x, 0, m1 * columns, m2 * columns, m3 * columns,
                        codes, (n + r) * blocks, zeros, is_there, (n + r) * groups, here, r, groups, size,
                    )  # fmt: skip
                    put(out, n + r, a0)
                    put(out, m1 * rows + n + r, a1)
                    put(out, m2 * rows + n + r, a2)
                    put(out, m3 * rows + n + r, a3)
            elif by_eights:
                for m in range(0, tokens, TOGETHER):
                    rows_by_eights(
                        x, codes, _ahead(blocks), here, zeros, is_there, out, n, last, m, min(TOGETHER, tokens - m),
                        rows, groups, size, tile, sums,
                    )  # fmt: skip
            else:
                for r in range(ROWS):
                    row = n + min(r, last)
                    decode(
                        codes, row * blocks, _ahead(blocks), zeros, is_there, row * groups, groups, size,
                        tile, r * columns,
                    )  # fmt: skip
                for m in range(0, tokens, 4):
                    most = tokens - 1 - m
                    at, to = m * columns, m * rows + n
                    m1, m2, m3 = min(1, most), min(2, most), min(3, most)
                    for r in range(0, ROWS, 2):
                        if r <= last:
                            a0, a1, a2, a3, b0, b1, b2, b3 = _four_tokens(
                                x, at, at + m1 * columns, at + m2 * columns, at + m3 * columns,
                                tile, r * columns, (r + 1) * columns, here, r, groups, size,
                            )  # fmt: skip
                            put(out, to + r, a0)
                            put(out, to + m1 * rows + r, a1)
                            put(out, to + m2 * rows + r, a2)
                            put(out, to + m3 * rows + r, a3)
                            if r < last:
                                put(out, to + r + 1, b0)
                                put(out, to + m1 * rows + r + 1, b1)
                                put(out, to + m2 * rows + r + 1, b2)
                                put(out, to + m3 * rows + r + 1, b3)


# codes, scales, zeros (0: none), out (bfloat16); rows, groups, blocks of a group, rows that share scales; rows per turn


@piece
def _expansion(words, kind, codes_kind):  # type: ignore[no-untyped-def]
    """The numbers themselves, rounded; of codes with 4 bits a block has the low bits first."""
    a = longs(get(words, 1))
    codes, scales, zeros = like(codes_kind, get(a, 0)), like(kind, get(a, 1)), like(codes_kind, get(a, 2))
    is_there, out = get(a, 2) != 0, like(brains(0), get(a, 3))
    rows, groups, size, sharing, step = get(a, 4), get(a, 5), get(a, 6), get(a, 7), get(a, 8)
    while True:
        begin = next_of(words) * step
        if begin >= rows:
            return
        for n in range(begin, min(begin + step, rows)):
            for g in range(groups):
                zero = zero_of(zeros, is_there, n * groups + g)
                scale = wide_splat(get(scales, n // sharing * groups + g))
                for b in range((n * groups + g) * size, (n * groups + g + 1) * size):
                    fetch(codes, b + AHEAD)
                    v, w = decoded(codes, b, zero)
                    wide_store(out, BLOCK * b, wide_times(v, scale))
                    wide_store(out, BLOCK * b + SIZE, wide_times(w, scale))


# -- entries -------------------------------------------------------------------------------------


def entries(source: str) -> dict[tuple[str, Any], Any]:
    """As in `kernels.py`; the dtype is that of the scales."""

    def product_int8_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, floats(0), int8s(0))

    def product_int8_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, halves(0), int8s(0))

    def product_int8_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, brains(0), int8s(0))

    def product_int4_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, floats(0), int4s(0))

    def product_int4_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, halves(0), int4s(0))

    def product_int4_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, brains(0), int4s(0))

    def product_fp8_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, floats(0), fp8s(0))

    def product_fp8_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, halves(0), fp8s(0))

    def product_fp8_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, brains(0), fp8s(0))

    def product_mxfp4_exponents(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, exponents(0), mxfp4s(0))

    def expansion_int8_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _expansion(words, floats(0), int8s(0))

    def expansion_int8_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _expansion(words, halves(0), int8s(0))

    def expansion_int8_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _expansion(words, brains(0), int8s(0))

    def expansion_int4_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _expansion(words, floats(0), int4s(0))

    def expansion_int4_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _expansion(words, halves(0), int4s(0))

    def expansion_int4_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _expansion(words, brains(0), int4s(0))

    def expansion_fp8_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _expansion(words, floats(0), fp8s(0))

    def expansion_fp8_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _expansion(words, halves(0), fp8s(0))

    def expansion_fp8_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _expansion(words, brains(0), fp8s(0))

    def expansion_mxfp4_exponents(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _expansion(words, exponents(0), mxfp4s(0))

    return {
        ("product_int8", torch.float32): product_int8_floats,
        ("product_int8", torch.float16): product_int8_halves,
        ("product_int8", torch.bfloat16): product_int8_brains,
        ("product_int4", torch.float32): product_int4_floats,
        ("product_int4", torch.float16): product_int4_halves,
        ("product_int4", torch.bfloat16): product_int4_brains,
        ("product_fp8", torch.float32): product_fp8_floats,
        ("product_fp8", torch.float16): product_fp8_halves,
        ("product_fp8", torch.bfloat16): product_fp8_brains,
        ("product_mxfp4", torch.uint8): product_mxfp4_exponents,
        ("expansion_int8", torch.float32): expansion_int8_floats,
        ("expansion_int8", torch.float16): expansion_int8_halves,
        ("expansion_int8", torch.bfloat16): expansion_int8_brains,
        ("expansion_int4", torch.float32): expansion_int4_floats,
        ("expansion_int4", torch.float16): expansion_int4_halves,
        ("expansion_int4", torch.bfloat16): expansion_int4_brains,
        ("expansion_fp8", torch.float32): expansion_fp8_floats,
        ("expansion_fp8", torch.float16): expansion_fp8_halves,
        ("expansion_fp8", torch.bfloat16): expansion_fp8_brains,
        ("expansion_mxfp4", torch.uint8): expansion_mxfp4_exponents,
    }
