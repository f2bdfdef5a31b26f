"""Rows that products take in whole tiles, and tensors with room for them.

oneDNN compiles a kernel in bfloat16 for each number of rows (docs/decisions/0087). So products take whole tiles: what
lies behind a tensor's last row is multiplied, too, and dropped. Kernels that make what is multiplied next leave room
there, so that nothing is copied for it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

# Rows of a tile of AMX; where there is none fewer do, of which fewer are dropped (100 rows are 104, not 112).
_AMX_TILE_ROWS = 16
_PLAIN_TILE_ROWS = 8
# The most rows of which none are dropped: oneDNN has other kernels for so few (torch 2.13).
_UNTILED_ROWS = 32


@functools.cache
def whole_rows(rows: int) -> int:
    """So many rows are multiplied in place of `rows`: whole tiles, and from 256 on at most an eighth more.

    Each number of rows takes oneDNN a millisecond or several, and half a megabyte for each matrix. A few dozen numbers
    are compiled once each; and with AMX whole tiles are faster than those with a rest. Up to 32 rows oneDNN takes
    kernels without tiles, which are faster for so few.
    """
    if rows <= _UNTILED_ROWS:
        return rows
    step = max(_tile_rows(), (1 << (rows - 1).bit_length()) // 16)
    return -(-rows // step) * step


def with_room(x: Tensor, *shape: int) -> Tensor:
    """A new contiguous tensor like `x`; in bfloat16 with room behind it for the rows that a product takes."""
    more = whole_rows(shape[0]) if x.dtype == torch.bfloat16 else shape[0]
    out = x.new_empty((more, *shape[1:]))
    return out if more == shape[0] else out[: shape[0]]


def widened(x: Tensor, rows: int) -> Tensor:
    """`x` [r, columns] and what lies behind it, [rows, columns]; a copy, and zeros, where there is no room."""
    columns = x.shape[1]
    end = (x.storage_offset() + rows * columns) * x.element_size()
    if x.is_contiguous() and end <= x.untyped_storage().nbytes():
        return x.as_strided((rows, columns), (columns, 1))
    return functional.pad(x, (0, 0, 0, rows - x.shape[0]))


@functools.cache
def _tile_rows() -> int:
    return _AMX_TILE_ROWS if torch.cpu._is_amx_tile_supported() else _PLAIN_TILE_ROWS
