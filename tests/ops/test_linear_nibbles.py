"""Products of a few tokens by a matrix in 4 bits on Hopper: what they are, in an emulator and on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.formats import Format
from cellar.ops.cuda.compiler import compile_cuda, compiler_available
from cellar.ops.cuda.hopper import hopper_available
from cellar.ops.linear.alone import NOBODY
from cellar.ops.linear.bytes import TOKENS, tokens_of
from cellar.ops.linear.nibbles import FILES, Nibbles, nibbles_linear, nibbles_source, writer_source, written_out
from cellar.quant.fragments import fragments
from cellar.quant.matrix import Quantized, dequantized
from cellar.quant.pack import to_bytes
from tests.ops import emulated

compiled = pytest.mark.skipif(emulated.compiler() is None, reason="this machine has no C++ compiler (g++)")
hopper = pytest.mark.skipif(
    not hopper_available(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="gpu: this machine has no Hopper GPU",
)
BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Example:
    """A product: `blocks` of the grid are fewer than tiles in some, so that a block has several."""

    sizes: Nibbles
    m: int
    n: int
    k: int
    group: int
    zeros: bool
    dtype: torch.dtype = BF16
    scales: torch.dtype = F16
    bias: bool = False
    clusters: int = 2


# Even and ragged in each direction, warps without a turn, more tiles than blocks, fewer turns than are asked for at
# once, clusters, every group, scales in both dtypes, rows that fill no piece.
EXAMPLES = (
    Example(Nibbles(1, 2, 1, 2, 2, 1), 1, 48, 512, 64, True),
    Example(Nibbles(1, 4, 1, 1, 3, 1), 8, 80, 1088, 64, True, bias=True),
    Example(Nibbles(2, 2, 1, 2, 2, 1), 11, 72, 640, 128, False, scales=BF16),
    Example(Nibbles(2, 3, 1, 1, 1, 1), 30, 64, 192, 32, True, bias=True),
    Example(Nibbles(1, 2, 1, 2, 4, 1), 5, 136, 512, 32, False),
    Example(Nibbles(2, 1, 2, 1, 2, 1), 17, 96, 640, 128, True),
    Example(Nibbles(4, 2, 2, 1, 2, 1), 3, 200, 1024, 64, True, bias=True),
    Example(Nibbles(1, 1, 4, 2, 2, 1), 33, 200, 320, 64, True, scales=BF16),
    Example(Nibbles(2, 2, 1, 2, 2, 1), 20, 80, 512, 64, True, dtype=F16),
    Example(Nibbles(1, 2, 2, 1, 2, 1), 64, 32, 256, 128, False, dtype=F16, bias=True),
)


def operands(of: Example, device: str = "cpu") -> tuple[Tensor, Quantized, Tensor | None]:
    """Tokens, a matrix with all codes and zero points, and a bias; scales of very different sizes, so that a wrong one
    shows.
    """
    generator = torch.Generator().manual_seed(of.m + of.n + of.k)
    codes = torch.randint(0, 16, (of.n, of.k), generator=generator, dtype=torch.uint8)
    grid = (of.n, of.k // of.group)
    scales = torch.exp2(4 * torch.rand(grid, generator=generator) - 8).to(of.scales)
    zeros = torch.randint(0, 17, grid, generator=generator, dtype=torch.uint8)
    if not of.zeros:
        zeros = torch.full_like(zeros, 8)
    matrix = Quantized(
        Format("int4", of.group, zero_points=of.zeros), to_bytes(codes).to(device), scales.to(device), zeros.to(device)
    )
    x = torch.randn((of.m, of.k), generator=generator).to(of.dtype).to(device)
    bias = torch.randn(of.n, generator=generator).to(of.dtype).to(device) if of.bias else None
    return x, matrix, bias


def plain(matrix: Quantized) -> Quantized:
    """As a checkpoint without zero points has it, if 8 stands for 0 everywhere."""
    assert matrix.zeros is not None
    symmetric = bool((matrix.zeros == 8).all())
    return replace(matrix, format=replace(matrix.format, zero_points=not symmetric))


def wanted(x: Tensor, matrix: Quantized, bias: Tensor | None) -> Tensor:
    """By float64."""
    out = x.double() @ dequantized(matrix).double().t()
    return out if bias is None else out + bias.double()


def compare(found: Tensor, expected: Tensor) -> None:
    """Rounded once; sums in float32 of numbers about as large as the result's norm."""
    assert found.isfinite().all()
    limit = float(expected.norm()) / expected.numel() ** 0.5
    rounding = 2**-8 if found.dtype == BF16 else 2**-11
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-4 * limit)


def run_emulated(of: Example, edits: Sequence[tuple[str, str]] = ()) -> None:
    x, matrix, bias = operands(of)
    form = fragments(plain(matrix))
    assert (form.zeros is not None) == of.zeros
    tokens = tokens_of(of.m)
    _, constants = nibbles_source(of.sizes, of.k, of.group, tokens, of.zeros, of.bias, of.dtype, of.scales)
    takes = [("const u16*", "x"), ("const u32*", "codes"), ("const u32*", "scales"), ("const u16*", "zeros")]
    takes += [("const u16*", "bias"), ("u16*", "out"), ("int", "m"), ("int", "n"), ("int", "step")]
    takes += [("const u16*", "delta"), ("const u16*", "norm"), ("u16*", "total"), ("float", "eps")]
    library = emulated.build(FILES, constants, "product_of_nibbles", takes, edits)
    out = torch.full((of.m, of.n), torch.nan, dtype=of.dtype)
    pointers = [emulated.pointer(t) for t in (x, form.codes, form.scales, form.zeros, bias, out)]
    counts = [ctypes.c_int(c) for c in (of.m, of.n, of.clusters)]
    for seed in range(2):
        out.fill_(torch.nan)
        shared = of.sizes.shared(tokens)
        blocks = of.clusters * of.sizes.sharers
        given = (*pointers, *counts, *NOBODY)
        emulated.launch(library, blocks, of.sizes.sharers, 32 * of.sizes.warps, shared, given, seed)
        compare(out, wanted(x, matrix, bias))


@compiled
@pytest.mark.parametrize("of", EXAMPLES, ids=str)
def test_emulated(of: Example) -> None:
    run_emulated(of)


@compiled
@pytest.mark.parametrize("of", [EXAMPLES[1], EXAMPLES[3], EXAMPLES[8], EXAMPLES[9]], ids=str)
def test_the_matrix_written_out_emulated(of: Example) -> None:
    _, matrix, _ = operands(of)
    form = fragments(plain(matrix))
    _, constants = writer_source(of.k, of.group, form.zeros is not None, of.dtype, of.scales)
    takes = [("const u32*", "codes"), ("const u32*", "scales"), ("const u16*", "zeros"), ("u16*", "out"), ("int", "n")]
    library = emulated.build(FILES, constants, "written_out", takes)
    out = torch.full((of.n, of.k), torch.nan, dtype=of.dtype)
    pointers = [emulated.pointer(t) for t in (form.codes, form.scales, form.zeros, out)]
    warps = constants["WARPS"]
    blocks = -(-form.codes.shape[0] * form.codes.shape[1] // warps)
    emulated.launch(library, blocks, 1, 32 * warps, 0, (*pointers, ctypes.c_int(of.n)))
    assert torch.equal(out, dequantized(matrix).to(of.dtype))


# What is wrong, the text, what stands there instead, and with which of EXAMPLES it shows.
PLANTED = (
    ("columns of x and weights do not meet", "word % 2 * 2], high", "(1 - word % 2) * 2], high", 0),
    ("a row's zero point is the one's eight behind", "row ? 0x4141 : 0x4040", "row ? 0x4040 : 0x4141", 0),
    ("a tile's sums go on in the next", "                clear(sum);\n", "", 1),
    ("the scale of the group in front", "(load * WIDTH + part * GROUP) / GROUP", "load * WIDTH / GROUP", 3),
    (
        "sums are read before they are there",
        "    leave(parts, sum);\n    __syncthreads();",
        "    leave(parts, sum);",
        1,
    ),
    ("sums are read before others sent theirs", "        cluster_sync<true>();\n", "", 5),
    ("float16 has its 1 elsewhere", "constexpr int up = BF16 ? 0 : 4;", "constexpr int up = 0;", 8),
    (
        "the last tile's rows are where they would be were it whole",
        "first_piece(here.tile, w.last) * 16",
        "here.tile * ROWS",
        6,
    ),
)


@compiled
@pytest.mark.parametrize(("what", "old", "new", "at"), PLANTED, ids=[planted[0] for planted in PLANTED])
def test_the_emulator_finds_planted_defects(what: str, old: str, new: str, at: int) -> None:
    with pytest.raises(AssertionError):
        run_emulated(EXAMPLES[at], edits=((old, new),))


def test_sizes_that_no_kernel_has_are_refused() -> None:
    for sizes in ((3, 8, 1, 1, 2, 1), (1, 0, 1, 1, 2, 1), (1, 8, 3, 1, 2, 1), (1, 8, 1, 4, 2, 1), (1, 8, 1, 1, 0, 1)):
        with pytest.raises(ConfigError, match="no size of a product of nibbles"):
            Nibbles(*sizes)
    assert Nibbles(2, 8, 1, 1, 2, 1).shared(32) == 4 * 8 * 32 * 36
    assert Nibbles(2, 8, 4, 1, 2, 1).shared(32) == 4 * (8 * 32 * 36 + 2 * 32 * 32)
    assert not Nibbles(4, 8, 1, 1, 2, 2).fits(64)


@pytest.mark.gpu
@pytest.mark.skipif(not compiler_available(), reason="gpu: NVRTC is not installed; CUDA builds of torch bring it")
@pytest.mark.parametrize("tokens", TOKENS)
def test_it_compiles(tokens: int) -> None:
    for dtype, scales in ((BF16, F16), (F16, BF16)):
        source = nibbles_source(Nibbles(2, 8, 2, 1, 2, 1), 4096, 64, tokens, True, True, dtype, scales)
        assert compile_cuda(*source).startswith(b"\x7fELF")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("of", EXAMPLES, ids=str)
def test_it_multiplies(of: Example) -> None:
    for times in (1, 40):
        larger = replace(of, n=times * of.n)
        x, matrix, bias = operands(larger, "cuda")
        form = fragments(plain(matrix))
        found = nibbles_linear(x, form, bias, of.sizes)
        compare(found, wanted(x, matrix, bias))
        assert torch.equal(nibbles_linear(x, form, bias, of.sizes), found), "the same bits every time"
        assert torch.equal(written_out(form, of.dtype), dequantized(matrix).to(of.dtype))
