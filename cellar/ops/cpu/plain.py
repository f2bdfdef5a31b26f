"""The product of few tokens with a plain matrix of 16 bits, which is read once, as it lies.

The form of a kernel is that of `kernels.py`. A row of x has the same sums whatever stands beside it: sixteen lanes, in
the order of the columns, added by halves at the end. Of up to four tokens numbers are multiplied as they are widened;
for more of them those of four rows and some columns are widened first, and each is used for all tokens from there.
Numbers are asked for four rows ahead: rows are too short for the processor to see where it goes on.
"""

from __future__ import annotations

from typing import Any

import torch

from cellar.ops.cpu.blocks import ROWS, SIZE
from cellar.ops.cpu.dots import fetch_element, sixteen
from cellar.ops.cpu.lanes import brains, floats, get, halves, like, longs, next_of, put, stack
from cellar.ops.cpu.pieces import piece
from cellar.ops.cpu.wide import is_one_register, wide_fma, wide_load, wide_splat, wide_store, wide_total

FEW = 4
"""Tokens that are multiplied by numbers as they are widened."""

PART = 1024
"""Columns of four rows that are widened at once: 16 KB, beside 4 KB of each token."""


@piece
def _one_token(x, matrix, at0, at1, at2, at3, columns, ahead):  # type: ignore[no-untyped-def]
    """-> the products of x with four rows."""
    s0 = s1 = s2 = s3 = wide_splat(0.0)
    for d in range(0, columns, 2 * SIZE):
        fetch_element(matrix, at0 + d + ahead)
        fetch_element(matrix, at1 + d + ahead)
        fetch_element(matrix, at2 + d + ahead)
        fetch_element(matrix, at3 + d + ahead)
        for e in range(d, d + 2 * SIZE, SIZE):
            y = wide_load(x, e)
            s0 = wide_fma(y, sixteen(matrix, at0 + e), s0)
            s1 = wide_fma(y, sixteen(matrix, at1 + e), s1)
            s2 = wide_fma(y, sixteen(matrix, at2 + e), s2)
            s3 = wide_fma(y, sixteen(matrix, at3 + e), s3)
    return wide_total(s0), wide_total(s1), wide_total(s2), wide_total(s3)


@piece
def _few_tokens_by_one(x, at0, at1, at2, at3, matrix, at, columns, ahead):  # type: ignore[no-untyped-def]
    """-> the products of four rows of x with a row of the matrix."""
    s0 = s1 = s2 = s3 = wide_splat(0.0)
    for d in range(0, columns, 2 * SIZE):
        fetch_element(matrix, at + d + ahead)
        for e in range(d, d + 2 * SIZE, SIZE):
            v = sixteen(matrix, at + e)
            s0 = wide_fma(wide_load(x, at0 + e), v, s0)
            s1 = wide_fma(wide_load(x, at1 + e), v, s1)
            s2 = wide_fma(wide_load(x, at2 + e), v, s2)
            s3 = wide_fma(wide_load(x, at3 + e), v, s3)
    return wide_total(s0), wide_total(s1), wide_total(s2), wide_total(s3)


@piece
def _few_tokens(x, at0, at1, at2, at3, matrix, first, second, columns, ahead):  # type: ignore[no-untyped-def]
    """-> the products of four rows of x with two rows of the matrix: one after the other, where sums of both would take
    all registers.
    """
    if not is_one_register():
        s0, s1, s2, s3 = _few_tokens_by_one(x, at0, at1, at2, at3, matrix, first, columns, ahead)
        t0, t1, t2, t3 = _few_tokens_by_one(x, at0, at1, at2, at3, matrix, second, columns, ahead)
        return s0, s1, s2, s3, t0, t1, t2, t3
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = wide_splat(0.0)
    for d in range(0, columns, 2 * SIZE):
        fetch_element(matrix, first + d + ahead)
        fetch_element(matrix, second + d + ahead)
        for e in range(d, d + 2 * SIZE, SIZE):
            v, w = sixteen(matrix, first + e), sixteen(matrix, second + e)
            y = wide_load(x, at0 + e)
            s0, t0 = wide_fma(y, v, s0), wide_fma(y, w, t0)
            y = wide_load(x, at1 + e)
            s1, t1 = wide_fma(y, v, s1), wide_fma(y, w, t1)
            y = wide_load(x, at2 + e)
            s2, t2 = wide_fma(y, v, s2), wide_fma(y, w, t2)
            y = wide_load(x, at3 + e)
            s3, t3 = wide_fma(y, v, s3), wide_fma(y, w, t3)
    return (
        wide_total(s0), wide_total(s1), wide_total(s2), wide_total(s3),
        wide_total(t0), wide_total(t1), wide_total(t2), wide_total(t3),
    )  # fmt: skip


@piece
def _widen(matrix, at, count, tile, to, ahead):  # type: ignore[no-untyped-def]
    for d in range(0, count, 2 * SIZE):
        fetch_element(matrix, at + d + ahead)
        wide_store(tile, to + d, sixteen(matrix, at + d))
        wide_store(tile, to + d + SIZE, sixteen(matrix, at + d + SIZE))


@piece
def _four_tokens(x, at0, at1, at2, at3, tile, first, second, count, sums, s):  # type: ignore[no-untyped-def]
    """The products of four rows of x with two of the tile, added to eight sums of sixteen lanes each."""
    s0, s1 = wide_load(sums, s), wide_load(sums, s + SIZE)
    s2, s3 = wide_load(sums, s + 2 * SIZE), wide_load(sums, s + 3 * SIZE)
    t0, t1 = wide_load(sums, s + 4 * SIZE), wide_load(sums, s + 5 * SIZE)
    t2, t3 = wide_load(sums, s + 6 * SIZE), wide_load(sums, s + 7 * SIZE)
    for d in range(0, count, SIZE):
        v, w = wide_load(tile, first + d), wide_load(tile, second + d)
        y = wide_load(x, at0 + d)
        s0, t0 = wide_fma(y, v, s0), wide_fma(y, w, t0)
        y = wide_load(x, at1 + d)
        s1, t1 = wide_fma(y, v, s1), wide_fma(y, w, t1)
        y = wide_load(x, at2 + d)
        s2, t2 = wide_fma(y, v, s2), wide_fma(y, w, t2)
        y = wide_load(x, at3 + d)
        s3, t3 = wide_fma(y, v, s3), wide_fma(y, w, t3)
    wide_store(sums, s, s0)
    wide_store(sums, s + SIZE, s1)
    wide_store(sums, s + 2 * SIZE, s2)
    wide_store(sums, s + 3 * SIZE, s3)
    wide_store(sums, s + 4 * SIZE, t0)
    wide_store(sums, s + 5 * SIZE, t1)
    wide_store(sums, s + 6 * SIZE, t2)
    wide_store(sums, s + 7 * SIZE, t3)


# x, matrix, out (float32); tokens, rows, columns, numbers from one row of the matrix to the next; rows per turn


@piece
def _product(words, kind):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    x, matrix, out = floats(get(a, 0)), like(kind, get(a, 1)), floats(get(a, 2))
    tokens, rows, columns, row, step = get(a, 3), get(a, 4), get(a, 5), get(a, 6), get(a, 7)
    fours, ahead = (tokens + 3) // 4, ROWS * row
    tile = stack(ROWS * PART if tokens > FEW else SIZE)
    sums = stack(fours * ROWS * 4 * SIZE if tokens > FEW else SIZE)
    while True:
        begin = next_of(words) * step
        if begin >= rows:
            return
        for n in range(begin, min(begin + step, rows), ROWS):
            # The last row again where there are no more.
            last = rows - 1 - n
            r1, r2, r3 = min(1, last), min(2, last), min(3, last)
            at0, at1, at2, at3 = n * row, (n + r1) * row, (n + r2) * row, (n + r3) * row
            if tokens == 1:
                s0, s1, s2, s3 = _one_token(x, matrix, at0, at1, at2, at3, columns, ahead)
                put(out, n, s0)
                put(out, n + r1, s1)
                put(out, n + r2, s2)
                put(out, n + r3, s3)
            elif tokens <= FEW:
                m1, m2, m3 = min(1, tokens - 1), min(2, tokens - 1), min(3, tokens - 1)
                for pair in range(0, ROWS, 2):
                    if pair <= last:
                        one, other = n + pair, n + min(pair + 1, last)
                        a0, a1, a2, a3, b0, b1, b2, b3 = _few_tokens(
                            x, 0, m1 * columns, m2 * columns, m3 * columns,
                            matrix, one * row, other * row, columns, ahead,
                        )  # fmt: skip
                        put(out, one, a0)
                        put(out, m1 * rows + one, a1)
                        put(out, m2 * rows + one, a2)
                        put(out, m3 * rows + one, a3)
                        put(out, other, b0)
                        put(out, m1 * rows + other, b1)
                        put(out, m2 * rows + other, b2)
                        put(out, m3 * rows + other, b3)
            else:
                zero = wide_splat(0.0)
                for s in range(0, fours * ROWS * 4 * SIZE, SIZE):
                    wide_store(sums, s, zero)
                for part in range(0, columns, PART):
                    count = min(PART, columns - part)
                    _widen(matrix, at0 + part, count, tile, 0, ahead)
                    _widen(matrix, at1 + part, count, tile, PART, ahead)
                    _widen(matrix, at2 + part, count, tile, 2 * PART, ahead)
                    _widen(matrix, at3 + part, count, tile, 3 * PART, ahead)
                    for m in range(0, tokens, 4):
                        most = tokens - 1 - m
                        at = m * columns + part
                        m1, m2, m3 = min(1, most) * columns, min(2, most) * columns, min(3, most) * columns
                        s = m * ROWS * SIZE
                        _four_tokens(x, at, at + m1, at + m2, at + m3, tile, 0, PART, count, sums, s)
                        _four_tokens(
                            x, at, at + m1, at + m2, at + m3, tile, 2 * PART, 3 * PART, count, sums, s + 8 * SIZE
                        )
                for m in range(tokens):
                    s = (m // 4 * 4 * ROWS + m % 4) * SIZE
                    for r in range(min(ROWS, last + 1)):
                        put(out, m * rows + n + r, wide_total(wide_load(sums, s + 4 * r * SIZE)))


# -- entries -------------------------------------------------------------------------------------


def entries(source: str) -> dict[tuple[str, Any], Any]:
    """As in `kernels.py`; the dtype is that of the matrix."""

    def product_plain_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, halves(0))

    def product_plain_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words, brains(0))

    return {
        ("product_plain", torch.float16): product_plain_halves,
        ("product_plain", torch.bfloat16): product_plain_brains,
    }
