"""Rows of a tensor as one piece of bytes, wherever they are placed: what planner and runtime count alike.

A tensor is runs of rows of one format; what is placed is cut where runs end. Plain rows lie behind one another. A piece
of quantized ones is arrays behind one another, each at a multiple of 64 bytes:

    codes   [rows, bytes of a row] [scales] [zero points] [order of columns]     as a processor reads them
    words   [blocks, rows, span of 16 bits] [scales] [zero points] [order]       as a GPU does (`quant/packed.py`)

So what arrives in a slot is multiplied as it is: codes never become plain numbers on their way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cellar.core.dtypes import DTYPE_BYTES
from cellar.core.formats import SCALE_BYTES, Format
from cellar.core.specs import TensorSpec

ALIGNMENT = 64
"""Of arrays in a piece, and of pieces: a line of the cache."""

GROUPS_IN_WORDS = (0, 32, 64, 128)
"""Of columns, what kernels on a GPU take; 0: a row."""

_CODES_A_WORD = {"int4": 4, "mxfp4": 4, "int8": 2, "fp8": 2}
_MOST_IN_WORDS = 1 << 31


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [start, stop) of a tensor that have one format. Those of a quantized one have scales of their own."""

    start: int
    stop: int
    format: Format

    def cut_at_most(self, row: int) -> int:
        """The last row up to this one at which the run may be cut."""
        step = max(1, self.format.rows)
        return row if row >= self.stop else self.start + (row - self.start) // step * step


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a piece: its name, where it begins, its shape, bytes of an element."""

    name: str
    offset: int
    shape: tuple[int, ...]
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.width


def format_name(tensor: TensorSpec) -> str:
    """The formats of a tensor's parts, as placements name them."""
    return "+".join(dict.fromkeys(part.format.name for part in tensor.stored_parts()))


def is_ordered(format: Format) -> bool:
    """True if columns have an order of their own (act-order), which a piece brings along."""
    return "ordered" in format.layout.split() and format.group > 0


def runs(tensor: TensorSpec) -> tuple[Run, ...]:
    """A tensor's runs of rows. Parts of one format are one run, unless that would cut a group of rows."""
    parts, regions = tensor.stored_parts(), tensor.regions()
    found, start = list[Run](), 0
    for region in regions:
        format = parts[region.part].format
        if format.is_quantized and not format.rows:
            format = replace(format, rows=1)  # each row has the scale of all
        found.append(Run(start, start + len(region.rows), format))
        start += len(region.rows)
    first = found[0].format
    step = max(1, first.rows)
    if all(run.format == first and (run.stop - run.start) % step == 0 for run in found) and not is_ordered(first):
        return (Run(0, start, first),)
    return tuple(found)


def pieces(tensor: TensorSpec, start: int, stop: int) -> Iterator[tuple[Run, int, int]]:
    """Rows [start, stop) by runs: (run, start, stop)."""
    for run in runs(tensor):
        first, last = max(start, run.start), min(stop, run.stop)
        if first < last:
            yield run, first, last


def cut_at_most(tensor: TensorSpec, row: int) -> int:
    """The last row up to this one at which a tensor may be cut."""
    return next((run.cut_at_most(row) for run in runs(tensor) if row < run.stop), tensor.shape[0])


def in_words(format: Format, shape: tuple[int, int]) -> bool:
    """True for rows that a GPU's kernels have a form for."""
    rows, columns = shape
    group = format.group
    return (
        format.is_quantized
        and group in GROUPS_IN_WORDS
        and (not group or columns % group == 0)
        and (format.rows <= 1 or not format.zero_points)
        and 0 < rows * (columns + 256) < _MOST_IN_WORDS
    )


def arrays(format: Format, shape: tuple[int, int], kind: str) -> tuple[Array, ...]:
    """The arrays of quantized rows [rows, columns] for a `kind` of what multiplies: cpu or gpu."""
    rows, columns = shape
    width = SCALE_BYTES[format.name]
    row_groups = -(-rows // format.rows)
    groups = -(-columns // format.group) if format.group else 1
    if kind == "gpu" and in_words(format, shape):
        count, span = _CODES_A_WORD[format.name], 32 if format.group == 32 else 64
        blocks = -(-columns // (count * span))
        across = blocks * count * span // format.group if format.group else 1
        if format.activations and format.group:
            across = -(-max(across, groups) // 4) * 4  # the library wants rows of scales 16 bytes apart
        found = [("words", (blocks, rows, span), 2), ("scales", (across, row_groups), width)]
        if format.zero_points:
            found.append(("zeros", (across, row_groups), 1))
    else:
        bytes_of_row = columns // 2 if _CODES_A_WORD[format.name] == 4 else columns
        found = [("codes", (rows, bytes_of_row), 1), ("scales", (row_groups, groups), width)]
        if format.zero_points or format.name == "int4":
            found.append(("zeros", (row_groups, groups), 1))
    if is_ordered(format):
        found.append(("order", (columns,), 8))
    end, made = 0, list[Array]()
    for name, dimensions, each in found:
        made.append(Array(name, -(-end // ALIGNMENT) * ALIGNMENT, dimensions, each))
        end = made[-1].offset + made[-1].nbytes
    return tuple(made)


def piece_nbytes(tensor: TensorSpec, run: Run, start: int, stop: int, kind: str) -> int:
    """Bytes of rows [start, stop) of a run."""
    if not run.format.is_quantized:
        return int((stop - start) * math.prod(tensor.shape[1:]) * DTYPE_BYTES[tensor.dtype])
    last = arrays(run.format, (stop - start, tensor.shape[1]), kind)[-1]
    return last.offset + last.nbytes


def rows_nbytes(tensor: TensorSpec, start: int, stop: int, kind: str) -> int:
    """Bytes that rows [start, stop) take, each piece of them aligned."""
    found = 0
    for run, first, last in pieces(tensor, start, stop):
        found = -(-found // ALIGNMENT) * ALIGNMENT + piece_nbytes(tensor, run, first, last, kind)
    return found
