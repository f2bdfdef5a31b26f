"""One token on its way into a product on Hopper, with norm, rounding and gate inside: in an emulator and on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.activation.definition import gated_definition
from cellar.ops.attention import AttentionShape
from cellar.ops.attention.hopper import sizes_for
from cellar.ops.cuda.hopper import hopper_available
from cellar.ops.linear.alone import NOBODY, NOTHING, Alone, Inside, room_of
from cellar.ops.linear.bytes import FILES as bytes_files
from cellar.ops.linear.bytes import Bytes, bytes_alone, bytes_kept, bytes_source, tokens_of
from cellar.ops.linear.nibbles import FILES as nibbles_files
from cellar.ops.linear.nibbles import Nibbles, nibbles_alone, nibbles_gate, nibbles_linear, nibbles_source
from cellar.ops.linear.weight import LinearWeight
from cellar.ops.norm.definition import add_rms_norm_definition
from cellar.quant.activations import rounded
from cellar.quant.byte_choice import default_product
from cellar.quant.bytes import ByteWeight
from cellar.quant.choice import default_nibbles
from cellar.quant.device import on_device
from cellar.quant.fragments import fragments
from cellar.quant.matrix import Quantized, dequantized, quantized
from cellar.quant.packed import packed
from cellar.quant.tokens import byte_tokens
from cellar.quant.weight import QuantizedWeight
from tests.ops import emulated

compiled = pytest.mark.skipif(emulated.compiler() is None, reason="this machine has no C++ compiler (g++)")
hopper = pytest.mark.skipif(
    not hopper_available(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="gpu: this machine has no Hopper GPU",
)
BF16, F16 = torch.bfloat16, torch.float16
FP8, INT8 = Format("fp8", activations="fp8"), Format("int8", activations="int8")
INT4, WIDE = Format("int4", 64, zero_points=True), Format("int8")


@dataclass(frozen=True)
class Example:
    """A product of m tokens. delta: something is added before the norm."""

    format: Format
    sizes: Bytes | Nibbles
    n: int
    k: int
    inside: Inside = NOTHING
    delta: bool = True
    bias: bool = False
    m: int = 1
    dtype: torch.dtype = BF16

    @property
    def out(self) -> int:
        """Rows of the result."""
        return self.n // 2 if self.inside.gated else self.n


# Threads without columns, columns beyond the last turn, rows that fill no tile, more tiles than blocks, every part
# alone and all together.
EXAMPLES = (
    Example(FP8, Bytes(1, 2, 2, 1), 48, 512, Inside(rounded=True)),
    Example(FP8, Bytes(1, 4, 3, 1), 80, 1040, Inside(rounded=True, normed=True), bias=True),
    Example(FP8, Bytes(2, 2, 2, 1), 96, 528, Inside(rounded=True, normed=True, gated=True), bias=True),
    Example(FP8, Bytes(1, 3, 2, 1), 112, 640, Inside(rounded=True, normed=True, gated=True), delta=False),
    Example(INT8, Bytes(1, 2, 2, 1), 64, 528, Inside(rounded=True, normed=True, gated=True)),
    Example(INT8, Bytes(2, 2, 1, 1), 48, 512, Inside(rounded=True), bias=True),
    Example(INT4, Nibbles(1, 2, 1, 2, 2, 1), 48, 576, Inside(normed=True, kept=16), bias=True),
    Example(INT4, Nibbles(2, 2, 2, 1, 2, 1), 80, 640, Inside(normed=True, kept=16), delta=False),
    Example(INT4, Nibbles(2, 2, 1, 2, 2, 1), 160, 512, Inside(normed=True, gated=True, kept=16), bias=True),
    Example(INT4, Nibbles(4, 2, 1, 1, 2, 1), 160, 320, Inside(normed=True, gated=True, kept=16), dtype=F16),
    Example(INT4, Nibbles(2, 3, 1, 1, 1, 1), 96, 448, Inside(gated=True), m=13, bias=True),
    Example(INT4, Nibbles(2, 2, 2, 2, 2, 1), 80, 832, Inside(kept=16), bias=True),
    Example(Format("int4", 32), Nibbles(1, 3, 1, 2, 1, 1), 48, 448, Inside(kept=16), dtype=F16),
    Example(Format("int4", 128, zero_points=True), Nibbles(2, 2, 2, 1, 2, 1), 64, 384, Inside(normed=True, kept=16)),
    Example(WIDE, Bytes(1, 2, 2, 1), 48, 512, Inside(kept=24)),
    Example(WIDE, Bytes(1, 4, 3, 1), 80, 1064, Inside(normed=True, kept=24), bias=True),
    Example(WIDE, Bytes(2, 2, 2, 1), 96, 528, Inside(normed=True, gated=True, kept=24), bias=True, dtype=F16),
)


@dataclass
class Operands:
    """Of an example: what the token is, and the matrix it meets."""

    x: Tensor
    delta: Tensor | None
    norm: Tensor | None
    matrix: Quantized
    bias: Tensor | None

    def token(self, eps: float) -> Alone:
        """As the kernels take it."""
        return Alone(self.x, self.delta, self.norm, eps)


EPS = 1e-3


def operands(of: Example, device: str = "cpu") -> Operands:
    generator = torch.Generator().manual_seed(of.n + of.k)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    # Rows of very different sizes, so that a wrong scale shows.
    matrix = quantized(random(of.n, of.k) * torch.exp2(3 * random(of.n, 1)) / of.k**0.5, of.format)
    parts = (None if part is None else part.to(device) for part in (matrix.codes, matrix.scales, matrix.zeros))
    codes, scales, zeros = parts
    assert codes is not None
    assert scales is not None
    vectors = [random(of.m, of.k), random(of.m, of.k), 1 + random(of.k) / 4, random(of.n)]
    x, delta, norm, bias = (vector.to(of.dtype).to(device) for vector in vectors)
    normed = of.inside.normed
    return Operands(
        x,
        delta if normed and of.delta else None,
        norm if normed else None,
        replace(matrix, codes=codes, scales=scales, zeros=zeros),
        bias if of.bias else None,
    )


def wanted(of: Example, given: Operands) -> tuple[Tensor, Tensor]:
    """One operation after another, the product in float64."""
    x = total = given.x
    if given.norm is not None:
        x, total = add_rms_norm_definition(x, given.delta, given.norm, EPS)
    if of.format.activations and x.is_cuda:  # ties go by the last bit of a quotient, which the CPU has another way
        codes, scales = byte_tokens(x, of.format.activations, 0)
        wide = codes.double() * scales.double()
    else:
        wide = rounded(x, of.format) if of.format.activations else x
    out = wide.double() @ dequantized(given.matrix).double().t()
    if given.bias is not None:
        out += given.bias.double()
    if of.inside.gated:
        return gated_definition(out.to(of.dtype), "silu"), total
    return out, total


def compare(of: Example, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Sums are rounded once, in 8 bits a code may be the next one; a gate has three more roundings."""
    assert torch.equal(found[1], expected[1])
    got, meant = found[0].double(), expected[0].double()
    assert got.isfinite().all()
    rounding = {BF16: 2**-8, F16: 2**-11}[of.dtype] * (4 if of.inside.gated else 1)
    limit = float(meant.norm()) / meant.numel() ** 0.5
    per_row = dequantized(given_rows(of)).double().norm(dim=1).to(got.device)
    scale = per_row[: of.out] * (per_row[of.out :] if of.inside.gated else 1)
    error = (got - meant).abs()
    allowed = rounding * meant.abs() + (4e-3 if of.inside.alone else 1e-4) * scale + 1e-4 * limit
    assert (error <= allowed).all(), float((error / allowed).max())


def given_rows(of: Example) -> Quantized:
    """The matrix on the CPU."""
    return operands(of).matrix


def bytes_of(of: Example, given: Operands) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix in 8 bits, in the form for its kind of tokens."""
    if of.inside.kept:
        form = packed(given.matrix)
        return form.words, form.scales[0]
    weight = ByteWeight(given.matrix)
    return weight._codes, weight._scales


def run_emulated(of: Example, edits: Sequence[tuple[str, str]] = ()) -> None:
    given = operands(of)
    expected = wanted(of, given)
    total = torch.full_like(given.x, torch.nan)
    out = torch.full((of.m, of.out), torch.nan, dtype=of.dtype)
    takes: list[tuple[str, str]]
    tokens, sizes, has_bias = tokens_of(of.m), of.sizes, of.bias
    step, clusters = 2, 1
    pointers: list[Tensor | None]
    if isinstance(sizes, Bytes):
        kernel, files = "product_of_bytes", bytes_files
        _, constants = bytes_source(sizes, of.k, tokens, False, of.format.name == "int8", has_bias, of.dtype, of.inside)
        takes = [("const void*", "x"), ("const float*", "x_scales"), ("const unsigned char*", "w")]
        takes += [("const float*", "w_scales"), ("const u16*", "bias"), ("u16*", "out")]
        pointers = [given.x, None, *bytes_of(of, given), given.bias, out]
        counts = [of.m, of.out, 0, step]
    else:
        pieces = fragments(given.matrix)
        kernel, files, clusters = "product_of_nibbles", nibbles_files, sizes.sharers
        scales = pieces.scales.dtype
        _, constants = nibbles_source(
            sizes, of.k, of.format.group, tokens, pieces.zeros is not None, has_bias, of.dtype, scales, of.inside
        )
        takes = [("const u16*", "x"), ("const u32*", "codes"), ("const u32*", "scales"), ("const u16*", "zeros")]
        takes += [("const u16*", "bias"), ("u16*", "out")]
        pointers = [given.x, pieces.codes, pieces.scales, pieces.zeros, given.bias, out]
        counts = [of.m, of.out, step]
    takes += [("int", f"count{i}") for i in range(len(counts))]
    takes += [("const u16*", "delta"), ("const u16*", "norm"), ("u16*", "total"), ("float", "eps")]
    behind = given.token(EPS).arguments(total if given.delta is not None else given.x) if of.inside.alone else NOBODY
    library = emulated.build(files, constants, kernel, takes, edits)
    shared = sizes.shared(tokens) + sizes.alone(of.inside, of.k)
    addresses = [emulated.pointer(pointer) for pointer in pointers]
    arguments = (*addresses, *map(ctypes.c_int, counts), *behind)
    for seed in range(2):
        out.fill_(torch.nan)
        total.fill_(torch.nan)
        emulated.launch(library, step * clusters, clusters, 32 * sizes.warps, shared, arguments, seed)
        compare(of, (out, total if given.delta is not None else given.x), expected)


@compiled
@pytest.mark.parametrize("of", EXAMPLES, ids=str)
def test_emulated(of: Example) -> None:
    run_emulated(of)


# What is wrong, the text, what stands there instead, and with which of EXAMPLES it shows.
PLANTED = (
    ("a thread's columns are left out of the norm", "/ K + given.eps", "/ (K / 2) + given.eps", 1),
    ("the sum is not written", "if (blockIdx.x == 0 && at < K) store", "if (0 && at < K) store", 1),
    (
        "the norm's weight is that of other columns",
        "load_token(given.norm, gain)",
        "load_token(given.norm + 8, gain)",
        1,
    ),
    ("a token's scale is one warp's", "all = scratch[warp] > all ? scratch[warp] : all", "all = most", 1),
    ("codes are read before they are there", "    __syncthreads();\n    return scale;", "    return scale;", 0),
    (
        "gate and up change places",
        "float gate, float up) {\n    const float g",
        "float up, float gate) {\n    const float g",
        2,
    ),
    ("the up rows have the gate's scales", "w_scales[n + at]", "w_scales[at]", 2),
    (
        "the up rows are the gate's",
        "(GATED ? eight * n : 0);\n                u32(&x)",
        "0;\n                u32(&x)",
        2,
    ),
    ("pieces of up are those behind", "i - OUT_PIECES + apart", "i", 8),
    ("a block of a cluster norms with its own columns", "NORMED ? OWN * CLUSTER : OWN", "OWN", 7),
    ("the sum of bits that are kept is not written", "if (blockIdx.x == 0 && at < K) *", "if (0 && at < K) *", 6),
    ("a warp brings what another multiplies", "int first = NORMED ? threadIdx.x / 32 : taker", "int first = 0", 11),
    ("bits are read before they are there", "    __syncwarp();\n", "", 11),
    ("a sum of columns is that of fewer", "distance = LANES / 2; distance;", "distance = LANES / 2; distance > 1;", 6),
    ("a zero point meets another group's sum", "number += upper ? left : 0", "number += upper ? 0 : left", 6),
    ("rows eight behind are as large as the others", "(eight ? LATER_ROW_UP : ROW_UP)", "ROW_UP", 6),
    ("each lane goes on with the first group", "threadIdx.x % TURN_GROUPS == group", "0", 6),
    ("groups of other lanes are lost", "distance = 1; distance < TURN_GROUPS", "distance = 4; distance < 1", 6),
    (
        "warps' powers of two are taken for one",
        "* (eight ? LATER_ROW_UP : ROW_UP) * back",
        "* (eight ? LATER_ROW_UP : ROW_UP)",
        6,
    ),
    ("the third byte is lost", "static_cast<float>(third) * 65536.0f", "0.0f", 14),
    ("bytes have no signs", "(whole[i] + 128) >> 8", "whole[i] >> 8", 14),
    ("bytes lie as columns do", "nearest(low_of(pairs[1]) * factor),", "nearest(high_of(pairs[0]) * factor),", 14),
    ("the matrix lies row by row", "(column / TURN * all + row) * TURN", "row * K + column / TURN * TURN", 14),
)


@compiled
@pytest.mark.parametrize(("what", "old", "new", "at"), PLANTED, ids=[planted[0] for planted in PLANTED])
def test_the_emulator_finds_planted_defects(what: str, old: str, new: str, at: int) -> None:
    with pytest.raises(AssertionError):
        run_emulated(EXAMPLES[at], edits=((old, new),))


def alone_in_the_emulator(of: Example, x: Tensor) -> Tensor:
    """The product of a token, whatever the example's own is."""
    given = operands(of)
    out = torch.full((1, of.n), torch.nan, dtype=of.dtype)
    takes = [("const float*", "w_scales"), ("const u16*", "bias"), ("u16*", "out")]
    if isinstance(of.sizes, Bytes):
        files, kernel, clusters, counts = bytes_files, "product_of_bytes", 1, (1, of.n, 0, 1)
        _, constants = bytes_source(of.sizes, of.k, 8, False, True, False, of.dtype, of.inside)
        takes = [("const void*", "x"), ("const float*", "x_scales"), ("const unsigned char*", "w"), *takes]
        tensors = [x, None, *bytes_of(of, given), None, out]
    else:
        files, kernel, clusters, counts = nibbles_files, "product_of_nibbles", of.sizes.sharers, (1, of.n, 1)
        form = fragments(given.matrix)
        zeros, group = form.zeros is not None, of.format.group
        _, constants = nibbles_source(of.sizes, of.k, group, 8, zeros, False, of.dtype, form.scales.dtype, of.inside)
        takes = [("const u32*", "scales"), ("const u16*", "zeros"), *takes[1:]]
        takes = [("const u16*", "x"), ("const u32*", "codes"), *takes]
        tensors = [x, form.codes, form.scales, form.zeros, None, out]
    takes += [("int", f"count{i}") for i in range(len(counts))]
    takes += [("const u16*", "delta"), ("const u16*", "norm"), ("u16*", "total"), ("float", "eps")]
    library = emulated.build(files, constants, kernel, takes)
    shared = of.sizes.shared(8) + of.sizes.alone(of.inside, of.k)
    arguments = (*map(emulated.pointer, tensors), *map(ctypes.c_int, counts), *NOBODY)
    emulated.launch(library, clusters, clusters, 32 * of.sizes.warps, shared, arguments)
    return out


KEPT = (replace(EXAMPLES[11], n=32, dtype=BF16, bias=False), replace(EXAMPLES[14], n=32))


@compiled
@pytest.mark.parametrize("of", KEPT, ids=lambda of: of.format.name)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_tokens_of_any_size_keep_their_bits(of: Example, size: float) -> None:
    x = operands(of).x * size
    matrix = dequantized(given_rows(of)).double()
    meant = x.double() @ matrix.t()
    limit = 2**-8 * meant.abs() + 2**-18 * float(x.double().norm()) * matrix.norm(dim=1) + 1e-42
    assert ((alone_in_the_emulator(of, x).double() - meant).abs() <= limit).all()


@compiled
@pytest.mark.parametrize("of", KEPT, ids=lambda of: of.format.name)
def test_one_number_a_thousand_times_the_others_takes_nothing_from_them(of: Example) -> None:
    """As some columns of real models are: where its weight is 0, all others count as much as before."""
    x = operands(of).x
    matrix = dequantized(given_rows(of)).double()
    row, column = (matrix == 0).nonzero()[0].tolist()
    x[0, column] = 1000 * float(x.abs().max())
    meant = (x.double() @ matrix.t())[0, row]
    others = float(x.double().index_fill(1, torch.tensor([column]), 0).norm() * matrix[row].norm())
    assert abs(alone_in_the_emulator(of, x).double()[0, row] - meant) <= 2**-8 * abs(meant) + 2**-12 * others


@compiled
@pytest.mark.parametrize("of", KEPT, ids=lambda of: of.format.name)
@pytest.mark.parametrize("what", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_stays_none(of: Example, what: float) -> None:
    x = operands(of).x
    x[0, 70] = what
    assert not alone_in_the_emulator(of, x).isfinite().any()


@compiled
@pytest.mark.parametrize("size", [0.0, 1e-37, 1e-30, 1e30])
def test_tokens_of_any_size_are_rounded(size: float) -> None:
    of = replace(EXAMPLES[0], n=16)
    given = operands(of)
    given.x.mul_(size)
    weight = ByteWeight(given.matrix)
    out = torch.full((1, of.n), torch.nan, dtype=BF16)
    _, constants = bytes_source(of.sizes, of.k, 8, False, False, False, BF16, of.inside)  # type: ignore[arg-type]
    takes = [("const void*", "x"), ("const float*", "x_scales"), ("const unsigned char*", "w")]
    takes += [("const float*", "w_scales"), ("const u16*", "bias"), ("u16*", "out")]
    takes += [("int", f"count{i}") for i in range(4)]
    takes += [("const u16*", "delta"), ("const u16*", "norm"), ("u16*", "total"), ("float", "eps")]
    library = emulated.build(bytes_files, constants, "product_of_bytes", takes)
    pointers = [emulated.pointer(t) for t in (given.x, None, weight._codes, weight._scales, None, out)]
    shared = of.sizes.shared(8) + of.sizes.alone(of.inside, of.k)
    counts = [ctypes.c_int(count) for count in (1, of.n, 0, 1)]
    emulated.launch(library, 1, 1, 32 * of.sizes.warps, shared, (*pointers, *counts, *NOBODY))
    meant = rounded(given.x, FP8).double() @ dequantized(given.matrix).double().t()
    torch.testing.assert_close(out.double(), meant, rtol=2**-7, atol=1e-3 * float(meant.abs().max()))


def test_kernels_of_up_to_eight_tokens_divide_memory_alike_and_those_of_more_have_room() -> None:
    """Matrices of Llama-3-8B: the norm is inside where k is the model's width, the rounding everywhere."""
    for n, k in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)):
        for m in (1, 2, 8):
            inside = Inside(normed=k == 4096, kept=16) if m == 1 else NOTHING
            four, eight = default_nibbles(n, k).at(m), default_product(n, k, m)
            assert isinstance(four, Nibbles)
            assert isinstance(eight, Bytes)
            assert room_of(four.shared(8) + four.alone(inside, k), four.resident, few=True) == 132 << 10
            for inside in (Inside(rounded=m == 1), Inside(kept=24 if m == 1 else 0)):
                room = room_of(eight.shared(8) + eight.alone(inside, k), eight.resident, few=True)
                assert room == 132 << 10
    wide = default_nibbles(4096, 14336).at(32)
    assert isinstance(wide, Nibbles)
    for tokens in (1, 2, 4, 8):  # attention of as many divides it likewise
        shape = AttentionShape(32, 8, 128, 32)
        of = sizes_for(shape, tokens, 132)
        assert room_of(of.shared(shape), of.at_once, few=True) == 132 << 10
    assert room_of(wide.shared(32), wide.resident, few=False) > wide.resident * wide.shared(32) > 64 << 10


def test_what_a_tile_cannot_hold_has_its_gate_apart() -> None:
    assert nibbles_gate(28672, Nibbles(2, 8, 1, 2, 2, 2))
    assert not nibbles_gate(28672, Nibbles(1, 8, 1, 2, 2, 2)), "a tile has a single piece"
    assert not nibbles_gate(28672, Nibbles(2, 8, 2, 2, 2, 2)), "blocks of a cluster add up parts of a tile"
    assert not nibbles_gate(48, Nibbles(2, 8, 1, 2, 2, 2)), "the up rows begin within a piece"
    bytes_, nibbles = Bytes(1, 8, 4, 2), Nibbles(2, 8, 2, 2, 2, 2)
    assert bytes_.alone(Inside(rounded=True), 4096) == 4096
    assert nibbles.alone(Inside(normed=True, kept=16), 4096) == 128 + 8192 + 512
    assert nibbles.alone(Inside(kept=16), 4096) == 128 + 4096 + 256, "of a cluster's columns a block has its own"
    assert bytes_.alone(Inside(kept=24), 4096) == bytes_.alone(Inside(kept=24), 4000) == 128 + 3 * 4096, "whole turns"
    assert bytes_.alone(Inside(gated=True), 4096) == 0


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("of", EXAMPLES, ids=str)
@pytest.mark.parametrize("wider", [1, 40])
def test_it_multiplies(of: Example, wider: int) -> None:
    of = replace(of, n=of.n * wider)
    given = operands(of, "cuda")
    expected = wanted(of, given)
    for _ in range(2):
        if isinstance(of.sizes, Bytes):
            multiply = bytes_kept if of.inside.kept else bytes_alone
            found = multiply(given.token(EPS), *bytes_of(of, given), given.bias, of.sizes, gate=of.inside.gated)
        else:
            pieces = fragments(given.matrix)
            if of.inside.kept:
                found = nibbles_alone(given.token(EPS), pieces, given.bias, of.sizes, gate=of.inside.gated)
            else:
                found = nibbles_linear(given.x, pieces, given.bias, of.sizes, gate=of.inside.gated), given.x
        compare(of, found, expected)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("format", [FP8, INT8, INT4, WIDE], ids=lambda f: f"{f.name} {f.activations}")
def test_a_layer_of_one_token_is_what_its_parts_are(format: Format) -> None:
    """Norm, gate and up, down: by weights as models have them, alone and as a row of several tokens."""
    generator = torch.Generator().manual_seed(3)

    def weight(n: int, k: int) -> LinearWeight:
        matrix = quantized(torch.randn((n, k), generator=generator) / k**0.5, format)
        parts = (None if part is None else part.cuda() for part in (matrix.codes, matrix.scales, matrix.zeros))
        codes, scales, zeros = parts
        assert codes is not None
        assert scales is not None
        moved = replace(matrix, codes=codes, scales=scales, zeros=zeros)
        return on_device(QuantizedWeight(moved))

    up, down = weight(2 * 2048, 2048), weight(2048, 2048)
    x, delta = (torch.randn((6, 2048), generator=generator).to(BF16).cuda() for _ in range(2))
    norm = torch.ones(2048, dtype=BF16, device="cuda")
    whole, totals = up.norm_feed_multiply(x, delta, norm, 1e-5, None, "silu", down, None)
    for i in range(6):
        row, total = up.norm_feed_multiply(x[i : i + 1], delta[i : i + 1], norm, 1e-5, None, "silu", down, None)
        assert torch.equal(total, totals[i : i + 1])
        error = float((row.double() - whole[i : i + 1].double()).norm() / whole[i].double().norm())
        assert error < (2e-2 if format.activations else 8e-3), error
