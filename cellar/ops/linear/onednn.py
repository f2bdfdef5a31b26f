"""Matrices in oneDNN's order: blocked for the processor's matrix instructions, in their own dtype.

In float32 a row's result does not depend on how many rows there are, nor on the number of threads, bit for bit. With
AVX-512 oneDNN keeps that only up to 1024 columns: beyond them it cuts the sum where the number of rows, or of threads,
suggests. So wider matrices are cut here, and the parts added in their order.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cellar.ops.cpu.room import whole_rows, widened
from cellar.ops.linear.weight import LinearWeight

# The rows that oneDNN's layout is made for: the one that is best from 1 to 512 (measured).
_PACK_ROWS = 64
# The most columns whose products oneDNN adds in one order (tests/ops/test_rows_alone.py tries it on every machine).
_PART_COLUMNS = 1024


class OneDnnWeight(LinearWeight):
    """A matrix on the CPU, packed by oneDNN; float32, or bfloat16 where the processor computes with it."""

    __slots__ = ("parts",)

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix.shape[0], matrix.shape[1])
        # bfloat16 promises nothing about its last bits, and rounds what parts would add.
        parts = torch.split(matrix, _PART_COLUMNS, dim=1) if matrix.dtype == torch.float32 else (matrix,)
        self.parts: tuple[Tensor, ...] = tuple(_packed(part) for part in parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By oneDNN, which adds each part's product to what the parts before it gave."""
        rows = x.shape[0]
        if not rows:
            return x.new_empty((0, self.out_features))
        if x.dtype == torch.bfloat16:
            more = whole_rows(rows)
            if more > rows:
                x = widened(x, more)
        first = x if len(self.parts) == 1 else x[:, :_PART_COLUMNS]  # a view takes microseconds
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(first, self.parts[0], bias, "none", [], "")
        for k, part in enumerate(self.parts[1:], 1):
            columns = x[:, k * _PART_COLUMNS : (k + 1) * _PART_COLUMNS]
            out = torch.ops.mkldnn._linear_pointwise.binary(columns, out, part, None, "add")
        return out if out.shape[0] == rows else out[:rows]

    def dense(self) -> Tensor:
        """The matrix in its own order, a copy."""
        return torch.cat([part.to_dense() for part in self.parts], dim=1)

    def remade(self, matrix: Tensor) -> OneDnnWeight:
        """Another one, packed."""
        return OneDnnWeight(matrix)


def _packed(matrix: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(matrix.contiguous(), _PACK_ROWS)
    return packed


@functools.cache
def onednn_packs(dtype: torch.dtype) -> bool:
    """True if oneDNN is built in and takes weights of this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        OneDnnWeight(torch.ones((2, 2), dtype=dtype)).multiply(torch.ones((1, 2), dtype=dtype))
    except RuntimeError:
        return False
    return True
