"""Plain matrices whose products come in blocks of equally many rows, so that a row's sums do not depend on the others.

A library chooses how it sums by how many rows there are: MKL has another order for 1, and for fewer than 16. A call
that always has the same shape always has the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cellar.ops.linear.weight import MatrixWeight

_ROWS = 16


class BlockedWeight(MatrixWeight):
    """A float32 matrix on the CPU, as it is."""

    __slots__ = ()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By the library, 16 rows at a time; the last ones are filled up with zeros."""
        count = x.shape[0]
        out = x.new_empty((-(-count // _ROWS) * _ROWS, self.out_features))
        for start in range(0, count, _ROWS):
            rows = x[start : start + _ROWS]
            if len(rows) < _ROWS:
                rows = torch.cat((rows, rows.new_zeros(_ROWS - len(rows), x.shape[1])))
            out[start : start + _ROWS] = functional.linear(rows, self.matrix, bias)
        return out[:count]
