"""Attention that reads the values of the largest scores alone (FlexGen §5).

The form of a kernel is that of `kernels.py`. A query's scores with all keys are kept. Hoare's selection finds the least
one that still counts, and the rows of V that belong to smaller ones are never touched. The weights are those of the
softmax over all keys.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import types

from cellar.ops.cpu.lanes import (
    WIDTH,
    brains,
    doubles,
    floats,
    fma,
    get,
    halves,
    ints,
    like,
    load,
    longs,
    next_of,
    put,
    splat,
    stack,
    store,
)
from cellar.ops.cpu.pieces import LEAST, copy, decode, piece, score, weigh

FLOAT, LONG = 4, 8
"""Bytes of a number, and of a place."""


@piece
def _kth_largest(numbers, count, k):  # type: ignore[no-untyped-def]
    """-> the number that `k` of `count` others precede in descending order; the first k + 1 are those then.

    The pivot is drawn, so no order of the numbers makes it slow, and drawn alike each time.
    """
    begin, last, state = 0, count - 1, 1
    while begin < last:
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        pivot = get(numbers, begin + (state >> 8) % (last - begin + 1))
        i, j = begin, last
        while i <= j:
            while get(numbers, i) > pivot:
                i += 1
            while pivot > get(numbers, j):
                j -= 1
            if i <= j:
                other = get(numbers, i)
                put(numbers, i, get(numbers, j))
                put(numbers, j, other)
                i += 1
                j -= 1
        if k <= j:
            last = j
        elif k >= i:
            begin = i
        else:
            return get(numbers, k)
    return get(numbers, k)


@piece
def _choose(scores, begin, own, most, places, spare):  # type: ignore[no-untyped-def]
    """Write to `places` the positions of the `most` largest scores of begin..own, of equal ones the first, ascending,
    then `own`; -> how many. `spare`: room for as many numbers as there are scores.
    """
    before = own - begin
    count = 0
    if most >= before:
        for n in range(begin, own):
            put(places, count, n)
            count += 1
    else:
        for n in range(before):
            put(spare, n, get(scores, begin + n))
        least = _kth_largest(spare, before, most - 1)
        equal = 0
        for n in range(most):
            if get(spare, n) == least:
                equal += 1
        for n in range(begin, own):
            s = get(scores, n)
            if s > least:
                put(places, count, n)
                count += 1
            elif s == least and equal > 0:
                put(places, count, n)
                count += 1
                equal -= 1
    put(places, count, own)
    return count + 1


@piece
def _add_rows(weights, places, begin, end, values, dim, sums):  # type: ignore[no-untyped-def]
    """Add to sums the weighted rows of `values` that begin at places[begin..end]."""
    d = 0
    while d + 8 * WIDTH <= dim:
        a0, a1, a2, a3 = load(sums, d), load(sums, d + 8), load(sums, d + 16), load(sums, d + 24)
        a4, a5, a6, a7 = load(sums, d + 32), load(sums, d + 40), load(sums, d + 48), load(sums, d + 56)
        for n in range(begin, end):
            w = splat(get(weights, n))
            r = get(places, n) + d
            a0 = fma(w, load(values, r), a0)
            a1 = fma(w, load(values, r + 8), a1)
            a2 = fma(w, load(values, r + 16), a2)
            a3 = fma(w, load(values, r + 24), a3)
            a4 = fma(w, load(values, r + 32), a4)
            a5 = fma(w, load(values, r + 40), a5)
            a6 = fma(w, load(values, r + 48), a6)
            a7 = fma(w, load(values, r + 56), a7)
        store(sums, d, a0)
        store(sums, d + 8, a1)
        store(sums, d + 16, a2)
        store(sums, d + 24, a3)
        store(sums, d + 32, a4)
        store(sums, d + 40, a5)
        store(sums, d + 48, a6)
        store(sums, d + 56, a7)
        d += 8 * WIDTH
    while d + WIDTH <= dim:
        b0 = load(sums, d)
        for n in range(begin, end):
            b0 = fma(splat(get(weights, n)), load(values, get(places, n) + d), b0)
        store(sums, d, b0)
        d += WIDTH
    while d < dim:
        b = get(sums, d)
        for n in range(begin, end):
            b = fma(get(weights, n), get(values, get(places, n) + d), b)
        put(sums, d, b)
        d += 1


# Those of `attention.py`, without what is new or turns (1, 3 to 10 are not read); then the share in
# millionths; room for scores, the address and how many a query has; how many threads have taken their part of it


@piece
def _sparse_attention(words, kind):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    q, q_token, q_head = like(kind, get(a, 0)), get(a, 1), get(a, 2)
    k_cache, v_cache, k_slot, v_slot = like(kind, get(a, 11)), like(kind, get(a, 12)), get(a, 13), get(a, 14)
    cache_head, table, table_stride = get(a, 15), ints(get(a, 16)), get(a, 17)
    out, out_token, out_head = like(kind, get(a, 18)), get(a, 19), get(a, 20)
    rows, starts, stops, offsets = ints(get(a, 21)), ints(get(a, 22)), ints(get(a, 23)), ints(get(a, 24))
    spans, firsts, listed = ints(get(a, 25)), ints(get(a, 26)), get(a, 25) != 0
    items, block, kv_heads, group = get(a, 27), get(a, 28), get(a, 29), get(a, 30)
    dim, chunk, window = get(a, 31), get(a, 32), get(a, 33)
    scale, format = get(doubles(get(words, 1)), 34), get(a, 35)
    share, room, width = get(a, 36), get(a, 37), get(a, 38)
    one = types.float32(1.0)
    most = block * group
    # Of each query: all its scores; then places of values, and as many numbers twice for the query at hand.
    room += next_of(longs(get(a, 39))) * width * ((most + 2) * FLOAT + LONG)
    places = longs(room + most * width * FLOAT)
    weights = floats(room + most * width * FLOAT + width * LONG)
    spare = floats(room + (most + 1) * width * FLOAT + width * LONG)
    queries, sums, tops = stack(most * dim), stack(dim), stack(most)
    decoded = stack(chunk * dim + WIDTH if format else 0)
    while True:
        item = next_of(words)
        if item >= items * kv_heads:
            return
        head = item % kv_heads
        item //= kv_heads
        span, skipped = item, 0
        if listed:
            span, skipped = get(spans, item), get(firsts, item)
        start = get(starts, span) + skipped
        count = min(block, get(stops, span) - start)
        token = get(offsets, span) + skipped
        slots = get(rows, span) * table_stride
        for i in range(count):
            for g in range(group):
                at = (token + i) * q_token + (head * group + g) * q_head
                copy(q, at, queries, (i * group + g) * dim, dim, scale)
                put(tops, i * group + g, types.float32(LEAST))
        first = (max(0, start - window + 1) if window else 0) // chunk
        for j in range(first, (start + count - 1) // chunk + 1):
            keys = get(table, slots + j) * k_slot + head * cache_head
            if format:
                begin = max(0, start + 1 - window - j * chunk) if window else 0
                end = min(chunk, start + count - j * chunk)
                decode(get(a, 11), keys, begin, end, chunk, dim, format, decoded, None)
            for i in range(count):
                position = start + i - j * chunk
                end = min(chunk, position + 1)
                begin = max(0, position + 1 - window) if window else 0
                if begin < end:
                    for n in range(i * group, i * group + group):
                        scores = floats(room + (n * width + (j - first) * chunk) * FLOAT)
                        if format:
                            top = score(queries, n * dim, decoded, 0, begin, end, dim, scores, None)
                        else:
                            top = score(queries, n * dim, k_cache, keys, begin, end, dim, scores, None)
                        if top > get(tops, n):
                            put(tops, n, top)
        for i in range(count):
            # Positions from that of the first chunk on, as scores have them.
            own = start + i - first * chunk
            begin = max(0, own + 1 - window) if window else 0
            read = -(-(own - begin) * share // 1000000)
            for g in range(group):
                n = i * group + g
                scores = floats(room + n * width * FLOAT)
                chosen = _choose(scores, begin, own, read, places, spare)
                weight = weigh(scores, begin, own + 1, get(tops, n))
                for x in range(chosen):
                    put(weights, x, get(scores, get(places, x)))
                for d in range(dim):
                    put(sums, d, types.float32(0.0))
                x = 0
                while x < chosen:
                    # The rows of a chunk; plain ones go on to the next.
                    j = get(places, x) // chunk
                    y = x
                    while y < chosen and get(places, y) // chunk == j:
                        within = get(places, y) - j * chunk
                        values = get(table, slots + first + j) * v_slot + head * cache_head
                        if format:
                            decode(get(a, 12), values, within, within + 1, chunk, dim, format, decoded, None)
                            put(places, y, within * dim)
                        else:
                            put(places, y, values + within * dim)
                        y += 1
                    if format:
                        _add_rows(weights, places, x, y, decoded, dim, sums)
                    x = y
                if not format:
                    _add_rows(weights, places, 0, chosen, v_cache, dim, sums)
                at = (token + i) * out_token + (head * group + g) * out_head
                copy(sums, 0, out, at, dim, one / weight)


def entries(source: str) -> dict[tuple[str, Any], Any]:
    """The kernels by name and element, as in `kernels.py`."""

    def sparse_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _sparse_attention(words, floats(0))

    def sparse_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _sparse_attention(words, halves(0))

    def sparse_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _sparse_attention(words, brains(0))

    return {
        ("sparse_attention", torch.float32): sparse_floats,
        ("sparse_attention", torch.float16): sparse_halves,
        ("sparse_attention", torch.bfloat16): sparse_brains,
    }
