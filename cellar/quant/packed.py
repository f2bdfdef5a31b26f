"""Quantized matrices as the kernels for GPUs read them: words of 16 bits, tile by tile.

Columns come in blocks, blocks in parts of `span` neighbours. A word holds one code of each part of its block, so that
the same bits of neighbouring words meet neighbouring columns:

    words[b, i, j] has the codes of W[i, b parts span + p span + j],    p = 0 .. parts - 1

Rows of a block lie behind one another: the tile of a program is one piece of memory. Blocks that the columns do not
fill are filled with codes that meet zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.quant.matrix import Quantized
from cellar.quant.pack import from_bytes, to_bytes

SYMMETRIC_ZERO = 8
"""The zero point of int4 where none is stored."""

# Where the bits of a part's code lie in a word, from the lowest. Of mxfp4 so that masks and few shifts put sign,
# exponent and mantissa where a bfloat16 has them.
_PLACES = {
    "int4": tuple(tuple(range(4 * p, 4 * p + 4)) for p in range(4)),
    "mxfp4": ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14)),
    "int8": (tuple(range(8)), tuple(range(8, 16))),
    "fp8": (tuple(range(8)), tuple(range(8, 16))),
}
_LONG, _SHORT = 64, 32
# Codes that change their places at a time.
_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """words: int16 [blocks, out, span]. scales: [groups, row groups], floats, of mxfp4 uint8; a scale of the matrix is
    that of each row. zeros: uint8 or int8 like scales, None where int4 has SYMMETRIC_ZERO, and others have none.
    """

    format: Format
    shape: tuple[int, int]
    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def parts(self) -> int:
        """Codes in a word."""
        return parts_of(self.format)

    @property
    def span(self) -> int:
        """Columns of a part."""
        return span_of(self.format)

    @property
    def groups(self) -> int:
        """Scales that a row has in each block; 0: one for all."""
        return self.parts * self.span // self.format.group if self.format.group else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its parts."""
        parts = (self.words, self.scales, self.zeros)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def parts_of(format: Format) -> int:
    """Codes in a word."""
    return len(_PLACES[format.name])


def span_of(format: Format) -> int:
    """Columns of a part: no group begins inside of one."""
    return _SHORT if format.group == _SHORT else _LONG


INDEXED = 1 << 31
"""Kernels count a matrix's numbers by integers below this."""


def packs(matrix: Quantized) -> bool:
    """True for matrices that have such a form: groups are whole spans of neighbours, and whole in every row."""
    group, rows = matrix.format.group, matrix.format.rows
    return (
        matrix.groups is None
        and group in (0, 32, 64, 128)
        and (not group or matrix.shape[1] % group == 0)
        and (rows <= 1 or matrix.zeros is None)
        and 0 < matrix.shape[0] * (matrix.shape[1] + 256) < INDEXED
    )


def rows_at_most(columns: int) -> int:
    """So many rows of so many columns have such a form, in whole tiles."""
    return (INDEXED - 1) // (columns + 256) // 256 * 256


def packed(matrix: Quantized) -> Packed:
    """The same codes in their new places, for matrices that `packs` takes."""
    format = matrix.format
    out, columns = matrix.shape
    parts, span = parts_of(format), span_of(format)
    blocks = -(-columns // (parts * span))
    words = torch.empty((blocks, out, span), dtype=torch.int16, device=matrix.codes.device)
    step = max(1, _AT_ONCE // columns)
    for start in range(0, 0 if words.is_meta else out, step):
        codes = _codes(matrix.codes[start : start + step], format)
        codes = torch.nn.functional.pad(codes, (0, blocks * parts * span - columns))
        grouped = codes.view(-1, blocks, parts, span).int()
        word = torch.zeros_like(grouped[:, :, 0])
        for part, places in enumerate(_PLACES[format.name]):
            for bit, place in enumerate(places):
                word |= ((grouped[:, :, part] >> bit) & 1) << place
        words[:, start : start + step] = word.transpose(0, 1).to(torch.int16)
    zeros = None if is_symmetric(matrix) else matrix.zeros
    groups = blocks * parts * span // format.group if format.group else 1
    # Of 8 bits there are few, so they may be as wide as the kernels compute.
    scales = matrix.scales.float() if format.name in ("int8", "fp8") else matrix.scales
    return Packed(
        format,
        matrix.shape,
        words,
        _across(scales, matrix, groups),
        None if zeros is None else _across(zeros, matrix, groups),
    )


def unpacked(matrix: Packed) -> Quantized:
    """The other way."""
    format = matrix.format
    out, columns = matrix.shape
    found = []
    step = max(1, _AT_ONCE // columns)
    for start in range(0, out, step):
        words = matrix.words[:, start : start + step].transpose(0, 1).int()
        codes = torch.zeros((*words.shape[:2], matrix.parts, matrix.span), dtype=torch.int32, device=words.device)
        for part, places in enumerate(_PLACES[format.name]):
            for bit, place in enumerate(places):
                codes[:, :, part] |= ((words >> place) & 1) << bit
        found.append(_bytes(codes.flatten(1)[:, :columns].to(torch.uint8), format))
    groups = columns // format.group if format.group else 1
    scales = matrix.scales[:groups].t().contiguous()
    zeros = None if matrix.zeros is None else matrix.zeros[:groups].t().contiguous()
    if zeros is None and format.name == "int4":
        zeros = torch.full(scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8, device=scales.device)
    if not format.rows and scales.shape[0] == out:
        scales, zeros = scales[:1], None if zeros is None else zeros[:1]
    return Quantized(format, torch.cat(found), scales, zeros)


def _codes(codes: Tensor, format: Format) -> Tensor:
    """uint8 [rows, in], as bits."""
    return from_bytes(codes) if parts_of(format) == 4 else codes.contiguous().view(torch.uint8)


def _bytes(codes: Tensor, format: Format) -> Tensor:
    """As `Quantized` has them."""
    if parts_of(format) == 4:
        return to_bytes(codes)
    return codes.view(torch.int8 if format.name == "int8" else torch.float8_e4m3fn)


def is_symmetric(matrix: Quantized) -> bool:
    """True where zero points need not be stored."""
    if matrix.zeros is None or matrix.format.zero_points:
        return matrix.zeros is None
    if matrix.zeros.is_meta:
        return True
    return bool((matrix.zeros == (SYMMETRIC_ZERO if matrix.format.name == "int4" else 0)).all())


def _across(shared: Tensor, matrix: Quantized, groups: int) -> Tensor:
    """[row groups, groups] -> [so many groups, row groups], zeros beyond; what the whole matrix shares for each row."""
    if not matrix.format.rows:
        shared = shared.expand(matrix.shape[0], -1)
    found = torch.zeros((groups, shared.shape[0]), dtype=shared.dtype, device=shared.device)
    found[: shared.shape[1]] = shared.t()
    return found
