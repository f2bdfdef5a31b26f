"""Quantized matrices as weights of linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cellar.ops.linear.weight import LinearWeight
from cellar.quant.int8 import Int8Weight, int8_multiplies
from cellar.quant.matrix import Quantized, by_groups, dequantized, in_order, quantized
from cellar.quant.product import quantized_linear


class QuantizedWeight(LinearWeight):
    """A quantized matrix, multiplied in float32.

    Columns that are in no order of their groups (act-order) are put into it once, and those of x at each product.
    """

    __slots__ = ("matrix", "order")

    def __init__(self, matrix: Quantized, order: Tensor | None = None) -> None:
        """`order`: columns are in it already."""
        super().__init__(*matrix.shape)
        ordered = by_groups(matrix)
        self.matrix: Quantized = matrix if ordered is None else ordered[0]
        self.order: Tensor | None = order if ordered is None else ordered[1]

    @property
    def nbytes(self) -> int:
        """Codes, scales, zero points and the order of columns."""
        return self.matrix.nbytes + (0 if self.order is None else self.order.numel() * self.order.element_size())

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b in float32, rounded once."""
        return quantized_linear(x if self.order is None else x[:, self.order], self.matrix, bias)

    def dense(self) -> Tensor:
        """float32 [out, in]."""
        return dequantized(self._given())

    def remade(self, matrix: Tensor) -> QuantizedWeight:
        """Another matrix, quantized to the same format."""
        return QuantizedWeight(quantized(matrix, self.matrix.format))

    def slice(self, axis: int, part: range) -> QuantizedWeight:
        """Rows or columns, with the codes and scales that they have. Raises ConfigError where that cuts a group."""
        matrix = self._given()
        cut = matrix.rows if axis == 0 else matrix.columns
        return QuantizedWeight(cut(part.start, part.stop))

    def _given(self) -> Quantized:
        """The matrix with its columns where they were."""
        return self.matrix if self.order is None else in_order(self.matrix, self.order)


class StackedWeight(LinearWeight):
    """Weights of unequal formats under one another: q, k and v, or gate and up, each as it is stored."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[LinearWeight]) -> None:
        super().__init__(sum(part.out_features for part in parts), parts[0].in_features)
        self.parts = tuple(parts)

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(part.nbytes for part in self.parts)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Each part's product, side by side."""
        sizes = [part.out_features for part in self.parts]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        return torch.cat([part.multiply(x, b) for part, b in zip(self.parts, biases, strict=True)], 1)

    def dense(self) -> Tensor:
        """float32 [out, in]."""
        return torch.cat([part.dense().float() for part in self.parts])

    def remade(self, matrix: Tensor) -> StackedWeight:
        """Another matrix of the same height, each of its parts in the format that stands there."""
        rows = torch.split(matrix, [part.out_features for part in self.parts])
        return StackedWeight([part.remade(piece) for part, piece in zip(self.parts, rows, strict=True)])

    def slice(self, axis: int, part: range) -> LinearWeight:
        """Rows or columns, of each part what lies there."""
        if axis == 1:
            return StackedWeight([one.slice(1, part) for one in self.parts])
        found, first = [], 0
        for one in self.parts:
            start, stop = max(part.start, first) - first, min(part.stop, first + one.out_features) - first
            if start < stop:
                found.append(one.slice(0, range(start, stop)))
            first += one.out_features
        return StackedWeight(found)


def on_cpu(weight: LinearWeight, put: Callable[[Tensor], Tensor] | None = None) -> LinearWeight:
    """A quantized weight in the form that the CPU multiplies fastest: packed, where activations are rounded to int8.

    What has no such form, here or on this processor, stays as it is, its tensors where `put` puts them.
    """
    if isinstance(weight, StackedWeight):
        return StackedWeight([on_cpu(part, put) for part in weight.parts])
    if not isinstance(weight, QuantizedWeight):
        return weight
    if weight.matrix.format.activations == "int8" and int8_multiplies():
        return Int8Weight(weight.matrix)
    return weight if put is None else QuantizedWeight(weight.matrix.put(put), weight.order)
