"""Packed weights give what plain ones give, in every dtype, and are used only where they hold the matrix."""

from __future__ import annotations

import pytest
import torch

from cellar.ops import linear as module
from cellar.ops.linear import HalfWeight, is_packed, linear, linear_definition, out_features, pack, weight_nbytes


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 64, 130])
@pytest.mark.parametrize(("n", "k"), [(640, 384), (77, 100), (1, 8), (33, 1)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_equals_plain(tokens: int, n: int, k: int, bias: bool, dtype: torch.dtype) -> None:
    x = random(tokens, k).to(dtype)
    weight = (random(n, k, seed=1) / k**0.5).to(dtype)
    b = random(n, seed=2).to(dtype) if bias else None
    packed = pack(weight)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    expected = linear_definition(x, weight, b)
    for form in (weight, packed):
        got = linear(x, form, b)
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert out_features(packed) == out_features(weight) == n


def test_float32_matrix_of_16_bit_values_is_packed_in_16_bits() -> None:
    weight = (0.05 * random(64, 64)).bfloat16().float()
    packed = pack(weight)
    if not module._half_works():
        assert not isinstance(packed, HalfWeight)
        return
    assert isinstance(packed, HalfWeight)
    assert weight_nbytes(packed) * 2 == weight_nbytes(weight)
    x = random(5, 64)
    torch.testing.assert_close(linear(x, packed), x.double().mm(weight.double().t()).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_float32_matrix_that_needs_its_bits_keeps_them(scale: float) -> None:
    weight = scale * random(64, 64)
    assert not isinstance(pack(weight), HalfWeight)
    # Tiny values would vanish in 16 bits even if they came from bfloat16.
    assert not isinstance(pack((1e-9 * weight).bfloat16().float()), HalfWeight)


def test_values_beyond_16_bit_floats_are_kept() -> None:
    weight = random(8, 8).bfloat16()
    weight[3, 4] = 1e6
    packed = pack(weight)
    assert not isinstance(packed, HalfWeight)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(linear(x, packed), linear_definition(x, weight), rtol=1e-2, atol=1e-2)


def test_packing_twice_changes_nothing() -> None:
    for weight in (random(16, 16), random(16, 16).half()):
        packed = pack(weight)
        assert pack(packed) is packed
        assert is_packed(packed) or packed is weight


def test_plain_16_bit_weights_are_widened_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WIDEN_ELEMENTS", 100)
    x, weight, bias = random(9, 40).half(), random(33, 40, seed=1).half(), random(33, seed=2).half()
    torch.testing.assert_close(linear(x, weight, bias), linear_definition(x, weight, bias), rtol=2e-3, atol=2e-3)


def test_float16_is_summed_in_float32() -> None:
    """Sums in float16 would stop at 2048, where adding 1 changes nothing."""
    x, weight = torch.ones(1, 4096, dtype=torch.float16), torch.ones(2, 4096, dtype=torch.float16)
    for form in (weight, pack(weight)):
        assert linear(x, form).tolist() == [[4096.0, 4096.0]]


def test_no_tokens() -> None:
    for weight in (random(6, 4), random(6, 4).half()):
        for form in (weight, pack(weight)):
            assert linear(torch.empty(0, 4, dtype=weight.dtype), form).shape == (0, 6)
