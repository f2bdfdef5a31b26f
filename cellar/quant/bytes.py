"""Matrices in 8 bits times tokens in 8 bits on Hopper, e4m3 or int8: both as they lie in memory, on tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.activation import gated
from cellar.ops.cuda.hopper import DTYPES, hopper_serves
from cellar.ops.linear.alone import FEW_TOKENS, NOTHING, Alone, Inside
from cellar.ops.linear.bytes import TOKENS, Bytes, bytes_alone, bytes_linear, bytes_source, tokens_of
from cellar.ops.linear.weight import LinearWeight
from cellar.quant.activations import rounded
from cellar.quant.byte_choice import Product, default_product
from cellar.quant.matrix import Quantized, dequantized, quantized
from cellar.quant.sums import scaled_sums
from cellar.quant.tokens import byte_tokens, gated_byte_tokens, norm_byte_tokens

_STEP = 16
"""What the library's product and ours want of both sides of a matrix."""
_BLOCK = 128
"""Rows and columns of a block, and numbers of a token, that share a scale."""


class ByteWeight(LinearWeight):
    """A matrix of e4m3 or int8, a scale for each row, or for each block of 128 x 128, and tokens of the same kind.

    At every number of tokens the same codes are multiplied; which kernel runs decides the order of sums alone.
    """

    __slots__ = ("_codes", "_scales", "format")

    def __init__(self, matrix: Quantized) -> None:
        super().__init__(*matrix.shape)
        self.format: Format = matrix.format
        self._codes = matrix.codes.contiguous()
        self._scales = _scales(matrix)

    @property
    def nbytes(self) -> int:
        """Codes and scales."""
        return self._codes.nbytes + self._scales.numel() * 4

    @property
    def asks_ahead(self) -> int:
        """All that attention of few takes."""
        return FEW_TOKENS

    @property
    def norms_itself(self) -> bool:
        """The norm rounds its tokens."""
        return True

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The tokens are rounded, then multiplied. In float32 by the dequantized matrix."""
        if x.dtype not in DTYPES:
            out = rounded(x, self.format).to(x.dtype) @ self.dense().to(x.dtype).t()
            return out if bias is None else out + bias
        if (sizes := self._alone(x)) is not None:
            return self._multiply_alone(Alone(x), sizes, bias)[0]
        return self._product(*byte_tokens(x, self.format.activations, self.format.group), bias, x.dtype)

    def norm_multiply(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add, norm and rounding in one launch; of one token in that of the product."""
        if residual.dtype != torch.bfloat16:
            return super().norm_multiply(residual, delta, norm, eps, bias)
        if (sizes := self._alone(residual)) is not None and norm.dtype == residual.dtype:
            return self._multiply_alone(Alone(residual, delta, norm, eps), sizes, bias)
        kind = self.format.activations, self.format.group
        codes, scales, total = norm_byte_tokens(residual, delta, norm, eps, *kind)
        return self._product(codes, scales, bias), total

    def norm_gated_multiply(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, bias: Tensor | None, kind: str
    ) -> tuple[Tensor, Tensor]:
        """The same, and the gate."""
        sizes = self._alone(residual)
        if sizes is not None and kind == "silu" and norm.dtype == residual.dtype and self.out_features % 2 == 0:
            return self._multiply_alone(Alone(residual, delta, norm, eps), sizes, bias, gate=True)
        product, total = self.norm_multiply(residual, delta, norm, eps, bias)
        return gated(product, kind), total

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
        """Gate and rounding in one launch, too, where the second matrix is of this kind."""
        inside = kind == "silu" and self._alone(residual) is not None
        if not isinstance(down, ByteWeight) or residual.dtype != torch.bfloat16 or inside:
            return super().norm_feed_multiply(residual, delta, norm, eps, bias, kind, down, down_bias)
        product, total = self.norm_multiply(residual, delta, norm, eps, bias)
        codes, scales = gated_byte_tokens(product, kind, down.format.activations, down.format.group)
        return down._product(codes, scales, down_bias), total

    def dense(self) -> Tensor:
        """float32 [out, in]."""
        return dequantized(self._given())

    def remade(self, matrix: Tensor) -> LinearWeight:
        """Another matrix, quantized to the same format."""
        return ByteWeight(quantized(matrix, self.format))

    def slice(self, axis: int, part: range) -> LinearWeight:
        """Rows or columns, with the codes and scales that they have. Raises ConfigError where that cuts a block."""
        matrix = self._given()
        return ByteWeight((matrix.rows if axis == 0 else matrix.columns)(part.start, part.stop))

    def _given(self) -> Quantized:
        scales = self._scales if self.format.group else self._scales[:, None]
        return Quantized(replace(self.format, rows=self.format.rows or 1), self._codes, scales)

    def _product(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """Rounded tokens by the matrix: [t, out]."""
        m = codes.shape[0]
        if not m or codes.is_meta:
            return torch.empty((m, self.out_features), dtype=dtype, device=codes.device)
        return byte_product(codes, scales, self._codes, self._scales, bias, self.product_for(m), dtype)

    def _alone(self, x: Tensor) -> Bytes | None:
        """Sizes of the kernel that takes these tokens in 16 bits: if there is one alone."""
        if x.shape[0] != 1 or x.dtype != torch.bfloat16 or self.format.group:
            return None
        return self.product_for(1)

    def _multiply_alone(
        self, token: Alone, sizes: Bytes, bias: Tensor | None, *, gate: bool = False
    ) -> tuple[Tensor, Tensor]:
        if token.x.is_meta:
            return token.x.new_empty((1, self.out_features // 2 if gate else self.out_features)), token.total()
        return bytes_alone(token, self._codes, self._scales, bias, sizes, gate=gate)

    def sources(self, bias: bool, dtype: torch.dtype, gate: bool = False) -> Iterator[tuple[str, dict[str, int]]]:
        """CUDA C++ of all that may multiply, with the constants that it is compiled with. `gate`: one comes behind."""
        grouped, whole = self.format.group > 0, self.format.name == "int8"
        ways = [(m, NOTHING) for m in (1, *TOKENS)]
        if not grouped and dtype == torch.bfloat16:
            ways[:1] = [(1, Inside(normed, rounded=True, gated=gate and normed)) for normed in (False, True)]
        for m, inside in ways:
            sizes = self.product_for(m)
            if sizes is not None:
                yield bytes_source(sizes, self.in_features, tokens_of(m), grouped, whole, bias, dtype, inside)

    def product_for(self, m: int) -> Product:
        """What multiplies so many tokens; None: the library."""
        return default_product(self.out_features, self.in_features, m)


def byte_product(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    product: Product,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x W^T + b: x: [m, k] and weight: [n, k], both e4m3 or both int8, with their scales -> [m, n] in a 16-bit dtype;
    by the library, which has no other, rounded to bfloat16 first.

    x_scales [m, 1] with scales [n], or [m, k / 128] with [n / 128, k / 128].
    """
    if product is not None:
        return bytes_linear(x, x_scales, weight, scales, bias, dtype, product)
    return _library_product(x, x_scales, weight, scales, bias).to(dtype)


def _library_product(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The same in bfloat16, by torch."""
    if x.dtype == torch.int8:
        return scaled_sums(torch._int_mm(x, weight.t()), x_scales, scales, bias)
    if scales.dim() == 1:
        out = torch._scaled_mm(x, weight.t(), x_scales, scales[None], out_dtype=torch.bfloat16)
    elif scales.shape[1] % 4:
        out = _half_product(x, x_scales, weight, scales)
    else:
        m = len(x)
        x, x_scales = _by_eights(x, x_scales)
        out = torch._scaled_mm(x, weight.t(), x_scales, scales.t(), out_dtype=torch.bfloat16)[:m]
    return out if bias is None else out.add_(bias)


def _half_product(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Both sides written out in float16, where the library's product by blocks wants a multiple of 512 columns (torch
    2.11). A token's largest number, and the matrix's, is 1 at most, so that no sum leaves float16's range.
    """
    tops = 448 * x_scales.amax(1, keepdim=True).clamp_min(1e-30), 448 * scales.amax().clamp_min(1e-30)
    by_row = scales.repeat_interleave(_BLOCK, 0)[: len(weight)]
    halves = (
        (side.float().view(len(side), -1, _BLOCK) * (factors / top)[:, :, None]).flatten(1).half()
        for side, factors, top in ((x, x_scales, tops[0]), (weight, by_row, tops[1]))
    )
    left, right = halves
    return ((left @ right.t()).float() * (tops[0] * tops[1])).bfloat16()


def _by_eights(x: Tensor, x_scales: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their scales by groups, with zeros up to a multiple of eight: the library's product by blocks wants
    the scales of a group 16 bytes apart, and refuses other numbers of tokens.
    """
    missing = -len(x) % 8
    if not missing:
        return x, x_scales.t().contiguous().t()
    codes = torch.nn.functional.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)
    return codes, torch.nn.functional.pad(x_scales.t(), (0, missing)).t()


def multiplies_bytes(matrix: Quantized) -> bool:
    """True for a matrix whose format rounds tokens, of a shape that tensor cores take, on Hopper."""
    return matrix.groups is None and multiplies_bytes_of(matrix.format, matrix.shape, matrix.codes.device)


def multiplies_bytes_of(format: Format, shape: tuple[int, int], device: torch.device) -> bool:
    """The same of a matrix that is not there yet, without an order of columns."""
    return bool(format.activations) and all(size % _STEP == 0 and size for size in shape) and hopper_serves(device)


def _scales(matrix: Quantized) -> Tensor:
    """float32 [out], or of blocks [out / 128, in / 128], rows a multiple of 16 bytes apart, as the library wants."""
    scales = matrix.scales.float()
    if not matrix.format.group:
        return scales.expand(matrix.shape[0], 1).flatten().contiguous()
    blocks, groups = scales.shape
    if scales.stride() == (-(-groups // 4) * 4, 1):
        return scales
    apart = scales.new_zeros((blocks, -(-groups // 4) * 4))
    apart[:, :groups] = scales
    return apart[:, :groups]
