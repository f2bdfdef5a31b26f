"""Plain matrices on the CPU: few tokens by kernels that read 16 bits as they lie, others by the library, and in float32
where 16-bit arithmetic is missing.
"""

from __future__ import annotations

import functools
import struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cellar.ops.cpu.blocks import BLOCK, ROWS, SIZE
from cellar.ops.cpu.launch import kernel, multiplies_in_units
from cellar.ops.linear.onednn import onednn_packs
from cellar.ops.linear.weight import MatrixWeight

# Rows of 16-bit weights that are widened at a time: 1 M elements stay in the cache and bound the extra memory.
WIDEN_ELEMENTS = 1 << 20

MOST_FEW = 16
"""Tokens that are multiplied by a kernel, which is 1.2 to 4 times as fast then (docs/performance/linear-cpu.md)."""

MOST_IN_UNITS = 64
"""The same by matrix units: of more tokens the library, which uses them too, is as fast."""

_TURNS, _TURN = 4, 1 << 15
"""Turns of each thread, and the least numbers of one: behind its end a thread has asked for rows that are another's."""


class DenseWeight(MatrixWeight):
    """The matrix as it is."""

    __slots__ = ()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By the library; 16-bit matrices in float32: few tokens by a kernel, in bfloat16 by matrix units if there are
        any, many with some rows of the matrix at a time where that is faster.
        """
        matrix = self.matrix
        if matrix.dtype == torch.float32:
            return functional.linear(x, matrix, bias)
        count = x.shape[0]
        if _takes(x, matrix):
            if _suits_units(x, matrix):
                return _in_units(x, matrix, bias)
            if count <= MOST_FEW:
                return _few(x, matrix, bias)
        if matrix.dtype == torch.bfloat16 and (count < 5 or onednn_packs(torch.bfloat16)):
            return functional.linear(x, matrix, bias)
        return widened(x, matrix, bias)

    def multiply_into(self, out: Tensor, x: Tensor) -> None:
        """By matrix units right into it, if `multiply` would use them."""
        matrix = self.matrix
        if _takes(x, matrix) and _suits_units(x, matrix):
            _in_units(x, matrix, None, out)
        else:
            super().multiply_into(out, x)


def _few(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """By `ops/cpu/plain.py`: [t, in] and [out, in], whose rows may lie apart, -> [t, out]."""
    (rows, columns), wide = matrix.shape, x.float().contiguous()
    out = wide.new_empty((len(x), rows))
    turn = max(rows // (_TURNS * torch.get_num_threads()), _TURN // columns) // ROWS * ROWS or ROWS
    places = (wide.data_ptr(), matrix.data_ptr(), out.data_ptr())
    kernel("product_plain", matrix.dtype)(
        struct.pack("8q", *places, len(x), rows, columns, matrix.stride(0), turn), matrix.numel()
    )
    return _with(out, bias, x.dtype)


def _takes(x: Tensor, matrix: Tensor) -> bool:
    """Whether the kernels multiply such matrices; `_few` takes fewer tokens."""
    fits = matrix.shape[1] % BLOCK == 0 and matrix.stride(1) == 1
    return 0 < len(x) <= MOST_IN_UNITS and matrix.numel() > 0 and fits


def _suits_units(x: Tensor, matrix: Tensor) -> bool:
    return x.dtype == matrix.dtype == torch.bfloat16 and matrix.shape[0] >= SIZE and multiplies_in_units()


def _in_units(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """By `ops/cpu/amx.py`; likewise."""
    rows, columns = matrix.shape
    padded = functional.pad(x, (0, 0, 0, -len(x) % SIZE)).contiguous().view(torch.int32)  # pairs of columns
    pairs = padded.view(-1, SIZE, columns // 2).transpose(1, 2).contiguous()
    added = None if bias is None else bias.float().contiguous()
    out = x.new_empty((len(x), rows)) if out is None else out
    places = (pairs, matrix, added, out)
    kernel("product_units", matrix.dtype)(
        struct.pack(
            "9q",
            *(0 if place is None else place.data_ptr() for place in places),
            _shape_of_tiles().ctypes.data,
            *(len(x), rows, columns, matrix.stride(0)),
        ),
        matrix.numel(),
    )
    return out


def _with(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if bias is not None:
        out += bias
    return out.to(dtype)


@functools.cache
def _shape_of_tiles() -> NDArray[np.uint8]:
    from cellar.ops.cpu.amx import shape_of_tiles

    return shape_of_tiles()


def widened(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product in float32, with some rows of the matrix at a time."""
    wide = x.float()
    rows = max(1, WIDEN_ELEMENTS // max(1, matrix.shape[1]))
    out = wide.new_empty((x.shape[0], matrix.shape[0]))
    for start in range(0, matrix.shape[0], rows):
        torch.mm(wide, matrix[start : start + rows].float().t(), out=out[:, start : start + rows])
    if bias is not None:
        out += bias
    return out.to(x.dtype)
