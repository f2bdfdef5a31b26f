"""Plain matrices on the CPU: few tokens by a kernel that reads 16 bits as they lie, others by the library, and in
float32 where 16-bit arithmetic is missing.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor
from torch.nn import functional

from cellar.ops.cpu.blocks import BLOCK, ROWS
from cellar.ops.cpu.launch import kernel
from cellar.ops.linear.onednn import onednn_packs
from cellar.ops.linear.weight import MatrixWeight

# Rows of 16-bit weights that are widened at a time: 1 M elements stay in the cache and bound the extra memory.
WIDEN_ELEMENTS = 1 << 20

MOST_FEW = 16
"""Tokens that are multiplied by the kernel, which is 1.2 to 4 times as fast then (docs/performance/linear-cpu.md)."""

_TURN = 1 << 15
"""Numbers that a thread takes per turn, about."""


class DenseWeight(MatrixWeight):
    """The matrix as it is."""

    __slots__ = ()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By the library; 16-bit matrices in float32: few tokens by the kernel, many with some rows of the matrix at a
        time where that is faster.
        """
        matrix = self.matrix
        if matrix.dtype == torch.float32:
            return functional.linear(x, matrix, bias)
        if 0 < x.shape[0] <= MOST_FEW and matrix.shape[1] % BLOCK == 0 and matrix.numel() and matrix.stride(1) == 1:
            return _few(x, matrix, bias)
        if matrix.dtype == torch.bfloat16 and (x.shape[0] < 5 or onednn_packs(torch.bfloat16)):
            return functional.linear(x, matrix, bias)
        return _widened(x, matrix, bias)


def _few(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """By `ops/cpu/plain.py`: [t, in] and [out, in], whose rows may lie apart, -> [t, out]."""
    (rows, columns), wide = matrix.shape, x.float().contiguous()
    out = wide.new_empty((len(x), rows))
    turn = max(1, _TURN // columns // ROWS) * ROWS
    places = (wide.data_ptr(), matrix.data_ptr(), out.data_ptr())
    kernel("product_plain", matrix.dtype)(
        struct.pack("8q", *places, len(x), rows, columns, matrix.stride(0), turn), matrix.numel()
    )
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def _widened(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    wide = x.float()
    rows = max(1, WIDEN_ELEMENTS // max(1, matrix.shape[1]))
    out = wide.new_empty((x.shape[0], matrix.shape[0]))
    for start in range(0, matrix.shape[0], rows):
        torch.mm(wide, matrix[start : start + rows].float().t(), out=out[:, start : start + rows])
    if bias is not None:
        out += bias
    return out.to(x.dtype)
