"""The product of few tokens in bfloat16 with a matrix of it by a processor's matrix units (AMX).

Sixteen rows of the matrix as they lie are one of their operands, sixteen tokens the other: up to so many a product
takes as long as its matrix takes to be read. More of them find the rows in the cache. The form of a kernel is that of
`kernels.py`. A token has the same sums whatever stands beside it: pairs of columns in their order. Numbers too small to
be normal count as zeros.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.typing import signature
from numba.extending import intrinsic

from cellar.ops.cpu.blocks import BLOCK, SIZE, UNIT
from cellar.ops.cpu.dots import fetch_element
from cellar.ops.cpu.lanes import brains, floats, get, like, longs, next_of, stack
from cellar.ops.cpu.pieces import piece
from cellar.ops.cpu.wide import has, wide_load, wide_plus, wide_splat, wide_store, wide_turn

AHEAD = 96
"""Numbers of a row that are asked for before they are needed: three lines of each of 64 rows. So many columns are
multiplied by all tokens, if these are more than sixteen, before the next ones: the first cache holds them, and the
tokens', and the next ones come meanwhile.
"""

_ARCH_PRCTL, _ALLOW, _TILE_DATA = 158, 0x1023, 18
"""The system is asked once whether this process may use the units' registers: they make its threads' state larger."""

_BYTE = ir.IntType(8)


@functools.cache
def has_units() -> bool:
    """True if what is compiled here may use them, and this process may, too."""
    if not (has("amx-bf16") and has("amx-tile") and sys.platform == "linux"):
        return False
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ALLOW, _TILE_DATA)) == 0


def shape_of_tiles() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What the units are set to: eight registers of sixteen rows of 64 bytes. [64]"""
    found = np.zeros(64, np.uint8)
    found[0] = 1  # the palette
    found[16:32].view(np.uint16)[:] = 64
    found[48:56] = SIZE
    return found


def _call(builder: Any, name: str, args: Any) -> None:
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [a.type for a in args]), name)
    builder.call(function, args)


def _named(name: str, *numbers: int) -> Any:
    """The instruction with these registers, of no memory."""

    def of(typing: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _call(builder, f"llvm.x86.{name}", [ir.Constant(_BYTE, number) for number in numbers])
            return context.get_dummy_value()

        return signature(types.none), lower

    return intrinsic(of)


def _of_memory(name: str, number: int) -> Any:
    """The instruction with this register, and with memory from an element on: rows so many bytes apart."""

    def of(typing: Any, pointer: Any, index: Any, stride: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            at = builder.bitcast(builder.gep(args[0], [args[1]]), _BYTE.as_pointer())
            _call(builder, f"llvm.x86.{name}", [ir.Constant(_BYTE, number), at, args[2]])
            return context.get_dummy_value()

        return signature(types.none, pointer, types.int64, types.int64), lower

    return intrinsic(of)


@intrinsic  # type: ignore[untyped-decorator]
def tiles_begin(typing: Any, pointer: Any) -> Any:
    """Set the units as the 64 bytes there say."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "llvm.x86.ldtilecfg", [builder.bitcast(args[0], _BYTE.as_pointer())])
        return context.get_dummy_value()

    return signature(types.none, pointer), lower


tiles_end = _named("tilerelease")
zero_0, zero_1, zero_2, zero_3 = (_named("tilezero", k) for k in range(4))
store_0, store_1, store_2, store_3 = (_of_memory("tilestored64", k) for k in range(4))
sums_0, sums_1, sums_2, sums_3 = (_of_memory("tileloadd64", k) for k in range(4))
load_tokens = _of_memory("tileloadd64", 4)
rows_0, rows_1, rows_2 = (_of_memory("tileloadd64", k) for k in (5, 6, 7))
dot_0, dot_1, dot_2, dot_3 = (_named("tdpbf16ps", k, 5 + k % 3, 4) for k in range(4))
"""Registers 0 to 3 are sums, 4 the tokens, 5 to 7 rows by turns."""


@piece
def _fetch(matrix, at, row):  # type: ignore[no-untyped-def]
    for r in range(SIZE):
        fetch_element(matrix, at + r * row)


@piece
def _unit(x, x_at, matrix, starts, row, columns, is_first, asked, sums, s):  # type: ignore[no-untyped-def]
    """Some columns of four times sixteen rows by sixteen tokens, added to their sums [4, 16 rows, 16 tokens] unless
    they are the first. asked: which of the four ask for what comes behind.
    """
    at0, at1, at2, at3 = starts
    asks0, asks1, asks2, asks3 = asked
    if is_first:
        zero_0()
        zero_1()
        zero_2()
        zero_3()
    else:
        sums_0(sums, s, 64)
        sums_1(sums, s + SIZE * SIZE, 64)
        sums_2(sums, s + 2 * SIZE * SIZE, 64)
        sums_3(sums, s + 3 * SIZE * SIZE, 64)
    for d in range(0, columns, BLOCK):
        load_tokens(x, x_at + d * SIZE, 64)
        if asks0:
            _fetch(matrix, at0 + d + AHEAD, row)
        if asks1:
            _fetch(matrix, at1 + d + AHEAD, row)
        if asks2:
            _fetch(matrix, at2 + d + AHEAD, row)
        if asks3:
            _fetch(matrix, at3 + d + AHEAD, row)
        rows_0(matrix, at0 + d, 2 * row)
        dot_0()
        rows_1(matrix, at1 + d, 2 * row)
        dot_1()
        rows_2(matrix, at2 + d, 2 * row)
        dot_2()
        rows_0(matrix, at3 + d, 2 * row)
        dot_3()
    store_0(sums, s, 64)
    store_1(sums, s + SIZE * SIZE, 64)
    store_2(sums, s + 2 * SIZE * SIZE, 64)
    store_3(sums, s + 3 * SIZE * SIZE, 64)


# x (sixteen tokens after sixteen, of them pairs of columns: of each its two numbers of each token), matrix, bias
# (float32, 0: none), out, the shape of tiles; tokens, rows (16 at least), columns, numbers from one row of the matrix
# to the next. All but the bias are bfloat16.


@piece
def _product(words):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    x, matrix, bias, out = brains(get(a, 0)), brains(get(a, 1)), floats(get(a, 2)), brains(get(a, 3))
    is_there = get(a, 2) != 0
    tokens, rows, columns, row = get(a, 5), get(a, 6), get(a, 7), get(a, 8)
    passes, most = (tokens + SIZE - 1) // SIZE, rows - SIZE
    part = columns if passes == 1 else AHEAD
    sums = stack(passes * UNIT * SIZE)
    tiles_begin(like(brains(0), get(a, 4)))
    while True:
        n = next_of(words) * UNIT
        if n >= rows:
            break
        # The last sixteen rows again where there are no more.
        n0, n1, n2, n3 = min(n, most), min(n + SIZE, most), min(n + 2 * SIZE, most), min(n + 3 * SIZE, most)
        for start in range(0, columns, part):
            starts = (n0 * row + start, n1 * row + start, n2 * row + start, n3 * row + start)
            count = min(part, columns - start)
            for p in range(passes):
                # Each pass asks for some of the rows, all together for all.
                asked = (p == 0, 1 % passes == p, 2 % passes == p, 3 % passes == p)
                at = p * SIZE * columns + start * SIZE
                _unit(x, at, matrix, starts, row, count, start == 0, asked, sums, p * UNIT * SIZE)
        for p in range(passes):
            for k in range(4):
                first, s = min(n + k * SIZE, most), (p * UNIT + k * SIZE) * SIZE
                wide_turn(sums, s)
                added = wide_load(bias, first) if is_there else wide_splat(0.0)
                for t in range(min(SIZE, tokens - p * SIZE)):
                    wide_store(out, (p * SIZE + t) * rows + first, wide_plus(wide_load(sums, s + t * SIZE), added))
    tiles_end()


# -- entries -------------------------------------------------------------------------------------


def entries(source: str) -> dict[tuple[str, Any], Any]:
    """As in `kernels.py`; none where there are no such units."""

    def product_units(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words)

    return {("product_units", torch.bfloat16): product_units} if has_units() else {}
