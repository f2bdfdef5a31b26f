"""Plain matrices on the CPU: the library's product, and float32 arithmetic where 16-bit arithmetic is missing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cellar.ops.linear.onednn import onednn_packs
from cellar.ops.linear.weight import MatrixWeight

# Rows of 16-bit weights that are widened at a time: 1 M elements stay in the cache and bound the extra memory.
WIDEN_ELEMENTS = 1 << 20


class DenseWeight(MatrixWeight):
    """The matrix as it is."""

    __slots__ = ()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By the library; 16-bit matrices in float32, some rows of the matrix at a time, where that is faster."""
        matrix = self.matrix
        if matrix.dtype == torch.float32:
            return functional.linear(x, matrix, bias)
        if matrix.dtype == torch.bfloat16 and (x.shape[0] < 5 or onednn_packs(torch.bfloat16)):
            return functional.linear(x, matrix, bias)
        return _widened(x, matrix, bias)


def _widened(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    wide = x.float()
    rows = max(1, WIDEN_ELEMENTS // max(1, matrix.shape[1]))
    out = wide.new_empty((x.shape[0], matrix.shape[0]))
    for start in range(0, matrix.shape[0], rows):
        torch.mm(wide, matrix[start : start + rows].float().t(), out=out[:, start : start + rows])
    if bias is not None:
        out += bias
    return out.to(x.dtype)
