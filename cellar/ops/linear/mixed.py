"""Products of 17 to 256 tokens in 16 bits by a matrix in 4 or 8 bits on Hopper (`mixed.cu`), on wide tensor cores."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.ops.cuda.compiler import compile_cuda
from cellar.ops.cuda.driver import Function, TensorMap, tensor_map
from cellar.ops.cuda.hopper import MAX_SHARED, hopper_source, multiply_across
from cellar.ops.linear.nibbles import Fragments

_DEPTH = 128
# Registers of a thread that does not multiply.
_IDLE = 24


@dataclass(frozen=True, slots=True)
class Kind:
    """Of a matrix, what a kernel is compiled for: bits, columns that share a scale (0: a row), scales, zero points."""

    bits: int
    group: int
    scales: torch.dtype
    zeros: bool


@dataclass(frozen=True, slots=True)
class Mixed:
    """Sizes of the kernel: tokens of a tile, teams of four warps with 64 rows each, parts of a sum, stages of 128
    columns in flight, blocks of a multiprocessor.
    """

    tokens: int
    teams: int
    parts: int
    stages: int
    resident: int = 1

    def __post_init__(self) -> None:
        if (
            self.tokens not in range(8, 257, 8)
            or self.teams not in (1, 2, 4)
            or self.parts not in (1, 2, 4, 8)
            or 4 * self.teams % self.parts
            or self.stages < 2
            or self.resident < 1
        ):
            raise ConfigError(
                f"{self} is no size of a mixed product: tokens are a multiple of 8 up to 256, teams 1, 2 or 4, parts "
                "1, 2, 4 or 8 and no more than four for each team, stages 2 or more, blocks 1 or more."
            )

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 64 * self.teams

    @property
    def threads(self) -> int:
        """Those that multiply, and four warps of which one loads."""
        return 128 * (self.teams + 1)

    def shared(self, kind: Kind) -> int:
        """Bytes of shared memory: barriers, what is in flight, and the parts that others of a cluster send."""
        stage = 2 * _DEPTH * self.tokens + self.rows * _DEPTH * kind.bits // 8
        if kind.group:
            stage += self.rows * (_DEPTH // kind.group) * (3 if kind.zeros else 2)
        parts = (self.parts - 1) * (4 * self.teams // self.parts) * 64 * self.tokens
        return 1024 + 16 * self.stages + self.stages * -(-stage // 1024) * 1024 + parts

    def fits(self, kind: Kind) -> bool:
        """True if as many blocks as the sizes say have room on a multiprocessor: memory, and registers for sums."""
        begins = 512 // self.resident // (self.teams + 1) // 8 * 8
        multiplies = (begins * (self.teams + 1) - _IDLE) // self.teams // 8 * 8
        if begins < self.tokens // 2 + 30 or multiplies < self.tokens // 2 + 40:
            return False
        return self.shared(kind) * self.resident <= MAX_SHARED[1]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """A matrix [n, k] of int8.

    words: int16 [blocks of 128 columns, n, 64], a row's column i in the lower byte of word i, column 64 + i in the
    upper one, zeros beyond k. scales: float32 [n].
    """

    n: int
    k: int
    words: Tensor
    scales: Tensor


Codes: TypeAlias = Fragments | Spans
# A tensor, its sizes, strides and box in elements of 16 bits, and its swizzle, as `tensor_map` takes them.
Box: TypeAlias = tuple[Tensor, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def mixed_kind(matrix: Codes) -> Kind:
    """What a matrix wants."""
    if isinstance(matrix, Spans):
        return Kind(8, 0, torch.float32, zeros=False)
    return Kind(4, matrix.group, matrix.scales.dtype, matrix.zeros is not None)


def mixed_takes(n: int, k: int) -> bool:
    """True for a matrix [n, k] whose tokens and results lie on 16 bytes."""
    return n % 8 == 0 and k % 8 == 0


def mixed_linear(x: Tensor, matrix: Codes, bias: Tensor | None, sizes: Mixed) -> Tensor:
    """x W^T + b: x: [m, k] in a 16-bit dtype, rows on 16 bytes -> [m, n], of a shape that `mixed_takes`."""
    x = x.contiguous()
    m, k = x.shape
    out = torch.empty((m, matrix.n), dtype=x.dtype, device=x.device)
    function = _function(sizes, mixed_kind(matrix), bias is not None, x.dtype, x.device)
    maps, down = _maps(x, matrix, sizes), -(-m // sizes.tokens)
    scales = matrix.scales.data_ptr() if isinstance(matrix, Spans) else 0
    function.launch(
        down * -(-matrix.n // sizes.rows),
        (
            *maps,
            ctypes.c_void_p(scales),
            ctypes.c_void_p(0 if bias is None else bias.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int(m),
            ctypes.c_int(matrix.n),
            ctypes.c_int(-(-k // _DEPTH)),
            ctypes.c_int(down),
        ),
        torch.cuda.current_stream(x.device).cuda_stream,
        dependent=True,
    )
    return out


def mixed_source(sizes: Mixed, kind: Kind, bias: bool, dtype: torch.dtype) -> tuple[str, dict[str, int]]:
    """CUDA C++ of one variant, and the constants that it is compiled with."""
    constants = {
        "BITS": kind.bits,
        "GROUP": kind.group,
        "TOKENS": sizes.tokens,
        "TEAMS": sizes.teams,
        "PARTS": sizes.parts,
        "STAGES": sizes.stages,
        "RESIDENT": sizes.resident,
        "HAS_ZEROS": kind.zeros,
        "HAS_BIAS": bias,
        "BF16": dtype == torch.bfloat16,
        "BF16_SCALES": kind.scales == torch.bfloat16,
    }
    source = hopper_source("linear/mixed.cu", instructions=[multiply_across(sizes.tokens, dtype)])
    return source, {name: int(value) for name, value in constants.items()}


def boxes(x: Tensor, matrix: Codes, sizes: Mixed) -> dict[str, Box]:
    """What the copy engine is told of tokens, codes, scales and zero points, by the kernel's names."""
    m, k = x.shape
    found: dict[str, Box] = {"xs": (x, (k, m), (k,), (64, sizes.tokens), 128)}
    if isinstance(matrix, Spans):
        blocks = matrix.words.shape[0]
        found["ws"] = (matrix.words, (64, matrix.n, blocks), (64, 64 * matrix.n), (64, sizes.rows, 1), 128)
        return found
    pieces, blocks = matrix.codes.shape[:2]
    groups, shares = k // matrix.group, _DEPTH // matrix.group
    below = sizes.rows // 16
    found["ws"] = (matrix.codes, (32, 8 * blocks, pieces), (32, 256 * blocks), (32, 16, below), 64)
    found["ss"] = (matrix.scales, (16 * groups, pieces), (16 * groups,), (16 * shares, below), 0)
    if matrix.zeros is not None:
        found["zs"] = (matrix.zeros, (8 * groups, pieces), (8 * groups,), (8 * shares, below), 0)
    return found


def _maps(x: Tensor, matrix: Codes, sizes: Mixed) -> list[TensorMap]:
    """Of tokens, codes, scales and zero points; tokens again for what there is not."""
    given = boxes(x, matrix, sizes)
    made = {name: tensor_map(of.data_ptr(), torch.bfloat16, *box) for name, (of, *box) in given.items()}
    return [made.get(name, made["xs"]) for name in ("xs", "ws", "ss", "zs")]


@functools.cache
def _function(sizes: Mixed, kind: Kind, bias: bool, dtype: torch.dtype, device: torch.device) -> Function:
    cubin = compile_cuda(*mixed_source(sizes, kind, bias, dtype))
    with torch.cuda.device(device):
        return Function(cubin, "mixed_product", sizes.threads, sizes.shared(kind), sizes.parts)
