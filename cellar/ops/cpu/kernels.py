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

from cellar.ops.cpu import amx as amx_cpu
from cellar.ops.cpu import attention as attention_cpu
from cellar.ops.cpu import blocks as blocks_cpu
from cellar.ops.cpu import decodes as decodes_cpu
from cellar.ops.cpu import dots as dots_cpu
from cellar.ops.cpu import eights as eights_cpu
from cellar.ops.cpu import fours as fours_cpu
from cellar.ops.cpu import gates as gates_cpu
from cellar.ops.cpu import lanes as lanes_cpu
from cellar.ops.cpu import panels as panels_cpu
from cellar.ops.cpu import pieces as pieces_cpu
from cellar.ops.cpu import plain as plain_cpu
from cellar.ops.cpu import planes as planes_cpu
from cellar.ops.cpu import quantized as quantized_cpu
from cellar.ops.cpu import sparse as sparse_cpu
from cellar.ops.cpu import tiles as tiles_cpu
from cellar.ops.cpu import wide as wide_cpu
from cellar.ops.cpu.lanes import (
    LONGS,
    WIDTH,
    begin_region,
    brains,
    doubles,
    floats,
    fma,
    get,
    greater,
    halves,
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
from cellar.ops.cpu.pieces import copy, piece, turn

LOG2E = 1.4426950408889634

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
    }


def _launcher(source: str) -> Any:
    def launch(region, kernel, arguments, threads):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        begin_region(region, kernel, arguments, threads)

    return launch


_KERNEL, _LAUNCH = types.void(LONGS), types.void(types.int64, types.int64, types.int64, types.int64)
# Numba looks at the file of the function alone; these are all that it may be made of.
_PARTS = (
    lanes_cpu, pieces_cpu, gates_cpu, blocks_cpu, wide_cpu, eights_cpu, quantized_cpu, dots_cpu, planes_cpu, panels_cpu,
    sparse_cpu, tiles_cpu, decodes_cpu, fours_cpu, attention_cpu, plain_cpu, amx_cpu,
)  # fmt: skip
_FILES = [__file__, *(str(part.__file__) for part in _PARTS)]
_SOURCE = hashlib.sha256(b"".join(Path(file).read_bytes() for file in _FILES)).hexdigest()
_KERNELS = _entries(_SOURCE)
for _part in (
    attention_cpu, gates_cpu, quantized_cpu, planes_cpu, panels_cpu, sparse_cpu, decodes_cpu, plain_cpu, amx_cpu,
):  # fmt: skip
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
