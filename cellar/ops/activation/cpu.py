"""Activations on the CPU, plain and gated, in one kernel.

torch's own treat the last few elements of a thread's share another way than the others, so that a row's last bits
depend on how many rows there are.
"""

from __future__ import annotations

import struct

from torch import Tensor

from cellar.ops.activation.definition import activate_definition, gated_definition
from cellar.ops.cpu.launch import kernel, rows_at_a_time, with_unit_stride
from cellar.ops.cpu.room import with_room

_ARGUMENTS = struct.Struct("8q")
# The kernel's numbers for them; relu is exact in any way.
_FUNCTIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def gated_cpu(x: Tensor, kind: str) -> Tensor:
    """`gated` for CPU tensors."""
    return _launch(x, x.shape[1] // 2, kind, True) if kind in _FUNCTIONS else gated_definition(x, kind)


def activate_cpu(x: Tensor, kind: str) -> Tensor:
    """`activate` for CPU tensors."""
    return _launch(x, x.shape[1], kind, False) if kind in _FUNCTIONS else activate_definition(x, kind)


def _launch(x: Tensor, columns: int, kind: str, gated: bool) -> Tensor:
    x = with_unit_stride(x)
    rows = x.shape[0]
    out = with_room(x, rows, columns)
    places = (x.data_ptr(), out.data_ptr(), rows, columns, x.stride(0), rows_at_a_time(columns))
    kernel("activation", x.dtype)(_ARGUMENTS.pack(*places, _FUNCTIONS[kind], gated), x.numel())
    return out
