"""Activations in int8: how a token is rounded, and products in whole numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.quant.activations import rounded, token_codes
from cellar.quant.int8 import Int8Weight, int8_multiplies
from cellar.quant.matrix import Quantized, dequantized, quantized
from cellar.quant.weight import QuantizedWeight, StackedWeight, on_cpu

ROUNDING = Format("int8", activations="int8")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_token_is_rounded_by_its_own_largest_number() -> None:
    x = torch.tensor([[255.0, -255.0, 1.0, 3.0, 0.0], [0.0] * 5, [1e-30, 2e-30, 0.0, 0.0, 0.0]])
    codes, scales = token_codes(x)
    assert codes.tolist() == [[127, -128, 0, 2, 0], [0] * 5, [64, 127, 0, 0, 0]]  # of two nearest the even one
    torch.testing.assert_close(scales.flatten(), torch.tensor([2.0, 1.0, 2e-30 / 127.5]))
    assert torch.equal(rounded(x, ROUNDING)[0], torch.tensor([254.0, -256.0, 0.0, 4.0, 0.0]))


def test_rounding_errs_by_half_a_code_but_for_what_is_largest() -> None:
    x = random(50, 300)
    codes, scales = token_codes(x)
    error = (rounded(x, ROUNDING) - x).abs() / scales
    assert error.max() <= 0.5 + 1e-4
    assert codes.min() == -128 or codes.max() == 127


@pytest.mark.parametrize("make", [QuantizedWeight, Int8Weight], ids=["kernel", "library"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_stays_none_and_in_its_token(
    make: Callable[[Quantized], QuantizedWeight], bad: float
) -> None:
    if make is Int8Weight and not int8_multiplies():
        make = QuantizedWeight
    weight, x = make(quantized(random(40, 96), ROUNDING)), random(5, 96, seed=1)
    wanted = weight.multiply(x)
    x[2, 7] = bad
    found = weight.multiply(x)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3, 4]], wanted[[0, 1, 3, 4]])


def test_sums_that_float32_cannot_hold_are_exact() -> None:
    """8,192 products of 127 and 127, or one less: rounded once, when all are added."""
    if not int8_multiplies():
        return
    codes = torch.full((3, 8192), 127, dtype=torch.int8)
    codes[1, 0] = 126
    x = torch.full((1, 8192), 127.5)
    found = Int8Weight(Quantized(ROUNDING, codes, torch.ones(3, 1))).multiply(x)[0]
    whole = 8192 * 127 * 127
    assert torch.equal(found, torch.tensor([whole, whole - 127, whole]).float())


def test_the_packed_form_is_the_matrix() -> None:
    matrix = quantized(random(48, 96), ROUNDING)
    weight = on_cpu(QuantizedWeight(matrix))
    assert isinstance(weight, Int8Weight) == int8_multiplies()
    wanted = dequantized(matrix)
    assert torch.equal(weight.dense(), wanted)
    assert weight.nbytes == matrix.nbytes
    assert torch.equal(weight.slice(0, range(5, 21)).dense(), wanted[5:21])
    assert torch.equal(weight.slice(1, range(32, 64)).dense(), wanted[:, 32:64])
    assert torch.equal(weight.remade(wanted).dense(), QuantizedWeight(quantized(wanted, ROUNDING)).dense())
    assert weight.multiply(torch.empty((0, 96))).shape == (0, 48)


def test_only_what_rounds_activations_is_packed() -> None:
    plain, rounding = QuantizedWeight(quantized(random(8, 32), Format("int8"))), quantized(random(8, 32), ROUNDING)
    assert on_cpu(plain) is plain
    both = on_cpu(StackedWeight([plain, QuantizedWeight(rounding)]))
    assert isinstance(both, StackedWeight)
    x = random(3, 32, seed=2)
    torch.testing.assert_close(both.multiply(x)[:, :8], plain.multiply(x))
    torch.testing.assert_close(both.multiply(x)[:, 8:], rounded(x, ROUNDING) @ dequantized(rounding).t())
