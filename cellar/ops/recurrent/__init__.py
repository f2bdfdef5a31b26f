"""Recurrent cells over rows of tables; what they mean stands in `definition.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cellar.ops.linear.definition import linear
from cellar.ops.linear.weight import Weight
from cellar.ops.recurrent import cases
from cellar.ops.recurrent.cpu import gru_gates_cpu, join_rows_cpu, lstm_gates_cpu, prepare_gates, tree_gates_cpu
from cellar.ops.recurrent.definition import (
    finite_states,
    gru_gates_definition,
    join_rows_definition,
    lstm_gates_definition,
    tree_gates_definition,
)
from cellar.ops.recurrent.triton import gru_gates_kernel, join_rows_kernel, lstm_gates_kernel, tree_gates_kernel
from cellar.ops.registry import Op, Variant

__all__ = ["OPS", "finite_states", "gru_gates", "join_rows", "lstm_gates", "prepare_gates", "product", "tree_gates"]

_JOIN_ROWS = Op(
    "join_rows",
    join_rows_definition,
    (Variant("triton", join_rows_kernel), Variant("cpu", join_rows_cpu)),
    cases.JOIN_ROWS,
)
_LSTM_GATES = Op(
    "lstm_gates",
    lstm_gates_definition,
    (Variant("triton", lstm_gates_kernel), Variant("cpu", lstm_gates_cpu)),
    cases.LSTM_GATES,
    changes=("h_out", "c_out"),
)
_GRU_GATES = Op(
    "gru_gates",
    gru_gates_definition,
    (Variant("triton", gru_gates_kernel), Variant("cpu", gru_gates_cpu)),
    cases.GRU_GATES,
    changes=("h_out",),
)
_TREE_GATES = Op(
    "tree_gates",
    tree_gates_definition,
    (Variant("triton", tree_gates_kernel), Variant("cpu", tree_gates_cpu)),
    cases.TREE_GATES,
    changes=("h_out", "c_out"),
)
OPS = (_JOIN_ROWS, _LSTM_GATES, _GRU_GATES, _TREE_GATES)


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x W^T, with its bias or with the bias that is still to be added, whatever costs less: by the library's float32
    kernels with a bias batches of 16 to 256 take up to twice as long (H200, docs/log/cells.md).
    """
    if x.is_cuda and x.dtype == torch.float32:
        return linear(x, weight), bias
    return linear(x, weight, bias), None


def join_rows(tables: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Row n of the result: tables[0][indices[0][n]], tables[1][indices[1][n]], ... side by side."""
    run = _JOIN_ROWS.on_cpu if not tables or tables[0].is_cpu else _JOIN_ROWS.on_gpu
    return run(tables, indices)


def lstm_gates(
    gates: Tensor,
    c: Tensor,
    c_index: Tensor,
    h_out: Tensor,
    h_rows: Tensor,
    c_out: Tensor,
    c_rows: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """An LSTM's step behind its matrix product: -> finite: [b] bool. `gates` is scratch."""
    run = _LSTM_GATES.on_cpu if gates.is_cpu else _LSTM_GATES.on_gpu
    return run(gates, c, c_index, h_out, h_rows, c_out, c_rows, bias)


def gru_gates(
    x_gates: Tensor,
    h_gates: Tensor,
    h: Tensor,
    h_index: Tensor,
    h_out: Tensor,
    h_rows: Tensor,
    x_bias: Tensor | None = None,
    h_bias: Tensor | None = None,
) -> Tensor:
    """A GRU's step behind its two matrix products: -> finite: [b] bool."""
    run = _GRU_GATES.on_cpu if x_gates.is_cpu else _GRU_GATES.on_gpu
    return run(x_gates, h_gates, h, h_index, h_out, h_rows, x_bias, h_bias)


def tree_gates(
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
    """A TreeLSTM's node behind its matrix products: -> finite: [b] bool. `gates` and `forget` are scratch."""
    run = _TREE_GATES.on_cpu if gates.is_cpu else _TREE_GATES.on_gpu
    return run(gates, forget, c, c_index, h_out, h_rows, c_out, c_rows, bias, forget_bias)
