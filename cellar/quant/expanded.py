"""Quantized matrices that lie on a device as a processor reads them: written out some rows at a time, then multiplied.

For rows that the CPU multiplies where they lie in passes of few tokens, and that come to the device in longer ones; and
for formats that the kernels there have no form for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cellar.quant.activations import rounded
from cellar.quant.matrix import dequantized
from cellar.quant.weight import QuantizedWeight

_ELEMENTS = 1 << 24
"""Numbers that are written out at a time."""


class ExpandedWeight(QuantizedWeight):
    """Multiplied by the library in the dtype of x."""

    __slots__ = ()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b; what the format rounds of x is rounded first."""
        if self.order is not None:
            x = x[:, self.order]
        matrix = self.matrix
        if matrix.format.activations:
            x = rounded(x, matrix.format).to(x.dtype)
        step = max(1, _ELEMENTS // max(1, self.in_features))
        step = -(-step // matrix.format.rows) * matrix.format.rows if matrix.format.rows else step
        parts = [
            functional.linear(x, dequantized(matrix.rows(start, min(start + step, self.out_features))).to(x.dtype))
            for start in range(0, self.out_features, step)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out if bias is None else out.add_(bias)
