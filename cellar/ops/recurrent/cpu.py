"""Recurrent cells on the CPU: gathers without a copy, and gates in one kernel (`ops/cpu/gates.py`)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from cellar.ops.cpu.launch import kernel, rows_at_a_time
from cellar.ops.recurrent.definition import (
    check_tables,
    gru_gates_definition,
    join_rows_definition,
    lstm_gates_definition,
    tree_gates_definition,
)
from cellar.ops.registry import FLOATS

GatesName = Literal["lstm_gates", "gru_gates", "tree_gates"]

_LSTM, _GRU, _TREE = struct.Struct("16q"), struct.Struct("16q"), struct.Struct("22q")


def join_rows_cpu(tables: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Each table gathered straight into its columns, which spares the copy of a `cat`."""
    check_tables(tables, indices)
    first = tables[0]
    if len(tables) == 1:
        return first.index_select(0, indices[0])
    if any(table.dtype != first.dtype for table in tables):
        return join_rows_definition(tables, indices)
    out = first.new_empty((len(indices[0]), sum(table.shape[1] for table in tables)))
    start = 0
    for table, index in zip(tables, indices, strict=True):
        stop = start + table.shape[1]
        torch.index_select(table, 0, index, out=out[:, start:stop])
        start = stop
    return out


def lstm_gates_cpu(
    gates: Tensor,
    c: Tensor,
    c_index: Tensor,
    h_out: Tensor,
    h_rows: Tensor,
    c_out: Tensor,
    c_rows: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """The step in one kernel."""
    if not _is_plain(gates, c, h_out, c_out, bias):
        return lstm_gates_definition(gates, c, c_index, h_out, h_rows, c_out, c_rows, bias)
    count, hidden = gates.shape[0], c.shape[1]
    check = gates.new_empty(count, dtype=torch.float32)
    arguments = _LSTM.pack(
        gates.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        c.data_ptr(),
        _longs(c_index).data_ptr(),
        h_out.data_ptr(),
        _longs(h_rows).data_ptr(),
        c_out.data_ptr(),
        _longs(c_rows).data_ptr(),
        check.data_ptr(),
        count,
        hidden,
        gates.stride(0),
        c.stride(0),
        h_out.stride(0),
        c_out.stride(0),
        rows_at_a_time(4 * hidden),
    )
    kernel("lstm_gates", gates.dtype)(arguments, 4 * count * hidden)
    return check.eq(check)


def gru_gates_cpu(
    x_gates: Tensor,
    h_gates: Tensor,
    h: Tensor,
    h_index: Tensor,
    h_out: Tensor,
    h_rows: Tensor,
    x_bias: Tensor | None = None,
    h_bias: Tensor | None = None,
) -> Tensor:
    """The step in one kernel."""
    if not _is_plain(x_gates, h_gates, h, h_out, x_bias, h_bias):
        return gru_gates_definition(x_gates, h_gates, h, h_index, h_out, h_rows, x_bias, h_bias)
    count, hidden = x_gates.shape[0], h.shape[1]
    check = x_gates.new_empty(count, dtype=torch.float32)
    arguments = _GRU.pack(
        x_gates.data_ptr(),
        0 if x_bias is None else x_bias.data_ptr(),
        h_gates.data_ptr(),
        0 if h_bias is None else h_bias.data_ptr(),
        h.data_ptr(),
        _longs(h_index).data_ptr(),
        h_out.data_ptr(),
        _longs(h_rows).data_ptr(),
        check.data_ptr(),
        count,
        hidden,
        x_gates.stride(0),
        h_gates.stride(0),
        h.stride(0),
        h_out.stride(0),
        rows_at_a_time(4 * hidden),
    )
    kernel("gru_gates", x_gates.dtype)(arguments, 6 * count * hidden)
    return check.eq(check)


def tree_gates_cpu(
    gates: Tensor,
    forget: Tensor,
    c: Tensor,
    c_index: Tensor,
    h_out: Tensor,
    h_rows: Tensor,
    c_out: Tensor,
    c_rows: Tensor,
    bias: Tensor | None = None,
    forget_bias: Tensor | None = None,
) -> Tensor:
    """The node in one kernel."""
    if not _is_plain(gates, forget, c, h_out, c_out, bias, forget_bias) or c_index.dtype != torch.int64:
        return tree_gates_definition(gates, forget, c, c_index, h_out, h_rows, c_out, c_rows, bias, forget_bias)
    count, hidden, children = gates.shape[0], c.shape[1], c_index.shape[1]
    check = gates.new_empty(count, dtype=torch.float32)
    arguments = _TREE.pack(
        gates.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        forget.data_ptr(),
        0 if forget_bias is None else forget_bias.data_ptr(),
        c.data_ptr(),
        c_index.data_ptr(),
        h_out.data_ptr(),
        _longs(h_rows).data_ptr(),
        c_out.data_ptr(),
        _longs(c_rows).data_ptr(),
        check.data_ptr(),
        count,
        hidden,
        children,
        gates.stride(0),
        forget.stride(0),
        c.stride(0),
        *c_index.stride(),
        h_out.stride(0),
        c_out.stride(0),
        rows_at_a_time((3 + children) * hidden),
    )
    kernel("tree_gates", gates.dtype)(arguments, (3 + 2 * children) * count * hidden)
    return check.eq(check)


def prepare_gates(name: GatesName, device: torch.device, dtype: torch.dtype) -> None:
    """Have a kernel of the CPU ready before its first call: seconds the first time on a machine, then nearly none."""
    if device.type == "cpu" and dtype in FLOATS:
        kernel(name, dtype)


def _is_plain(first: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel can read and write these: one floating dtype, and numbers of a row side by side."""
    dtype = first.dtype
    if dtype not in FLOATS or (first.shape[-1] > 1 and first.stride(-1) != 1):
        return False
    return all(x is None or (x.dtype == dtype and (x.stride(-1) == 1 or x.shape[-1] < 2)) for x in others)


def _longs(index: Tensor) -> Tensor:
    return index if index.dtype == torch.int64 and index.stride(0) == 1 else index.long().contiguous()
