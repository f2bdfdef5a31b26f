"""Matrices in int4 on Hopper: codes in the order of operands, for our kernel, or written out for the library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.cuda.hopper import DTYPES, hopper_serves
from cellar.ops.linear.alone import FEW_TOKENS, NOTHING, Alone, Inside
from cellar.ops.linear.bytes import TOKENS, tokens_of
from cellar.ops.linear.mixed import Mixed, mixed_kind, mixed_linear, mixed_source, mixed_takes
from cellar.ops.linear.nibbles import (
    KEPT,
    Fragments,
    Nibbles,
    nibbles_alone,
    nibbles_gate,
    nibbles_linear,
    nibbles_source,
    writer_source,
    written_out,
)
from cellar.ops.linear.weight import LinearWeight
from cellar.quant.choice import Kernel, QuantizedChoice, default_nibbles
from cellar.quant.fragments import fragments, fragments_take, unfragmented
from cellar.quant.matrix import Quantized, dequantized, quantized


class NibbleWeight(LinearWeight):
    """A matrix of int4 in groups of 32, 64 or 128 columns, with zero points or without."""

    __slots__ = ("_form", "choice", "format")

    def __init__(self, matrix: Quantized, choice: QuantizedChoice | None = None) -> None:
        super().__init__(*matrix.shape)
        self.format: Format = matrix.format
        self._form = fragments(matrix)
        if choice is None or not choice.all_are(Nibbles, *([Mixed] if mixed_takes(*matrix.shape) else [])):
            choice = default_nibbles(*matrix.shape)
        self.choice = choice

    @property
    def nbytes(self) -> int:
        """Codes, scales and zero points, of the rows that there are."""
        return self._form.nbytes

    @property
    def asks_ahead(self) -> int:
        """All that attention of few takes."""
        return FEW_TOKENS

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By the kernel of the choice. In float32 by the dequantized matrix."""
        if not x.shape[0] or x.is_meta:
            return x.new_empty((x.shape[0], self.out_features))
        if x.dtype not in DTYPES:
            return torch.nn.functional.linear(x, self.dense().to(x.dtype), bias)
        return multiply_nibbles(x, self._form, bias, self.choice.at(x.shape[0]))

    def gated_multiply(self, x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        """SiLU's gate where the product of a few tokens is written."""
        sizes = self._few(x)
        if sizes is None or kind != "silu" or not nibbles_gate(self.out_features, sizes):
            return super().gated_multiply(x, bias, kind)
        return nibbles_linear(x, self._form, bias, sizes, gate=True)

    def norm_multiply(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One token in one launch."""
        if (sizes := self._alone(residual, norm)) is None:
            return super().norm_multiply(residual, delta, norm, eps, bias)
        return nibbles_alone(Alone(residual, delta, norm, eps), self._form, bias, sizes)

    def norm_gated_multiply(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, bias: Tensor | None, kind: str
    ) -> tuple[Tensor, Tensor]:
        """The gate where the product is written, one token in one launch."""
        sizes = self._few(residual) if kind == "silu" and self._alone(residual, norm) is not None else None
        if sizes is None or not nibbles_gate(self.out_features, sizes):
            return super().norm_gated_multiply(residual, delta, norm, eps, bias, kind)
        return nibbles_alone(Alone(residual, delta, norm, eps), self._form, bias, sizes, gate=True)

    def _few(self, x: Tensor) -> Nibbles | None:
        """Sizes of the kernel for a few tokens, where it takes these."""
        sizes = self.choice.at(x.shape[0]) if x.shape[0] and x.dtype in DTYPES and not x.is_meta else None
        return sizes if isinstance(sizes, Nibbles) else None

    def _alone(self, x: Tensor, norm: Tensor) -> Nibbles | None:
        """The same for one token whose norm it has inside."""
        return self._few(x) if x.shape[0] == 1 and norm.dtype == x.dtype else None

    def dense(self) -> Tensor:
        """float32 [out, in]."""
        return dequantized(self._given())

    def remade(self, matrix: Tensor) -> LinearWeight:
        """Another matrix, quantized to the same format."""
        return NibbleWeight(quantized(matrix, self.format))

    def slice(self, axis: int, part: range) -> LinearWeight:
        """Rows or columns, with the codes and scales that they have. Raises ConfigError where that cuts a group."""
        matrix = self._given()
        return NibbleWeight((matrix.rows if axis == 0 else matrix.columns)(part.start, part.stop))

    def sources(self, bias: bool, dtype: torch.dtype, gate: bool = False) -> Iterator[tuple[str, dict[str, int]]]:
        """CUDA C++ of all that may run, with the constants that it is compiled with. `gate`: one comes behind."""
        kind = self.in_features, self._form.group
        has_zeros, scales = self._form.zeros is not None, self._form.scales.dtype
        alone = ((1, Inside(normed, kept=KEPT)) for normed in (False, True))
        for m, inside in (*alone, *((m, NOTHING) for m in TOKENS)):
            sizes = self.choice.at(m)
            if isinstance(sizes, Nibbles):
                if gate and nibbles_gate(self.out_features, sizes):
                    inside = replace(inside, gated=True)
                yield nibbles_source(sizes, *kind, tokens_of(m), has_zeros, bias, dtype, scales, inside)
        for kernel in self.choice.kernels:
            if isinstance(kernel, Mixed):
                yield mixed_source(kernel, mixed_kind(self._form), bias, dtype)
        yield writer_source(*kind, has_zeros, dtype, scales)

    def _given(self) -> Quantized:
        return unfragmented(self._form, self.format)


def multiply_nibbles(x: Tensor, matrix: Fragments, bias: Tensor | None, kernel: Kernel) -> Tensor:
    """x W^T + b in 16 bits by one kernel: x: [m, k] -> [m, n]; None: the matrix is written out for the library."""
    if isinstance(kernel, Nibbles):
        return nibbles_linear(x, matrix, bias, kernel)
    if isinstance(kernel, Mixed):
        return mixed_linear(x, matrix, bias, kernel)
    return torch.nn.functional.linear(x, written_out(matrix, x.dtype), bias)


def multiplies_nibbles(matrix: Quantized) -> bool:
    """True for an int4 matrix of a shape that the kernel takes, on Hopper."""
    return fragments_take(matrix) and hopper_serves(matrix.codes.device)
