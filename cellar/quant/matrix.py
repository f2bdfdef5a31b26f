"""A quantized matrix in memory, and what it means: the definitions, in plain torch.

    W[i, j] = (value(codes[i, j]) - zeros[r, g]) scales[r, g],    r = i // rows, g = j // group (or groups[j])

`value` is the code itself for integers (int4: 0 to 15), the number that it stands for in the floating formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.formats import Format
from cellar.quant.pack import from_bytes, to_bytes

FP8_MOST = 448.0
"""The largest number of float8_e4m3fn."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of the codes 0 to 7 of MXFP4 (OCP Microscaling Formats 1.0, §5.3.3); 8 to 15 are their negatives."""

# Numbers that are quantized, or put into another order, at a time: what lies beside the result is no larger.
_AT_ONCE = 1 << 24

_E2M1_EXPONENT = 2
_E8M0_BIAS = 127


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix [out, in].

    codes: int4, mxfp4: uint8 [out, in / 2], the first of two columns in the low bits; int8: int8 [out, in]; fp8:
    float8_e4m3fn [out, in]. scales: [row groups, groups], floats; of mxfp4 uint8, exponents with a bias of 127. zeros:
    the same shape, or None for none. groups: int64 [in], the group of each column where they are not neighbours
    (act-order), else None.
    """

    format: Format
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        out, columns = self.codes.shape
        return out, columns * 2 if self.format.name in ("int4", "mxfp4") else columns

    @property
    def nbytes(self) -> int:
        """Bytes of all its parts."""
        parts = (self.codes, self.scales, self.zeros, self.groups)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def put(self, put: Callable[[Tensor], Tensor]) -> Quantized:
        """Codes, scales and zero points where `put` puts tensors."""
        zeros = None if self.zeros is None else put(self.zeros)
        return replace(self, codes=put(self.codes), scales=put(self.scales), zeros=zeros)

    def rows(self, start: int, stop: int) -> Quantized:
        """Some rows. Raises ConfigError where that would cut a group."""
        step = self.format.rows
        if step > 1 and (start % step or (stop % step and stop != self.shape[0])):
            raise ConfigError(f"rows {start} to {stop} cut a group of {step}; cut at multiples of it.")
        if step == 0:
            return replace(self, codes=self.codes[start:stop])
        part = slice(start // step, -(-stop // step))
        zeros = None if self.zeros is None else self.zeros[part]
        return replace(self, codes=self.codes[start:stop], scales=self.scales[part], zeros=zeros)

    def columns(self, start: int, stop: int) -> Quantized:
        """Some columns. Raises ConfigError where that would cut a group, or a byte."""
        step, pair = self.format.group, 2 if self.codes.shape[1] != self.shape[1] else 1
        if start % pair or stop % pair:
            raise ConfigError(f"columns {start} to {stop} cut a byte; cut at even columns.")
        codes = self.codes[:, start // pair : stop // pair].contiguous()
        if self.groups is not None:
            return replace(self, codes=codes, groups=self.groups[start:stop])
        if step == 0:
            return replace(self, codes=codes)
        if start % step or (stop % step and stop != self.shape[1]):
            raise ConfigError(f"columns {start} to {stop} cut a group of {step}; cut at multiples of it.")
        part = slice(start // step, -(-stop // step))
        zeros = None if self.zeros is None else self.zeros[:, part].contiguous()
        return replace(self, codes=codes, scales=self.scales[:, part].contiguous(), zeros=zeros)


def empty_quantized(format: Format, shape: tuple[int, int], device: torch.device) -> Quantized:
    """A matrix of the types and shapes that `quantized` gives, and no numbers."""
    out, columns = shape
    row_groups = -(-out // format.rows) if format.rows else 1
    grid = (row_groups, -(-columns // format.group) if format.group else 1)
    codes, scales = _TYPES[format.name]
    wide = columns // 2 if codes == torch.uint8 else columns
    zeros = torch.empty(grid, dtype=torch.uint8, device=device) if format.name == "int4" else None
    empty = torch.empty((out, wide), dtype=codes, device=device), torch.empty(grid, dtype=scales, device=device)
    return Quantized(format, *empty, zeros)


_TYPES = {
    "int4": (torch.uint8, torch.float16),
    "int8": (torch.int8, torch.float32),
    "fp8": (torch.float8_e4m3fn, torch.float32),
    "mxfp4": (torch.uint8, torch.uint8),
}


def by_groups(matrix: Quantized) -> tuple[Quantized, Tensor] | None:
    """Columns in the order of their groups, and which they were: int64 [in], so that W x = W' x[order].

    None if groups have no order, or not all as many columns as the format says.
    """
    if matrix.groups is None:
        return None
    group, columns = matrix.format.group, matrix.shape[1]
    counts = torch.bincount(matrix.groups, minlength=matrix.scales.shape[1])
    if columns % group or bool((counts != group).any()):
        return None
    order = matrix.groups.argsort(stable=True)
    return replace(matrix, codes=_taken(matrix, order), groups=None), order


def in_order(matrix: Quantized, order: Tensor) -> Quantized:
    """The other way: columns where `order` says that they were."""
    back = order.argsort()
    return replace(matrix, codes=_taken(matrix, back), groups=back // matrix.format.group)


def _taken(matrix: Quantized, order: Tensor) -> Tensor:
    """The codes of these columns."""
    if matrix.codes.shape[1] == matrix.shape[1]:
        return matrix.codes[:, order]
    codes = torch.empty_like(matrix.codes)
    step = max(1, _AT_ONCE // matrix.shape[1])
    for start in range(0, len(codes), step):
        codes[start : start + step] = to_bytes(from_bytes(matrix.codes[start : start + step])[:, order])
    return codes


def dequantized(matrix: Quantized) -> Tensor:
    """float32 [out, in], new: what the quantized matrix stands for."""
    out, columns = matrix.shape
    values = _values(matrix)
    group = matrix.format.group or columns
    if matrix.groups is not None or columns % group:
        groups = torch.arange(columns, device=values.device) // group if matrix.groups is None else matrix.groups
        if matrix.zeros is not None:
            values -= _by_rows(matrix.zeros.float(), matrix)[:, groups]
        return values.mul_(_by_rows(_scales(matrix), matrix)[:, groups])
    grouped = values.view(out, -1, group)
    if matrix.zeros is not None:
        grouped -= _by_rows(matrix.zeros.float(), matrix)[..., None]
    grouped *= _by_rows(_scales(matrix), matrix)[..., None]
    return values


def _by_rows(shared: Tensor, matrix: Quantized) -> Tensor:
    """[row groups, groups] -> [out, groups], or [1, groups] where all rows share."""
    rows = matrix.format.rows
    return shared.repeat_interleave(rows, 0)[: matrix.shape[0]] if rows > 1 else shared


def quantized(weight: Tensor, format: Format) -> Quantized:
    """weight: floats [out, in] -> the nearest numbers of a format, scales by each group's range.

    int8, fp8: the largest magnitude is the largest code. int4 with zero points: codes 0 and 15 are the least and the
    most (or 0); without: 8 stands for 0 and the largest magnitude is 7 from it. mxfp4: as the OCP specification's §6.3.
    A group of zeros has scale 1. Raises ConfigError if the groups do not divide the rows' length.
    """
    out, columns = weight.shape
    group = format.group or columns
    rows = format.rows or out
    if columns % group or (format.name in ("int4", "mxfp4") and columns % 2):
        raise ConfigError(f"rows of {columns} numbers have no groups of {group}; choose a group that divides them.")
    step = max(rows, _AT_ONCE // columns // rows * rows)
    if out > step and format.rows:
        parts = [_quantized(part, format, rows, group) for part in torch.split(weight, step)]
        return _under(parts)
    return _quantized(weight, format, rows, group)


def _quantized(weight: Tensor, format: Format, rows: int, group: int) -> Quantized:
    """`quantized` for so many rows that share scales, and columns."""
    out, columns = weight.shape
    wide = weight.float()
    row_groups = -(-out // rows)
    padded = torch.nn.functional.pad(wide, (0, 0, 0, row_groups * rows - out))
    grouped = padded.view(row_groups, rows, columns // group, group)
    least, most = grouped.amin((1, 3)), grouped.amax((1, 3))
    largest = torch.maximum(-least, most)
    zeros = None
    if format.name == "mxfp4":
        exponents = (largest.log2().floor() - _E2M1_EXPONENT).clamp(-_E8M0_BIAS, _E8M0_BIAS)
        scales = (exponents + _E8M0_BIAS).to(torch.uint8)
        each = torch.exp2(scales.float() - _E8M0_BIAS)
    elif format.name == "int4" and format.zero_points:
        least, most = least.clamp(max=0), most.clamp(min=0)
        scales = _rounded_scale((most - least) / 15)
        each = scales.float()
        zeros = (-least / each).round().clamp(0, 15).to(torch.uint8)
    else:
        codes_most = {"int4": 7.0, "int8": 127.0, "fp8": FP8_MOST}[format.name]
        scales = largest / codes_most
        scales = _rounded_scale(scales) if format.name == "int4" else torch.where(scales > 0, scales, 1.0)
        each = scales.float()
        if format.name == "int4":
            zeros = torch.full_like(each, 8, dtype=torch.uint8)
    spread = each[:, None, :, None]
    scaled = (grouped / spread).view(-1, columns)[:out]
    if zeros is not None:
        offset = zeros.float()[:, None, :, None].expand(-1, rows, -1, group).reshape(-1, columns)[:out]
        codes = to_bytes((scaled.round() + offset).clamp(0, 15).to(torch.uint8))
    elif format.name == "int8":
        codes = scaled.round().clamp(-127, 127).to(torch.int8)
    elif format.name == "fp8":
        codes = scaled.clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)
    else:
        codes = to_bytes(_nearest_e2m1(scaled))
    return Quantized(format, codes, scales, zeros)


def stacked(parts: Sequence[Quantized]) -> Quantized | None:
    """Matrices of one format under one another as one; None if there is no such one.

    What has one scale for all its rows gets one for each, so that every part keeps its own.
    """
    parts = [_by_row(part) for part in parts]
    first = parts[0]
    if any(
        part.format != first.format
        or part.groups is not None
        or part.scales.dtype != first.scales.dtype
        or (part.zeros is None) != (first.zeros is None)
        or part.shape[0] % first.format.rows
        for part in parts
    ):
        return None if len(parts) > 1 else first
    return _under(parts)


def _under(parts: Sequence[Quantized]) -> Quantized:
    """Matrices of one format under one another, each of whole groups of rows."""
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
    )


def _by_row(matrix: Quantized) -> Quantized:
    if matrix.format.rows:
        return matrix
    out = matrix.shape[0]
    zeros = None if matrix.zeros is None else matrix.zeros.expand(out, -1).contiguous()
    scales = matrix.scales.expand(out, -1).contiguous()
    return replace(matrix, format=replace(matrix.format, rows=1), scales=scales, zeros=zeros)


def _values(matrix: Quantized) -> Tensor:
    """float32 [out, in], new. The bits of short floats are put where 16-bit floats have theirs, whose exponents differ
    by a constant: faster than a table, and exact, subnormal numbers too.
    """
    match matrix.format.name:
        case "int4":
            return from_bytes(matrix.codes).float()
        case "mxfp4":
            codes = from_bytes(matrix.codes).short()
            return (((codes << 12) & -0x8000) | ((codes & 7) << 9)).view(torch.float16).float().mul_(2.0**14)
        case "fp8":
            # The sign is extended to two bits, of which the second belongs to the exponent.
            codes = matrix.codes.view(torch.int8).short()
            return ((codes << 7) & ~0x4000).view(torch.float16).float().mul_(2.0**8)
    return matrix.codes.float()


def _scales(matrix: Quantized) -> Tensor:
    if matrix.format.name == "mxfp4":
        return torch.exp2(matrix.scales.float() - _E8M0_BIAS)
    return matrix.scales.float()


def _rounded_scale(scales: Tensor) -> Tensor:
    """In 16 bits, as they are kept; what would be 0 there is 1."""
    half = scales.half()
    return torch.where(half > 0, half, 1.0).half()


def _nearest_e2m1(scaled: Tensor) -> Tensor:
    """Codes of the nearest numbers, of two equally near ones the even code; beyond the largest the largest."""
    numbers = torch.tensor(E2M1, device=scaled.device)
    between = (numbers[1:] + numbers[:-1]) / 2
    size = scaled.abs()
    codes = torch.bucketize(size, between)
    odd_ties = (codes < len(between)) & (size == between[codes.clamp(max=len(between) - 1)]) & (codes % 2 == 1)
    codes = codes + odd_ties
    return (codes + 8 * (scaled < 0)).to(torch.uint8)
