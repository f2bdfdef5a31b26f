"""Products of more than a few tokens with codes, where a register holds eight numbers (AVX2, NEON).

Sums of four tokens and two rows in sixteen lanes would take all sixteen registers and more, so half of the lanes are
computed after the others: eight registers of sums, two of numbers, one of a token's. Some columns of four rows are
decoded into a tile that stays in the first cache, for all tokens, whose sums are put aside in between. Tokens lie in
the order in which they are read. All is added in the order of `quantized.py`, so every bit is as there.
"""

from __future__ import annotations

from cellar.ops.cpu.blocks import BLOCK, FOUR, ROWS, SIZE
from cellar.ops.cpu.lanes import WIDTH, fma, get, load, put, splat, store, total
from cellar.ops.cpu.pieces import piece
from cellar.ops.cpu.wide import byte_of, decoded, fetch, wide_store

PART = 512
"""Columns of a tile, at most: 8 KB."""

TOGETHER = 32
"""Tokens for which a tile is decoded once."""


@piece
def zero_of(zeros, is_there, index):  # type: ignore[no-untyped-def]
    """A group's zero point."""
    return byte_of(zeros, index) if is_there else 0


@piece
def decode(codes, at, ahead, zeros, is_there, zero_at, groups, size, tile, to):  # type: ignore[no-untyped-def]
    """Numbers of a row, without scales: `groups` of `size` blocks, from block and group `at` and `zero_at` on."""
    for g in range(groups):
        zero = zero_of(zeros, is_there, zero_at + g)
        for b in range(g * size, g * size + size):
            fetch(codes, ahead + at + b)
            v, w = decoded(codes, at + b, zero)
            wide_store(tile, to + BLOCK * b, v)
            wide_store(tile, to + BLOCK * b + SIZE, w)


@piece
def _sums(x, x_at, tile, first, second, from_, groups, group, is_whole, scales, one_at, other_at, sums, at):  # type: ignore[no-untyped-def]
    """Add the products of four tokens with two rows to their sums, in eight lanes from `from_` on. is_whole: a row is
    one group, of which this is a part: its scale comes at the end.
    """
    p0 = at + from_
    p1, p2, p3 = p0 + ROWS * SIZE, p0 + 2 * ROWS * SIZE, p0 + 3 * ROWS * SIZE
    a0, a1, a2, a3 = load(sums, p0), load(sums, p1), load(sums, p2), load(sums, p3)
    b0, b1, b2, b3 = load(sums, p0 + SIZE), load(sums, p1 + SIZE), load(sums, p2 + SIZE), load(sums, p3 + SIZE)
    for g in range(groups):
        if is_whole:
            s0, s1, s2, s3, t0, t1, t2, t3 = a0, a1, a2, a3, b0, b1, b2, b3
        else:
            s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = splat(0.0)
        for k in range(g * group // SIZE, (g + 1) * group // SIZE):
            d, e = k * SIZE + from_, x_at + k * FOUR * WIDTH
            v, w = load(tile, first + d), load(tile, second + d)
            y = load(x, e)
            s0, t0 = fma(y, v, s0), fma(y, w, t0)
            y = load(x, e + WIDTH)
            s1, t1 = fma(y, v, s1), fma(y, w, t1)
            y = load(x, e + 2 * WIDTH)
            s2, t2 = fma(y, v, s2), fma(y, w, t2)
            y = load(x, e + 3 * WIDTH)
            s3, t3 = fma(y, v, s3), fma(y, w, t3)
        if is_whole:
            a0, a1, a2, a3, b0, b1, b2, b3 = s0, s1, s2, s3, t0, t1, t2, t3
        else:
            one, other = splat(get(scales, one_at + g)), splat(get(scales, other_at + g))
            a0, a1, a2, a3 = fma(s0, one, a0), fma(s1, one, a1), fma(s2, one, a2), fma(s3, one, a3)
            b0, b1, b2, b3 = fma(t0, other, b0), fma(t1, other, b1), fma(t2, other, b2), fma(t3, other, b3)
    store(sums, p0, a0)
    store(sums, p1, a1)
    store(sums, p2, a2)
    store(sums, p3, a3)
    store(sums, p0 + SIZE, b0)
    store(sums, p1 + SIZE, b1)
    store(sums, p2 + SIZE, b2)
    store(sums, p3 + SIZE, b3)


@piece
def part_size(groups, size):  # type: ignore[no-untyped-def]
    """Columns that are decoded at once: whole groups, unless a row is one."""
    group = size * BLOCK
    return PART if groups == 1 else max(1, PART // group) * group


@piece
def rows_by_eights(  # type: ignore[no-untyped-def]
    x, codes, ahead, scales, zeros, is_there, out, n, last, begin, tokens, rows, groups, size, tile, sums
):
    """The products of up to TOGETHER tokens, from the `begin`-th on, with ROWS rows from the n-th on, of which the
    `last`-th is the last that is there. x: [fours of tokens, 2, columns / 16, 4, 8], lanes from 0 and from 8 on apart,
    zeros behind the last token. scales: of those rows; tile: ROWS x `part_size`; sums: [tokens + 3, ROWS, 16].
    """
    columns, part, is_whole = groups * size * BLOCK, part_size(groups, size), groups == 1
    group = columns // groups
    for k in range(0, (tokens + FOUR - 1) * ROWS * SIZE, WIDTH):
        store(sums, k, splat(0.0))
    for start in range(0, columns, part):
        count = min(part, columns - start)
        some, each = (1, count) if is_whole else (count // group, group)
        for r in range(ROWS):
            row = n + min(r, last)
            block, zero_at = (row * columns + start) // BLOCK, row * groups + start // group
            decode(codes, block, ahead, zeros, is_there, zero_at, some, each // BLOCK, tile, r * part)
        for m in range(0, tokens, FOUR):
            for r in range(0, ROWS, 2):
                one_at = r * groups + start // group
                for from_ in range(0, SIZE, WIDTH):
                    # Of sixteen columns four tokens have four times eight numbers in either half.
                    x_at = (begin + m) * columns + (from_ // WIDTH * columns + start) * FOUR // 2
                    _sums(
                        x, x_at, tile, r * part, (r + 1) * part, from_, some, each, is_whole,
                        scales, one_at, one_at + groups, sums, (m * ROWS + r) * SIZE,
                    )  # fmt: skip
    for m in range(tokens):
        for r in range(min(ROWS, last + 1)):
            at = (m * ROWS + r) * SIZE
            low, high = load(sums, at), load(sums, at + WIDTH)
            if is_whole:
                scale = splat(get(scales, r))
                low, high = fma(low, scale, splat(0.0)), fma(high, scale, splat(0.0))
            put(out, (begin + m) * rows + n + r, total(low + high))
