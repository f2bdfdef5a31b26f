"""Products with quantized matrices on the CPU: `ops/cpu/quantized.py`, `ops/cpu/planes.py` and `ops/cpu/panels.py`."""

from __future__ import annotations

import struct
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from cellar.ops.cpu.blocks import BLOCK, COLUMNS, FOUR, PANEL, PLACE, ROWS, SIZE
from cellar.ops.cpu.launch import kernel, multiplies_bytes, takes_fours
from cellar.ops.linear.dense import widened
from cellar.ops.linear.onednn import onednn_packs
from cellar.quant.activations import rounded, token_codes
from cellar.quant.matrix import Quantized

# Groups of which COLUMNS hold whole ones.
_IN_COLUMNS = (BLOCK, 2 * BLOCK, 4 * BLOCK)
# Turns of each thread, and the least numbers of one: the longer a thread reads on, the faster memory delivers, and the
# more turns, the less all wait for one that has no core for a while.
_TURNS, _TURN = 4, 1 << 16
# Tokens from which on it is worth writing the matrix out for the library, in bfloat16 and in float32, so many numbers
# at a time; tokens up to which whole numbers have the kernel for a few, by what codes cost it, and how many of those a
# thread's stack holds at once.
_EXPANDED_FROM, _WIDENED_FROM = 8, 32
_EXPANDED = 1 << 20
_WHOLE_TO, _WHOLE_AT_ONCE = {"int4": 4, "int8": 6}, 8
# Tokens of a call of the kernel that takes many: what they have become stays in the second cache.
_MANY = 128


def takes(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> bool:
    """True for matrices in memory whose groups are whole blocks of neighbours."""
    group = matrix.format.group or x.shape[1]
    return (
        matrix.codes.is_cpu
        and matrix.codes.is_contiguous()
        and matrix.groups is None
        and x.shape[1] % group == 0
        and group % BLOCK == 0
        and (matrix.zeros is None or matrix.format.rows == 1)
    )


def quantized_linear_cpu(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> Tensor:
    """`quantized_linear` for matrices that are taken; summed in float32, rounded once.

    Tokens in bfloat16 are multiplied in whole numbers where the processor can (`multiplied_in_bytes`), a few by one
    kernel and many by another; else by the library, which promises nothing about their last bits. Where the format
    rounds activations, their codes are multiplied: whole numbers, exact up to 2^24, the bits of `int8.py`.
    """
    tokens, rows = x.shape[0], matrix.shape[0]
    if not tokens or not rows:
        return x.new_empty((tokens, rows))
    if matrix.format.activations == "fp8":
        x = rounded(x, matrix.format).to(x.dtype)
    if matrix.format.activations == "int8":
        codes, scales = token_codes(x)
        ones = torch.ones((matrix.shape[0], 1))
        whole = replace(matrix, format=replace(matrix.format, rows=1), scales=ones)
        out = _summed(codes.float(), whole).mul_(matrix.scales.float().view(1, -1)).mul_(scales)
    elif multiplied_in_bytes(x, matrix) and tokens <= _WHOLE_TO[matrix.format.name]:
        return products_in_bytes(x, matrix, bias, x.dtype)
    elif rows >= PANEL and multiplied_in_bytes(x, matrix):
        return products_in_panels(x, matrix, bias, x.dtype)
    elif x.dtype == torch.bfloat16 and tokens >= (_EXPANDED_FROM if onednn_packs(torch.bfloat16) else _WIDENED_FROM):
        return _expanded(x, matrix, bias)
    else:
        out = _summed(x.float(), matrix)
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def multiplied_in_bytes(x: Tensor, matrix: Quantized) -> bool:
    """True for bfloat16 and codes of 4 bits in groups of at most 128, or of 8 bits with a scale a row or for all."""
    format = matrix.format
    if x.dtype != torch.bfloat16 or x.shape[1] % COLUMNS or not multiplies_bytes():
        return False
    if format.name == "int8":
        return format.group == 0 and matrix.zeros is None
    return format.name == "int4" and format.group in _IN_COLUMNS


def products_in_bytes(x: Tensor, matrix: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[t, out] in bfloat16 or float32; the largest number of each token times 2^-23 is as good as 0.

    A few tokens at a time: a thread's stack holds what they have become.
    """
    out, x = torch.empty((x.shape[0], matrix.shape[0]), dtype=dtype), x.contiguous()
    raised = None if bias is None else bias.float().contiguous()
    parts = [(x, out)]
    if len(x) > _WHOLE_AT_ONCE:
        parts = list(zip(torch.split(x, _WHOLE_AT_ONCE), torch.split(out, _WHOLE_AT_ONCE), strict=True))
    for some, there in parts:
        places = some.data_ptr(), 0 if raised is None else raised.data_ptr()
        _launch("whole", places, matrix, there, (len(some), dtype == torch.bfloat16))
    return out


def products_in_panels(x: Tensor, matrix: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[t, out] in bfloat16 or float32, of at least PANEL rows (`ops/cpu/panels.py`)."""
    (rows, columns), name = matrix.shape, matrix.format.name
    out, x = torch.empty((x.shape[0], rows), dtype=dtype), x.contiguous()
    raised = None if bias is None else bias.float().contiguous()
    blocks, per = columns // COLUMNS, COLUMNS // (matrix.format.group or COLUMNS)
    places = torch.empty((min(_MANY, len(x)), blocks, PLACE), dtype=torch.uint8)
    for some, there in zip(torch.split(x, _MANY), torch.split(out, _MANY), strict=True):
        values = (some.data_ptr(), places.data_ptr(), len(some), blocks, per, max(1, len(some) // 16))
        kernel(f"tokens_{name}", x.dtype)(struct.pack("6q", *values), some.numel())
        first = places.data_ptr(), 0 if raised is None else raised.data_ptr()
        _launch("panels", first, matrix, there, (len(some), dtype == torch.bfloat16), PANEL)
    return out


def _summed(x: Tensor, matrix: Quantized) -> Tensor:
    """float32 [t, out] by the kernel that reads codes in their bits."""
    out = torch.empty((x.shape[0], matrix.shape[0]), dtype=torch.float32)
    tokens, columns = x.shape
    wide = _in_order(x, matrix)
    if tokens > FOUR and takes_fours():
        padded = functional.pad(wide.reshape(tokens, columns), (0, 0, 0, -tokens % FOUR))
        wide = padded.view(-1, FOUR, columns // SIZE, 2, SIZE // 2).permute(0, 3, 2, 1, 4)
    wide = wide.contiguous()
    _launch("product", (wide.data_ptr(),), matrix, out, (tokens,))
    return out


def _expanded(x: Tensor, matrix: Quantized, bias: Tensor | None) -> Tensor:
    """Some rows at a time become bfloat16 in the same scratch memory, and the library multiplies them."""
    rows, columns = matrix.shape
    step = max(1, _EXPANDED // columns)
    if matrix.format.rows > 1:
        step = -(-step // matrix.format.rows) * matrix.format.rows
    scratch = x.new_empty((min(step, rows), columns))
    x = _in_order(x, matrix).reshape(x.shape)
    multiply = functional.linear if onednn_packs(torch.bfloat16) else widened
    parts = []
    for start in range(0, rows, step):
        part = matrix.rows(start, min(rows, start + step))
        there = scratch[: part.shape[0]]
        _launch("expansion", (), part, there, ())
        parts.append(multiply(x, there, None if bias is None else bias[start : start + step]))
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _in_order(x: Tensor, matrix: Quantized) -> Tensor:
    """The columns as they are decoded: of pairs in a byte all the first, then all the second."""
    if matrix.format.name not in ("int4", "mxfp4"):
        return x
    return x.reshape(x.shape[0], -1, SIZE, 2).transpose(2, 3)


def _launch(
    name: str, first: tuple[int, ...], matrix: Quantized, out: Tensor, tokens: tuple[int, ...], together: int = ROWS
) -> None:
    """Run a kernel of `ops/cpu/quantized.py`, `ops/cpu/planes.py` or `ops/cpu/panels.py`, `together` rows at once."""
    rows, columns = matrix.shape
    scales = matrix.scales.contiguous()
    zeros = None if matrix.zeros is None else matrix.zeros.contiguous()
    group = matrix.format.group or columns
    turn = max(rows // (_TURNS * torch.get_num_threads()), _TURN // columns) // together * together or together
    places = (*first, matrix.codes.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr())
    counts = (*tokens, rows, columns // group, group // BLOCK, matrix.format.rows or rows, turn)
    values = (*places, out.data_ptr(), *counts)
    kernel(f"{name}_{matrix.format.name}", scales.dtype)(struct.pack(f"{len(values)}q", *values), rows * columns)
