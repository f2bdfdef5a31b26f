"""Kernels of recurrent cells: all that comes behind their matrix products, row by row.

The form of a kernel is that of `kernels.py`. A row's numbers are computed eight at a time, its last ones too (padded
with zeros), so that what is computed depends neither on where a row stands in its batch nor on who computes it. torch's
own loops compute what does not fill their registers otherwise than the rest, and where that is depends on the batch.

Indices are int64 and `check` is float32 [b]: 0 where a row's new state is finite, NaN elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch

from cellar.ops.cpu.lanes import (
    WIDTH,
    brains,
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
    splat,
    stack,
    store,
    total,
)
from cellar.ops.cpu.pieces import piece

LOG2E = 1.4426950408889634


@piece
def _sigmoid(x):  # type: ignore[no-untyped-def]
    # 2^127 is the last power; the greater of a number and NaN is NaN in this order.
    bounded = greater(splat(-127.0), x * splat(LOG2E))
    return splat(1.0) / (splat(1.0) + power(splat(0.0) - bounded))


@piece
def _tanh(x):  # type: ignore[no-untyped-def]
    s = _sigmoid(x + x)
    return s + s - splat(1.0)


@piece
def _clear(memory, count):  # type: ignore[no-untyped-def]
    for k in range(count):
        store(memory, WIDTH * k, splat(0.0))


@piece
def _take(last, place, source, at, count):  # type: ignore[no-untyped-def]
    """-> `count` numbers of a tensor and zeros behind them, by way of the memory at `place`."""
    for d in range(count):
        put(last, WIDTH * place + d, get(source, at + d))
    return load(last, WIDTH * place)


@piece
def _give(last, values, target, at, count):  # type: ignore[no-untyped-def]
    """Write the first `count` numbers."""
    store(last, 0, values)
    for d in range(count):
        put(target, at + d, get(last, d))


# -- LSTM ------------------------------------------------------------------------------------------

# gates, bias (0: none), c, c_index, h_out, h_rows, c_out, c_rows, check; rows, hidden; strides of gates, c, h_out,
# c_out; rows per turn


@piece
def _lstm_lanes(i, f, g, o, c):  # type: ignore[no-untyped-def]
    new = fma(_sigmoid(f), c, _sigmoid(i) * _tanh(g))
    return _sigmoid(o) * _tanh(new), new


@piece
def _lstm_gates(words, kind):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    gates, bias, c = like(kind, get(a, 0)), like(kind, get(a, 1)), like(kind, get(a, 2))
    h_out, c_out = like(kind, get(a, 4)), like(kind, get(a, 6))
    c_index, h_rows, c_rows = longs(get(a, 3)), longs(get(a, 5)), longs(get(a, 7))
    check, biased = floats(get(a, 8)), get(a, 1) != 0
    rows, hidden, stride, step = get(a, 9), get(a, 10), get(a, 11), get(a, 15)
    whole = hidden - hidden % WIDTH
    rest = hidden - whole
    last = stack(10 * WIDTH)  # the last numbers of rows, with zeros behind them
    _clear(last, 10)
    while True:
        begin = next_of(words) * step
        if begin >= rows:
            return
        for n in range(begin, min(begin + step, rows)):
            at, old = n * stride, get(c_index, n) * get(a, 12)
            h_to, c_to = get(h_rows, n) * get(a, 13), get(c_rows, n) * get(a, 14)
            bad = splat(0.0)
            for d in range(0, whole, WIDTH):
                i, f = load(gates, at + d), load(gates, at + hidden + d)
                g, o = load(gates, at + 2 * hidden + d), load(gates, at + 3 * hidden + d)
                if biased:
                    i, f = i + load(bias, d), f + load(bias, hidden + d)
                    g, o = g + load(bias, 2 * hidden + d), o + load(bias, 3 * hidden + d)
                h, new = _lstm_lanes(i, f, g, o, load(c, old + d))
                store(h_out, h_to + d, h)
                store(c_out, c_to + d, new)
                bad = bad + (new - new)
            if rest:
                d = whole
                i, f = _take(last, 1, gates, at + d, rest), _take(last, 2, gates, at + hidden + d, rest)
                g = _take(last, 3, gates, at + 2 * hidden + d, rest)
                o = _take(last, 4, gates, at + 3 * hidden + d, rest)
                if biased:
                    i = i + _take(last, 5, bias, d, rest)
                    f = f + _take(last, 6, bias, hidden + d, rest)
                    g = g + _take(last, 7, bias, 2 * hidden + d, rest)
                    o = o + _take(last, 8, bias, 3 * hidden + d, rest)
                h, new = _lstm_lanes(i, f, g, o, _take(last, 9, c, old + d, rest))
                _give(last, h, h_out, h_to + d, rest)
                _give(last, new, c_out, c_to + d, rest)
                bad = bad + (new - new)
            put(check, n, total(bad))


# -- GRU -------------------------------------------------------------------------------------------

# x_gates, x_bias (0: none), h_gates, h_bias (0: none), h, h_index, h_out, h_rows, check; rows, hidden; strides of
# x_gates, h_gates, h, h_out; rows per turn


@piece
def _gru_lanes(rx, rh, zx, zh, nx, nh, old):  # type: ignore[no-untyped-def]
    n = _tanh(fma(_sigmoid(rx + rh), nh, nx))
    return fma(_sigmoid(zx + zh), old - n, n)


@piece
def _gru_gates(words, kind):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    x_gates, x_bias = like(kind, get(a, 0)), like(kind, get(a, 1))
    h_gates, h_bias = like(kind, get(a, 2)), like(kind, get(a, 3))
    h, h_out = like(kind, get(a, 4)), like(kind, get(a, 6))
    h_index, h_rows, check = longs(get(a, 5)), longs(get(a, 7)), floats(get(a, 8))
    by_x, by_h = get(a, 1) != 0, get(a, 3) != 0
    rows, hidden, step = get(a, 9), get(a, 10), get(a, 15)
    whole = hidden - hidden % WIDTH
    rest = hidden - whole
    last = stack(14 * WIDTH)  # the last numbers of rows, with zeros behind them
    _clear(last, 14)
    while True:
        begin = next_of(words) * step
        if begin >= rows:
            return
        for n in range(begin, min(begin + step, rows)):
            x_at, h_at = n * get(a, 11), n * get(a, 12)
            old, to = get(h_index, n) * get(a, 13), get(h_rows, n) * get(a, 14)
            bad = splat(0.0)
            for d in range(0, whole, WIDTH):
                rx, rh = load(x_gates, x_at + d), load(h_gates, h_at + d)
                zx, zh = load(x_gates, x_at + hidden + d), load(h_gates, h_at + hidden + d)
                nx, nh = load(x_gates, x_at + 2 * hidden + d), load(h_gates, h_at + 2 * hidden + d)
                if by_x:
                    rx, zx = rx + load(x_bias, d), zx + load(x_bias, hidden + d)
                    nx = nx + load(x_bias, 2 * hidden + d)
                if by_h:
                    rh, zh = rh + load(h_bias, d), zh + load(h_bias, hidden + d)
                    nh = nh + load(h_bias, 2 * hidden + d)
                new = _gru_lanes(rx, rh, zx, zh, nx, nh, load(h, old + d))
                store(h_out, to + d, new)
                bad = bad + (new - new)
            if rest:
                d = whole
                rx, rh = _take(last, 1, x_gates, x_at + d, rest), _take(last, 2, h_gates, h_at + d, rest)
                zx = _take(last, 3, x_gates, x_at + hidden + d, rest)
                zh = _take(last, 4, h_gates, h_at + hidden + d, rest)
                nx = _take(last, 5, x_gates, x_at + 2 * hidden + d, rest)
                nh = _take(last, 6, h_gates, h_at + 2 * hidden + d, rest)
                if by_x:
                    rx = rx + _take(last, 7, x_bias, d, rest)
                    zx = zx + _take(last, 8, x_bias, hidden + d, rest)
                    nx = nx + _take(last, 9, x_bias, 2 * hidden + d, rest)
                if by_h:
                    rh = rh + _take(last, 10, h_bias, d, rest)
                    zh = zh + _take(last, 11, h_bias, hidden + d, rest)
                    nh = nh + _take(last, 12, h_bias, 2 * hidden + d, rest)
                new = _gru_lanes(rx, rh, zx, zh, nx, nh, _take(last, 13, h, old + d, rest))
                _give(last, new, h_out, to + d, rest)
                bad = bad + (new - new)
            put(check, n, total(bad))


# -- TreeLSTM --------------------------------------------------------------------------------------

# gates, bias (0: none), forget, forget_bias (0: none), c, c_index, h_out, h_rows, c_out, c_rows, check; rows, hidden,
# children; strides of gates, forget, c, c_index (rows, children), h_out, c_out; rows per turn


@piece
def _tree_lanes(o, new):  # type: ignore[no-untyped-def]
    return _sigmoid(o) * _tanh(new)


@piece
def _tree_gates(words, kind):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    gates, bias = like(kind, get(a, 0)), like(kind, get(a, 1))
    forget, forget_bias = like(kind, get(a, 2)), like(kind, get(a, 3))
    c, h_out, c_out = like(kind, get(a, 4)), like(kind, get(a, 6)), like(kind, get(a, 8))
    c_index, h_rows, c_rows = longs(get(a, 5)), longs(get(a, 7)), longs(get(a, 9))
    check, biased, forget_biased = floats(get(a, 10)), get(a, 1) != 0, get(a, 3) != 0
    rows, hidden, children, step = get(a, 11), get(a, 12), get(a, 13), get(a, 21)
    whole = hidden - hidden % WIDTH
    rest = hidden - whole
    last = stack(10 * WIDTH)  # the last numbers of rows, with zeros behind them
    _clear(last, 10)
    while True:
        begin = next_of(words) * step
        if begin >= rows:
            return
        for n in range(begin, min(begin + step, rows)):
            at, kept_at, child_at = n * get(a, 14), n * get(a, 15), n * get(a, 17)
            h_to, c_to = get(h_rows, n) * get(a, 19), get(c_rows, n) * get(a, 20)
            bad = splat(0.0)
            for d in range(0, whole, WIDTH):
                i, o, u = load(gates, at + d), load(gates, at + hidden + d), load(gates, at + 2 * hidden + d)
                if biased:
                    i, o = i + load(bias, d), o + load(bias, hidden + d)
                    u = u + load(bias, 2 * hidden + d)
                new = _sigmoid(i) * _tanh(u)
                for k in range(children):
                    f = load(forget, kept_at + k * hidden + d)
                    if forget_biased:
                        f = f + load(forget_bias, k * hidden + d)
                    old = get(c_index, child_at + k * get(a, 18)) * get(a, 16)
                    new = fma(_sigmoid(f), load(c, old + d), new)
                store(h_out, h_to + d, _tree_lanes(o, new))
                store(c_out, c_to + d, new)
                bad = bad + (new - new)
            if rest:
                d = whole
                i, o = _take(last, 1, gates, at + d, rest), _take(last, 2, gates, at + hidden + d, rest)
                u = _take(last, 3, gates, at + 2 * hidden + d, rest)
                if biased:
                    i = i + _take(last, 4, bias, d, rest)
                    o = o + _take(last, 5, bias, hidden + d, rest)
                    u = u + _take(last, 6, bias, 2 * hidden + d, rest)
                new = _sigmoid(i) * _tanh(u)
                for k in range(children):
                    f = _take(last, 7, forget, kept_at + k * hidden + d, rest)
                    if forget_biased:
                        f = f + _take(last, 8, forget_bias, k * hidden + d, rest)
                    old = get(c_index, child_at + k * get(a, 18)) * get(a, 16)
                    new = fma(_sigmoid(f), _take(last, 9, c, old + d, rest), new)
                _give(last, _tree_lanes(o, new), h_out, h_to + d, rest)
                _give(last, new, c_out, c_to + d, rest)
                bad = bad + (new - new)
            put(check, n, total(bad))


# -- entries -------------------------------------------------------------------------------------


def entries(source: str) -> dict[tuple[str, Any], Any]:
    """As in `kernels.py`."""

    def lstm_gates_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _lstm_gates(words, floats(0))

    def lstm_gates_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _lstm_gates(words, halves(0))

    def lstm_gates_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _lstm_gates(words, brains(0))

    def gru_gates_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _gru_gates(words, floats(0))

    def gru_gates_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _gru_gates(words, halves(0))

    def gru_gates_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _gru_gates(words, brains(0))

    def tree_gates_floats(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _tree_gates(words, floats(0))

    def tree_gates_halves(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _tree_gates(words, halves(0))

    def tree_gates_brains(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _tree_gates(words, brains(0))

    return {
        ("lstm_gates", torch.float32): lstm_gates_floats,
        ("lstm_gates", torch.float16): lstm_gates_halves,
        ("lstm_gates", torch.bfloat16): lstm_gates_brains,
        ("gru_gates", torch.float32): gru_gates_floats,
        ("gru_gates", torch.float16): gru_gates_halves,
        ("gru_gates", torch.bfloat16): gru_gates_brains,
        ("tree_gates", torch.float32): tree_gates_floats,
        ("tree_gates", torch.float16): tree_gates_halves,
        ("tree_gates", torch.bfloat16): tree_gates_brains,
    }
