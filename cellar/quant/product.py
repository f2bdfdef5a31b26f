"""The product with a quantized matrix: what it means, and who computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cellar.core.formats import Format
from cellar.ops.cuda.hopper import DTYPES, hopper_serves
from cellar.ops.linear.mixed import Mixed, mixed_linear, mixed_takes
from cellar.ops.registry import Case, Op, Variant
from cellar.quant.activations import rounded
from cellar.quant.bytes import ByteWeight, multiplies_bytes
from cellar.quant.choice import default_choice
from cellar.quant.cpu import quantized_linear_cpu, takes
from cellar.quant.fragments import fragments, fragments_take
from cellar.quant.int8 import Int8Weight, int8_multiplies
from cellar.quant.matrix import Quantized, dequantized, quantized
from cellar.quant.nibbles import NibbleWeight, multiplies_nibbles
from cellar.quant.packed import is_symmetric, packed, packs
from cellar.quant.spans import is_spans, spans
from cellar.quant.triton import multiply_packed

# Numbers that are dequantized at a time: they stay in a CPU's cache and bound the extra memory.
_ELEMENTS = 1 << 18
# What the kernel for many tokens is tried with.
_MIXED = Mixed(32, 2, 2, 2)


def quantized_linear(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x: [t, in]; matrix: [out, in]; bias: [out] or None -> [t, out] in x's dtype."""
    return (_OP.on_cpu if x.is_cpu else _OP.on_gpu)(x, matrix, bias)


def quantized_linear_definition(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> Tensor:
    """The dequantized matrix's product in float32, rounded once: some rows are dequantized at a time.

    Where the format rounds activations, x is rounded first.
    """
    out_features, columns = matrix.shape
    wide = rounded(x, matrix.format) if matrix.format.activations else x.float()
    out = wide.new_empty((x.shape[0], out_features))
    step = max(1, _ELEMENTS // max(1, columns))
    if matrix.format.rows > 1:
        step = -(-step // matrix.format.rows) * matrix.format.rows
    for start in range(0, out_features, step):
        stop = min(out_features, start + step)
        out[:, start:stop] = functional.linear(wide, dequantized(matrix.rows(start, stop)))
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def quantized_linear_kernel(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> Tensor:
    """`quantized_linear`, the matrix put into the kernels' form at each call; weights keep it (`device.py`)."""
    choice = default_choice(matrix.format, *matrix.shape)
    if matrix.format.activations:
        x = rounded(x, matrix.format).to(x.dtype)
    return multiply_packed(x, packed(matrix), bias, choice.at(x.shape[0]))


def quantized_linear_hopper(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> Tensor:
    """`quantized_linear` of e4m3 by e4m3 on tensor cores; weights keep the form (`fp8.py`)."""
    return ByteWeight(matrix).multiply(x, bias)


def _is_fp8(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> bool:
    return x.dtype == torch.bfloat16 and multiplies_bytes(matrix)


def quantized_linear_nibbles(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> Tensor:
    """`quantized_linear` of int4 in the order of operands; weights keep the form (`nibbles.py`)."""
    return NibbleWeight(matrix).multiply(x, bias)


def _is_nibbles(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> bool:
    return x.dtype in DTYPES and multiplies_nibbles(matrix)


def quantized_linear_mixed(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> Tensor:
    """`quantized_linear` of int4 and int8 for many tokens; weights keep the form (`nibbles.py`, `device.py`)."""
    form = fragments(matrix) if fragments_take(matrix) else spans(packed(matrix))
    return mixed_linear(x, form, bias, _MIXED)


def _is_mixed(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> bool:
    takes = x.dtype in DTYPES and x.shape[0] > 0 and mixed_takes(*matrix.shape) and hopper_serves(matrix.codes.device)
    return takes and (fragments_take(matrix) or (packs(matrix) and is_spans(matrix.format, is_symmetric(matrix))))


def _is_packed(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> bool:
    return packs(matrix) and x.shape[0] > 0


def quantized_linear_int8(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> Tensor:
    """`quantized_linear` in whole numbers, the matrix packed at each call; weights keep it (`int8.py`)."""
    return Int8Weight(matrix).multiply(x, bias)


def _is_int8(x: Tensor, matrix: Quantized, bias: Tensor | None = None) -> bool:
    return matrix.format.activations == "int8" and int8_multiplies()


def _case(format: Format, t: int, n: int, k: int, bias: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(n)
        matrix = quantized(torch.randn((n, k), generator=generator) / k**0.5, format)
        parts = (matrix.codes, matrix.scales, matrix.zeros)
        codes, scales, zeros = (None if part is None else part.to(device) for part in parts)
        assert codes is not None
        assert scales is not None
        return {
            "x": torch.randn((t, k), generator=generator).to(dtype).to(device),
            "matrix": Quantized(format, codes, scales, zeros),
            "bias": torch.randn((n,), generator=generator).to(dtype).to(device) if bias else None,
        }

    return Case(f"{format.name}/{format.group} {t}x{n}x{k}", make)


_OP = Op(
    "quantized_linear",
    quantized_linear_definition,
    (
        Variant("hopper", quantized_linear_hopper, _is_fp8),
        Variant("hopper", quantized_linear_nibbles, _is_nibbles),
        Variant("triton", quantized_linear_kernel, _is_packed),
        Variant("hopper", quantized_linear_mixed, _is_mixed),
        Variant("cpu", quantized_linear_cpu, takes),
        Variant("cpu", quantized_linear_int8, _is_int8),
    ),
    (
        _case(Format("int4", 32), 1, 70, 96),
        _case(Format("int4", 64, zero_points=True), 1, 300, 576, bias=True),
        _case(Format("int4", 128, zero_points=True), 6, 33, 256),
        _case(Format("int8"), 1, 130, 416, bias=True),
        _case(Format("int8"), 7, 31, 96),
        _case(Format("int8"), 2, 5, 41),
        _case(Format("fp8"), 1, 40, 160),
        _case(Format("fp8", 128, rows=128), 5, 200, 256, bias=True),
        _case(Format("fp8", rows=0), 2, 9, 64),
        _case(Format("mxfp4", 32), 1, 37, 64),
        _case(Format("mxfp4", 32), 9, 34, 96, bias=True),
        _case(Format("int4", 64, zero_points=True), 20, 66, 320),
        _case(Format("int4", 32, zero_points=True), 8, 40, 192, bias=True),
        _case(Format("int4", 128), 40, 24, 384, bias=True),
        _case(Format("int8", 64), 3, 40, 192),
        _case(Format("int8"), 35, 72, 328, bias=True),
        _case(Format("int4", 128, zero_points=True), 33, 136, 512, bias=True),
        _case(Format("int8", activations="int8"), 1, 70, 96, bias=True),
        _case(Format("int8", activations="int8"), 3, 33, 41),
        _case(Format("int8", rows=0, activations="int8"), 19, 40, 320),
        _case(Format("fp8", activations="fp8"), 1, 48, 160, bias=True),
        _case(Format("fp8", rows=0, activations="fp8"), 20, 64, 272),
        _case(Format("fp8", 128, rows=128, activations="fp8"), 5, 208, 384, bias=True),
        _case(Format("fp8", 128, rows=128, activations="fp8"), 40, 128, 640),
    ),
)

OPS = (_OP,)
