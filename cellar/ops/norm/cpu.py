"""RMSNorm on the CPU in one kernel, with the add in front of it."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from cellar.ops.cpu.launch import kernel, rows_at_a_time, with_unit_stride
from cellar.ops.cpu.room import with_room

_ARGUMENTS = struct.Struct("11qd")


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` for CPU tensors."""
    x = with_unit_stride(x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1]))
    out = with_room(x, *x.shape)
    columns = x.shape[-1]
    inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    rows = x.shape[0] * inner
    places = (x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0)
    step = rows_at_a_time(columns)
    arguments = _ARGUMENTS.pack(*places, rows, inner, columns, x.stride(0), inner_stride, step, eps)
    kernel("norm", x.dtype)(arguments, rows * columns)
    return out


def add_rms_norm_cpu(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` for CPU tensors."""
    if delta is None:
        return rms_norm_cpu(residual, weight, eps), residual
    if not (residual.is_contiguous() and delta.is_contiguous()):
        residual, delta = residual.contiguous(), delta.contiguous()
    rows, columns = residual.shape
    out, total = with_room(delta, rows, columns), torch.empty_like(delta)
    places = (residual.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr())
    arguments = _ARGUMENTS.pack(*places, rows, 1, columns, columns, 0, rows_at_a_time(columns), eps)
    kernel("norm", residual.dtype)(arguments, rows * columns)
    return out, total
