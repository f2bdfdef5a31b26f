"""Products of a few tokens in 8 bits on Hopper: what they are, in an emulator and on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.ops.cuda.compiler import compile_cuda, compiler_available
from cellar.ops.cuda.hopper import hopper_available
from cellar.ops.linear.alone import NOBODY
from cellar.ops.linear.bytes import FILES, TOKENS, Bytes, bytes_linear, bytes_source, tokens_of
from tests.ops import emulated

compiled = pytest.mark.skipif(emulated.compiler() is None, reason="this machine has no C++ compiler (g++)")
hopper = pytest.mark.skipif(
    not hopper_available(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="gpu: this machine has no Hopper GPU",
)

# (sizes, tokens, rows, columns, kind): even and ragged in each direction, warps without a turn, more tiles than
# blocks, fewer turns than are asked for at once.
CASES = (
    (Bytes(1, 2, 2, 1), 1, 48, 512, "rows"),
    (Bytes(1, 4, 3, 1), 8, 80, 1040, "rows"),
    (Bytes(2, 2, 2, 1), 11, 80, 656, "rows"),
    (Bytes(2, 3, 1, 1), 30, 64, 256, "rows"),
    (Bytes(1, 2, 4, 1), 5, 272, 512, "blocks"),
    (Bytes(2, 4, 2, 1), 17, 160, 640, "blocks"),
    (Bytes(1, 2, 2, 1), 3, 48, 528, "int8"),
    (Bytes(2, 2, 2, 1), 20, 80, 512, "int8"),
)


def operands(m: int, n: int, k: int, kind: str, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of both sides; scales of very different sizes, so that a wrong one shows."""
    generator = torch.Generator(device=device).manual_seed(m + n + k)

    def codes(*shape: int) -> Tensor:
        drawn = 64 * torch.randn(shape, device=device, generator=generator)
        return drawn.clamp(-128, 127).to(torch.int8) if kind == "int8" else drawn.to(torch.float8_e4m3fn)

    def scales(*shape: int) -> Tensor:
        return torch.exp2(4 * torch.rand(shape, device=device, generator=generator) - 10)

    if kind != "blocks":
        return codes(m, k), scales(m, 1), codes(n, k), scales(n)
    groups = k // 128
    apart = scales(-(-n // 128), -(-groups // 4) * 4)
    return codes(m, k), scales(groups, m).t(), codes(n, k), apart[:, :groups]


def wanted(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """By float64."""
    n = weight.shape[0]
    if scales.dim() == 1:
        out = x.double() @ weight.double().t() * x_scales * scales
    else:
        rows = scales.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
        out = (x.double() * x_scales.double().repeat_interleave(128, 1)) @ (weight.double() * rows).t()
    return out if bias is None else out + bias.double()


def compare(found: Tensor, expected: Tensor) -> None:
    """Rounded once to bfloat16 (2^-9 of a number); sums in float32 of numbers about as large as the result's norm."""
    assert found.isfinite().all()
    limit = float(expected.norm()) / expected.numel() ** 0.5
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4 * limit)


def run_emulated(
    sizes: Bytes, m: int, n: int, k: int, kind: str, with_bias: bool, edits: Sequence[tuple[str, str]] = ()
) -> None:
    x, x_scales, weight, scales = operands(m, n, k, kind)
    bias = torch.randn(n).bfloat16() if with_bias else None
    tokens = tokens_of(m)
    _, constants = bytes_source(sizes, k, tokens, kind == "blocks", kind == "int8", with_bias, torch.bfloat16)
    takes = [("const unsigned char*", "x"), ("const float*", "x_scales"), ("const unsigned char*", "w")]
    takes += [("const float*", "w_scales"), ("const u16*", "bias"), ("u16*", "out")]
    takes += [("int", name) for name in ("m", "n", "w_stride", "step")]
    takes += [("const u16*", "delta"), ("const u16*", "norm"), ("u16*", "total"), ("float", "eps")]
    library = emulated.build(FILES, constants, "product_of_bytes", takes, edits)
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    blocks = 2
    pointers = [emulated.pointer(t) for t in (x, x_scales, weight, scales, bias, out)]
    counts = [ctypes.c_int(c) for c in (m, n, scales.stride(0) if kind == "blocks" else 0, blocks)]
    for seed in range(2):
        out.fill_(torch.nan)
        emulated.launch(library, blocks, 1, 32 * sizes.warps, sizes.shared(tokens), (*pointers, *counts, *NOBODY), seed)
        compare(out, wanted(x, x_scales, weight, scales, bias))


@compiled
@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=str)
def test_emulated(number: int, case: tuple[Bytes, int, int, int, str]) -> None:
    run_emulated(*case, with_bias=number % 2 == 1)


# What is wrong, the text, what stands there instead, and with which of CASES it shows.
PLANTED = (
    ("columns of x and weights do not meet", "low[2], high[2], low[3], high[3]", "low[3], high[3], low[2], high[2]", 0),
    ("a tile's sums go on in the next", "                clear(sum);\n                here", "                here", 2),
    ("the scale of another block of columns", "128 * w_stride + turn]", "128 * w_stride]", 4),
    ("the scale of another block of rows", "here.tile * ROWS / 128", "here.tile / 128", 4),
    ("sums are read before they are there", "    __syncthreads();\n    for (int i", "    for (int i", 2),
)


@compiled
@pytest.mark.parametrize(("what", "old", "new", "at"), PLANTED, ids=[planted[0] for planted in PLANTED])
def test_the_emulator_finds_planted_defects(what: str, old: str, new: str, at: int) -> None:
    with pytest.raises(AssertionError):
        run_emulated(*CASES[at], with_bias=False, edits=((old, new),))


def test_sizes_that_no_kernel_has_are_refused() -> None:
    for sizes in ((3, 8, 2, 1), (0, 8, 2, 1), (1, 0, 2, 1), (1, 8, 0, 1), (1, 8, 2, 0)):
        with pytest.raises(ConfigError, match="no size of a product of bytes"):
            Bytes(*sizes)
    assert [tokens_of(m) for m in (1, 8, 9, 33, 64)] == [8, 8, 16, 64, 64]
    assert Bytes(2, 8, 2, 1).shared(32) == 4 * 8 * 32 * 36


@pytest.mark.gpu
@pytest.mark.skipif(not compiler_available(), reason="gpu: NVRTC is not installed; CUDA builds of torch bring it")
@pytest.mark.parametrize("tokens", TOKENS)
def test_it_compiles(tokens: int) -> None:
    for grouped, whole in ((False, False), (True, False), (False, True)):
        source = bytes_source(Bytes(1, 8, 2, 1), 4096, tokens, grouped, whole, True, torch.bfloat16)
        assert compile_cuda(*source).startswith(b"\x7fELF")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_multiplies(case: tuple[Bytes, int, int, int, str]) -> None:
    sizes, m, n, k, kind = case
    for rows in (n, 40 * n):
        x, x_scales, weight, scales = operands(m, rows, k, kind, "cuda")
        for bias in (None, torch.randn(rows, device="cuda").bfloat16()):
            got = bytes_linear(x, x_scales, weight, scales, bias, torch.bfloat16, sizes)
            compare(got, wanted(x, x_scales, weight, scales, bias))
            again = bytes_linear(x, x_scales, weight, scales, bias, torch.bfloat16, sizes)
            assert torch.equal(got, again), "the same bits every time"
