"""Matrices as 16-bit floats in FBGEMM's order, multiplied with float32 activations and summed in float32.

Decoding reads every weight per step, so half the bytes is nearly half the time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cellar.ops.linear.dense import WIDEN_ELEMENTS
from cellar.ops.linear.weight import LinearWeight

PERIOD = 120
"""Rows that FBGEMM takes at a time."""


class HalfWeight(LinearWeight):
    """A matrix on the CPU, rounded to 16-bit floats and packed by FBGEMM."""

    __slots__ = ("packed",)

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix.shape[0], matrix.shape[1])
        self.packed: Any = torch.ops.quantized.linear_prepack_fp16(matrix.float().contiguous(), None)

    @property
    def nbytes(self) -> int:
        """Two bytes an element."""
        return 2 * self.out_features * self.in_features

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By FBGEMM, in float32."""
        if not x.shape[0]:
            return x.new_empty((0, self.out_features))
        rows = x.shape[0]
        wide, taken = x.float(), _taken(rows)
        if taken > rows:
            wide = torch.cat((wide, wide.new_zeros((taken - rows, self.in_features))))
        out = _product(wide, self.packed)[:rows]
        if bias is not None:
            out += bias
        return out.to(x.dtype)

    def dense(self) -> Tensor:
        """The rounded matrix in float32, a copy."""
        matrix: Tensor = torch.ops.quantized.linear_unpack_fp16(self.packed)[0]
        return matrix

    def remade(self, matrix: Tensor) -> HalfWeight:
        """Another one, packed."""
        return HalfWeight(matrix)


def _product(x: Tensor, packed: Any) -> Tensor:
    # Of torch's two operations on such weights, this one divides its work among threads.
    out: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, packed)
    return out


def _taken(rows: int) -> int:
    """So many rows are multiplied in place of `rows`, so that each has the bits that it has in all other company."""
    return rows - rows % PERIOD + _alike()[rows % PERIOD]


@functools.cache
def _alike() -> tuple[int, ...]:
    """For each number of rows up to PERIOD the next one of which all rows have the same bits.

    FBGEMM cuts rows into tiles of up to six, and on processors without AVX-512 sums of tiles of one and two rows come
    in an order of their own (torch 2.13). All rows are held against those of tiles of three.
    """
    x = torch.randn((PERIOD, 256), generator=torch.Generator().manual_seed(0))
    packed = torch.ops.quantized.linear_prepack_fp16(x[:48].contiguous(), None)
    usual = torch.cat([_product(x[start : start + 3], packed) for start in range(0, PERIOD, 3)])
    found, following = [], 0
    for rows in range(PERIOD, 0, -1):
        if rows == PERIOD or torch.equal(_product(x[:rows], packed), usual[:rows]):
            following = rows
        found.append(following)
    return (0, *reversed(found))


def half_holds(matrix: Tensor) -> bool:
    """True if 16-bit floats keep the matrix to 2^-24 of its Frobenius norm: exact but for a few tiny elements."""
    if matrix.dtype == torch.float16:
        return True
    change = size = 0.0
    rows = max(1, WIDEN_ELEMENTS // matrix.shape[1])
    for start in range(0, matrix.shape[0], rows):
        part = matrix[start : start + rows].float()
        change += float((part - part.half().float()).square_().sum(dtype=torch.float64))
        size += float(part.square().sum(dtype=torch.float64))
    # Not a number compares false: infinite elements, and those beyond 65504.
    return change <= 2.0**-48 * size


@functools.cache
def half_works() -> bool:
    """True if this build and processor have FBGEMM (x86 with AVX2)."""
    try:
        weight = HalfWeight(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        return weight.multiply(torch.ones((1, 2))).tolist() == [[3.0, 7.0]]
    except (RuntimeError, AttributeError):
        return False
