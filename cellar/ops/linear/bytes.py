"""Products of a few tokens in 8 bits by a matrix in 8 bits on Hopper (`bytes.cu`), weights at memory's speed."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.ops.cuda.compiler import compile_cuda
from cellar.ops.cuda.driver import Function
from cellar.ops.cuda.hopper import hopper_source, multiprocessors

TOKENS = (8, 16, 32, 64)
"""Numbers of tokens that a kernel is made for; it takes fewer."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Sizes of the kernel: pieces of 16 rows in a tile, warps, turns in flight, blocks of a multiprocessor."""

    pieces: int
    warps: int
    depth: int
    resident: int

    def __post_init__(self) -> None:
        if min(self.pieces, self.warps, self.depth, self.resident) < 1 or self.pieces not in (1, 2, 4):
            raise ConfigError(f"{self} is no size of a product of bytes: pieces are 1, 2 or 4, the rest is positive.")

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 16 * self.pieces

    def shared(self, tokens: int) -> int:
        """Bytes of shared memory: the sums of all warps."""
        return 4 * self.warps * tokens * (self.rows + 4)


def tokens_of(m: int) -> int:
    """The kernel for m tokens. Raises StopIteration beyond the largest."""
    return next(tokens for tokens in TOKENS if tokens >= m)


def bytes_linear(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, sizes: Bytes
) -> Tensor:
    """x W^T + b: x: [m, k], weight: [n, k] -> [m, n] in a 16-bit dtype.

    x and weight are both e4m3 or both int8, and contiguous; k is a multiple of 16.

    x_scales: float32 [m, 1] with scales [n], or [m, k / 128], tokens behind one another, with [n / 128, k / 128].
    """
    m, k = x.shape
    n = weight.shape[0]
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    grouped = scales.dim() == 2
    whole = x.dtype == torch.int8
    function = _function(sizes, k, tokens_of(m), grouped, whole, bias is not None, dtype, x.device)
    blocks = min(-(-n // sizes.rows), sizes.resident * multiprocessors(x.device))
    function.launch(
        blocks,
        (
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(x_scales.data_ptr()),
            ctypes.c_void_p(weight.data_ptr()),
            ctypes.c_void_p(scales.data_ptr()),
            ctypes.c_void_p(0 if bias is None else bias.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int(m),
            ctypes.c_int(n),
            ctypes.c_int(scales.stride(0) if grouped else 0),
            ctypes.c_int(blocks),
        ),
        torch.cuda.current_stream(x.device).cuda_stream,
        dependent=True,
    )
    return out


def bytes_source(
    sizes: Bytes, k: int, tokens: int, grouped: bool, whole: bool, bias: bool, dtype: torch.dtype
) -> tuple[str, dict[str, int]]:
    """CUDA C++ of one variant, and the constants that it is compiled with."""
    constants = {
        "K": k,
        "TOKENS": tokens,
        "PIECES": sizes.pieces,
        "WARPS": sizes.warps,
        "DEPTH": sizes.depth,
        "RESIDENT": sizes.resident,
        "GROUPED": grouped,
        "WHOLE": whole,
        "HAS_BIAS": bias,
        "BF16": dtype == torch.bfloat16,
    }
    return hopper_source("linear/tile.cuh", "linear/bytes.cu"), {name: int(value) for name, value in constants.items()}


@functools.cache
def _function(
    sizes: Bytes, k: int, tokens: int, grouped: bool, whole: bool, bias: bool, dtype: torch.dtype, device: torch.device
) -> Function:
    cubin = compile_cuda(*bytes_source(sizes, k, tokens, grouped, whole, bias, dtype))
    with torch.cuda.device(device):
        return Function(cubin, "product_of_bytes", 32 * sizes.warps, sizes.shared(tokens), 1)
