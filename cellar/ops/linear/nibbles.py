"""Products of a few tokens by a matrix in 4 bits on Hopper (`nibbles.cu`), weights at memory's speed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.ops.cuda.compiler import compile_cuda
from cellar.ops.cuda.driver import Argument, Function
from cellar.ops.cuda.hopper import MAX_SHARED, hopper_source, multiprocessors
from cellar.ops.linear.alone import FEW_TOKENS, NOBODY, NOTHING, Alone, Inside, room_of
from cellar.ops.linear.bytes import tokens_of

ROWS, COLUMNS = 16, 64
"""Of a piece of the matrix: what a warp loads at once."""

FILES = ("linear/tile.cuh", "linear/alone.cuh", "linear/kept.cuh", "linear/nibbles.cu")

KEPT = 16
"""Bits of an only token's numbers, in float16."""

_MOST_TOKENS = 64
_WRITERS = 8  # warps of a block that writes the matrix out


@dataclass(frozen=True, slots=True)
class Nibbles:
    """Sizes of the kernel: pieces of 16 rows in a tile, warps, blocks of a cluster that share the columns of a tile,
    loads of 64 columns in a turn, turns in flight, blocks of a multiprocessor.
    """

    pieces: int
    warps: int
    sharers: int
    loads: int
    depth: int
    resident: int

    def __post_init__(self) -> None:
        least = min(self.pieces, self.warps, self.sharers, self.loads, self.depth, self.resident)
        if least < 1 or self.pieces not in (1, 2, 4) or self.sharers not in (1, 2, 4, 8) or self.loads not in (1, 2):
            raise ConfigError(
                f"{self} is no size of a product of nibbles: pieces are 1, 2 or 4, sharers 1, 2, 4 or 8, loads 1 or 2, "
                "the rest is positive."
            )

    @property
    def rows(self) -> int:
        """Of a tile."""
        return ROWS * self.pieces

    def shared(self, tokens: int) -> int:
        """Bytes of shared memory: the sums of all warps, and twice what others of a cluster send."""
        sums = self.warps * tokens * (self.rows + 4)
        if self.sharers > 1:
            sums += 2 * self.sharers * -(-tokens // self.sharers) * self.rows
        return 4 * sums

    def alone(self, inside: Inside, k: int) -> int:
        """Bytes of it that an only token of k numbers takes."""
        return inside.shared(k, self.warps, COLUMNS * self.loads, self.sharers)

    def fits(self, tokens: int) -> bool:
        """True if as many blocks as the sizes say have room on a multiprocessor."""
        return self.shared(tokens) * self.resident <= MAX_SHARED[1]


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """A matrix [n, k] in 4 bits in the order of the tensor cores' operands, padded to 16 rows; k is a multiple of 64.

    codes: int32 [pieces, k / 64, 32 lanes, 4 words]. scales: bfloat16 or float16 [pieces, k / group, 8, 2], of rows i
    and i + 8 of a piece behind one another. zeros: uint8, the same shape, or None, where code 8 stands for 0.
    """

    n: int
    k: int
    group: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    @property
    def nbytes(self) -> int:
        """Codes, scales and zero points of the rows that there are."""
        groups = self.n * (self.k // self.group)
        return self.n * self.k // 2 + groups * (2 if self.zeros is None else 3)


def nibbles_linear(x: Tensor, matrix: Fragments, bias: Tensor | None, sizes: Nibbles, *, gate: bool = False) -> Tensor:
    """x W^T + b: x: [m, k] in a 16-bit dtype, rows on 16 bytes -> [m, n]; 64 tokens at a time, one as `nibbles_alone`.

    With `gate` silu(x G^T + b) * (x U^T + c) -> [m, n / 2], G the upper half of the matrix and U the lower, where
    `nibbles_gate` says so.
    """
    if len(x) == 1:
        return nibbles_alone(Alone(x), matrix, bias, sizes, gate=gate)[0]
    return _multiply(x.contiguous(), matrix, bias, sizes, Inside(gated=gate), NOBODY)


def nibbles_alone(
    token: Alone, matrix: Fragments, bias: Tensor | None, sizes: Nibbles, *, gate: bool = False
) -> tuple[Tensor, Tensor]:
    """The same of one token, behind its norm if it has one -> (product, x + delta)."""
    token = token.contiguous()
    total = token.total()
    inside = Inside(normed=token.norm is not None, gated=gate, kept=KEPT)
    return _multiply(token.x, matrix, bias, sizes, inside, token.arguments(total)), total


def nibbles_gate(n: int, sizes: Nibbles) -> bool:
    """True if a kernel of these sizes can have the gate of a matrix [n, k] inside: a tile has rows of both halves."""
    return n % (2 * ROWS) == 0 and sizes.sharers == 1 and sizes.pieces > 1 and n >= ROWS * sizes.pieces


def _multiply(
    x: Tensor, matrix: Fragments, bias: Tensor | None, sizes: Nibbles, inside: Inside, behind: Sequence[Argument]
) -> Tensor:
    while sizes.pieces > matrix.codes.shape[0]:
        sizes = replace(sizes, pieces=sizes.pieces // 2)
    n = matrix.n // 2 if inside.gated else matrix.n
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    blocks = min(-(-matrix.n // sizes.rows), max(1, sizes.resident * multiprocessors(x.device) // sizes.sharers))
    for start in range(0, x.shape[0], _MOST_TOKENS):
        some = x[start : start + _MOST_TOKENS]
        function = _product(
            sizes, matrix.k, matrix.group, tokens_of(len(some)), matrix.zeros is not None, bias is not None,
            x.dtype, matrix.scales.dtype, inside, x.device,
        )  # fmt: skip
        _launch(function, blocks, x.device, [
            _address(some), *_matrix(matrix), _address(bias), _address(out[start:]),
            ctypes.c_int(len(some)), ctypes.c_int(n), ctypes.c_int(blocks), *behind,
        ])  # fmt: skip
    return out


def written_out(matrix: Fragments, dtype: torch.dtype) -> Tensor:
    """The matrix [n, k], rounded to a 16-bit dtype."""
    out = torch.empty((matrix.n, matrix.k), dtype=dtype, device=matrix.codes.device)
    function = _writer(matrix.k, matrix.group, matrix.zeros is not None, dtype, matrix.scales.dtype, out.device)
    blocks = -(-matrix.codes.shape[0] * matrix.codes.shape[1] // _WRITERS)
    _launch(function, blocks, out.device, [*_matrix(matrix), _address(out), ctypes.c_int(matrix.n)])
    return out


def nibbles_source(
    sizes: Nibbles,
    k: int,
    group: int,
    tokens: int,
    zeros: bool,
    bias: bool,
    dtype: torch.dtype,
    scales: torch.dtype,
    inside: Inside = NOTHING,
) -> tuple[str, dict[str, int]]:
    """CUDA C++ of one variant, and the constants that it is compiled with."""
    constants = {
        "K": k,
        "GROUP": group,
        "TOKENS": tokens,
        "PIECES": sizes.pieces,
        "WARPS": sizes.warps,
        "CLUSTER": sizes.sharers,
        "LOADS": sizes.loads,
        "DEPTH": sizes.depth,
        "RESIDENT": sizes.resident,
        "HAS_ZEROS": zeros,
        "HAS_BIAS": bias,
        "BF16": dtype == torch.bfloat16,
        "BF16_SCALES": scales == torch.bfloat16,
        **inside.constants(),
    }
    source = hopper_source(*FILES)
    return source, {name: int(value) for name, value in constants.items()}


def writer_source(
    k: int, group: int, zeros: bool, dtype: torch.dtype, scales: torch.dtype
) -> tuple[str, dict[str, int]]:
    """The same of what writes the matrix out."""
    return nibbles_source(Nibbles(1, _WRITERS, 1, 1, 1, 1), k, group, 8, zeros, False, dtype, scales)


@functools.cache
def _product(
    sizes: Nibbles, k: int, group: int, tokens: int, zeros: bool, bias: bool, dtype: torch.dtype, scales: torch.dtype,
    inside: Inside, device: torch.device,
) -> Function:  # fmt: skip
    cubin = compile_cuda(*nibbles_source(sizes, k, group, tokens, zeros, bias, dtype, scales, inside))
    shared = sizes.shared(tokens) + sizes.alone(inside, k)
    room = room_of(shared, sizes.resident, few=tokens <= FEW_TOKENS)
    with torch.cuda.device(device):
        return Function(cubin, "product_of_nibbles", 32 * sizes.warps, shared, sizes.sharers, room)


@functools.cache
def _writer(k: int, group: int, zeros: bool, dtype: torch.dtype, scales: torch.dtype, device: torch.device) -> Function:
    cubin = compile_cuda(*writer_source(k, group, zeros, dtype, scales))
    with torch.cuda.device(device):
        return Function(cubin, "written_out", 32 * _WRITERS, 0, 1)


def _launch(function: Function, clusters: int, device: torch.device, arguments: Sequence[Argument]) -> None:
    function.launch(clusters, arguments, torch.cuda.current_stream(device).cuda_stream, dependent=True)


def _matrix(matrix: Fragments) -> tuple[ctypes.c_void_p, ...]:
    return _address(matrix.codes), _address(matrix.scales), _address(matrix.zeros)


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())
