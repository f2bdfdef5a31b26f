"""Matrices on a GPU, with what their products look up: which kernel runs them at how many tokens, and counters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cellar.ops.linear.choice import LEAST_FLAT_ROWS, Kernel, LinearChoice, Wide, default_choice
from cellar.ops.linear.hopper import wide, wide_takes
from cellar.ops.linear.triton import multiply, norm_gemv
from cellar.ops.linear.weight import MatrixWeight
from cellar.ops.norm import add_rms_norm
from cellar.ops.room import room_of


class DeviceWeight(MatrixWeight):
    """A plain matrix, its choice of kernels (None: what its shape suggests), and its counters if it has been prepared.

    arrivals: int32, zero between launches: what split products count in; None: each call clears some of its own.
    """

    __slots__ = ("arrivals", "choice")

    def __init__(self, matrix: Tensor, choice: LinearChoice | None = None, arrivals: Tensor | None = None) -> None:
        super().__init__(matrix)
        choice = choice or default_choice(*matrix.shape)
        self.choice = choice.fitting(room_of(matrix.device))
        self.arrivals = arrivals

    def remade(self, matrix: Tensor) -> DeviceWeight:
        """Another one, prepared if this one is; its shape says its kernels."""
        matrix = matrix.contiguous()
        return DeviceWeight(matrix) if self.arrivals is None else prepare(matrix)

    def kernel(self, x: Tensor) -> Kernel:
        """The kernel that is fastest for these tokens, of those that take them; None: the library's."""
        if not x.shape[0]:
            return None
        choice = self.choice
        return choice.at(x.shape[0], bool(choice.wide) and wide_takes(x, self.matrix))

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By the kernel of the choice. Of float32 only the library knows ways that are exact and fast."""
        if self.matrix.dtype == torch.float32:
            return functional.linear(x, self.matrix, bias)
        return self.multiply_by(self.kernel(x), x, bias)

    def multiply_by(self, kernel: Kernel, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By this kernel."""
        return multiply(x, self.matrix, bias, kernel, self.arrivals)

    def gated_multiply(self, x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        """SiLU's gate in the epilogue of the wide product."""
        if kind == "silu" and isinstance(kernel := self.kernel(x), Wide):
            return wide(x, self.matrix, bias, kernel, gate=True)
        return super().gated_multiply(x, bias, kind)

    def norm_multiply(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One token in a single launch, unless the choice says that this is slower."""
        sizes = self.choice.fused
        if sizes is not None and residual.shape[0] == 1:
            return norm_gemv(residual, delta, norm, eps, self.matrix, bias, sizes, gate=False)
        normed, total = add_rms_norm(residual, delta, norm, eps)
        return self.multiply(normed, bias), total

    def norm_gated_multiply(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, bias: Tensor | None, kind: str
    ) -> tuple[Tensor, Tensor]:
        """With SiLU one token in a single launch."""
        sizes = self.choice.fused
        if kind == "silu" and sizes is not None and residual.shape[0] == 1:
            return norm_gemv(residual, delta, norm, eps, self.matrix, bias, sizes, gate=True)
        return super().norm_gated_multiply(residual, delta, norm, eps, bias, kind)


def prepare(matrix: Tensor, choice: LinearChoice | None = None) -> DeviceWeight:
    """A matrix with its choice of kernels (None: what its shape suggests), and the counters that split products want
    zero, and leave zero: one clearing less per call.
    """
    blocks = -(-matrix.shape[0] // LEAST_FLAT_ROWS)
    return DeviceWeight(matrix, choice, torch.zeros(blocks, dtype=torch.int32, device=matrix.device))
