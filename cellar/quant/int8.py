"""int8 weights times int8 activations on a CPU, in whole numbers, by oneDNN."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.linear.weight import LinearWeight
from cellar.quant.activations import token_codes
from cellar.quant.matrix import Quantized, quantized

# oneDNN's fast products take tokens without a sign.
_RAISED = 128
# The number of tokens that the packed form is made for; it serves all others.
_PACK_TOKENS = 64


class Int8Weight(LinearWeight):
    """A matrix of int8 without zero points, a scale a row, and tokens in int8 by their own ranges.

    Sums are of whole numbers in 32 bits, so a token's result is the same bits whatever stands beside it, on any number
    of threads. The matrix is kept packed only.
    """

    __slots__ = ("_offsets", "_ones", "_packed", "_scales", "format")

    def __init__(self, matrix: Quantized) -> None:
        super().__init__(*matrix.shape)
        self.format: Format = matrix.format
        self._packed = _packed(matrix.codes)
        self._scales = matrix.scales.float().expand(matrix.shape[0], 1).flatten().contiguous()
        self._ones = torch.ones(matrix.shape[0])
        self._offsets = torch.zeros(matrix.shape[0], dtype=torch.int32)

    @property
    def nbytes(self) -> int:
        """Codes and scales."""
        return self.out_features * self.in_features + self._scales.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The tokens' codes by the matrix's, times both scales in float32, rounded once."""
        if not x.shape[0]:
            return x.new_empty((0, self.out_features))
        codes, scales = token_codes(x)
        # The library multiplies by scales in an order of its own; this one is `quantized_linear_cpu`'s, bit for bit.
        out = _product(codes, self._packed, self._ones, self._offsets).mul_(self._scales).mul_(scales)
        if bias is not None:
            out += bias
        return out.to(x.dtype)

    def dense(self) -> Tensor:
        """float32 [out, in]."""
        return self._codes() * self._scales[:, None]

    def remade(self, matrix: Tensor) -> LinearWeight:
        """Another matrix, quantized to the same format."""
        return Int8Weight(quantized(matrix, self.format))

    def slice(self, axis: int, part: range) -> LinearWeight:
        """Rows or columns, with the codes and scales that they have."""
        codes = self._codes().narrow(axis, part.start, len(part)).contiguous()
        scales = self._scales[part.start : part.stop] if axis == 0 else self._scales
        by_row = Format("int8", activations=self.format.activations)
        return Int8Weight(Quantized(by_row, codes, scales[:, None]))

    def _codes(self) -> Tensor:
        return self._packed.to_dense().t()


@functools.cache
def int8_multiplies() -> bool:
    """True if the library multiplies int8 exactly on this processor.

    Without VNNI it adds pairs of products in 16 bits and cuts them off: the largest numbers show that.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    codes = torch.full((8, 256), 127, dtype=torch.int8)
    codes[1::2, ::3] = -128
    scales, offsets = torch.ones(8), torch.zeros(8, dtype=torch.int32)
    wanted = codes.float() @ codes.float().t()
    try:
        packed = _packed(codes)
        return all(torch.equal(_product(codes[:m], packed, scales, offsets), wanted[:m]) for m in (1, 2, 8))
    except (RuntimeError, AttributeError):  # built without it
        return False


def _packed(codes: Tensor) -> Tensor:
    """int8 [out, in] in oneDNN's order."""
    made: Tensor = torch.ops.onednn.qlinear_prepack(codes.contiguous(), [_PACK_TOKENS, codes.shape[1]])
    return made


def _product(tokens: Tensor, packed: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """tokens: int8 [t, in] -> float32 [t, out], of each row times its scale."""
    raised = (tokens.view(torch.uint8) ^ _RAISED).contiguous()  # adds 128
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        raised, 1.0, _RAISED, packed, scales, offsets, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out
