"""Packed weights give what plain ones give, in every dtype, and are used only where they hold the matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cellar.ops.cpu import room
from cellar.ops.linear import dense as module
from cellar.ops.linear.definition import as_linear, linear, linear_definition
from cellar.ops.linear.dense import DenseWeight
from cellar.ops.linear.device import DeviceWeight, prepare
from cellar.ops.linear.fused import (
    norm_gated_linear,
    norm_gated_linear_definition,
    norm_linear,
    norm_linear_definition,
)
from cellar.ops.linear.half import HalfWeight, half_works
from cellar.ops.linear.onednn import OneDnnWeight, onednn_packs
from cellar.ops.linear.pack import pack
from cellar.ops.linear.weight import LinearWeight


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
    assert (packed.out_features, packed.in_features) == (n, k)


def test_float32_matrix_of_16_bit_values_is_packed_in_16_bits() -> None:
    weight = (0.05 * random(64, 64)).bfloat16().float()
    packed = pack(weight)
    if not half_works():
        assert not isinstance(packed, HalfWeight)
        return
    assert isinstance(packed, HalfWeight)
    assert packed.nbytes * 2 == DenseWeight(weight).nbytes == weight.nbytes
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


FORMS: dict[str, Callable[[torch.Tensor], LinearWeight]] = {
    "dense": DenseWeight,
    "half": HalfWeight,
    "onednn": OneDnnWeight,
    "device": prepare,
    "unprepared": DeviceWeight,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_format_gives_its_matrix_back_and_can_be_cut(form: str) -> None:
    """Rows and columns of a weight are the weight of these rows and columns: dense form, bytes and products."""
    matrix = random(20, 12, seed=3).half().float()
    weight = FORMS[form](matrix)
    assert torch.equal(weight.dense().float(), matrix)
    assert weight.nbytes == matrix.numel() * (2 if form == "half" else 4)
    x = random(3, 12)
    for axis, part in ((0, range(5, 19)), (1, range(4, 11)), (0, range(20))):
        cut = weight.slice(axis, part)
        wanted = matrix.narrow(axis, part.start, len(part))
        assert type(cut) is type(weight)
        assert (cut.out_features, cut.in_features) == tuple(wanted.shape)
        assert torch.equal(cut.dense().float(), wanted)
        xs = x if axis == 0 else x[:, part.start : part.stop]
        torch.testing.assert_close(linear(xs, cut), linear_definition(xs, wanted), rtol=1e-5, atol=1e-5)
    if isinstance(weight, DeviceWeight):
        counters = weight.slice(0, range(3)).arrivals  # type: ignore[attr-defined]
        assert (counters is None) == (form == "unprepared")


def test_a_plain_tensor_is_a_dense_weight_and_others_stay_what_they_are() -> None:
    matrix = random(4, 6)
    assert as_linear(matrix).dense() is matrix
    packed = pack(matrix)
    assert as_linear(packed) is packed


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@pytest.mark.parametrize("tokens", [1, 3])
def test_fused_forms_of_every_format_are_their_parts(tokens: int) -> None:
    """One token goes through the device's fused kernel, in the interpreter."""
    residual, delta, norm, bias = random(tokens, 12), random(tokens, 12, seed=1), random(12, seed=2), random(20, seed=4)
    matrix = random(20, 12, seed=3).half().float()
    for make in FORMS.values():
        for got, wanted in (
            (
                norm_linear(residual, delta, norm, 1e-5, make(matrix), bias),
                norm_linear_definition(residual, delta, norm, 1e-5, matrix, bias),
            ),
            (
                norm_gated_linear(residual, delta, norm, 1e-5, make(matrix), bias, "silu"),
                norm_gated_linear_definition(residual, delta, norm, 1e-5, matrix, bias, "silu"),
            ),
        ):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_plain_16_bit_weights_are_widened_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WIDEN_ELEMENTS", 100)
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


@pytest.mark.parametrize("tiled", [True, False])
def test_numbers_of_rows_that_are_compiled_for_are_few(tiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compiled once, which takes as long as some hundred rows."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiled)
    room._tile_rows.cache_clear()
    tile, taken = room._tile_rows(), {rows: room.whole_rows.__wrapped__(rows) for rows in range(1, 4097)}
    room._tile_rows.cache_clear()
    assert tile == (16 if tiled else 8)
    assert all(rows <= more <= max(rows + tile - 1, 1.125 * rows) for rows, more in taken.items())
    assert all(rows == more for rows, more in taken.items() if rows <= 32)
    assert all(more % tile == 0 for rows, more in taken.items() if rows > 32)
    assert len(set(taken.values())) < 100
    assert all(taken[more] == more for more in taken.values())


@pytest.mark.parametrize("rows", [5, 33, 100, 255, 300])
def test_what_lies_behind_a_tensor_is_multiplied_and_dropped(rows: int) -> None:
    """Also where it is no number, and where there is nothing."""
    x = room.with_room(random(1, 96).bfloat16(), rows, 96)
    x.copy_(random(rows, 96))
    whole = room.whole_rows(rows)
    assert (x.shape, x.is_contiguous()) == ((rows, 96), True)
    room.widened(x, whole)[rows:] = torch.nan
    forms = (x, x.clone(), torch.cat((x, x), dim=1)[:, :96])
    if onednn_packs(torch.bfloat16):
        weight = OneDnnWeight(random(64, 96, seed=1).bfloat16())
        expected = weight.multiply(x)
        torch.testing.assert_close(expected, linear_definition(x, weight.dense()), atol=0.1, rtol=0.02)
        for form in forms:
            assert torch.equal(weight.multiply(form), expected)
    if whole > rows:
        assert room.widened(x, whole).data_ptr() == x.data_ptr()
        assert room.widened(x.clone(), whole)[rows:].count_nonzero() == 0


@pytest.mark.parametrize("rows", [1, 17, 32, 33, 48, 49, 130, 521])
@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_that_fill_up_a_tile_are_nobodys(rows: int, with_bias: bool) -> None:
    if not onednn_packs(torch.bfloat16):
        return  # a processor that does not compute with them is given no such weight
    matrix, x = random(48, 64, seed=1).bfloat16(), random(rows, 64).bfloat16()
    bias = random(48, seed=2).bfloat16() if with_bias else None
    out = OneDnnWeight(matrix).multiply(x, bias)
    right = x.double() @ matrix.double().t() + (0 if bias is None else bias.double())
    assert out.shape == right.shape
    assert (out.double() - right).norm() <= 0.01 * right.norm()
