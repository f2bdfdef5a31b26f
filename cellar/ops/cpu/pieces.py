"""Pieces of several kernels of the CPU: heads are turned and copied, rows of a cache scored, decoded and summed."""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cellar.ops.cpu.dots import fetch_byte
from cellar.ops.cpu.lanes import (
    WIDTH,
    brains,
    codes,
    e4m3,
    exponents,
    fma,
    front,
    get,
    greater,
    high,
    largest,
    load,
    low,
    power,
    put,
    rounded,
    splat,
    store,
    total,
    totals,
)

LEAST = -1.0e30

LINE = 64
"""Bytes that come into the processor's cache together."""


def piece(function: Any) -> Any:
    """A function that kernels call."""
    return njit(function, error_model="numpy", boundscheck=False)


@piece
def turn(source, at, target, to, kind, cos_sin, row, half, dim, scale):  # type: ignore[no-untyped-def]
    """Copy a head of `dim` elements, its first 2 * half turned by row `row` of the table, times `scale`."""
    scales = splat(scale)
    whole = half - half % WIDTH
    cos, sin = row * 2 * half, row * 2 * half + half
    for d in range(0, whole, WIDTH):
        c, s = load(cos_sin, cos + d), load(cos_sin, sin + d)
        x, y = load(source, at + d), load(source, at + half + d)
        store(target, to + d, rounded(kind, fma(x, c, splat(0.0) - y * s)) * scales)
        store(target, to + half + d, rounded(kind, fma(y, c, x * s)) * scales)
    for d in range(whole, half):
        c, s = get(cos_sin, cos + d), get(cos_sin, sin + d)
        x, y = get(source, at + d), get(source, at + half + d)
        put(target, to + d, rounded(kind, fma(x, c, -(y * s))) * scale)
        put(target, to + half + d, rounded(kind, fma(y, c, x * s)) * scale)
    copy(source, at + 2 * half, target, to + 2 * half, dim - 2 * half, scale)


@piece
def copy(source, at, target, to, count, scale):  # type: ignore[no-untyped-def]
    scales = splat(scale)
    whole = count - count % WIDTH
    for d in range(0, whole, WIDTH):
        store(target, to + d, load(source, at + d) * scales)
    for d in range(whole, count):
        put(target, to + d, get(source, at + d) * scale)


@piece
def ask(ahead, n, count):  # type: ignore[no-untyped-def]
    """Have rows n, n + 1 and so on, `count` of them, come into the processor's cache, of what is `ahead`: an address,
    the bytes of a row, and how many rows will be read there.
    """
    address, row, needed = ahead
    if n < needed:
        for byte in range(n * row, min(n + count, needed) * row, LINE):
            fetch_byte(codes(address), byte)


@piece
def widen(cache, at, begin, end, dim, rows, ahead):  # type: ignore[no-untyped-def]
    """Rows begin..end of one head in a chunk, the 0th at an element, as float32 [chunk, dim]."""
    one = types.float32(1.0)
    for n in range(begin, end):
        ask(ahead, n, 1)
        copy(cache, at + n * dim, rows, n * dim, dim, one)


@piece
def eight_scores(query, at, keys, k_at, dim, last):  # type: ignore[no-untyped-def]
    """Lane n is the query times the n-th key from k_at on; beyond `last` the last one's stands in their place."""
    r1, r2, r3 = k_at + min(1, last) * dim, k_at + min(2, last) * dim, k_at + min(3, last) * dim
    r4, r5, r6 = k_at + min(4, last) * dim, k_at + min(5, last) * dim, k_at + min(6, last) * dim
    r7 = k_at + min(7, last) * dim
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = splat(0.0)
    for d in range(0, dim - dim % WIDTH, WIDTH):
        x = load(query, at + d)
        s0 = fma(x, load(keys, k_at + d), s0)
        s1 = fma(x, load(keys, r1 + d), s1)
        s2 = fma(x, load(keys, r2 + d), s2)
        s3 = fma(x, load(keys, r3 + d), s3)
        s4 = fma(x, load(keys, r4 + d), s4)
        s5 = fma(x, load(keys, r5 + d), s5)
        s6 = fma(x, load(keys, r6 + d), s6)
        s7 = fma(x, load(keys, r7 + d), s7)
    return totals(s0, s1, s2, s3, s4, s5, s6, s7)


@piece
def tail_score(query, at, keys, k_at, dim):  # type: ignore[no-untyped-def]
    """The rest of a product: what is left of the dimensions behind the last whole lanes."""
    s = types.float32(0.0)
    for d in range(dim - dim % WIDTH, dim):
        s = fma(get(query, at + d), get(keys, k_at + d), s)
    return s


@piece
def score(query, at, keys, k_at, begin, end, dim, scores, ahead):  # type: ignore[no-untyped-def]
    """Write the scores of positions begin..end of a chunk, the last one again up to whole lanes; -> the largest."""
    largest_so_far = splat(LEAST)
    for o in range(begin, end, WIDTH):
        if ahead is not None:
            ask(ahead, o, WIDTH)
        s = eight_scores(query, at, keys, k_at + o * dim, dim, end - 1 - o)
        if dim % WIDTH:
            store(scores, o, s)
            for x in range(o, o + WIDTH):
                rest = tail_score(query, at, keys, k_at + min(x, end - 1) * dim, dim)
                put(scores, x, get(scores, x) + rest)
            s = load(scores, o)
        largest_so_far = greater(s, largest_so_far)
        store(scores, o, s)
    return largest(largest_so_far)


@piece
def weigh(scores, begin, end, top):  # type: ignore[no-untyped-def]
    """Scores s become 2^(s - top), 0 behind the end; -> their sum."""
    tops, weight = splat(top), splat(0.0)
    for o in range(begin, end, WIDTH):
        w = power(load(scores, o) - tops)
        if o + WIDTH > end:
            w = front(w, end - o)
        store(scores, o, w)
        weight = weight + w
    return total(weight)


@piece
def add_values(weights, begin, end, values, v_at, dim, sums, at, shrink, ahead):  # type: ignore[no-untyped-def]
    """sums * shrink + the weighted sum of the values begin..end, those of v_at being the 0th, dim elements each."""
    shrinks = splat(shrink)
    d = 0
    while d + 8 * WIDTH <= dim:
        o = at + d
        a0, a1 = load(sums, o) * shrinks, load(sums, o + 8) * shrinks
        a2, a3 = load(sums, o + 16) * shrinks, load(sums, o + 24) * shrinks
        a4, a5 = load(sums, o + 32) * shrinks, load(sums, o + 40) * shrinks
        a6, a7 = load(sums, o + 48) * shrinks, load(sums, o + 56) * shrinks
        for n in range(begin, end):
            if ahead is not None and d == 0:
                ask(ahead, n, 1)
            w = splat(get(weights, n))
            r = v_at + n * dim + d
            a0 = fma(w, load(values, r), a0)
            a1 = fma(w, load(values, r + 8), a1)
            a2 = fma(w, load(values, r + 16), a2)
            a3 = fma(w, load(values, r + 24), a3)
            a4 = fma(w, load(values, r + 32), a4)
            a5 = fma(w, load(values, r + 40), a5)
            a6 = fma(w, load(values, r + 48), a6)
            a7 = fma(w, load(values, r + 56), a7)
        store(sums, o, a0)
        store(sums, o + 8, a1)
        store(sums, o + 16, a2)
        store(sums, o + 24, a3)
        store(sums, o + 32, a4)
        store(sums, o + 40, a5)
        store(sums, o + 48, a6)
        store(sums, o + 56, a7)
        d += 8 * WIDTH
    while d + WIDTH <= dim:
        b0 = load(sums, at + d) * shrinks
        for n in range(begin, end):
            b0 = fma(splat(get(weights, n)), load(values, v_at + n * dim + d), b0)
        store(sums, at + d, b0)
        d += WIDTH
    while d < dim:
        b = get(sums, at + d) * shrink
        for n in range(begin, end):
            b = fma(get(weights, n), get(values, v_at + n * dim + d), b)
        put(sums, at + d, b)
        d += 1


# How the cache's rows are written (`ops/kv_format.py`).
PLAIN, FP8, INT4 = 0, 1, 2


@piece
def decode(cache, at, begin, end, chunk, dim, format, rows, ahead):  # type: ignore[no-untyped-def]
    """Rows begin..end of one head in a chunk that lies at byte `at`, as float32 [chunk, dim].

    Whole lanes are read and written: what is too much of a row stands behind it, where the next one is written.
    """
    raw = codes(cache + at)
    if format == FP8:
        factors = exponents(cache + at + chunk * dim)
        for n in range(begin, end):
            if ahead is not None:
                ask(ahead, n, 1)
            factor = splat(get(factors, n))
            for d in range(0, dim, WIDTH):
                store(rows, n * dim + d, e4m3(raw, n * dim + d) * factor)
        return
    half = dim // 2
    pairs = brains(cache + at + chunk * half)
    for n in range(begin, end):
        if ahead is not None:
            ask(ahead, n, 1)
        scale, least = splat(get(pairs, 4 * n)), splat(get(pairs, 4 * n + 1))
        for d in range(0, half, WIDTH):
            store(rows, n * dim + d, fma(low(raw, n * half + d), scale, least))
        scale, least = splat(get(pairs, 4 * n + 2)), splat(get(pairs, 4 * n + 3))
        for d in range(0, half, WIDTH):
            store(rows, n * dim + half + d, fma(high(raw, n * half + d), scale, least))
