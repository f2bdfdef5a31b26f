"""Products of a few tokens in 8 bits by a matrix in 8 bits on Hopper (`bytes.cu`), weights at memory's speed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.ops.cuda.compiler import compile_cuda
from cellar.ops.cuda.driver import Argument, Function
from cellar.ops.cuda.hopper import hopper_source, multiprocessors
from cellar.ops.linear.alone import FEW_TOKENS, NOBODY, NOTHING, Alone, Inside, room_of

FILES = ("linear/tile.cuh", "linear/alone.cuh", "linear/kept.cuh", "linear/bytes.cu")

_TURN = 128  # columns that a warp takes at a time

KEPT = 24
"""Bits of an only token's numbers, in three bytes."""

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

    def alone(self, inside: Inside, k: int) -> int:
        """Bytes of it that an only token of k numbers takes."""
        return inside.shared(k, self.warps, _TURN)


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
    return _multiply(x, x_scales, weight, scales, bias, dtype, sizes, NOTHING, NOBODY)


def bytes_alone(
    token: Alone, weight: Tensor, scales: Tensor, bias: Tensor | None, sizes: Bytes, *, gate: bool = False
) -> tuple[Tensor, Tensor]:
    """One token in bfloat16, behind its norm if it has one, rounded here, times a matrix [n, k] in e4m3 or int8 with
    scales [n] -> (product [1, n], x + delta). With `gate` silu of the upper half's product times the lower half's.
    """
    token = token.contiguous()
    total = token.total()
    inside = Inside(normed=token.norm is not None, rounded=True, gated=gate)
    dtype, behind = token.x.dtype, token.arguments(total)
    return _multiply(token.x, None, weight, scales, bias, dtype, sizes, inside, behind), total


def bytes_kept(
    token: Alone, words: Tensor, scales: Tensor, bias: Tensor | None, sizes: Bytes, *, gate: bool = False
) -> tuple[Tensor, Tensor]:
    """The same of one token in a 16-bit dtype that is not rounded, times a matrix in int8: words [blocks, n, 64] as
    `mixed.Spans` has them, scales [n]. Of the largest number of a warp's columns 22 bits are kept, of others as much as
    lies above the last of these.
    """
    token = token.contiguous()
    total = token.total()
    inside = Inside(normed=token.norm is not None, gated=gate, kept=KEPT)
    dtype, behind = token.x.dtype, token.arguments(total)
    return _multiply(token.x, None, words, scales, bias, dtype, sizes, inside, behind), total


def _multiply(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    sizes: Bytes,
    inside: Inside,
    behind: Sequence[Argument],
) -> Tensor:
    m, k = x.shape
    rows = weight.shape[1] if inside.kept else weight.shape[0]
    n = rows // 2 if inside.gated else rows
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    grouped = scales.dim() == 2
    whole = weight.dtype != torch.float8_e4m3fn
    function = _function(sizes, k, tokens_of(m), grouped, whole, bias is not None, dtype, inside, x.device)
    blocks = min(-(-rows // sizes.rows), sizes.resident * multiprocessors(x.device))
    pointers = (x, x_scales, weight, scales, bias, out)
    counts = (m, n, scales.stride(0) if grouped else 0, blocks)
    function.launch(
        blocks,
        (
            *(ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in pointers),
            *(ctypes.c_int(count) for count in counts),
            *behind,
        ),
        torch.cuda.current_stream(x.device).cuda_stream,
        dependent=True,
    )
    return out


def bytes_source(
    sizes: Bytes,
    k: int,
    tokens: int,
    grouped: bool,
    whole: bool,
    bias: bool,
    dtype: torch.dtype,
    inside: Inside = NOTHING,
) -> tuple[str, dict[str, int]]:
    """CUDA C++ of one variant, and the constants that it is compiled with."""
    constants = {
        "K": k,
        "TOKENS": tokens,
        "PIECES": sizes.pieces,
        "WARPS": sizes.warps,
        "CLUSTER": 1,
        "DEPTH": sizes.depth,
        "RESIDENT": sizes.resident,
        "GROUPED": grouped,
        "WHOLE": whole,
        "HAS_BIAS": bias,
        "BF16": dtype == torch.bfloat16,
        **inside.constants(),
    }
    source = hopper_source(*FILES)
    return source, {name: int(value) for name, value in constants.items()}


@functools.cache
def _function(
    sizes: Bytes,
    k: int,
    tokens: int,
    grouped: bool,
    whole: bool,
    bias: bool,
    dtype: torch.dtype,
    inside: Inside,
    device: torch.device,
) -> Function:
    cubin = compile_cuda(*bytes_source(sizes, k, tokens, grouped, whole, bias, dtype, inside))
    shared = sizes.shared(tokens) + sizes.alone(inside, k)
    room = room_of(shared, sizes.resident, few=tokens <= FEW_TOKENS)
    with torch.cuda.device(device):
        return Function(cubin, "product_of_bytes", 32 * sizes.warps, shared, 1, room)
