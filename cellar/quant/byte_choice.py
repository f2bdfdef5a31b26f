"""What multiplies tokens in 8 bits by a matrix in 8 bits: our kernel for a few tokens, the library for more."""

from __future__ import annotations

from typing import TypeAlias

from cellar.ops.linear.bytes import Bytes

Product: TypeAlias = Bytes | None
"""None is the library's."""


_LARGE_OUT, _LARGE_IN, _SQUARE = 16384, 8192, 4096


def default_product(n: int, k: int, m: int) -> Product:
    """What was fastest on an H200 for matrices of about this shape (docs/log/quantized-gpu.md)."""
    if m <= 4:
        if n >= _LARGE_OUT or k >= _LARGE_IN:
            return Bytes(1, 8, 4, 2)
        return Bytes(1, 8, 2, 3) if n > _SQUARE else Bytes(1, 8, 3, 2)
    if m <= 8:
        return Bytes(1, 8, 4, 2) if k >= _LARGE_IN else Bytes(1, 8, 2, 3)
    if m <= 16:
        return Bytes(1, 8, 2, 2)
    return Bytes(2, 8, 2, 1) if m <= 32 and n < _LARGE_OUT else None
