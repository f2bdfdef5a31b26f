"""Quantized matrices on a GPU, with what their products look up: kernels by number of tokens, and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from cellar.ops.cuda.hopper import DTYPES
from cellar.ops.linear.alone import Alone, Inside
from cellar.ops.linear.bytes import KEPT, Bytes, bytes_kept, bytes_source
from cellar.ops.linear.choice import Shape
from cellar.ops.linear.mixed import Mixed, mixed_kind, mixed_linear, mixed_source
from cellar.ops.linear.weight import LinearWeight
from cellar.ops.room import room_of
from cellar.quant.activations import rounded
from cellar.quant.byte_choice import default_product
from cellar.quant.bytes import ByteWeight, multiplies_bytes
from cellar.quant.choice import LEAST_ROWS, Kernel, QuantizedChoice, Tiles, default_choice, default_spans
from cellar.quant.matrix import Quantized, dequantized, in_order
from cellar.quant.nibbles import NibbleWeight, multiplies_nibbles
from cellar.quant.packed import Packed, packed, packs, rows_at_most, unpacked
from cellar.quant.spans import multiplies_spans, spans
from cellar.quant.triton import multiply_packed
from cellar.quant.weight import QuantizedWeight, StackedWeight

ChoiceOf: TypeAlias = Callable[[Shape], QuantizedChoice | None]

# Columns of a matrix whose only token is kept in shared memory: with more other kernels' division would have no room.
_MOST_KEPT = 16_384
# Tiles of tokens for which split products have counters; with more of them there are enough programs without a split.
_MOST_ACROSS = 4


class PackedWeight(LinearWeight):
    """A quantized matrix in the kernels' form. `order`: its columns as those of x, None where they lie so already.

    Activations keep the run's dtype, but for those that the format rounds to 8 bits.
    """

    __slots__ = ("_kept", "arrivals", "choice", "matrix", "order")

    def __init__(self, matrix: Packed, order: Tensor | None, choice: QuantizedChoice | None) -> None:
        super().__init__(*matrix.shape)
        mixed = multiplies_spans(matrix)
        # What multiplies one token alone, whatever the choice says.
        alone = mixed and order is None and matrix.shape[1] <= _MOST_KEPT
        self._kept = default_product(*matrix.shape, 1) if alone else None
        if choice is None or not choice.all_are(Tiles, *([Mixed] if mixed else [])):
            choice = default_spans(*matrix.shape) if mixed else default_choice(matrix.format, *matrix.shape)
        self.matrix = matrix
        self.order = order
        self.choice = choice.fitting(matrix.format, room_of(matrix.words.device))
        counters = -(-matrix.shape[0] // LEAST_ROWS) * _MOST_ACROSS
        self.arrivals = torch.zeros(counters, dtype=torch.int32, device=matrix.words.device)

    @property
    def asks_ahead(self) -> int:
        """One, where it is by the kernel that asks."""
        return int(self._kept is not None)

    @property
    def nbytes(self) -> int:
        """Words, scales, zero points and the order of columns."""
        return self.matrix.nbytes + (0 if self.order is None else self.order.numel() * self.order.element_size())

    def kernel(self, x: Tensor) -> Kernel:
        """The kernel for these tokens; in float32 several are for the library."""
        m = x.shape[0]
        kernel = None if x.dtype == torch.float32 and m > 1 else self.choice.at(m)
        return None if isinstance(kernel, Mixed) and x.dtype not in DTYPES else kernel

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By the kernel of the choice."""
        if not x.shape[0]:
            return x.new_empty((0, self.out_features))
        if (sizes := self._alone(x)) is not None:
            return self._multiply_alone(Alone(x), sizes, bias)[0]
        if self.order is not None:
            x = x[:, self.order]
        if self.matrix.format.activations and not x.is_meta:
            x = rounded(x, self.matrix.format).to(x.dtype)
        kernel = self.kernel(x)
        if not isinstance(kernel, Mixed):
            return multiply_packed(x, self.matrix, bias, kernel, self.arrivals)
        if x.is_meta:
            return x.new_empty((x.shape[0], self.out_features))
        return mixed_linear(x, spans(self.matrix), bias, kernel)

    def norm_multiply(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One token in one launch."""
        sizes = self._alone(residual) if norm.dtype == residual.dtype else None
        if sizes is None:
            return super().norm_multiply(residual, delta, norm, eps, bias)
        return self._multiply_alone(Alone(residual, delta, norm, eps), sizes, bias)

    def norm_gated_multiply(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, bias: Tensor | None, kind: str
    ) -> tuple[Tensor, Tensor]:
        """The gate where the product is written, one token in one launch."""
        inside = kind == "silu" and norm.dtype == residual.dtype and self.out_features % 2 == 0
        sizes = self._alone(residual) if inside else None
        if sizes is None:
            return super().norm_gated_multiply(residual, delta, norm, eps, bias, kind)
        return self._multiply_alone(Alone(residual, delta, norm, eps), sizes, bias, gate=True)

    def _alone(self, x: Tensor) -> Bytes | None:
        """Sizes of the kernel that takes these tokens as bytes: if there is one alone."""
        return self._kept if x.shape[0] == 1 and x.dtype in DTYPES else None

    def _multiply_alone(
        self, token: Alone, sizes: Bytes, bias: Tensor | None, *, gate: bool = False
    ) -> tuple[Tensor, Tensor]:
        if token.x.is_meta:
            return token.x.new_empty((1, self.out_features // 2 if gate else self.out_features)), token.total()
        return bytes_kept(token, self.matrix.words, self.matrix.scales[0], bias, sizes, gate=gate)

    def sources(self, bias: bool, dtype: torch.dtype, gate: bool = False) -> Iterator[tuple[str, dict[str, int]]]:
        """CUDA C++ of all that may run, with the constants that it is compiled with. `gate`: one comes behind."""
        if self._kept is not None:
            for normed in (False, True):
                inside = Inside(normed, gated=gate and normed, kept=KEPT)
                yield bytes_source(self._kept, self.in_features, 8, False, True, bias, dtype, inside)
        for kernel in self.choice.kernels:
            if isinstance(kernel, Mixed):
                yield mixed_source(kernel, mixed_kind(spans(self.matrix)), bias, dtype)

    def dense(self) -> Tensor:
        """float32 [out, in]."""
        return dequantized(self._given())

    def remade(self, matrix: Tensor) -> LinearWeight:
        """Another matrix, quantized to the same format."""
        return on_device(QuantizedWeight(self._given()).remade(matrix))

    def slice(self, axis: int, part: range) -> LinearWeight:
        """Rows or columns, with the codes and scales that they have. Raises ConfigError where that cuts a group."""
        return on_device(QuantizedWeight(self._given()).slice(axis, part))

    def _given(self) -> Quantized:
        """The matrix with its columns where they were."""
        matrix = unpacked(self.matrix)
        return matrix if self.order is None else in_order(matrix, self.order)


def on_device(weight: LinearWeight, choice_of: ChoiceOf = lambda shape: None) -> LinearWeight:
    """A quantized weight in the form that a GPU multiplies, with its choice (None: what its shape suggests).

    What has no such form stays as it is; what is too large for kernels to index is several under one another.
    """
    if isinstance(weight, StackedWeight):
        return StackedWeight([on_device(part, choice_of) for part in weight.parts])
    if isinstance(weight, QuantizedWeight) and multiplies_bytes(weight.matrix):
        return ByteWeight(weight.matrix)
    if not isinstance(weight, QuantizedWeight):
        return weight
    format = weight.matrix.format
    shape = Shape(*weight.matrix.shape, format.name, format.group)
    if weight.order is None and multiplies_nibbles(weight.matrix):
        return NibbleWeight(weight.matrix, choice_of(shape))
    rows, most = weight.matrix.shape[0], rows_at_most(weight.matrix.shape[1])
    if rows > most > 0:
        pieces = [range(start, min(start + most, rows)) for start in range(0, rows, most)]
        return StackedWeight([on_device(weight.slice(0, piece), choice_of) for piece in pieces])
    if not packs(weight.matrix):
        return weight
    return PackedWeight(packed(weight.matrix), weight.order, choice_of(shape))
