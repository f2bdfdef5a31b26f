"""Matrices in 4 bits in the order in which Hopper's tensor cores take operands: what a thread needs is 16 bytes.

A piece is 16 rows, a block 64 columns. Lane 4 g + q has rows g and g + 8, and 8 neighbouring columns of each half of
the block, 8 q and on; a word has 4 of them:

    bits 4 i and on:        row g + 8 (i % 2), column 32 half + 8 q + 4 side + 2 (i // 2)        of word 2 half + side
    bits 16 + 4 i and on:   the next column                                                      (i = 0 .. 3)

So one mask gives two neighbouring columns of a row, an operand of an instruction (m16n8k16: 16 rows, 16 columns, of
which the q-th lanes have 4; which columns meet does not matter as long as those of x are the same).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.linear.nibbles import COLUMNS, ROWS, Fragments
from cellar.quant.matrix import Quantized
from cellar.quant.pack import from_bytes, to_bytes
from cellar.quant.packed import SYMMETRIC_ZERO, is_symmetric

# Axes of codes as they are: piece, row // 8, row % 8, block, half, q, side, pair, column; and where they go.
_AXES = (2, 8, -1, 2, 4, 2, 2, 2)
_ORDER = (0, 3, 2, 5, 4, 6, 8, 7, 1)
_BACK = tuple(_ORDER.index(axis) for axis in range(len(_ORDER)))
# Codes that change their places at a time.
_AT_ONCE = 1 << 24


def fragments_take(matrix: Quantized) -> bool:
    """True for matrices that have such a form: int4 in groups of 32, 64 or 128 neighbours, each row by itself."""
    format = matrix.format
    return (
        format.name == "int4"
        and format.group in (32, 64, 128)
        and format.rows == 1
        and not format.activations
        and matrix.groups is None
        and matrix.shape[0] > 0
        and matrix.shape[1] % max(COLUMNS, format.group) == 0
        and matrix.scales.dtype in (torch.float16, torch.bfloat16)
        and (matrix.zeros is None or matrix.zeros.dtype == torch.uint8)
        and matrix.shape[0] * (matrix.shape[1] // 32) < 1 << 31
    )


def fragments(matrix: Quantized) -> Fragments:
    """The same codes in their new places, for matrices that `fragments_take`."""
    n, k = matrix.shape
    pieces = -(-n // ROWS)
    codes = torch.zeros((pieces, k // COLUMNS, 32, 4), dtype=torch.int32, device=matrix.codes.device)
    step = max(1, _AT_ONCE // k // ROWS)
    for start in range(0, 0 if codes.is_meta else pieces, step):
        rows = from_bytes(matrix.codes[start * ROWS : (start + step) * ROWS])
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        placed = rows.view(-1, *_split(k)).permute(_ORDER).reshape(-1, k // COLUMNS, 32, 4, 8)
        codes[start : start + step] = to_bytes(placed).view(torch.int32).squeeze(-1)
    zeros = None if matrix.zeros is None or is_symmetric(matrix) else _paired(matrix.zeros)
    return Fragments(n, k, matrix.format.group, codes, _paired(matrix.scales), zeros)


def unfragmented(matrix: Fragments, format: Format) -> Quantized:
    """The other way."""
    found = []
    step = max(1, _AT_ONCE // matrix.k // ROWS)
    for some in torch.split(matrix.codes, step):
        nibbles = from_bytes(some.contiguous().view(torch.uint8)).view(len(some), -1, 8, 4, 2, 2, 2, 2, 2)
        found.append(to_bytes(nibbles.permute(_BACK).reshape(-1, matrix.k)))
    scales = _unpaired(matrix.scales, matrix.n)
    if matrix.zeros is None:
        zeros = torch.full(scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8, device=scales.device)
    else:
        zeros = _unpaired(matrix.zeros, matrix.n)
    return Quantized(format, torch.cat(found)[: matrix.n], scales, zeros)


def _split(k: int) -> tuple[int, ...]:
    return tuple(k // COLUMNS if size < 0 else size for size in _AXES)


def _paired(shared: Tensor) -> Tensor:
    """[n, groups] -> [pieces, groups, 8, 2]."""
    padded = torch.nn.functional.pad(shared, (0, 0, 0, -len(shared) % ROWS))
    return padded.view(-1, 2, 8, shared.shape[1]).permute(0, 3, 2, 1).contiguous()


def _unpaired(paired: Tensor, n: int) -> Tensor:
    return paired.permute(0, 3, 2, 1).reshape(-1, paired.shape[1])[:n].contiguous()
