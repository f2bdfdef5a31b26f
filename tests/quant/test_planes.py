"""Products of a few bfloat16 tokens in whole numbers, on processors that have the instruction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.cpu.launch import multiplies_bytes
from cellar.quant import cpu
from cellar.quant.matrix import Quantized, dequantized, quantized
from cellar.quant.pack import to_bytes

pytestmark = pytest.mark.skipif(not multiplies_bytes(), reason="this processor has no dot products of bytes (VNNI)")

FORMATS = {
    "int4/32": Format("int4", 32),
    "int4/64": Format("int4", 64),
    "int4/128": Format("int4", 128),
    "int4/64 zeros": Format("int4", 64, zero_points=True),
    "int8": Format("int8"),
    "int8 matrix": Format("int8", rows=0),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def summed(x: Tensor, matrix: Quantized) -> Tensor:
    """float32 [t, out], as `quantized_linear_cpu` has them before they are rounded."""
    assert cpu.multiplied_in_bytes(x, matrix)
    return cpu.products_in_bytes(x, matrix, None, torch.float32)


def wide_range(*shape: int) -> Tensor:
    """bfloat16, a few numbers much larger than all others, as activations have them."""
    x = random(*shape, seed=1)
    x[:, 5] *= 3000
    x[:, 77] *= 100
    return x.bfloat16()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 4, 161])
@pytest.mark.parametrize("columns", [128, 384, 2048])
def test_products_equal_those_of_the_dequantized_matrix(name: str, rows: int, columns: int) -> None:
    """Within what a sum in float32 would lose, too: 2^-23 of the largest number of the token."""
    matrix = quantized(random(rows, columns), FORMATS[name])
    whole = dequantized(matrix).double()
    for tokens in (1, 2, 7):
        x = wide_range(tokens, columns)
        wanted = x.double() @ whole.T
        lost = 2.0**-23 * x.double().abs().amax(1, keepdim=True) * whole.abs().sum(1)
        bound = lost + 5e-7 * (x.double().abs() @ whole.abs().T)
        assert bool(((summed(x, matrix).double() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_has_the_same_bits_in_company(name: str) -> None:
    matrix, x = quantized(random(75, 640), FORMATS[name]), wide_range(19, 640)
    together = summed(x, matrix)
    assert torch.equal(together, torch.cat([summed(token[None], matrix) for token in x]))


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_gives_a_token_the_same_bits_beside_a_few(name: str) -> None:
    """Beside up to three in int4, and five in int8. Beyond, another kernel multiplies, which adds in another order and
    gives a token the same bits beside any number (`test_panels.py`).
    """
    matrix, x, bias = quantized(random(75, 640), FORMATS[name]), wide_range(16, 640), random(1, 75)[0].bfloat16()
    most = 4 if name.startswith("int4") else 6
    alone = torch.cat([cpu.quantized_linear_cpu(token[None], matrix, bias) for token in x])
    assert torch.equal(cpu.quantized_linear_cpu(x[:most], matrix, bias), alone[:most])
    many = cpu.quantized_linear_cpu(x, matrix, bias)
    for tokens in (most + 1, 9, 15):
        assert torch.equal(cpu.quantized_linear_cpu(x[:tokens], matrix, bias), many[:tokens])


def test_numbers_that_fit_are_multiplied_exactly() -> None:
    """Every code, every zero point, and every power of two that a bfloat16 has within 2^14 of the largest."""
    codes = (torch.arange(16 * 128) % 16).view(16, 128).to(torch.uint8)
    zeros = torch.arange(16, dtype=torch.uint8)[:, None]
    four = Quantized(Format("int4", 128, zero_points=True), to_bytes(codes), torch.ones(16, 1), zeros)
    eights = torch.arange(256, dtype=torch.uint8).view(torch.int8).repeat(3, 1)
    eight = Quantized(Format("int8"), eights, torch.full((3, 1), 0.5))
    for matrix in (four, eight):
        for token in torch.eye(matrix.shape[1]):
            assert torch.equal(summed(token.bfloat16()[None], matrix)[0], dequantized(matrix) @ token)
    x = torch.zeros(14, 128)
    for k in range(14):
        x[k, k], x[k, 127] = -(2.0**-k), 1.0
    wanted = x @ dequantized(four).T
    for scale in (1.0, 2.0**100, 2.0**-100):
        assert torch.equal(summed((x * scale).bfloat16(), four), wanted * scale)


@pytest.fixture(params=["int4/64 zeros", "int8"])
def matrix(request: pytest.FixtureRequest) -> Quantized:
    return quantized(random(9, 256), FORMATS[request.param])


def test_nothing_gives_nothing_and_no_number_gives_none(matrix: Quantized) -> None:
    x = random(4, 256).bfloat16()
    x[0] = 0
    x[1] = 1e-38
    x[2, 3] = float("inf")
    x[3, 200] = float("nan")
    found = summed(x, matrix)
    assert bool((found[0] == 0).all())
    assert bool((found[1].abs() < 1e-35).all())
    assert bool(found[2:].isnan().all())


def test_a_row_of_zeros_beside_others_gives_exactly_zero() -> None:
    """Its scale is 1 and its zero point 0: sums that are taken away from each other must be the same."""
    weight = random(4, 512)
    weight[1] = 0
    weight[2, 64:128] = 0
    found = summed(random(1, 512).bfloat16(), quantized(weight, FORMATS["int4/64 zeros"]))
    assert found[0, 1] == 0


def test_others_go_another_way() -> None:
    x = random(1, 256).bfloat16()
    four = quantized(random(8, 256), FORMATS["int4/64"])
    assert cpu.multiplied_in_bytes(x, four)
    assert not cpu.multiplied_in_bytes(x.float(), four), "24 bits"
    assert not cpu.multiplied_in_bytes(x[:, :192], quantized(random(8, 192), FORMATS["int4/64"]))
    assert not cpu.multiplied_in_bytes(x, quantized(random(8, 256), Format("int4", 256)))
    assert not cpu.multiplied_in_bytes(x, quantized(random(8, 256), Format("int8", 128)))
    assert not cpu.multiplied_in_bytes(x, quantized(random(8, 256), Format("fp8")))
    eight = quantized(random(8, 256), FORMATS["int8"])
    shifted = replace(eight, zeros=torch.ones(8, 1, dtype=torch.int8))
    assert not cpu.multiplied_in_bytes(x, shifted)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 6])
def test_nothing_behind_the_last_row_counts(name: str, rows: int) -> None:
    """Scales and zero points are read sixteen at a time, where there are so many."""
    whole = quantized(random(rows + 2, 384), FORMATS[name])
    if whole.format.rows:
        whole.scales[rows:] = float("nan")
        cut, x = whole.rows(0, rows), wide_range(2, 384)
        assert torch.equal(summed(x, cut), summed(x, cut.put(torch.clone)))


@pytest.mark.parametrize("name", ["int4/64 zeros", "int8"])
def test_it_is_how_a_few_tokens_are_multiplied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x, bias = quantized(random(40, 256), FORMATS[name]), wide_range(3, 256), random(40).bfloat16()
    wanted = (summed(x, matrix) + bias).bfloat16()
    assert torch.equal(cpu.quantized_linear_cpu(x, matrix, bias), wanted)
    monkeypatch.setattr(cpu, "_summed", None)
    assert torch.equal(cpu.quantized_linear_cpu(x, matrix, bias), wanted)
