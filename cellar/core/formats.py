"""How the elements of a stored tensor are written, as data."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cellar.core.dtypes import DTYPE_BYTES

SCALE_BYTES = {"int4": 2, "int8": 4, "fp8": 4, "mxfp4": 1}
"""Of one scale in memory."""


@dataclass(frozen=True, slots=True)
class Format:
    """A dtype for plain numbers; for quantized ones the type of an element, and which elements share a scale.

    `name`: a dtype, or int4, int8, fp8 (e4m3) or mxfp4 (e2m1, scales are powers of two).
    `group` neighbours along the input dimension share a scale (0: all of a row), in each of `rows` neighbouring rows
    together (1: every row has its own, 0: the matrix has one). `zero_points`: each group has an offset, too.
    `layout`: how a checkpoint lays it out, for its reader (`models/quantized.py`): its name, and what else is promised.
    `activations`: int8 or fp8 (e4m3) if the numbers of each token are rounded to that before they are multiplied
    (`quant/activations.py`); empty: they keep the dtype of the run.
    """

    name: str
    group: int = 0
    rows: int = 1
    zero_points: bool = False
    layout: str = "plain"
    activations: str = ""

    @property
    def is_quantized(self) -> bool:
        """True for elements that mean nothing without their scales."""
        return self.name in SCALE_BYTES

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this shape in memory, scales and zero points included."""
        plain = prod(shape) * DTYPE_BYTES[self.name]
        if not self.is_quantized:
            return int(plain)
        columns = shape[-1]
        row_groups = -(-(prod(shape) // columns) // self.rows) if self.rows else 1
        groups = row_groups * (-(-columns // self.group) if self.group else 1)
        return int(plain + groups * (SCALE_BYTES[self.name] + self.zero_points))
