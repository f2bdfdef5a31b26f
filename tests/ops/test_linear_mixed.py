"""Products of some tokens by a matrix in 4 or 8 bits on Hopper: what they are, in an emulator and on a GPU."""

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
from cellar.ops.linear.mixed import Codes, Mixed, boxes, mixed_kind, mixed_linear, mixed_source, mixed_takes
from cellar.quant.fragments import fragments
from cellar.quant.matrix import Quantized, dequantized
from cellar.quant.pack import to_bytes
from cellar.quant.packed import packed
from cellar.quant.spans import spans
from tests.ops import emulated

compiled = pytest.mark.skipif(emulated.compiler() is None, reason="this machine has no C++ compiler (g++)")
hopper = pytest.mark.skipif(
    not hopper_available(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="gpu: this machine has no Hopper GPU",
)
BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Example:
    """A product. group: of int4; 0: int8."""

    sizes: Mixed
    m: int
    n: int
    k: int
    group: int = 0
    zeros: bool = False
    dtype: torch.dtype = BF16
    scales: torch.dtype = F16
    bias: bool = False


# Even and ragged in each direction, fewer stages than turns, tiles of tokens, clusters, teams, every group, scales in
# both dtypes, rows that fill no tile, half a turn at the end.
EXAMPLES = (
    Example(Mixed(16, 1, 1, 2), 16, 64, 512),
    Example(Mixed(24, 2, 2, 2), 21, 136, 648, bias=True),
    Example(Mixed(16, 1, 4, 2), 20, 64, 640, dtype=F16),
    Example(Mixed(16, 1, 1, 2), 16, 64, 512, 128, scales=BF16),
    Example(Mixed(24, 1, 2, 2), 21, 72, 832, 64, True, bias=True),
    Example(Mixed(16, 1, 2, 3), 20, 64, 448, 32, True),
    Example(Mixed(32, 4, 1, 2), 30, 200, 384, 32, False, dtype=F16, bias=True),
    Example(Mixed(16, 2, 8, 2), 9, 120, 1024, 128, True, dtype=F16, scales=BF16),
)


def operands(of: Example, device: str = "cpu") -> tuple[Tensor, Quantized, Tensor | None]:
    """Tokens, a matrix with all codes and zero points, and a bias; scales of very different sizes, so that a wrong one
    shows.
    """
    generator = torch.Generator().manual_seed(of.m + of.n + of.k)
    grid = (of.n, of.k // of.group if of.group else 1)
    scales = torch.exp2(4 * torch.rand(grid, generator=generator) - 8)
    if of.group:
        codes = torch.randint(0, 16, (of.n, of.k), generator=generator, dtype=torch.uint8)
        zeros = torch.randint(0, 17, grid, generator=generator, dtype=torch.uint8)
        zeros = zeros if of.zeros else torch.full_like(zeros, 8)
        format = Format("int4", of.group, zero_points=of.zeros)
        matrix = Quantized(format, to_bytes(codes).to(device), scales.to(of.scales).to(device), zeros.to(device))
    else:
        codes = torch.randint(-128, 128, (of.n, of.k), generator=generator, dtype=torch.int8)
        matrix = Quantized(Format("int8"), codes.to(device), scales.to(device))
    x = torch.randn((of.m, of.k), generator=generator).to(of.dtype).to(device)
    bias = torch.randn(of.n, generator=generator).to(of.dtype).to(device) if of.bias else None
    return x, matrix, bias


def form_of(matrix: Quantized) -> Codes:
    """As the kernel reads it."""
    if matrix.format.name == "int4":
        return fragments(matrix)
    return spans(packed(matrix))


def wanted(x: Tensor, matrix: Quantized, bias: Tensor | None) -> Tensor:
    """By float64; numbers of 4 bits are rounded to the dtype of x first."""
    exact = dequantized(matrix)
    out = x.double() @ (exact.to(x.dtype) if matrix.format.name == "int4" else exact).double().t()
    return out if bias is None else out + bias.double()


def compare(found: Tensor, expected: Tensor) -> None:
    """Rounded once; sums in float32 of numbers about as large as the result's norm."""
    assert found.isfinite().all()
    limit = float(expected.norm()) / expected.numel() ** 0.5
    rounding = 2**-8 if found.dtype == BF16 else 2**-11
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=2e-4 * limit)


def run_emulated(of: Example, edits: Sequence[tuple[str, str]] = ()) -> None:
    x, matrix, bias = operands(of)
    form, sizes = form_of(matrix), of.sizes
    kind = mixed_kind(form)
    assert kind.zeros == of.zeros
    _, constants = mixed_source(sizes, kind, of.bias, of.dtype)
    takes = [("const TensorMap&*", name) for name in ("xs", "ws", "ss", "zs")]
    takes += [("const float*", "scales"), ("const u16*", "bias"), ("u16*", "out")]
    takes += [("int", name) for name in ("m", "n", "steps", "down")]
    library = emulated.build(("linear/mixed.cu",), constants, "mixed_product", takes, edits)
    given = boxes(x, form, sizes)
    maps = {name: emulated.tensor_map(*box) for name, box in given.items()}
    out = torch.full((of.m, of.n), torch.nan, dtype=of.dtype)
    down = -(-of.m // sizes.tokens)
    arguments = (
        *(maps.get(name, maps["xs"]) for name in ("xs", "ws", "ss", "zs")),
        *(emulated.pointer(t) for t in (None if of.group else form.scales, bias, out)),
        *(ctypes.c_int(count) for count in (of.m, of.n, -(-of.k // 128), down)),
    )
    blocks = down * -(-of.n // sizes.rows) * sizes.parts
    for seed in range(2):
        out.fill_(torch.nan)
        emulated.launch(library, blocks, sizes.parts, sizes.threads, sizes.shared(kind), arguments, seed)
        compare(out, wanted(x, matrix, bias))


@pytest.mark.long
@compiled
@pytest.mark.parametrize("of", EXAMPLES, ids=str)
def test_emulated(of: Example) -> None:
    run_emulated(of)


# What is wrong, the text, what stands there instead, and with which of EXAMPLES it shows.
PLANTED = (
    ("a stage is given back before it has been read", "products_done<1>();", "products_done<2>();", 4),
    ("the other half of the tokens' columns", "operand * 64 + chunk * 16", "(1 - operand) * 64 + chunk * 16", 0),
    ("a number's sign is another bit", "masked_with(placed, 0x00800080", "masked_with(placed, 0x00400040", 0),
    ("two lanes' words change places", "0x6240 + q % 2", "0x2604 + q % 2", 3),
    ("the scale of the group in front", "chunk * CHUNK / GROUP * 32", "0", 5),
    ("zero points of the group in front", "chunk * CHUNK / GROUP * 16", "0", 5),
    ("bfloat16 gets a scale cut off", "multiply_two(exact, with.rest[i % 2])", "0", 4),
    ("rows are written with their neighbours' scales", "task.scales[own]", "task.scales[own ^ 8]", 1),
    ("sums are read before others sent theirs", "        cluster_sync<true>();  // what", "        // what", 4),
    ("parts overlap", "steps * rank / PARTS, task.steps", "0, task.steps", 2),
)


@pytest.mark.long
@compiled
@pytest.mark.parametrize(("what", "old", "new", "at"), PLANTED, ids=[planted[0] for planted in PLANTED])
def test_the_emulator_finds_planted_defects(what: str, old: str, new: str, at: int) -> None:
    with pytest.raises(AssertionError):
        run_emulated(EXAMPLES[at], edits=((old, new),))


def test_sizes_that_no_kernel_has_are_refused() -> None:
    for sizes in ((12, 1, 1, 2), (264, 1, 1, 2), (64, 3, 1, 2), (64, 1, 8, 2), (64, 1, 3, 2), (64, 1, 1, 1)):
        with pytest.raises(ConfigError, match="no size of a mixed product"):
            Mixed(*sizes)


def test_tokens_and_results_lie_on_16_bytes() -> None:
    assert mixed_takes(64, 72)
    assert not mixed_takes(60, 72)
    assert not mixed_takes(64, 68)


@pytest.mark.gpu
@pytest.mark.skipif(not compiler_available(), reason="gpu: NVRTC is not installed; CUDA builds of torch bring it")
def test_it_compiles() -> None:
    for of in (EXAMPLES[1], EXAMPLES[4], EXAMPLES[7]):
        _, matrix, _ = operands(of)
        for sizes in (of.sizes, Mixed(128, 4, 1, 3), Mixed(256, 2, 1, 2)):
            source = mixed_source(sizes, mixed_kind(form_of(matrix)), of.bias, of.dtype)
            assert compile_cuda(*source).startswith(b"\x7fELF")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("of", EXAMPLES, ids=str)
def test_it_multiplies(of: Example) -> None:
    for times in (1, 40):
        larger = replace(of, n=times * of.n)
        x, matrix, bias = operands(larger, "cuda")
        form = form_of(matrix)
        found = mixed_linear(x, form, bias, of.sizes)
        compare(found, wanted(x, matrix, bias))
        assert torch.equal(mixed_linear(x, form, bias, of.sizes), found), "the same bits every time"
        alone = mixed_linear(x[-1:].clone(), form, bias, of.sizes)
        assert torch.equal(alone[0], found[-1]), "whatever tokens there are"
