"""int8 with a scale for each row, in our kernel for Hopper: the words that Triton's kernels read, and no others."""

from __future__ import annotations

from cellar.core.formats import Format
from cellar.ops.cuda.hopper import hopper_serves
from cellar.ops.linear.mixed import Spans, mixed_takes
from cellar.quant.packed import Packed


def multiplies_spans(matrix: Packed) -> bool:
    """True for int8 without groups and zero points, of a shape that the kernel takes, on Hopper."""
    takes = is_spans(matrix.format, matrix.zeros is None) and mixed_takes(*matrix.shape)
    return takes and hopper_serves(matrix.words.device)


def is_spans(format: Format, symmetric: bool) -> bool:
    """True for the format; `symmetric`: of a matrix without zero points."""
    return format.name == "int8" and not format.group and not format.activations and symmetric


def spans(matrix: Packed) -> Spans:
    """The same words, of a matrix whose format `is_spans`."""
    return Spans(*matrix.shape, matrix.words, matrix.scales[0])
