"""Products of many bfloat16 tokens in whole numbers, on processors that have the instruction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.cpu.blocks import COLUMNS
from cellar.ops.cpu.launch import multiplies_bytes
from cellar.quant import cpu
from cellar.quant.matrix import Quantized, dequantized, quantized
from cellar.quant.pack import to_bytes
from tests.quant.test_planes import FORMATS, random, wide_range

pytestmark = pytest.mark.skipif(not multiplies_bytes(), reason="this processor has no dot products of bytes (VNNI)")


def product(x: Tensor, matrix: Quantized) -> Tensor:
    """float32 [t, out], as `quantized_linear_cpu` has them before they are rounded."""
    assert cpu.multiplied_in_bytes(x, matrix)
    return cpu.products_in_panels(x, matrix, None, torch.float32)


def lost(x: Tensor, whole: Tensor) -> Tensor:
    """[t, out]: what tokens lose at most when their numbers become 15 bits of their block's largest, or 23 bits."""
    blocks = x.double().abs().reshape(len(x), -1, COLUMNS)
    most = blocks.amax(2)
    part = torch.where(most.square() > 64 * blocks.square().mean(2), 2.0**-22, 2.0**-14)
    found: Tensor = (most * part) @ whole.abs().reshape(len(whole), -1, COLUMNS).sum(2).T
    return found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [32, 75, 161])
@pytest.mark.parametrize("columns", [128, 384, 2176])
def test_products_equal_those_of_the_dequantized_matrix(name: str, rows: int, columns: int) -> None:
    """2,176 columns are more than are turned at once; 75 and 161 rows are not whole panels."""
    matrix = quantized(random(rows, columns), FORMATS[name])
    whole = dequantized(matrix).double()
    for tokens in (1, 6, 131):
        x = random(tokens, columns, seed=2).bfloat16()
        x[::3] = wide_range(len(x[::3]), columns)
        wanted = x.double() @ whole.T
        bound = lost(x, whole) + 1e-6 * (x.double().abs() @ whole.abs().T)
        assert bool(((product(x, matrix).double() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_has_the_same_bits_in_company(name: str) -> None:
    """Alone, among more than one call takes, and beside those whose largest numbers need a third byte."""
    matrix, x = quantized(random(75, 640), FORMATS[name]), random(150, 640, seed=3).bfloat16()
    x[1::4] = wide_range(len(x[1::4]), 640)
    together = product(x, matrix)
    assert torch.equal(together, torch.cat([product(token[None], matrix) for token in x]))


@pytest.mark.parametrize("scale", [1.0, 2.0**70, 2.0**-90])
def test_a_much_larger_number_takes_nothing_from_the_others(scale: float) -> None:
    """With 15 bits 1,000 times as large a number would leave 5 of the others', whose squares may be no numbers."""
    matrix = quantized(random(64, 256), FORMATS["int8"])
    whole = dequantized(matrix).double()
    x = (random(20, 256, seed=4) * scale).bfloat16()
    x[:, 9] = 4096.0 * scale
    rest = x.double()
    rest[:, 9] = 0
    found = product(x, matrix).double() - 4096.0 * scale * whole[:, 9]
    assert float((found - rest @ whole.T).norm() / found.norm()) < 1e-3


def test_numbers_that_fit_are_multiplied_exactly() -> None:
    """Every code, every zero point, and every power of two within 2^13 of the largest, beside few and beside many."""
    codes = (torch.arange(32 * 128) % 16).view(32, 128).to(torch.uint8)
    zeros = (torch.arange(32) % 16).to(torch.uint8)[:, None]
    four = Quantized(Format("int4", 128, zero_points=True), to_bytes(codes), torch.ones(32, 1), zeros)
    eights = (torch.arange(32 * 256) * 7 % 256).to(torch.uint8).view(torch.int8).view(32, 256)
    eight = Quantized(Format("int8"), eights, torch.full((32, 1), 0.5))
    for matrix in (four, eight):
        columns = matrix.shape[1]
        assert torch.equal(product(torch.eye(columns).bfloat16(), matrix), dequantized(matrix).T)
        x = torch.zeros(14, columns)
        for k in range(14):
            x[k, 64:], x[k, k] = 1.0, -(2.0**-k)
        wanted = x @ dequantized(matrix).T
        for scale in (1.0, 2.0**100, 2.0**-100):
            assert torch.equal(product((x * scale).bfloat16(), matrix), wanted * scale)


@pytest.mark.parametrize("name", ["int4/64 zeros", "int8"])
def test_nothing_gives_nothing_and_no_number_gives_none(name: str) -> None:
    matrix, x = quantized(random(40, 256), FORMATS[name]), random(5, 256).bfloat16()
    x[0] = 0
    x[1] = 1e-38
    x[2, 3] = float("inf")
    x[3, 200] = float("nan")
    found = product(x, matrix)
    assert bool((found[0] == 0).all())
    assert bool((found[1].abs() < 1e-35).all())
    assert bool(found[2:4].isnan().all())
    assert bool(found[4].isfinite().all())


def test_a_row_of_zeros_beside_others_gives_exactly_zero() -> None:
    weight = random(40, 512)
    weight[33] = 0
    weight[2, 64:128] = 0
    x = wide_range(20, 512)
    assert bool((product(x, quantized(weight, FORMATS["int4/64 zeros"]))[:, 33] == 0).all())


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_how_many_tokens_are_multiplied(name: str) -> None:
    """By a matrix that has rows enough; with the bias of a layer, and rounded once."""
    matrix, x, bias = quantized(random(40, 256), FORMATS[name]), wide_range(17, 256), random(1, 40)[0].bfloat16()
    wanted = product(x, matrix) + bias.float()
    assert torch.equal(cpu.quantized_linear_cpu(x, matrix, bias), wanted.bfloat16())
    few = quantized(random(31, 256), FORMATS[name])
    found = cpu.quantized_linear_cpu(x, few, None).float()
    close = x.float() @ dequantized(few).T
    assert float((found - close).norm() / close.norm()) < 1e-2
