"""Decodes over K and V in 4 bits in whole numbers, where a processor multiplies bytes (VNNI).

A code is a byte without a sign. What it is multiplied by is a whole number of 15 bits, in units of the largest of them:
two bytes with a sign, 256 times the one and the other. Four products are added in one instruction. Scores: four codes
of each of sixteen positions stand side by side, for all queries that share them, and a register holds sixteen sums.

    q . k = unit scale (256 sum(high c) + sum(low c)) + least sum(q)     of each half of a head, c its codes

Values: the codes of four positions stand side by side, and a weight has the scale of its position in it, so that each
half has weights of its own; dimensions come in another order (`back_from_fours`). Numbers of a query are rounded by
2^-16 of the largest, and weights of a chunk likewise. That a key has 4 bits is worth 200 times as much in a score,
however much larger one number of a query is than the others: it is multiplied by what its dimension's code is off.
"""

from __future__ import annotations

from numba import types

from cellar.ops.cpu.blocks import SIZE
from cellar.ops.cpu.dots import (
    bits,
    dot,
    even_and_odd,
    high_nibbles,
    in_fours,
    larger,
    largest_of,
    low_nibbles,
    nearest,
    nearest_256th,
    number_of,
    numbers,
    of_pairs,
    quarter_store,
    size_bits,
    times_256,
    turn_words,
    whole_load,
    whole_minus,
    whole_plus,
    whole_splat,
    whole_store,
    word_splat,
)
from cellar.ops.cpu.lanes import brains, codes, get, put
from cellar.ops.cpu.pieces import LEAST, ask, piece
from cellar.ops.cpu.wide import wide_fma, wide_load, wide_splat, wide_store, wide_times, wide_total

MOST = 127 * 256
"""What two bytes with a sign hold."""
BYTES, CODES = 64, 128


@piece
def _unit(source, at, count):  # type: ignore[no-untyped-def]
    """What so many numbers are counted in, and its inverse: none, if any of them is none."""
    largest = whole_splat(0)
    for d in range(0, count, SIZE):
        largest = larger(largest, size_bits(bits(wide_load(source, at + d))))
    size = number_of(largest_of(largest))
    if size == types.float32(0.0):
        return size, size
    return size / types.float32(MOST), types.float32(MOST) / size


@piece
def _split(x, inverse, planes, high, low):  # type: ignore[no-untyped-def]
    """Sixteen numbers as two bytes each, at those places."""
    n = nearest(wide_times(x, wide_splat(inverse)))
    upper = nearest_256th(n)
    quarter_store(planes, high, upper)
    quarter_store(planes, low, whole_minus(n, times_256(upper)))


@piece
def split_query(row, dim, planes, g):  # type: ignore[no-untyped-def]
    """float32 [dim] as bytes, [high and low, dim] of query g; -> their unit, and the sum of each half."""
    unit, inverse = _unit(row, 0, dim)
    low = high = types.float32(0.0)
    at, half = 2 * g * dim, dim // 2
    for d in range(0, dim, SIZE):
        _split(wide_load(row, d), inverse, planes, at + d, at + dim + d)
    for d in range(half):
        low += get(row, d)
        high += get(row, half + d)
    return unit, low, high


@piece
def take_factors(base, row, chunk, begin, end, factors):  # type: ignore[no-untyped-def]
    """Scales of lower halves, their least numbers, and the same of upper halves: [4, chunk], 0 outside begin..end."""
    pairs = brains(base + chunk * row)
    for n in range(begin // SIZE * SIZE, end, SIZE):
        scales, leasts = of_pairs(pairs, 4 * n)
        more_scales, more_leasts = of_pairs(pairs, 4 * n + 2 * SIZE)
        low, high = even_and_odd(scales, more_scales)
        wide_store(factors, n, low)
        wide_store(factors, 2 * chunk + n, high)
        low, high = even_and_odd(leasts, more_leasts)
        wide_store(factors, chunk + n, low)
        wide_store(factors, 3 * chunk + n, high)
    for k in range(4):
        for n in range(begin // SIZE * SIZE, begin):
            put(factors, k * chunk + n, types.float32(0.0))
        for n in range(end, (end + SIZE - 1) // SIZE * SIZE):
            put(factors, k * chunk + n, types.float32(0.0))


@piece
def _products(planes, at, dim, turned, low_scales, high_scales):  # type: ignore[no-untyped-def]
    """A query's products with the codes of sixteen positions, in the query's unit."""
    half = dim // 2
    a = b = c = d = whole_splat(0)
    e = f = g = h = whole_splat(0)
    for w in range(0, half, 8):
        x, y = whole_load(turned, 32 * w), whole_load(turned, 32 * w + BYTES)
        a, b = dot(a, x, word_splat(planes, at + w)), dot(b, x, word_splat(planes, at + dim + w))
        c = dot(c, y, word_splat(planes, at + half + w))
        d = dot(d, y, word_splat(planes, at + dim + half + w))
        x, y = whole_load(turned, 32 * w + 2 * BYTES), whole_load(turned, 32 * w + 3 * BYTES)
        e, f = dot(e, x, word_splat(planes, at + w + 4)), dot(f, x, word_splat(planes, at + dim + w + 4))
        g = dot(g, y, word_splat(planes, at + half + w + 4))
        h = dot(h, y, word_splat(planes, at + dim + half + w + 4))
    x = whole_plus(times_256(whole_plus(a, e)), whole_plus(b, f))
    y = whole_plus(times_256(whole_plus(c, g)), whole_plus(d, h))
    return wide_fma(numbers(x), low_scales, wide_times(numbers(y), high_scales))


@piece
def score_fours(  # type: ignore[no-untyped-def]
    planes, units, halves_of, group, base, sizes, ahead, begin, end, factors, turned, scores, stride, tops_here
):
    """Write the scores of positions begin..end with each query of the group, and the largest of each."""
    dim, chunk, row, _ = sizes
    take_factors(base, row, chunk, begin, end, factors)
    for n in range(begin // SIZE * SIZE, end, SIZE):
        for k in range(SIZE):
            ask(ahead, n + k, 1)
        for r in range(dim // CODES):
            turn_words(codes(base), n * row + r * BYTES, row, turned, r * 2 * SIZE * BYTES)
        low_scales, high_scales = wide_load(factors, n), wide_load(factors, 2 * chunk + n)
        low_least, high_least = wide_load(factors, chunk + n), wide_load(factors, 3 * chunk + n)
        for g in range(group):
            found = _products(planes, 2 * g * dim, dim, turned, low_scales, high_scales)
            low, high = wide_splat(get(halves_of, 2 * g)), wide_splat(get(halves_of, 2 * g + 1))
            least = wide_fma(low_least, low, wide_times(high_least, high))
            wide_store(scores, g * stride + n, wide_fma(found, wide_splat(get(units, g)), least))
    for g in range(group):
        most = types.float32(LEAST)
        for n in range(begin, end):
            s = get(scores, g * stride + n)
            if s > most:
                most = s
        put(tops_here, g, most)


@piece
def mix_fours(base, sizes, ahead, begin, end, factors, mixed):  # type: ignore[no-untyped-def]
    """The codes of every four positions byte by byte: [positions / 4, dim / 128, halves, 4, 64]; and their factors."""
    dim, chunk, row, _ = sizes
    take_factors(base, row, chunk, begin, end, factors)
    for n in range(begin // 4 * 4, end, 4):
        for k in range(4):
            ask(ahead, n + k, 1)
        for r in range(dim // CODES):
            a, b = whole_load(codes(base), n * row + r * BYTES), whole_load(codes(base), (n + 1) * row + r * BYTES)
            c, d = (
                whole_load(codes(base), (n + 2) * row + r * BYTES),
                whole_load(codes(base), (n + 3) * row + r * BYTES),
            )
            to = n * dim + r * 8 * BYTES
            _store_four(in_fours(low_nibbles(a), low_nibbles(b), low_nibbles(c), low_nibbles(d)), mixed, to)
            to += 4 * BYTES
            _store_four(in_fours(high_nibbles(a), high_nibbles(b), high_nibbles(c), high_nibbles(d)), mixed, to)


@piece
def _store_four(found, mixed, to):  # type: ignore[no-untyped-def]
    whole_store(mixed, to, found[0])
    whole_store(mixed, to + BYTES, found[1])
    whole_store(mixed, to + 2 * BYTES, found[2])
    whole_store(mixed, to + 3 * BYTES, found[3])


@piece
def add_fours(  # type: ignore[no-untyped-def]
    weights, at, mixed, sizes, begin, end, factors, planes, scaled, sums, o, shrink
):
    """sums * shrink + the weighted sum of the values begin..end of a query whose weights are from `at` on."""
    dim, chunk = sizes[0], sizes[1]
    first = begin // SIZE * SIZE
    for n in range(first, begin):
        put(weights, at + n, types.float32(0.0))
    for n in range(end, (end + SIZE - 1) // SIZE * SIZE):
        put(weights, at + n, types.float32(0.0))
    shrinks = wide_splat(shrink)
    for h in range(2):
        least = wide_splat(types.float32(0.0))
        for n in range(first, end, SIZE):
            w = wide_load(weights, at + n)
            wide_store(scaled, n, wide_times(w, wide_load(factors, 2 * h * chunk + n)))
            least = wide_fma(w, wide_load(factors, (2 * h + 1) * chunk + n), least)
        added = wide_splat(wide_total(least))
        unit, inverse = _unit(scaled, first, (end - first + SIZE - 1) // SIZE * SIZE)
        units = wide_splat(unit)
        for n in range(first, end, SIZE):
            _split(wide_load(scaled, n), inverse, planes, n, chunk + n)
        for r in range(dim // CODES):
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = whole_splat(0)
            for n in range(begin // 4 * 4, end, 4):
                high, low = word_splat(planes, n), word_splat(planes, chunk + n)
                where = n * dim + (2 * r + h) * 4 * BYTES
                x = whole_load(mixed, where)
                a0, b0 = dot(a0, x, high), dot(b0, x, low)
                x = whole_load(mixed, where + BYTES)
                a1, b1 = dot(a1, x, high), dot(b1, x, low)
                x = whole_load(mixed, where + 2 * BYTES)
                a2, b2 = dot(a2, x, high), dot(b2, x, low)
                x = whole_load(mixed, where + 3 * BYTES)
                a3, b3 = dot(a3, x, high), dot(b3, x, low)
            to = o + (2 * r + h) * BYTES
            _gather(sums, to, a0, b0, units, added, shrinks)
            _gather(sums, to + 16, a1, b1, units, added, shrinks)
            _gather(sums, to + 32, a2, b2, units, added, shrinks)
            _gather(sums, to + 48, a3, b3, units, added, shrinks)


@piece
def _gather(sums, o, high, low, units, added, shrinks):  # type: ignore[no-untyped-def]
    found = wide_fma(numbers(whole_plus(times_256(high), low)), units, added)
    wide_store(sums, o, wide_fma(wide_load(sums, o), shrinks, found))


@piece
def back_from_fours(source, at, target, to, dim, scale):  # type: ignore[no-untyped-def]
    """From the order of sums into the dimensions' own, times `scale`."""
    for r in range(dim // CODES):
        for h in range(2):
            for m in range(4):
                first, then = at + ((2 * r + h) * 4 + m) * SIZE, to + h * (dim // 2) + r * BYTES + 4 * m
                for j in range(4):
                    for i in range(4):
                        put(target, then + 16 * j + i, get(source, first + 4 * j + i) * scale)
