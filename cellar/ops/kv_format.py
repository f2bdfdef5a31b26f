"""Rows of K and V in fewer bits, in plain torch: what every kernel's bytes and numbers are compared with.

A cache's element type says its format: float8_e4m3fn for fp8, uint8 for int4, anything else is plain. Of a quantized
one the last dimension is `row_nbytes` (`core/kv_formats.py`), and the rows of one head in a chunk are one piece: the
codes of all tokens, then the scales of all tokens. A token's codes and scales depend on its own K and V alone, so
nothing that is written later changes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cellar.core.kv_formats import KVFormat, codes_nbytes, row_nbytes

FP8_MAX = 448.0
"""The largest number of e4m3."""


class Pieces(NamedTuple):
    """Views of a quantized cache, uint8: codes [slots, kv_heads, chunk_size, ...], scales likewise."""

    codes: Tensor
    scales: Tensor


def format_of(cache: Tensor) -> KVFormat:
    """How a cache's rows are written."""
    if cache.dtype == torch.float8_e4m3fn:
        return "fp8"
    return "int4" if cache.dtype == torch.uint8 else "plain"


def as_bytes(cache: Tensor) -> Tensor:
    """A quantized cache as uint8, for kernels that take codes apart themselves."""
    return cache.view(torch.uint8)


def pieces(cache: Tensor, head_dim: int) -> Pieces:
    """Codes and scales of a quantized cache [slots, kv_heads, chunk_size, row_nbytes], any stride of slots."""
    size, row = cache.shape[2:]
    width = codes_nbytes(format_of(cache), head_dim)
    slots, heads = cache.shape[:2]
    codes, scales = as_bytes(cache).flatten(2).split_with_sizes([size * width, size * (row - width)], dim=2)
    return Pieces(codes.view(slots, heads, size, width), scales.view(slots, heads, size, row - width))


def quantized(x: Tensor, format: KVFormat) -> tuple[Tensor, Tensor]:
    """Rows [..., head_dim] -> their codes and scales, uint8 [..., bytes].

    fp8: the scale is the least power of two with which the largest number is one of e4m3, and codes are the nearest;
    all of it is exact but that rounding, so every device writes the same bytes. int4: (largest - least) / 15 and the
    least number, rounded to bfloat16; codes are the nearest ones of 0 to 15. Rows that are not finite have scales that
    are not.
    """
    wide = x.float()
    if format == "fp8":
        largest = wide.abs().amax(-1, keepdim=True)
        bits = largest.view(torch.int32)
        # 448 is 1.75 x 2^8: the exponent, less 8, one more beyond 1.75.
        power = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)).clamp_(min=1)
        power = torch.where(bits < 0x7F800000, power, 255)
        inverse = ((254 - power).clamp_(min=0) << 23).view(torch.float32)
        return (wide * inverse).to(torch.float8_e4m3fn).view(torch.uint8), power.to(torch.uint8)
    halves = wide.reshape(*wide.shape[:-1], 2, -1)
    least, largest = halves.aminmax(dim=-1, keepdim=True)
    scale, least = ((largest - least) * (1 / 15)).bfloat16(), least.bfloat16()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    codes = ((halves - least.float()) * inverse).clamp_(0, 15).round_().to(torch.uint8)
    scales = torch.stack((scale, least), dim=-1).flatten(-3)
    return codes[..., 0, :] | codes[..., 1, :] << 4, scales.view(torch.uint8)


def dequantized(cache: Tensor, head_dim: int) -> Tensor:
    """The numbers of a cache: [slots, kv_heads, chunk_size, head_dim], float32; a plain cache as it is."""
    format = format_of(cache)
    if format == "plain":
        return cache
    codes, scales = pieces(cache, head_dim)
    if format == "fp8":
        factor = (scales.int() << 23).view(torch.float32)
        return codes.view(torch.float8_e4m3fn).float() * factor
    halves = torch.stack((codes & 15, codes >> 4), dim=-2).float()
    pairs = scales.contiguous().view(torch.bfloat16).float().view(*scales.shape[:-1], 2, 2)
    numbers: Tensor = halves * pairs[..., :1] + pairs[..., 1:]
    return numbers.flatten(-2)


def quantized_cache(plain: Tensor, format: KVFormat) -> Tensor:
    """A cache with the same K and V in fewer bits: [..., chunk_size, head_dim] -> [..., chunk_size, row_nbytes].

    As it is for a plain format.
    """
    if format == "plain":
        return plain
    dim, dtype = plain.shape[-1], torch.float8_e4m3fn if format == "fp8" else torch.uint8
    shape = (*plain.shape[:-1], row_nbytes(format, dim))
    made = torch.zeros(shape, dtype=torch.uint8, device=plain.device).view(dtype)
    heads = plain.flatten(0, -4) if plain.dim() > 4 else plain
    for there, found in zip(pieces(made.view(*heads.shape[:-1], -1), dim), quantized(heads, format), strict=True):
        there.copy_(found)
    return made
