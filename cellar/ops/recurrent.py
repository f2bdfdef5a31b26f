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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.ops.linear import linear
from cellar.ops.registry import Case, Op
from cellar.ops.triton_support import kernel

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 1024
_MOST_TABLES = 4


def join_rows(tables: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Row n of the result: tables[0][indices[0][n]], tables[1][indices[1][n]], ... side by side.

    tables[k]: [rows_k, d_k]; indices[k]: [b] integers -> [b, sum of d_k] in the dtype of tables[0].
    Raises ConfigError for no table or more than four.
    """
    return join_rows_kernel(tables, indices) if tables and tables[0].is_cuda else _join_rows_cpu(tables, indices)


def join_rows_definition(tables: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Gathered and joined in plain torch."""
    _check_tables(tables, indices)
    parts = [table.index_select(0, index) for table, index in zip(tables, indices, strict=True)]
    return torch.cat([part.to(tables[0].dtype) for part in parts], dim=1)


def join_rows_kernel(tables: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Gathered and joined in one Triton kernel."""
    _check_tables(tables, indices)
    widths = [table.shape[1] for table in tables]
    out = torch.empty((len(indices[0]), sum(widths)), dtype=tables[0].dtype, device=tables[0].device)
    if out.numel():
        rows = [table if table.stride(1) == 1 else table.contiguous() for table in tables]
        absent = _MOST_TABLES - len(rows)
        grid = (out.shape[0], len(rows), -(-max(widths) // _BLOCK))
        _join_kernel[grid](
            out,
            *rows,
            *(rows[:1] * absent),
            *indices,
            *(list(indices[:1]) * absent),
            *(row.stride(0) for row in rows),
            *([0] * absent),
            *widths,
            *([0] * absent),
            out.shape[1],
            BLOCK=_BLOCK,
        )
    return out


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x W^T, with its bias or with the bias that is still to be added, whatever costs less: by the library's float32
    kernels with a bias batches of 16 to 256 take up to twice as long (H200, docs/log/cells.md).
    """
    if weight.is_cuda and weight.dtype == torch.float32:
        return linear(x, weight), bias
    return linear(x, weight, bias), None


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
    """An LSTM's step behind its matrix product (Hochreiter and Schmidhuber 1997, gates in PyTorch's order).

        i, f, o = sigmoid(gates[:, 0], gates[:, 1], gates[:, 3]);  g = tanh(gates[:, 2])       gates: [b, 4 hidden]
        c_out[c_rows] = f * c[c_index] + i * g;  h_out[h_rows] = o * tanh(c_out[c_rows])

    c: [rows, hidden]; h_out, c_out: [rows, hidden], changed; indices: [b]; bias: [4 hidden], added to gates, or None
    -> finite: [b] bool. `gates` is scratch.
    """
    run = lstm_gates_kernel if gates.is_cuda else _lstm_gates_cpu
    return run(gates, c, c_index, h_out, h_rows, c_out, c_rows, bias)


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
    """The step in plain torch, in float32."""
    i, f, g, o = _biased(gates, bias).chunk(4, dim=1)
    new = f.sigmoid() * c.index_select(0, c_index).float() + i.sigmoid() * g.tanh()
    return _scatter(o.sigmoid() * new.tanh(), new, h_out, h_rows, c_out, c_rows)


def lstm_gates_kernel(
    gates: Tensor,
    c: Tensor,
    c_index: Tensor,
    h_out: Tensor,
    h_rows: Tensor,
    c_out: Tensor,
    c_rows: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """The step in Triton, a program per row."""
    count, hidden = gates.shape[0], c.shape[1]
    finite = torch.empty(count, dtype=torch.bool, device=gates.device)
    if count:
        _lstm_kernel[count,](
            gates,
            c,
            c_index,
            h_out,
            h_rows,
            c_out,
            c_rows,
            gates if bias is None else bias,
            finite.view(torch.uint8),
            hidden,
            gates.stride(0),
            c.stride(0),
            h_out.stride(0),
            c_out.stride(0),
            BIAS=bias is not None,
            BLOCK=_block(hidden),
        )
    return finite


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
    """A GRU's step behind its two matrix products (Cho et al. 2014, in PyTorch's variant and order).

        r, z = sigmoid(x_gates[:, :2] + h_gates[:, :2]);  n = tanh(x_gates[:, 2] + r * h_gates[:, 2])
        h_out[h_rows] = (1 - z) * n + z * h[h_index]

    x_gates, h_gates: [b, 3 hidden]; h: [rows, hidden]; h_out: [rows, hidden], changed; indices: [b];
    x_bias, h_bias: [3 hidden], added to the gates, or None -> finite: [b] bool.
    """
    run = gru_gates_kernel if x_gates.is_cuda else _gru_gates_cpu
    return run(x_gates, h_gates, h, h_index, h_out, h_rows, x_bias, h_bias)


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
    """The step in plain torch, in float32."""
    hidden = h.shape[1]
    from_x, from_h = _biased(x_gates, x_bias), _biased(h_gates, h_bias)
    r, z = (from_x[:, : 2 * hidden] + from_h[:, : 2 * hidden]).sigmoid_().chunk(2, dim=1)
    n = torch.addcmul(from_x[:, 2 * hidden :], r, from_h[:, 2 * hidden :]).tanh_()
    new = torch.lerp(n, h.index_select(0, h_index).float(), z)
    h_out.index_copy_(0, h_rows, new.to(h_out.dtype))
    return finite_states(new)


def gru_gates_kernel(
    x_gates: Tensor,
    h_gates: Tensor,
    h: Tensor,
    h_index: Tensor,
    h_out: Tensor,
    h_rows: Tensor,
    x_bias: Tensor | None = None,
    h_bias: Tensor | None = None,
) -> Tensor:
    """The step in Triton, a program per row."""
    count, hidden = x_gates.shape[0], h.shape[1]
    finite = torch.empty(count, dtype=torch.bool, device=x_gates.device)
    if count:
        _gru_kernel[count,](
            x_gates,
            h_gates,
            h,
            h_index,
            h_out,
            h_rows,
            x_gates if x_bias is None else x_bias,
            h_gates if h_bias is None else h_bias,
            finite.view(torch.uint8),
            hidden,
            x_gates.stride(0),
            h_gates.stride(0),
            h.stride(0),
            h_out.stride(0),
            X_BIAS=x_bias is not None,
            H_BIAS=h_bias is not None,
            BLOCK=_block(hidden),
        )
    return finite


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
    """A TreeLSTM's node behind its matrix products (Tai et al. 2015, arXiv 1503.00075, equations 2-14).

        i, o = sigmoid(gates[:, 0], gates[:, 1]);  u = tanh(gates[:, 2])                       gates: [b, 3 hidden]
        c_out[c_rows] = i * u + sum over k of sigmoid(forget[:, k]) * c[c_index[:, k]]      forget: [b, k hidden]
        h_out[h_rows] = o * tanh(c_out[c_rows])

    c: [rows, hidden]; c_index: [b, k] (k may be 0: a leaf; a missing child is a row of zeros); h_out, c_out:
    [rows, hidden], changed; h_rows, c_rows: [b]; bias: [3 hidden], forget_bias: [k hidden], added to gates and forget,
    or None -> finite: [b] bool. `gates` and `forget` are scratch.
    """
    run = tree_gates_kernel if gates.is_cuda else _tree_gates_cpu
    return run(gates, forget, c, c_index, h_out, h_rows, c_out, c_rows, bias, forget_bias)


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
    """The node in plain torch, in float32."""
    i, o, u = _biased(gates, bias).chunk(3, dim=1)
    new = i.sigmoid() * u.tanh()
    children = c_index.shape[1]
    if children:
        kept = _biased(forget, forget_bias).sigmoid().view(len(gates), children, -1)
        new = new + (kept * c.float()[c_index]).sum(1)
    return _scatter(o.sigmoid() * new.tanh(), new, h_out, h_rows, c_out, c_rows)


def tree_gates_kernel(
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
    """The node in Triton, a program per row."""
    count, hidden = gates.shape[0], c.shape[1]
    finite = torch.empty(count, dtype=torch.bool, device=gates.device)
    if count:
        _tree_kernel[count,](
            gates,
            forget,
            c,
            c_index,
            h_out,
            h_rows,
            c_out,
            c_rows,
            gates if bias is None else bias,
            forget if forget_bias is None else forget_bias,
            finite.view(torch.uint8),
            hidden,
            c_index.shape[1],
            gates.stride(0),
            forget.stride(0),
            c.stride(0),
            c_index.stride(0),
            c_index.stride(1),
            h_out.stride(0),
            c_out.stride(0),
            BIAS=bias is not None,
            FORGET_BIAS=forget_bias is not None,
            BLOCK=_block(hidden),
        )
    return finite


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    """In float32."""
    return gates.float() if bias is None else gates.float() + bias.float()


def _check_tables(tables: Sequence[Tensor], indices: Sequence[Tensor]) -> None:
    if not 0 < len(tables) <= _MOST_TABLES or len(tables) != len(indices):
        raise ConfigError(
            f"{len(tables)} tables and {len(indices)} indices cannot be joined; "
            f"give one to {_MOST_TABLES} tables, each with its index."
        )


def _join_rows_cpu(tables: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Each table gathered straight into its columns, which spares the copy of a `cat`."""
    _check_tables(tables, indices)
    first = tables[0]
    if any(table.dtype != first.dtype for table in tables):
        return join_rows_definition(tables, indices)
    out = first.new_empty((len(indices[0]), sum(table.shape[1] for table in tables)))
    start = 0
    for table, index in zip(tables, indices, strict=True):
        stop = start + table.shape[1]
        torch.index_select(table, 0, index, out=out[:, start:stop])
        start = stop
    return out


def _lstm_gates_cpu(
    gates: Tensor,
    c: Tensor,
    c_index: Tensor,
    h_out: Tensor,
    h_rows: Tensor,
    c_out: Tensor,
    c_rows: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """One sigmoid over all gates, because tanh(x) = 2 sigmoid(2x) - 1 and torch's tanh takes 3.5 times as long.

    x + x and not 2 x: a number as an operand is made a tensor first, which takes longer than a small batch's sum.
    """
    if gates.dtype != torch.float32:
        return lstm_gates_definition(gates, c, c_index, h_out, h_rows, c_out, c_rows, bias)
    gates = _biased(gates, bias)
    i, f, g, o = gates.chunk(4, dim=1)
    g.add_(g)
    gates.sigmoid_()
    new = c.index_select(0, c_index).mul_(f)
    new.addcmul_(i, g, value=2).sub_(i)
    return _scatter_output(o, new, h_out, h_rows, c_out, c_rows)


def _gru_gates_cpu(
    x_gates: Tensor,
    h_gates: Tensor,
    h: Tensor,
    h_index: Tensor,
    h_out: Tensor,
    h_rows: Tensor,
    x_bias: Tensor | None = None,
    h_bias: Tensor | None = None,
) -> Tensor:
    """As for the LSTM."""
    if x_gates.dtype != torch.float32:
        return gru_gates_definition(x_gates, h_gates, h, h_index, h_out, h_rows, x_bias, h_bias)
    x_gates, h_gates = _biased(x_gates, x_bias), _biased(h_gates, h_bias)
    two = 2 * h.shape[1]
    r, z = (x_gates[:, :two] + h_gates[:, :two]).sigmoid_().chunk(2, dim=1)
    n = torch.addcmul(x_gates[:, two:], r, h_gates[:, two:])
    n = n.add_(n).sigmoid_()
    n.add_(n).sub_(1)
    new = torch.lerp(n, h.index_select(0, h_index), z)
    h_out.index_copy_(0, h_rows, new)
    return finite_states(new)


def _tree_gates_cpu(
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
    """As for the LSTM, child by child."""
    if gates.dtype != torch.float32:
        return tree_gates_definition(gates, forget, c, c_index, h_out, h_rows, c_out, c_rows, bias, forget_bias)
    gates, forget = _biased(gates, bias), _biased(forget, forget_bias)
    i, o, u = gates.chunk(3, dim=1)
    u.add_(u)
    gates.sigmoid_()
    new = torch.addcmul(i * u, i, u).sub_(i)
    if c_index.shape[1]:
        forget.sigmoid_()
        for kept, child in zip(forget.chunk(c_index.shape[1], dim=1), c_index.unbind(1), strict=True):
            new.addcmul_(kept, c.index_select(0, child))
    return _scatter_output(o, new, h_out, h_rows, c_out, c_rows)


def _scatter_output(o: Tensor, new: Tensor, h_out: Tensor, h_rows: Tensor, c_out: Tensor, c_rows: Tensor) -> Tensor:
    """h = o * tanh(c) by the same identity; o may be overwritten."""
    h = (new + new).sigmoid_().mul_(o)
    h.add_(h).sub_(o)
    return _scatter(h, new, h_out, h_rows, c_out, c_rows)


def _scatter(h: Tensor, new: Tensor, h_out: Tensor, h_rows: Tensor, c_out: Tensor, c_rows: Tensor) -> Tensor:
    h_out.index_copy_(0, h_rows, h.to(h_out.dtype))
    c_out.index_copy_(0, c_rows, new.to(c_out.dtype))
    # h is bounded, c may be infinite under a finite h.
    return finite_states(new)


def finite_states(rows: Tensor) -> Tensor:
    """rows: [b, hidden] -> [b] bool, False for rows with NaN or infinity.

    States are far from the largest number (c grows by at most one a step), so that their sum shows it.
    """
    total = rows.sum(1)
    return total.sub_(total).eq(total)


def _block(hidden: int) -> int:
    return min(_BLOCK, 1 << max(4, (hidden - 1).bit_length()))


@kernel
def _join_kernel(  # type: ignore[no-untyped-def]
    out,  # [b, sum of widths]
    table0,  # [rows, width0]
    table1,
    table2,
    table3,
    index0,  # [b]
    index1,
    index2,
    index3,
    stride0,
    stride1,
    stride2,
    stride3,
    width0,
    width1,
    width2,
    width3,
    total,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    target = out + n * total
    if part == 0:
        row = tl.load(index0 + n).to(tl.int64)
        mask = column < width0
        x = tl.load(table0 + row * stride0 + column, mask=mask)
        tl.store(target + column, x.to(out.dtype.element_ty), mask=mask)
    elif part == 1:
        row = tl.load(index1 + n).to(tl.int64)
        mask = column < width1
        x = tl.load(table1 + row * stride1 + column, mask=mask)
        tl.store(target + width0 + column, x.to(out.dtype.element_ty), mask=mask)
    elif part == 2:
        row = tl.load(index2 + n).to(tl.int64)
        mask = column < width2
        x = tl.load(table2 + row * stride2 + column, mask=mask)
        tl.store(target + width0 + width1 + column, x.to(out.dtype.element_ty), mask=mask)
    else:
        row = tl.load(index3 + n).to(tl.int64)
        mask = column < width3
        x = tl.load(table3 + row * stride3 + column, mask=mask)
        tl.store(target + width0 + width1 + width2 + column, x.to(out.dtype.element_ty), mask=mask)


@kernel
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@kernel
def _gate(at, bias, mask, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
    return x


@kernel
def _lstm_kernel(  # type: ignore[no-untyped-def]
    gates,  # [b, 4 hidden]
    c,  # [rows, hidden]
    c_index,  # [b]
    h_out,  # [rows, hidden]
    h_rows,  # [b]
    c_out,  # [rows, hidden]
    c_rows,  # [b]
    bias,  # [4 hidden]
    finite,  # [b]
    hidden,
    gates_stride,
    c_stride,
    h_out_stride,
    c_out_stride,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    source = c + tl.load(c_index + n).to(tl.int64) * c_stride
    h_target = h_out + tl.load(h_rows + n).to(tl.int64) * h_out_stride
    c_target = c_out + tl.load(c_rows + n).to(tl.int64) * c_out_stride
    row = gates + n * gates_stride
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < hidden
        i = tl.sigmoid(_gate(row + column, bias + column, mask, BIAS))
        f = tl.sigmoid(_gate(row + hidden + column, bias + hidden + column, mask, BIAS))
        g = _tanh(_gate(row + 2 * hidden + column, bias + 2 * hidden + column, mask, BIAS))
        o = tl.sigmoid(_gate(row + 3 * hidden + column, bias + 3 * hidden + column, mask, BIAS))
        new = f * tl.load(source + column, mask=mask, other=0.0).to(tl.float32) + i * g
        tl.store(c_target + column, new.to(c_out.dtype.element_ty), mask=mask)
        tl.store(h_target + column, (o * _tanh(new)).to(h_out.dtype.element_ty), mask=mask)
        bad += tl.where(tl.abs(new) < float("inf"), 0, 1)
    tl.store(finite + n, (tl.sum(bad, axis=0) == 0).to(tl.uint8))


@kernel
def _gru_kernel(  # type: ignore[no-untyped-def]
    x_gates,  # [b, 3 hidden]
    h_gates,  # [b, 3 hidden]
    h,  # [rows, hidden]
    h_index,  # [b]
    h_out,  # [rows, hidden]
    h_rows,  # [b]
    x_bias,  # [3 hidden]
    h_bias,  # [3 hidden]
    finite,  # [b]
    hidden,
    x_stride,
    g_stride,
    h_stride,
    h_out_stride,
    X_BIAS: tl.constexpr,
    H_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    k = tl.program_id(0).to(tl.int64)
    source = h + tl.load(h_index + k).to(tl.int64) * h_stride
    target = h_out + tl.load(h_rows + k).to(tl.int64) * h_out_stride
    from_x = x_gates + k * x_stride
    from_h = h_gates + k * g_stride
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < hidden
        rx = _gate(from_x + column, x_bias + column, mask, X_BIAS)
        rh = _gate(from_h + column, h_bias + column, mask, H_BIAS)
        zx = _gate(from_x + hidden + column, x_bias + hidden + column, mask, X_BIAS)
        zh = _gate(from_h + hidden + column, h_bias + hidden + column, mask, H_BIAS)
        nx = _gate(from_x + 2 * hidden + column, x_bias + 2 * hidden + column, mask, X_BIAS)
        nh = _gate(from_h + 2 * hidden + column, h_bias + 2 * hidden + column, mask, H_BIAS)
        old = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
        n = _tanh(nx + tl.sigmoid(rx + rh) * nh)
        new = n + tl.sigmoid(zx + zh) * (old - n)
        tl.store(target + column, new.to(h_out.dtype.element_ty), mask=mask)
        bad += tl.where(tl.abs(new) < float("inf"), 0, 1)
    tl.store(finite + k, (tl.sum(bad, axis=0) == 0).to(tl.uint8))


@kernel
def _tree_kernel(  # type: ignore[no-untyped-def]
    gates,  # [b, 3 hidden]
    forget,  # [b, children * hidden]
    c,  # [rows, hidden]
    c_index,  # [b, children]
    h_out,  # [rows, hidden]
    h_rows,  # [b]
    c_out,  # [rows, hidden]
    c_rows,  # [b]
    bias,  # [3 hidden]
    forget_bias,  # [children * hidden]
    finite,  # [b]
    hidden,
    children,
    gates_stride,
    forget_stride,
    c_stride,
    index_stride,
    child_stride,
    h_out_stride,
    c_out_stride,
    BIAS: tl.constexpr,
    FORGET_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    h_target = h_out + tl.load(h_rows + n).to(tl.int64) * h_out_stride
    c_target = c_out + tl.load(c_rows + n).to(tl.int64) * c_out_stride
    row = gates + n * gates_stride
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < hidden
        i = tl.sigmoid(_gate(row + column, bias + column, mask, BIAS))
        o = tl.sigmoid(_gate(row + hidden + column, bias + hidden + column, mask, BIAS))
        new = i * _tanh(_gate(row + 2 * hidden + column, bias + 2 * hidden + column, mask, BIAS))
        for k in range(children):
            child = tl.load(c_index + n * index_stride + k * child_stride).to(tl.int64)
            at = k * hidden + column
            kept = _gate(forget + n * forget_stride + at, forget_bias + at, mask, FORGET_BIAS)
            old = tl.load(c + child * c_stride + column, mask=mask, other=0.0).to(tl.float32)
            new += tl.sigmoid(kept) * old
        tl.store(c_target + column, new.to(c_out.dtype.element_ty), mask=mask)
        tl.store(h_target + column, (o * _tanh(new)).to(h_out.dtype.element_ty), mask=mask)
        bad += tl.where(tl.abs(new) < float("inf"), 0, 1)
    tl.store(finite + n, (tl.sum(bad, axis=0) == 0).to(tl.uint8))


def _rows(seed: int, device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def _index(seed: int, device: torch.device, rows: int, count: int) -> Tensor:
    """Different rows, so that none is written twice."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:count].to(device)


def _join_case(widths: tuple[int, ...], count: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "tables": [_rows(k, device, dtype, 9, width) for k, width in enumerate(widths)],
            "indices": [_index(k, device, 9, count) for k in range(len(widths))],
        }

    return Case(f"{count} rows of {' and '.join(map(str, widths))}", make)


def _lstm_case(name: str, hidden: int, count: int, broken: bool = False, biased: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        gates = _rows(0, device, dtype, count, 4 * hidden)
        if broken:
            gates[1, 3] = torch.nan
        # States lie in one table, as a bank has them: two old ones a row, then two new ones.
        bank = _rows(1, device, dtype, 44, hidden)
        places = _index(2, device, 11, count) * 4
        return {
            "gates": gates,
            "c": bank,
            "c_index": places + 1,
            "h_out": bank,
            "h_rows": places + 2,
            "c_out": bank,
            "c_rows": places + 3,
            "bias": _rows(3, device, dtype, 4 * hidden) if biased else None,
        }

    return Case(name, make)


def _gru_case(hidden: int, count: int, biased: str = "") -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "x_gates": _rows(0, device, dtype, count, 3 * hidden),
            "h_gates": _rows(1, device, dtype, count, 3 * hidden),
            "h": _rows(2, device, dtype, 11, hidden),
            "h_index": _index(3, device, 11, count),
            "h_out": _rows(4, device, dtype, 11, hidden),
            "h_rows": _index(5, device, 11, count),
            "x_bias": _rows(6, device, dtype, 3 * hidden) if "x" in biased else None,
            "h_bias": _rows(7, device, dtype, 3 * hidden) if "h" in biased else None,
        }

    return Case(f"{count} rows of {hidden}{', biases of ' * bool(biased)}{biased}", make)


def _tree_case(hidden: int, count: int, children: int, biased: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        together = _rows(0, device, dtype, count, (3 + children) * hidden)
        bias = _rows(7, device, dtype, (3 + children) * hidden)
        return {
            # As one matrix product leaves them.
            "gates": together[:, : 3 * hidden],
            "forget": together[:, 3 * hidden :],
            "c": _rows(1, device, dtype, 30, hidden),
            "c_index": _index(2, device, 30, count * children).view(count, children),
            "h_out": _rows(3, device, dtype, 30, hidden),
            "h_rows": _index(4, device, 30, count),
            "c_out": _rows(5, device, dtype, 30, hidden),
            "c_rows": _index(6, device, 30, count),
            "bias": bias[: 3 * hidden] if biased else None,
            "forget_bias": bias[3 * hidden :] if biased else None,
        }

    return Case(f"{count} nodes of {children} children, {hidden} wide{', biased' * biased}", make)


OPS = (
    Op(
        "join_rows",
        join_rows,
        join_rows_definition,
        join_rows_kernel,
        (_join_case((20,), 3), _join_case((33, 70), 5), _join_case((8, 4, 1030), 2), _join_case((3, 5, 4, 6), 4)),
    ),
    Op(
        "lstm_gates",
        lstm_gates,
        lstm_gates_definition,
        lstm_gates_kernel,
        (
            _lstm_case("three rows", 20, 3),
            _lstm_case("a wide row", 1100, 1),
            _lstm_case("one row of four is broken", 33, 4, broken=True),
            _lstm_case("a bias", 33, 5, biased=True),
        ),
        ("h_out", "c_out"),
    ),
    Op(
        "gru_gates",
        gru_gates,
        gru_gates_definition,
        gru_gates_kernel,
        (_gru_case(20, 3), _gru_case(1030, 2), _gru_case(33, 4, "x and h"), _gru_case(20, 2, "h")),
        ("h_out",),
    ),
    Op(
        "tree_gates",
        tree_gates,
        tree_gates_definition,
        tree_gates_kernel,
        (
            _tree_case(20, 3, 2),
            _tree_case(33, 2, 0),
            _tree_case(1030, 2, 3),
            _tree_case(33, 4, 2, biased=True),
            _tree_case(20, 2, 0, biased=True),
        ),
        ("h_out", "c_out"),
    ),
)
