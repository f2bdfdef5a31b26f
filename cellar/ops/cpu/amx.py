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
from cellar.ops.cpu.lanes import brains, floats, get, like, longs, next_of, put, stack
from cellar.ops.cpu.pieces import piece
from cellar.ops.cpu.wide import has

AHEAD = 96
"""Numbers of a row that are asked for before they are needed: three lines of each of 64 rows."""

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
load_tokens = _of_memory("tileloadd64", 4)
rows_0, rows_1, rows_2 = (_of_memory("tileloadd64", k) for k in (5, 6, 7))
dot_0, dot_1, dot_2, dot_3 = (_named("tdpbf16ps", k, 5 + k % 3, 4) for k in range(4))
"""Registers 0 to 3 are sums, 4 the tokens, 5 to 7 rows by turns."""


@piece
def _fetch(matrix, at, row):  # type: ignore[no-untyped-def]
    for r in range(SIZE):
        fetch_element(matrix, at + r * row + AHEAD)


@piece
def _unit(x, x_at, matrix, at0, at1, at2, at3, row, columns, asks, sums):  # type: ignore[no-untyped-def]
    """Four times sixteen rows by sixteen tokens: [4, 16 rows, 16 tokens]. `asks` for what comes behind."""
    zero_0()
    zero_1()
    zero_2()
    zero_3()
    for d in range(0, columns, BLOCK):
        load_tokens(x, x_at + d * SIZE, 64)
        if asks:
            _fetch(matrix, at0 + d, row)
            _fetch(matrix, at1 + d, row)
            _fetch(matrix, at2 + d, row)
            _fetch(matrix, at3 + d, row)
        rows_0(matrix, at0 + d, 2 * row)
        dot_0()
        rows_1(matrix, at1 + d, 2 * row)
        dot_1()
        rows_2(matrix, at2 + d, 2 * row)
        dot_2()
        rows_0(matrix, at3 + d, 2 * row)
        dot_3()
    store_0(sums, 0, 64)
    store_1(sums, SIZE * SIZE, 64)
    store_2(sums, 2 * SIZE * SIZE, 64)
    store_3(sums, 3 * SIZE * SIZE, 64)


# x (sixteen tokens after sixteen, of them pairs of columns: of each its two numbers of each token), matrix, both
# bfloat16, out (float32), the shape of tiles; tokens, rows (16 at least), columns, numbers from one row of the matrix
# to the next; rows per turn


@piece
def _product(words):  # type: ignore[no-untyped-def]
    a = longs(get(words, 1))
    x, matrix, out = brains(get(a, 0)), brains(get(a, 1)), floats(get(a, 2))
    tokens, rows, columns, row, step = get(a, 4), get(a, 5), get(a, 6), get(a, 7), get(a, 8)
    sums, most = stack(UNIT * SIZE), rows - SIZE
    tiles_begin(like(brains(0), get(a, 3)))
    while True:
        begin = next_of(words) * step
        if begin >= rows:
            break
        for n in range(begin, min(begin + step, rows), UNIT):
            # The last sixteen rows again where there are no more.
            n0, n1, n2, n3 = min(n, most), min(n + SIZE, most), min(n + 2 * SIZE, most), min(n + 3 * SIZE, most)
            for m in range(0, tokens, SIZE):
                _unit(x, m * columns, matrix, n0 * row, n1 * row, n2 * row, n3 * row, row, columns, m == 0, sums)
                for k in range(4):
                    first = min(n + k * SIZE, most)
                    for t in range(min(SIZE, tokens - m)):
                        for r in range(SIZE):
                            put(out, (m + t) * rows + first + r, get(sums, (k * SIZE + r) * SIZE + t))
    tiles_end()


# -- entries -------------------------------------------------------------------------------------


def entries(source: str) -> dict[tuple[str, Any], Any]:
    """As in `kernels.py`; none where there are no such units."""

    def product_units(words):  # type: ignore[no-untyped-def]
        source  # noqa: B018
        _product(words)

    return {("product_units", torch.bfloat16): product_units} if has_units() else {}
