"""Attention of the CPU's own engine: spans of any length, decodes and prompts, over the chunks as they lie.

The form of a kernel is that of `kernels.py`; what it computes, and in which order, is said in `ops/attention/cpu.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import types

from cellar.ops.cpu.blocks import SIZE
from cellar.ops.cpu.lanes import (
    WIDTH,
    brains,
    doubles,
    first_of,
    floats,
    fma,
    get,
    greater,
    halves,
    ints,
    like,
    load,
    longs,
    next_of,
    power,
    put,
    splat,
    stack,
    store,
)
from cellar.ops.cpu.pieces import INT4, LEAST, add_values, copy, decode, piece, score, turn, weigh, widen
from cellar.ops.cpu.tiles import QUERIES, largest_of, score_tile, sum_tile, turn_keys

LONG_ROW = 512
"""Bytes of a row of a cache from which on a processor finds the next ones by itself."""


@piece
def _attend_all(  # type: ignore[no-untyped-def]
    queries, count, turned, values, chunk, dim, scores, spare, tops, weights_of, shrinks, sums
):
    """Add a chunk that all of `count` queries see whole, its keys turned, to what they have seen so far."""
    for n in range(0, count, QUERIES):
        score_tile(queries, n * dim, turned, chunk, dim, scores, n * chunk)
    for n in range(count):
        put(spare, n, largest_of(scores, n * chunk, n * chunk + chunk))
    for n in range(0, count, WIDTH):
        old = load(tops, n)
        top = greater(load(spare, n), old)
        store(tops, n, top)
        store(shrinks, n, power(old - top))
    for n in range(count):
        put(spare, n, weigh(scores, n * chunk, n * chunk + chunk, get(tops, n)))
    for n in range(0, count, WIDTH):
        store(weights_of, n, fma(load(weights_of, n), load(shrinks, n), load(spare, n)))
    for n in range(0, count, QUERIES):
        sum_tile(scores, n * chunk, values, chunk, dim, sums, n * dim, shrinks, n)


@piece
def _attend(  # type: ignore[no-untyped-def]
    queries, first, group, keys, k_at, values, v_at, begin, end, dim, scores, tops, weights_of, sums, k_ahead, v_ahead
):
    """Add positions begin..end of a chunk to what the queries `first` and the group's next ones have seen so far."""
    for n in range(first, first + group):
        old = get(tops, n)
        if k_ahead is not None and n == first:  # the others would ask for the same
            top = score(queries, n * dim, keys, k_at, begin, end, dim, scores, k_ahead)
        else:
            top = score(queries, n * dim, keys, k_at, begin, end, dim, scores, None)
        shrink = types.float32(1.0)
        if top > old:
            shrink = first_of(power(splat(old - top)))
            put(tops, n, top)
        else:
            top = old
        weight = weigh(scores, begin, end, top)
        put(weights_of, n, fma(get(weights_of, n), shrink, weight))
        if v_ahead is not None and n == first:
            add_values(scores, begin, end, values, v_at, dim, sums, n * dim, shrink, v_ahead)
        else:
            add_values(scores, begin, end, values, v_at, dim, sums, n * dim, shrink, None)


# q, its token and head strides; k, its (0: all K and V are written); v, its; cos_sin (0: nothing turns), rotary_dim;
# k_cache, v_cache, their slot strides, their head stride; table, its stride; out, its token and head strides;
# row, start, stop, offset (int32, of spans); span and first query of each item (int32; 0: item = span, of one token);
# items, queries of an item, kv_heads, group, dim, chunk, window (0: none), scale * log2(e), format of the cache's rows
# (strides of quantized ones are in bytes)


@piece
def _attention(words, kind, size):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    q, q_token, q_head = like(kind, get(a, 0)), get(a, 1), get(a, 2)
    k, k_token, k_head = like(kind, get(a, 3)), get(a, 4), get(a, 5)
    v, v_token, v_head = like(kind, get(a, 6)), get(a, 7), get(a, 8)
    is_new = get(a, 3) != 0
    cos_sin, half = floats(get(a, 9)), get(a, 10) // 2
    k_cache, v_cache, k_slot, v_slot = like(kind, get(a, 11)), like(kind, get(a, 12)), get(a, 13), get(a, 14)
    cache_head, table, table_stride = get(a, 15), ints(get(a, 16)), get(a, 17)
    out, out_token, out_head = like(kind, get(a, 18)), get(a, 19), get(a, 20)
    rows, starts, stops, offsets = ints(get(a, 21)), ints(get(a, 22)), ints(get(a, 23)), ints(get(a, 24))
    spans, firsts, listed = ints(get(a, 25)), ints(get(a, 26)), get(a, 25) != 0
    items, block, kv_heads, group = get(a, 27), get(a, 28), get(a, 29), get(a, 30)
    dim, chunk, window = get(a, 31), get(a, 32), get(a, 33)
    scale, format = get(doubles(get(words, 1)), 34), get(a, 35)
    one = types.float32(1.0)
    # Of each query and head: the query, and a sum of values, largest score and sum of weights as far as they go.
    most = -(-block * group // WIDTH) * WIDTH
    queries, sums = stack(most * dim), stack(most * dim)
    tops, weights_of, shrinks, spare = stack(most), stack(most), stack(most), stack(most)
    tiled = listed and dim % SIZE == 0
    # Bytes of an element (of codes: of a byte), and of a row.
    unit, width = (1, dim // 2 if format == INT4 else dim) if format else (size, dim * size)
    scores, turned = stack(most * chunk if tiled else chunk + WIDTH), stack(chunk * dim if tiled else 0)
    decoded = chunk * dim + WIDTH
    held = decoded if format or tiled or size < 4 else 0
    decoded_keys, decoded_values = stack(held), stack(held)
    if tiled:  # the last places are no query's, but computed with, and what may lie there would be slow
        for n in range(most):
            put(tops, n, types.float32(LEAST))
            put(weights_of, n, types.float32(0.0))
            put(spare, n, types.float32(0.0))
        for d in range(block * group * dim, most * dim):
            put(queries, d, types.float32(0.0))
            put(sums, d, types.float32(0.0))
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
        if is_new:
            slot = get(table, slots + start // chunk)
            inner = head * cache_head + start % chunk * dim
            at = token * k_token + head * k_head
            turn(k, at, k_cache, slot * k_slot + inner, kind, cos_sin, start, half, dim, one)
            copy(v, token * v_token + head * v_head, v_cache, slot * v_slot + inner, dim, one)
        for i in range(count):
            for g in range(group):
                n = i * group + g
                at = (token + i) * q_token + (head * group + g) * q_head
                turn(q, at, queries, n * dim, kind, cos_sin, start + i, half, dim, scale)
                put(tops, n, types.float32(LEAST))
                put(weights_of, n, types.float32(0.0))
        for d in range(0, count * group * dim - WIDTH + 1, WIDTH):
            store(sums, d, splat(0.0))
        for d in range(count * group * dim - count * group * dim % WIDTH, count * group * dim):
            put(sums, d, types.float32(0.0))
        least = max(0, start - window + 1) if window else 0
        last = (start + count - 1) // chunk
        # Elements of 16 bits that several queries multiply are made float32 once.
        widens = size < 4 and not format and count * group > 1
        for j in range(least // chunk, last + 1):
            slot, next_slot = get(table, slots + j), get(table, slots + min(j + 1, last))
            keys, values = slot * k_slot + head * cache_head, slot * v_slot + head * cache_head
            # Of a prompt most chunks are in a cache already.
            needed = max(0, min(chunk, start + 1 - j * chunk - chunk)) if count == 1 and width < LONG_ROW else 0
            k_ahead = (get(a, 11) + (next_slot * k_slot + head * cache_head) * unit, width, needed)
            v_ahead = (get(a, 12) + (next_slot * v_slot + head * cache_head) * unit, width, needed)
            is_whole = start >= j * chunk + chunk - 1 and (not window or start + count - window <= j * chunk)
            is_tile = tiled and is_whole and count * group >= QUERIES
            # Of the first query's window up to the last query's position.
            begin = max(0, start + 1 - window - j * chunk) if window else 0
            end = min(chunk, start + count - j * chunk)
            if format:
                decode(get(a, 11), keys, begin, end, chunk, dim, format, decoded_keys, k_ahead)
                decode(get(a, 12), values, begin, end, chunk, dim, format, decoded_values, v_ahead)
            elif widens or is_tile:
                if not is_tile:
                    widen(k_cache, keys, begin, end, dim, decoded_keys, k_ahead)
                widen(v_cache, values, begin, end, dim, decoded_values, v_ahead)
            if is_tile:
                if format:
                    turn_keys(decoded_keys, 0, chunk, dim, turned, None)
                else:
                    turn_keys(k_cache, keys, chunk, dim, turned, k_ahead)
                _attend_all(
                    queries, count * group, turned, decoded_values, chunk, dim,
                    scores, spare, tops, weights_of, shrinks, sums,
                )  # fmt: skip
                continue
            for i in range(count):
                position = start + i - j * chunk
                end = min(chunk, position + 1)
                begin = max(0, position + 1 - window) if window else 0
                if begin < end and (format or widens):
                    _attend(
                        queries, i * group, group, decoded_keys, 0, decoded_values, 0,
                        begin, end, dim, scores, tops, weights_of, sums, None, None,
                    )  # fmt: skip
                elif begin < end and needed:
                    _attend(
                        queries, i * group, group, k_cache, keys, v_cache, values,
                        begin, end, dim, scores, tops, weights_of, sums, k_ahead, v_ahead,
                    )  # fmt: skip
                elif begin < end:
                    _attend(
                        queries, i * group, group, k_cache, keys, v_cache, values,
                        begin, end, dim, scores, tops, weights_of, sums, None, None,
                    )  # fmt: skip
        for i in range(count):
            for g in range(group):
                n = i * group + g
                at = (token + i) * out_token + (head * group + g) * out_head
                copy(sums, n * dim, out, at, dim, one / get(weights_of, n))


def entries(source: str) -> dict[tuple[str, Any], Any]:
    """The kernels by name and element, as in `kernels.py`."""

    def attention_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attention(words, floats(0), 4)

    def attention_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attention(words, halves(0), 2)

    def attention_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _attention(words, brains(0), 2)

    return {
        ("attention", torch.float32): attention_floats,
        ("attention", torch.float16): attention_halves,
        ("attention", torch.bfloat16): attention_brains,
    }
