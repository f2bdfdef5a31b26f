"""Formats by their definitions: error bounds from the number of bits, what is stored exactly, cuts, stacks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.formats import Format
from cellar.ops.linear.definition import linear, linear_definition
from cellar.ops.linear.dense import DenseWeight
from cellar.quant import matrix as matrix_module
from cellar.quant import product
from cellar.quant.matrix import E2M1, Quantized, dequantized, quantized, stacked
from cellar.quant.pack import AWQ_ORDER, from_bytes, from_words, to_bytes
from cellar.quant.weight import QuantizedWeight, StackedWeight

FORMATS = {
    "int4/32": Format("int4", 32),
    "int4/64 zeros": Format("int4", 64, zero_points=True),
    "int4/128": Format("int4", 128),
    "int8": Format("int8"),
    "fp8": Format("fp8"),
    "fp8 tensor": Format("fp8", rows=0),
    "fp8 blocks": Format("fp8", 128, rows=128),
    "mxfp4": Format("mxfp4", 32),
}


def random(out: int = 160, columns: int = 256, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Groups of very different sizes, so that a scale in the wrong place shows.
    sizes = torch.exp(2 * torch.randn((out, columns // 32), generator=generator)).repeat_interleave(32, 1)
    return sizes * torch.randn((out, columns), generator=generator)


def range_of(weight: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the most of each number's group, spread over the matrix: by loops, not as `matrix.py` does it."""
    least, most = torch.empty_like(weight), torch.empty_like(weight)
    rows, group = format.rows or len(weight), format.group or weight.shape[1]
    for i, j in itertools.product(range(0, len(weight), rows), range(0, weight.shape[1], group)):
        there = weight[i : i + rows, j : j + group]
        least[i : i + rows, j : j + group] = there.min()
        most[i : i + rows, j : j + group] = there.max()
    return least, most


@pytest.mark.parametrize("name", FORMATS)
def test_no_number_moves_by_more_than_its_format_allows(name: str) -> None:
    format = FORMATS[name]
    weight = random()
    least, most = range_of(weight, format)
    largest = torch.maximum(-least, most)
    moved = (dequantized(quantized(weight, format)) - weight).abs()
    if format.name == "fp8":
        # Half a unit of three bits of mantissa; below the smallest normal number half a unit of that.
        bound = torch.maximum(weight.abs() / 16, largest / 448 * 2.0**-10)
    elif format.name == "mxfp4":
        # Scales are powers of two: up to 8 for a largest code of 6.
        bound = torch.maximum(weight.abs() / 4, largest / 16)
    elif format.zero_points:
        bound = (most.clamp(min=0) - least.clamp(max=0)) / 15
    else:
        bound = largest / {"int4": 7, "int8": 127}[format.name] / 2
    assert bool((moved <= 1.01 * bound).all())
    assert float(moved.max()) > 0


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_has_is_kept(name: str) -> None:
    """Quantizing what was dequantized changes nothing, zeros stay zeros, and bytes are those the format says."""
    format = FORMATS[name]
    once = dequantized(quantized(random(), format))
    torch.testing.assert_close(dequantized(quantized(once, format)), once, rtol=2e-3, atol=0)
    sparse = random()
    sparse[:, ::3] = 0
    assert bool((dequantized(quantized(sparse, format))[:, ::3] == 0).all())
    assert torch.equal(dequantized(quantized(torch.zeros(160, 256), format)), torch.zeros(160, 256))
    found = quantized(random(), format)
    assert found.shape == (160, 256)
    kept = found.nbytes - (0 if format.zero_points or found.zeros is None else found.zeros.numel())
    assert kept == format.nbytes((160, 256))


def test_by_hand() -> None:
    """Two groups of int4, worked out on paper."""
    row = torch.tensor([[-1.0, 0.5, 2.0, 0.0, 0.0, 0.0, 0.0, -0.0]])
    found = quantized(row, Format("int4", 4, zero_points=True))
    assert found.scales.tolist() == [[float(torch.tensor(0.2).half()), 1.0]]
    assert found.zeros is not None
    assert found.zeros.tolist() == [[5, 0]]
    # 0.5 / 0.19995 is 2.5006, which is nearest to 3.
    assert from_bytes(found.codes).tolist() == [[0, 8, 15, 5, 0, 0, 0, 0]]
    eight = quantized(torch.tensor([[-2.54, 1.24, 0.02]]), Format("int8"))
    assert eight.codes.tolist() == [[-127, 62, 1]]


def test_mxfp4_rounds_to_the_nearest_and_ties_to_even() -> None:
    numbers = torch.tensor([*E2M1, 0.25, 0.75, 1.25, 2.5, 5.0, -3.4, -0.2, 7.5] * 2)[None]
    found = dequantized(quantized(numbers, Format("mxfp4", 32)))[0, :16]
    assert found.tolist() == [*E2M1, 0.0, 1.0, 1.0, 2.0, 4.0, -3.0, 0.0, 6.0]


def test_every_code_has_the_number_that_its_format_says() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    eight = bits[(bits & 127) != 127].view(torch.float8_e4m3fn)[None]
    found = dequantized(Quantized(Format("fp8"), eight, torch.ones(1, 1)))
    assert torch.equal(found, eight.float())
    assert found.abs().max() == 448
    pairs = torch.arange(16, dtype=torch.uint8)[None]
    four = Quantized(Format("mxfp4", 16), to_bytes(pairs), torch.full((1, 1), 127, dtype=torch.uint8))
    assert dequantized(four).tolist() == [[*E2M1, *(-number for number in E2M1)]]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_products_equal_those_of_the_dequantized_matrix(
    name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = quantized(random(), FORMATS[name])
    weight = QuantizedWeight(matrix)
    x, bias = random(tokens, 256, seed=1), torch.randn(160)
    whole = dequantized(matrix)
    wanted = x.double() @ whole.double().T + bias.double()
    # What rounding may do follows from the sizes of the summands, not of the sum.
    bound = 5e-7 * (x.double().abs() @ whole.double().abs().T + bias.double().abs())
    assert bool(((linear(x, weight, bias) - wanted).abs() <= bound).all())
    # In parts of some rows, blocks of rows whole.
    monkeypatch.setattr(product, "_ELEMENTS", 256 * 7)
    definition = product.quantized_linear_definition(x, matrix, bias)
    assert bool(((definition - wanted).abs() <= bound).all())
    assert linear(x.bfloat16(), weight).dtype == torch.bfloat16
    assert torch.equal(weight.dense(), dequantized(matrix))


@pytest.mark.parametrize(
    ("format", "columns"),
    [
        (Format("int8"), 1600),
        (Format("int8"), 32),
        (Format("int8", 1024), 2048),
        (Format("int4", 64, zero_points=True), 1600),
        (Format("int4", 96), 1056),
        (Format("mxfp4", 32), 1056),
        (Format("fp8"), 544),
        (Format("fp8", 128, rows=128), 768),
    ],
    ids=str,
)
def test_a_token_has_the_same_bits_alone_and_in_any_company(format: Format, columns: int) -> None:
    """Of groups and rows that do and do not fill the parts in which they are decoded."""
    matrix, x = quantized(random(70, columns), format), random(70, columns, seed=1)
    assert product.takes(x, matrix), "a kernel's"
    weight = QuantizedWeight(matrix)
    alone = torch.cat([linear(token[None], weight) for token in x])
    for tokens in (4, 5, 8, 31, 33, 70):
        assert torch.equal(linear(x[:tokens], weight), alone[:tokens])


@pytest.mark.parametrize("name", FORMATS)
def test_cuts_take_codes_and_scales_as_they_are(name: str) -> None:
    matrix = quantized(random(256), FORMATS[name])
    whole, weight = dequantized(matrix), QuantizedWeight(matrix)
    assert torch.equal(weight.slice(0, range(128, 256)).dense(), whole[128:])
    assert torch.equal(weight.slice(1, range(128, 256)).dense(), whole[:, 128:])
    assert torch.equal(weight.slice(1, range(256)).dense(), whole)


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_quantized_in_parts_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantized(random(300), FORMATS[name])
    monkeypatch.setattr(matrix_module, "_AT_ONCE", 256 * 40)
    parts = quantized(random(300), FORMATS[name])
    assert parts.nbytes == whole.nbytes
    assert torch.equal(dequantized(parts), dequantized(whole))


def test_a_cut_through_a_group_is_refused() -> None:
    four, blocks = quantized(random(256), Format("int4", 64)), quantized(random(256), Format("fp8", 128, rows=128))
    with pytest.raises(ConfigError, match="cut a group of 64"):
        four.columns(0, 32)
    with pytest.raises(ConfigError, match="cut a byte"):
        four.columns(1, 65)
    with pytest.raises(ConfigError, match="rows 64 to 128 cut a group of 128"):
        blocks.rows(64, 128)
    with pytest.raises(ConfigError, match="groups of 48"):
        quantized(random(), Format("int4", 48))


def test_columns_in_any_order_have_the_group_that_they_say() -> None:
    """Act-order: the groups of columns are given."""
    plain = quantized(random(), Format("int4", 32))
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    shuffled = Quantized(
        plain.format,
        to_bytes(from_bytes(plain.codes)[:, order]),
        plain.scales,
        plain.zeros,
        groups=torch.arange(256)[order] // 32,
    )
    assert torch.equal(dequantized(shuffled), dequantized(plain)[:, order])
    assert torch.equal(dequantized(shuffled.columns(10, 50)), dequantized(plain)[:, order[10:50]])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [1, 6])
def test_products_with_columns_in_any_order(bits: int, tokens: int) -> None:
    """By the kernels, for the columns are put into the order of their groups; cut, they are where they were."""
    codes = torch.randint(0, 1 << bits, (70, 256), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    kept = to_bytes(codes) if bits == 4 else (codes.short() - 128).to(torch.int8)
    zeros = torch.randint(0, 16, (70, 4), dtype=kept.dtype)
    groups = torch.arange(256)[torch.randperm(256)] // 64
    matrix = Quantized(Format(f"int{bits}", 64, zero_points=True), kept, torch.rand(70, 4).half(), zeros, groups)
    weight, whole = QuantizedWeight(matrix), dequantized(matrix)
    assert weight.matrix.groups is None, "only neighbours are multiplied fast"
    x = random(tokens, 256, seed=3)
    bound = 5e-7 * (x.double().abs() @ whole.double().abs().T)
    assert bool(((linear(x, weight) - x.double() @ whole.double().T).abs() <= bound).all())
    assert torch.equal(weight.dense(), whole)
    assert torch.equal(weight.slice(1, range(10, 50)).dense(), whole[:, 10:50])
    assert torch.equal(weight.slice(0, range(3, 9)).dense(), whole[3:9])


def test_every_code_is_multiplied_as_its_number() -> None:
    """By the kernels, one token and several: each code alone, by a one in its column."""
    eight = torch.arange(256, dtype=torch.uint8)
    eight = torch.where((eight & 127) == 127, 0, eight)[None]
    four = torch.arange(32, dtype=torch.uint8)[None] % 16
    cases = [
        Quantized(Format("fp8"), eight.view(torch.float8_e4m3fn), torch.full((1, 1), 0.5)),
        Quantized(Format("int8"), eight.view(torch.int8), torch.full((1, 1), 0.5)),
        Quantized(Format("mxfp4", 32), to_bytes(four), torch.tensor([[130]], dtype=torch.uint8)),
        Quantized(Format("mxfp4", 32), to_bytes(four), torch.tensor([[0]], dtype=torch.uint8)),
        Quantized(
            Format("int4", 32, zero_points=True),
            to_bytes(four),
            torch.ones(1, 1),
            torch.tensor([[9]], dtype=torch.uint8),
        ),
    ]
    for matrix in cases:
        wanted = dequantized(matrix)
        ones = torch.eye(matrix.shape[1])
        assert product.takes(ones, matrix), "a kernel's"
        assert torch.equal(linear(ones, QuantizedWeight(matrix))[:, 0], wanted[0])
        assert torch.equal(torch.cat([linear(one[None], QuantizedWeight(matrix)) for one in ones])[:, 0], wanted[0])


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_one_format_are_stacked(name: str) -> None:
    format = FORMATS[name]
    heights = (128, 256) if format.rows > 1 else (96, 160)
    parts = [quantized(random(height, seed=height), format) for height in heights]
    both = stacked(parts)
    assert both is not None
    assert torch.equal(dequantized(both), torch.cat([dequantized(part) for part in parts]))


def test_parts_of_unequal_formats_stay_apart() -> None:
    four, eight = quantized(random(64), FORMATS["int4/32"]), quantized(random(32, seed=1), FORMATS["int8"])
    plain = random(16, seed=2)
    assert stacked([four, eight]) is None
    assert stacked([quantized(random(96), FORMATS["fp8 blocks"])] * 2) is None, "a block would hold rows of both"
    weight = StackedWeight([QuantizedWeight(four), QuantizedWeight(eight), DenseWeight(plain)])
    whole = torch.cat([dequantized(four), dequantized(eight), plain])
    x, bias = torch.randn(3, 256), torch.randn(112)
    moved = (linear(x, weight, bias) - linear_definition(x, whole, bias)).abs()
    # Sums of 256 products in another order differ by units of the largest partial sum, not of what is left of it.
    assert bool((moved <= 1e-6 * (x.abs() @ whole.abs().T + 1)).all())
    assert torch.equal(weight.dense(), whole)
    assert torch.equal(weight.slice(0, range(50, 100)).dense(), whole[50:100])
    assert torch.equal(weight.slice(1, range(64, 128)).dense(), whole[:, 64:128])
    assert weight.nbytes == four.nbytes + eight.nbytes + plain.nbytes


def to_words(codes: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """What `from_words` undoes: codes uint8 [..., m] -> int32 [..., m bits / 32]."""
    count = 32 // bits
    grouped = codes.long().view(*codes.shape[:-1], -1, count)
    if order is not None:
        grouped = grouped[..., torch.tensor(order, device=codes.device)]
    shifts = torch.arange(0, 32, bits, device=codes.device)
    words = (grouped << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@settings(deadline=None)
@given(st.sampled_from([4, 8]), st.booleans(), st.integers(0, 2**32 - 1))
def test_words_give_back_what_was_packed(bits: int, awq: bool, seed: int) -> None:
    order = AWQ_ORDER if awq and bits == 4 else None
    codes = torch.randint(0, 1 << bits, (3, 64), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert torch.equal(from_words(to_words(codes, bits, order), bits, order), codes)
    if bits == 4:
        assert torch.equal(from_bytes(to_bytes(codes)), codes)


def test_words_by_hand() -> None:
    """Element i of a word lies at bits 4 i; AWQ puts 0, 2, 4, 6, 1, 3, 5, 7 there."""
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert from_words(word, 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert from_words(word, 4, AWQ_ORDER).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]
    assert from_words(torch.tensor([[-1]], dtype=torch.int32), 8).tolist() == [[255] * 4]
