"""Tiles of attention on the CPU: four queries at a time against a chunk that all of them see whole.

A query alone reads a chunk's keys and values from the cache, element by element as they are kept (`pieces.py`). Where
many queries share a chunk it is written out once as float32, its keys turned on their side, and each number of it that
is loaded is used four times. Every sum has the order that it has there, so a query's result is the same, bit for bit.
"""

from __future__ import annotations

from numba import types

from cellar.ops.cpu.blocks import SIZE
from cellar.ops.cpu.lanes import WIDTH, flipped, get, greater, largest, load, splat, store
from cellar.ops.cpu.pieces import LEAST, ask, piece
from cellar.ops.cpu.wide import wide_fma, wide_load, wide_plus, wide_splat, wide_store, wide_times

QUERIES = 4
"""Whose sums are kept in registers at once, as many as hide an addition's latency."""


@piece
def turn_keys(keys, k_at, chunk, dim, turned, ahead):  # type: ignore[no-untyped-def]
    """[chunk, dim] of a cache, from its k_at-th element on, as float32 [dim, chunk]. `dim` is a multiple of WIDTH."""
    for n in range(0, chunk, WIDTH):
        if ahead is not None:
            ask(ahead, n, WIDTH)
        for d in range(0, dim, WIDTH):
            at = k_at + n * dim + d
            a0, a1, a2, a3, a4, a5, a6, a7 = flipped(
                load(keys, at),
                load(keys, at + dim),
                load(keys, at + 2 * dim),
                load(keys, at + 3 * dim),
                load(keys, at + 4 * dim),
                load(keys, at + 5 * dim),
                load(keys, at + 6 * dim),
                load(keys, at + 7 * dim),
            )
            to = d * chunk + n
            store(turned, to, a0)
            store(turned, to + chunk, a1)
            store(turned, to + 2 * chunk, a2)
            store(turned, to + 3 * chunk, a3)
            store(turned, to + 4 * chunk, a4)
            store(turned, to + 5 * chunk, a5)
            store(turned, to + 6 * chunk, a6)
            store(turned, to + 7 * chunk, a7)


@piece
def _chains(queries, at, turned, o, first, chunk, dim):  # type: ignore[no-untyped-def]
    """Of four queries and sixteen keys: the sums over the dimensions first, first + WIDTH and so on."""
    s0 = s1 = s2 = s3 = wide_splat(types.float32(0.0))
    for d in range(first, dim, WIDTH):
        k, x = wide_load(turned, d * chunk + o), at + d
        s0 = wide_fma(wide_splat(get(queries, x)), k, s0)
        s1 = wide_fma(wide_splat(get(queries, x + dim)), k, s1)
        s2 = wide_fma(wide_splat(get(queries, x + 2 * dim)), k, s2)
        s3 = wide_fma(wide_splat(get(queries, x + 3 * dim)), k, s3)
    return s0, s1, s2, s3


@piece
def _plus(a, b):  # type: ignore[no-untyped-def]
    return wide_plus(a[0], b[0]), wide_plus(a[1], b[1]), wide_plus(a[2], b[2]), wide_plus(a[3], b[3])


@piece
def score_tile(queries, at, turned, chunk, dim, scores, to):  # type: ignore[no-untyped-def]
    """Write the scores of four queries with all keys of a chunk, `chunk` numbers each: what `score` finds."""
    for o in range(0, chunk, SIZE):
        zero = wide_splat(types.float32(0.0))
        s = zero, zero, zero, zero
        for half in range(0, WIDTH, WIDTH // 2):
            a = zero, zero, zero, zero
            for pair in range(half, half + WIDTH // 2, 2):
                x = _chains(queries, at, turned, o, pair, chunk, dim)
                a = _plus(a, _plus(x, _chains(queries, at, turned, o, pair + 1, chunk, dim)))
            s = _plus(s, a)
        wide_store(scores, to + o, s[0])
        wide_store(scores, to + chunk + o, s[1])
        wide_store(scores, to + 2 * chunk + o, s[2])
        wide_store(scores, to + 3 * chunk + o, s[3])


@piece
def largest_of(scores, begin, end):  # type: ignore[no-untyped-def]
    """The largest of begin..end, whole lanes."""
    found = splat(types.float32(LEAST))
    for o in range(begin, end, WIDTH):
        found = greater(load(scores, o), found)
    return largest(found)


@piece
def sum_tile(weights, at, values, chunk, dim, sums, to, shrinks, n):  # type: ignore[no-untyped-def]
    """What `add_values` does, for four queries and a whole chunk. `dim` is a multiple of SIZE."""
    f0, f1 = wide_splat(get(shrinks, n)), wide_splat(get(shrinks, n + 1))
    f2, f3 = wide_splat(get(shrinks, n + 2)), wide_splat(get(shrinks, n + 3))
    for d in range(0, dim, SIZE):
        o = to + d
        a0 = wide_times(wide_load(sums, o), f0)
        a1 = wide_times(wide_load(sums, o + dim), f1)
        a2 = wide_times(wide_load(sums, o + 2 * dim), f2)
        a3 = wide_times(wide_load(sums, o + 3 * dim), f3)
        for x in range(chunk):
            v, w = wide_load(values, x * dim + d), at + x
            a0 = wide_fma(wide_splat(get(weights, w)), v, a0)
            a1 = wide_fma(wide_splat(get(weights, w + chunk)), v, a1)
            a2 = wide_fma(wide_splat(get(weights, w + 2 * chunk)), v, a2)
            a3 = wide_fma(wide_splat(get(weights, w + 3 * chunk)), v, a3)
        wide_store(sums, o, a0)
        wide_store(sums, o + dim, a1)
        wide_store(sums, o + 2 * dim, a2)
        wide_store(sums, o + 3 * dim, a3)
