"""Recurrent cells in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cellar.ops.recurrent.definition import MOST_TABLES, check_tables
from cellar.ops.triton_support import kernel

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 1024


def join_rows_kernel(tables: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Gathered and joined in one Triton kernel."""
    check_tables(tables, indices)
    widths = [table.shape[1] for table in tables]
    out = torch.empty((len(indices[0]), sum(widths)), dtype=tables[0].dtype, device=tables[0].device)
    if out.numel():
        rows = [table if table.stride(1) == 1 else table.contiguous() for table in tables]
        absent = MOST_TABLES - len(rows)
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
