"""Matrices multiplied as they lie, for memory that other matrices take turns in: nothing is packed, nothing is kept.

In float32 a row's result does not depend on how many rows there are. oneDNN has another order of summing for one row,
so one row is computed as two. It cuts sums over more columns than it likes where the number of rows suggests, and a
part of a matrix's columns, which do not lie behind one another, it multiplies a thousand times slower: so such matrices
are left to a product of always as many rows (`blocked.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.ops.linear.blocked import BlockedWeight
from cellar.ops.linear.dense import DenseWeight
from cellar.ops.linear.device import DeviceWeight
from cellar.ops.linear.onednn import onednn_packs
from cellar.ops.linear.weight import LinearWeight, MatrixWeight

MOST_COLUMNS = 1024


class InPlaceWeight(MatrixWeight):
    """A float32 matrix of up to MOST_COLUMNS on the CPU in its own order, multiplied by oneDNN."""

    __slots__ = ()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By oneDNN."""
        count = x.shape[0]
        if not count:
            return x.new_empty((0, self.out_features))
        if count == 1:
            x = x.expand(2, -1)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.matrix, bias, "none", [], "")
        return out[:count]


def in_place(matrix: Tensor) -> LinearWeight:
    """A matrix [out, in] as it lies: its memory may be filled with another one of the same shape."""
    if not matrix.is_cpu:
        return DeviceWeight(matrix)
    if matrix.dtype != torch.float32 or not matrix.numel():
        return DenseWeight(matrix)
    if matrix.shape[1] <= MOST_COLUMNS and onednn_packs(torch.float32):
        return InPlaceWeight(matrix)
    return BlockedWeight(matrix)
