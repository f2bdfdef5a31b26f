"""The gate with SiLU on the CPU, in one kernel."""

from __future__ import annotations

import struct

from torch import Tensor

from cellar.ops.launch_cpu import kernel, rows_at_a_time, with_unit_stride

_ARGUMENTS = struct.Struct("6q")


def silu_gate_cpu(x: Tensor) -> Tensor:
    """`gated` with kind silu for CPU tensors."""
    x = with_unit_stride(x)
    rows, columns = x.shape
    columns //= 2
    out = x.new_empty((rows, columns))
    arguments = _ARGUMENTS.pack(x.data_ptr(), out.data_ptr(), rows, columns, x.stride(0), rows_at_a_time(columns))
    kernel("silu_gate", x.dtype)(arguments, 2 * rows * columns)
    return out
