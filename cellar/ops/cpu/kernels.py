"""The kernels of the CPU, compiled by Numba when they are first asked for and kept on disk.

Each takes one pointer to two words: a counter that the threads of a call share, and the address of the call's
arguments, eight bytes each, in the order of the list above the kernel; strides are in elements. Threads take turns at
the counter, so one that lost its core for a while leaves its share to the others; what is computed does not depend on
who does it. `kind` is a pointer whose type says what the tensors' elements are.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, types

from cellar.ops.cpu import blocks as blocks_cpu
from cellar.ops.cpu import decodes as decodes_cpu
from cellar.ops.cpu import dots as dots_cpu
from cellar.ops.cpu import fours as fours_cpu
from cellar.ops.cpu import gates as gates_cpu
from cellar.ops.cpu import lanes as lanes_cpu
from cellar.ops.cpu import pieces as pieces_cpu
from cellar.ops.cpu import planes as planes_cpu
from cellar.ops.cpu import quantized as quantized_cpu
from cellar.ops.cpu import sparse as sparse_cpu
from cellar.ops.cpu import tiles as tiles_cpu
from cellar.ops.cpu import wide as wide_cpu
from cellar.ops.cpu.blocks import SIZE
from cellar.ops.cpu.lanes import (
    LONGS,
    WIDTH,
    begin_region,
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
    root,
    rounded,
    splat,
    stack,
    store,
    total,
)
from cellar.ops.cpu.pieces import INT4, LEAST, add_values, copy, decode, piece, score, turn, weigh, widen
from cellar.ops.cpu.tiles import QUERIES, largest_of, score_tile, sum_tile, turn_keys

LOG2E = 1.4426950408889634

LONG_ROW = 512
"""Bytes of a row of a cache from which on a processor finds the next ones by itself."""


# -- norm ----------------------------------------------------------------------------------------

# x, delta (0: none), weight, out, sum (0: no sum); rows, inner (rows of one outer index), columns; strides of x:
# outer, inner; rows per turn; eps


@piece
def _norm(words, kind):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    x, weight, out = like(kind, get(a, 0)), like(kind, get(a, 2)), like(kind, get(a, 3))
    delta, added = like(kind, get(a, 1)), like(kind, get(a, 4))
    adds = get(a, 1) != 0
    rows, inner, columns = get(a, 5), get(a, 6), get(a, 7)
    outer_stride, inner_stride, step = get(a, 8), get(a, 9), get(a, 10)
    eps = get(doubles(get(words, 1)), 11)
    whole = columns - columns % WIDTH
    while True:
        first = next_of(words) * step
        if first >= rows:
            return
        for row in range(first, min(first + step, rows)):
            at = row // inner * outer_stride + row % inner * inner_stride
            to = row * columns
            squares = splat(0.0)
            for d in range(0, whole, WIDTH):
                v = load(x, at + d)
                if adds:
                    v = rounded(kind, v + load(delta, to + d))
                    store(added, to + d, v)
                squares = fma(v, v, squares)
            square = total(squares)
            for d in range(whole, columns):
                n = get(x, at + d)
                if adds:
                    n = rounded(kind, n + get(delta, to + d))
                    put(added, to + d, n)
                square = fma(n, n, square)
            scale = types.float32(1.0) / root(square / types.float32(columns) + eps)
            scales = splat(scale)
            if adds:
                for d in range(0, whole, WIDTH):
                    store(out, to + d, rounded(kind, load(added, to + d) * scales) * load(weight, d))
                for d in range(whole, columns):
                    put(out, to + d, rounded(kind, get(added, to + d) * scale) * get(weight, d))
            else:
                for d in range(0, whole, WIDTH):
                    store(out, to + d, rounded(kind, load(x, at + d) * scales) * load(weight, d))
                for d in range(whole, columns):
                    put(out, to + d, rounded(kind, get(x, at + d) * scale) * get(weight, d))


# -- activation ----------------------------------------------------------------------------------

SILU, GELU, GELU_TANH = 0, 1, 2


@piece
def _activated(v, function):  # type: ignore[no-untyped-def]
    if function == SILU:
        return v / (splat(1.0) + power(v * splat(-LOG2E)))
    if function == GELU_TANH:  # (1 + tanh u) / 2 = 1 / (1 + e^(-2u)), u = sqrt(2 / pi) (v + 0.044715 v^3)
        u = fma(v * v, splat(-2.0 * 0.7978845608028654 * 0.044715 * LOG2E), splat(-2.0 * 0.7978845608028654 * LOG2E))
        return v / (splat(1.0) + power(v * u))
    # 1 - erf to 1.5e-7, for arguments from 0 on (Abramowitz and Stegun, 7.1.26).
    size = greater(v, splat(0.0) - v)
    t = splat(1.0) / fma(size, splat(0.3275911 * 0.7071067811865476), splat(1.0))
    rest = fma(t, splat(1.061405429), splat(-1.453152027))
    rest = fma(t, fma(t, fma(t, rest, splat(1.421413741)), splat(-0.284496736)), splat(0.254829592)) * t
    rest = rest * power(v * v * splat(-0.5 * LOG2E))
    return greater(v, splat(0.0)) - splat(0.5) * size * rest


# x, out, rows, columns of out, stride of x, rows per turn, function, gated (1: behind the gates stands what they let
# through)


@piece
def _activation(words, kind):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    x, out = like(kind, get(a, 0)), like(kind, get(a, 1))
    rows, columns, stride, step, function, gated = get(a, 2), get(a, 3), get(a, 4), get(a, 5), get(a, 6), get(a, 7)
    whole = columns - columns % WIDTH
    last = stack(WIDTH)
    for d in range(WIDTH):
        put(last, d, types.float32(0.0))
    while True:
        first = next_of(words) * step
        if first >= rows:
            return
        for row in range(first, min(first + step, rows)):
            at, to = row * stride, row * columns
            for d in range(0, whole, WIDTH):
                v = rounded(kind, _activated(load(x, at + d), function))
                if gated:
                    v = v * load(x, at + columns + d)
                store(out, to + d, v)
            if whole < columns:
                for d in range(whole, columns):
                    put(last, d - whole, get(x, at + d))
                store(last, 0, rounded(kind, _activated(load(last, 0), function)))
                for d in range(whole, columns):
                    n = get(last, d - whole)
                    if gated:
                        n = n * get(x, at + columns + d)
                    put(out, to + d, n)


# -- rotary embedding ----------------------------------------------------------------------------


# q, its token and head strides; k, its; v, its; out (q turned); positions, cos_sin, rotary_dim (0: nothing turns);
# k_cache, v_cache, their slot strides, their head stride; slot_mapping; tokens, heads, kv_heads, dim, chunk; tokens per
# turn


@piece
def _rotary_kv(words, kind):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    q, q_token, q_head = like(kind, get(a, 0)), get(a, 1), get(a, 2)
    k, k_token, k_head = like(kind, get(a, 3)), get(a, 4), get(a, 5)
    v, v_token, v_head = like(kind, get(a, 6)), get(a, 7), get(a, 8)
    out, positions, cos_sin, half = like(kind, get(a, 9)), longs(get(a, 10)), floats(get(a, 11)), get(a, 12) // 2
    k_cache, v_cache, k_slot, v_slot = like(kind, get(a, 13)), like(kind, get(a, 14)), get(a, 15), get(a, 16)
    cache_head, mapping = get(a, 17), longs(get(a, 18))
    tokens, heads, kv_heads, dim, chunk, step = get(a, 19), get(a, 20), get(a, 21), get(a, 22), get(a, 23), get(a, 24)
    one = types.float32(1.0)
    while True:
        first = next_of(words) * step
        if first >= tokens:
            return
        for t in range(first, min(first + step, tokens)):
            place = get(mapping, t)
            inner = place % chunk * dim
            k_at = place // chunk * k_slot + inner
            v_at = place // chunk * v_slot + inner
            position = get(positions, t)
            for h in range(heads if half else 0):
                turn(q, t * q_token + h * q_head, out, (t * heads + h) * dim, kind, cos_sin, position, half, dim, one)
            for h in range(kv_heads):
                to = k_at + h * cache_head
                turn(k, t * k_token + h * k_head, k_cache, to, kind, cos_sin, position, half, dim, one)
                copy(v, t * v_token + h * v_head, v_cache, v_at + h * cache_head, dim, one)


# -- attention -----------------------------------------------------------------------------------


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


# -- entries -------------------------------------------------------------------------------------


def _entries(source: str) -> dict[tuple[str, Any], Any]:
    """The kernels by name and element. What Numba keeps on disk it looks up by `source`, too."""

    def norm_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _norm(words, floats(0))

    def norm_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _norm(words, halves(0))

    def norm_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _norm(words, brains(0))

    def activation_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _activation(words, floats(0))

    def activation_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _activation(words, halves(0))

    def activation_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _activation(words, brains(0))

    def rotary_kv_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _rotary_kv(words, floats(0))

    def rotary_kv_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _rotary_kv(words, halves(0))

    def rotary_kv_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _rotary_kv(words, brains(0))

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
        ("norm", torch.float32): norm_floats,
        ("norm", torch.float16): norm_halves,
        ("norm", torch.bfloat16): norm_brains,
        ("activation", torch.float32): activation_floats,
        ("activation", torch.float16): activation_halves,
        ("activation", torch.bfloat16): activation_brains,
        ("rotary_kv", torch.float32): rotary_kv_floats,
        ("rotary_kv", torch.float16): rotary_kv_halves,
        ("rotary_kv", torch.bfloat16): rotary_kv_brains,
        ("attention", torch.float32): attention_floats,
        ("attention", torch.float16): attention_halves,
        ("attention", torch.bfloat16): attention_brains,
    }


def _launcher(source: str) -> Any:
    def launch(region, kernel, arguments, threads):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        begin_region(region, kernel, arguments, threads)

    return launch


_KERNEL, _LAUNCH = types.void(LONGS), types.void(types.int64, types.int64, types.int64, types.int64)
# Numba looks at the file of the function alone; these are all that it may be made of.
_PARTS = (
    lanes_cpu, pieces_cpu, gates_cpu, blocks_cpu, wide_cpu, quantized_cpu, dots_cpu, planes_cpu, sparse_cpu, tiles_cpu,
    decodes_cpu,
    fours_cpu,
)  # fmt: skip
_FILES = [__file__, *(str(part.__file__) for part in _PARTS)]
_SOURCE = hashlib.sha256(b"".join(Path(file).read_bytes() for file in _FILES)).hexdigest()
_KERNELS = _entries(_SOURCE)
for _part in (gates_cpu, quantized_cpu, planes_cpu, sparse_cpu, decodes_cpu):
    _KERNELS |= _part.entries(_SOURCE)


@functools.cache
def compiled(name: str, dtype: torch.dtype) -> Any:
    """A kernel; its `address` is good as long as it lives, which is as long as the process does."""
    return _compiled(_KERNELS[name, dtype], _KERNEL)


@functools.cache
def launcher() -> Any:
    """`launch(region, kernel, arguments, threads)`, all of them integers; region 0: on this thread."""
    return _compiled(_launcher(_SOURCE), _LAUNCH)


def _compiled(function: Any, shape: Any) -> Any:
    """Compile it, or read it from disk; where nothing can be written nothing is kept."""
    try:
        return cfunc(shape, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return cfunc(shape, error_model="numpy")(function)
