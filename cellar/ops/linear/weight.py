"""What a linear layer multiplies by: a matrix in one format, which knows how it is multiplied there.

A format is a class of its own, each in a file of this folder. A model's code does not see which one it has: it calls
`linear`, `norm_linear` and `norm_gated_linear`, and these call the weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

from torch import Tensor

from cellar.ops.activation import gated
from cellar.ops.norm import add_rms_norm


class LinearWeight(ABC):
    """A matrix [out_features, in_features] in one format, never changed after it was made."""

    __slots__ = ("in_features", "out_features")

    def __init__(self, out_features: int, in_features: int) -> None:
        self.out_features = out_features
        self.in_features = in_features

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that a product reads of it (padding of a packed form is not counted)."""

    @property
    def asks_ahead(self) -> int:
        """Up to so many tokens its product on a GPU asks for weights before the kernel in front has ended, and divides
        a multiprocessor's memory as attention of few does.
        """
        return 0

    @property
    def norms_itself(self) -> bool:
        """Whether `norm_multiply` of several tokens is more than `add_rms_norm` with a product behind it."""
        return False

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b: x: [t, in]; bias: [out] or None -> [t, out] in x's dtype."""

    def multiply_into(self, out: Tensor, x: Tensor) -> None:
        """`multiply` without a bias, into [t, out] of x's dtype, contiguous. A format that can write there says so."""
        out.copy_(self.multiply(x))

    @abstractmethod
    def dense(self) -> Tensor:
        """The matrix itself, [out, in]: what every product with it is to equal, up to rounding."""

    @abstractmethod
    def remade(self, matrix: Tensor) -> LinearWeight:
        """Another matrix in the same format."""

    def slice(self, axis: int, part: range) -> LinearWeight:
        """Some rows (axis 0) or columns (axis 1), a step of 1 apart, in the same format.

        For weights that are in memory; a loader cuts what it reads before it packs (`Region`).
        """
        return self.remade(self.dense().narrow(axis, part.start, len(part)))

    def gated_multiply(self, x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        """act(gate) * up, the halves of x W^T + b, gate rows first."""
        return gated(self.multiply(x, bias), kind)

    def norm_multiply(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`norm_linear` with this weight. A format that can do it in one launch says so here."""
        normed, total = add_rms_norm(residual, delta, norm, eps)
        return self.multiply(normed, bias), total

    def norm_gated_multiply(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, bias: Tensor | None, kind: str
    ) -> tuple[Tensor, Tensor]:
        """`norm_gated_linear` with this weight, gate rows first."""
        normed, total = add_rms_norm(residual, delta, norm, eps)
        return self.gated_multiply(normed, bias, kind), total

    def norm_feed_multiply(
        self,
        residual: Tensor,
        delta: Tensor | None,
        norm: Tensor,
        eps: float,
        bias: Tensor | None,
        kind: str,
        down: LinearWeight,
        down_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`norm_feed_forward` with this weight for gate and up, and `down` behind them."""
        x, total = self.norm_gated_multiply(residual, delta, norm, eps, bias, kind)
        return down.multiply(x, down_bias), total


class MatrixWeight(LinearWeight):
    """The matrix itself; who comes of it says how it is multiplied."""

    __slots__ = ("matrix",)

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix.shape[0], matrix.shape[1])
        self.matrix = matrix

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.matrix.numel() * self.matrix.element_size()

    def dense(self) -> Tensor:
        """The matrix."""
        return self.matrix

    def remade(self, matrix: Tensor) -> MatrixWeight:
        """Another one."""
        return type(self)(matrix)


Weight: TypeAlias = Tensor | LinearWeight
"""What a model's function finds under a name: a matrix to multiply by, or a plain tensor (tables, norms, biases)."""
