"""What multiplies tokens in 8 bits by a matrix in 8 bits: our kernel for a few tokens, the library for more."""

from __future__ import annotations

from typing import TypeAlias

from cellar.ops.linear.bytes import Bytes

Product: TypeAlias = Bytes | None
"""None is the library's."""


def default_product(n: int, k: int, m: int) -> Product:
    """What was fastest on an H200 for matrices of about this shape."""
    if m <= 16:
        return Bytes(1, 8, 2, 3 if m <= 8 else 2)
    return Bytes(2, 8, 2, 1) if m <= 32 else None
