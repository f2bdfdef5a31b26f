"""Recurrent cells: rows gathered side by side for one matrix product, and what comes after it (gates and states).

A cell of a batch b reads its states from tables of rows by index and writes its new states into rows by index, so
that a request may join, leave or move without a copy of its own:

    x = join_rows((words, h), (token, before))           [b, in + hidden]     gather
    gates, rest = product(x, weight, bias)               [b, 4 hidden]        one matrix product
    lstm_gates(gates, c, before, h, after, c, after, rest)   h[after], c[after]   pointwise and scatter

Tables may be one and the same. No row is written twice in a call, and none is both read and written.
Each function of gates says which rows are finite: a broken request is found by its row, its neighbours go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cellar.core.errors import ConfigError

MOST_TABLES = 4


def join_rows_definition(tables: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Row n of the result: tables[0][indices[0][n]], tables[1][indices[1][n]], ... side by side.

    tables[k]: [rows_k, d_k]; indices[k]: [b] integers -> [b, sum of d_k] in the dtype of tables[0].
    Raises ConfigError for no table or more than four.
    """
    check_tables(tables, indices)
    parts = [table.index_select(0, index) for table, index in zip(tables, indices, strict=True)]
    return torch.cat([part.to(tables[0].dtype) for part in parts], dim=1)


def lstm_gates_definition(
    gates: Tensor,
    c: Tensor,
    c_index: Tensor,
    h_out: Tensor,
    h_rows: Tensor,
    c_out: Tensor,
    c_rows: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """An LSTM's step behind its matrix product (Hochreiter and Schmidhuber 1997, gates in PyTorch's order).

        i, f, o = sigmoid(gates[:, 0], gates[:, 1], gates[:, 3]);  g = tanh(gates[:, 2])       gates: [b, 4 hidden]
        c_out[c_rows] = f * c[c_index] + i * g;  h_out[h_rows] = o * tanh(c_out[c_rows])

    c: [rows, hidden]; h_out, c_out: [rows, hidden], changed; indices: [b]; bias: [4 hidden], added to gates, or None
    -> finite: [b] bool. `gates` is scratch.
    """
    i, f, g, o = biased(gates, bias).chunk(4, dim=1)
    new = f.sigmoid() * c.index_select(0, c_index).float() + i.sigmoid() * g.tanh()
    return scatter(o.sigmoid() * new.tanh(), new, h_out, h_rows, c_out, c_rows)


def gru_gates_definition(
    x_gates: Tensor,
    h_gates: Tensor,
    h: Tensor,
    h_index: Tensor,
    h_out: Tensor,
    h_rows: Tensor,
    x_bias: Tensor | None = None,
    h_bias: Tensor | None = None,
) -> Tensor:
    """A GRU's step behind its two matrix products (Cho et al. 2014, in PyTorch's variant and order).

        r, z = sigmoid(x_gates[:, :2] + h_gates[:, :2]);  n = tanh(x_gates[:, 2] + r * h_gates[:, 2])
        h_out[h_rows] = (1 - z) * n + z * h[h_index]

    x_gates, h_gates: [b, 3 hidden]; h: [rows, hidden]; h_out: [rows, hidden], changed; indices: [b];
    x_bias, h_bias: [3 hidden], added to the gates, or None -> finite: [b] bool.
    """
    hidden = h.shape[1]
    from_x, from_h = biased(x_gates, x_bias), biased(h_gates, h_bias)
    r, z = (from_x[:, : 2 * hidden] + from_h[:, : 2 * hidden]).sigmoid_().chunk(2, dim=1)
    n = torch.addcmul(from_x[:, 2 * hidden :], r, from_h[:, 2 * hidden :]).tanh_()
    new = torch.lerp(n, h.index_select(0, h_index).float(), z)
    h_out.index_copy_(0, h_rows, new.to(h_out.dtype))
    return finite_states(new)


def tree_gates_definition(
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
    """A TreeLSTM's node behind its matrix products (Tai et al. 2015, arXiv 1503.00075, equations 2-14).

        i, o = sigmoid(gates[:, 0], gates[:, 1]);  u = tanh(gates[:, 2])                       gates: [b, 3 hidden]
        c_out[c_rows] = i * u + sum over k of sigmoid(forget[:, k]) * c[c_index[:, k]]      forget: [b, k hidden]
        h_out[h_rows] = o * tanh(c_out[c_rows])

    c: [rows, hidden]; c_index: [b, k] (k may be 0: a leaf; a missing child is a row of zeros); h_out, c_out:
    [rows, hidden], changed; h_rows, c_rows: [b]; bias: [3 hidden], forget_bias: [k hidden], added to gates and forget,
    or None -> finite: [b] bool. `gates` and `forget` are scratch.
    """
    i, o, u = biased(gates, bias).chunk(3, dim=1)
    new = i.sigmoid() * u.tanh()
    children = c_index.shape[1]
    if children:
        kept = biased(forget, forget_bias).sigmoid().view(len(gates), children, -1)
        new = new + (kept * c.float()[c_index]).sum(1)
    return scatter(o.sigmoid() * new.tanh(), new, h_out, h_rows, c_out, c_rows)


def finite_states(rows: Tensor) -> Tensor:
    """rows: [b, hidden] -> [b] bool, False for rows with NaN or infinity.

    States are far from the largest number (c grows by at most one a step), so that their sum shows it.
    """
    total = rows.sum(1)
    return total.sub_(total).eq(total)


def biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    """In float32."""
    return gates.float() if bias is None else gates.float() + bias.float()


def scatter(h: Tensor, new: Tensor, h_out: Tensor, h_rows: Tensor, c_out: Tensor, c_rows: Tensor) -> Tensor:
    h_out.index_copy_(0, h_rows, h.to(h_out.dtype))
    c_out.index_copy_(0, c_rows, new.to(c_out.dtype))
    # h is bounded, c may be infinite under a finite h.
    return finite_states(new)


def check_tables(tables: Sequence[Tensor], indices: Sequence[Tensor]) -> None:
    if not 0 < len(tables) <= MOST_TABLES or len(tables) != len(indices):
        raise ConfigError(
            f"{len(tables)} tables and {len(indices)} indices cannot be joined; "
            f"give one to {MOST_TABLES} tables, each with its index."
        )
