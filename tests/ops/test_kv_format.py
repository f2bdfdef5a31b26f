"""K and V in fewer bits: the bytes that are written, the numbers that they mean, and attention over them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cellar.core.errors import ConfigError
from cellar.core.kv_formats import KVFormat, kv_cache_dtype, row_nbytes
from cellar.ops.attention import decode_attention, decodes_at_once
from cellar.ops.attention.cases import decode_case
from cellar.ops.attention.definition import decode_attention_definition
from cellar.ops.attention.triton import decode_attention_kernel
from cellar.ops.kv_format import dequantized, pieces, quantized_cache
from cellar.ops.rotary import write_kv

CPU = torch.device("cpu")
FORMATS: tuple[KVFormat, ...] = ("fp8", "int4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def there_and_back(x: torch.Tensor, form: KVFormat) -> torch.Tensor:
    return dequantized(quantized_cache(x.view(1, 1, 1, *x.shape), form)[0], x.shape[-1])[0, 0]


def test_fp8_is_the_nearest_number_at_the_least_power_of_two() -> None:
    x = torch.tensor([[448.0, 1.06, -0.26, 0.0], [449.0, 1.06, -0.26, 3.0], [2.0**-20, 0, 0, -(2.0**-21)]])
    found = there_and_back(x, "fp8")
    # 448 needs no scale; 449 needs 2, and twice 224 is 448.
    assert found.tolist() == [[448, 1.0, -0.25, 0], [448, 1.0, -0.25, 3.0], [2.0**-20, 0, 0, -(2.0**-21)]]


def test_int4_has_the_largest_and_the_least_of_each_half() -> None:
    x = torch.tensor([[0.0, 15.0, 7.4, 1.6, -3.0, -1.5, -1.5, 0.0]])
    # The second half's scale is a fifth: of -1.5, between two codes, the even one is taken.
    wanted = [0.0, 15.0, 7.0, 2.0, -3.0, -1.6, -1.6, 0.0]
    assert there_and_back(x, "int4")[0].tolist() == pytest.approx(wanted, abs=0.01)
    assert there_and_back(torch.full((1, 8), 5.0), "int4").tolist() == [[5.0] * 8]


@pytest.mark.parametrize("form", FORMATS)
@given(
    seed=st.integers(0, 2**31),
    power=st.integers(-100, 100),
    dim=st.sampled_from([2, 16, 20, 64, 128]),
    offset=st.floats(-3, 3),
)
def test_numbers_come_back_nearly(form: KVFormat, seed: int, power: int, dim: int, offset: float) -> None:
    x = (torch.randn(32, dim, generator=torch.Generator().manual_seed(seed)) + offset) * 2.0**power
    found = there_and_back(x, form)
    if form == "fp8":
        # Half a unit of three bits; and of the smallest numbers half of 2^-9 at the row's scale.
        bound = x.abs() * 2**-4 + x.abs().amax(-1, keepdim=True) * (2**-10 / 224)
    else:
        low, high = x.unflatten(-1, (2, -1)).aminmax(dim=-1, keepdim=True)
        bound = (
            ((high - low) / 30 * 1.01 + torch.maximum(low.abs(), high.abs()) * 2**-8)
            .expand(-1, -1, dim // 2)
            .flatten(-2)
        )
    assert ((found - x).abs() <= bound).all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(form: KVFormat, bad: float) -> None:
    x = torch.ones(16, 32)
    x[3, 5] = bad
    found = there_and_back(x, form)
    assert not found[3].isfinite().all()
    assert found[[0, 1, 2, *range(4, 16)]].isfinite().all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_written_alone(form: KVFormat, dtype: torch.dtype) -> None:
    """Appending a token changes no byte of those before it, nor do they change its own."""
    noise = torch.Generator().manual_seed(3)
    k, v = (torch.randn(40, 3, 24, generator=noise).to(dtype) for _ in range(2))
    places = torch.randperm(64, generator=noise)[:40]
    whole, one_by_one = (quantized_cache(torch.zeros(4, 2, 3, 16, 24), form) for _ in range(2))
    write_kv(k, v, whole[:, 0], whole[:, 1], places)
    for i in range(40):
        before = one_by_one.view(torch.uint8).clone()
        write_kv(k[i : i + 1], v[i : i + 1], one_by_one[:, 0], one_by_one[:, 1], places[i : i + 1])
        changed = (one_by_one.view(torch.uint8) != before).sum().item()
        assert changed <= 2 * 3 * row_nbytes(form, 24)
    assert torch.equal(whole.view(torch.uint8), one_by_one.view(torch.uint8))
    for cache, x in ((whole[:, 0], k), (whole[:, 1], v)):
        found = dequantized(cache, 24)[places // 16, :, places % 16]
        torch.testing.assert_close(found, there_and_back(x.flatten(0, 1), form).view(40, 3, 24), atol=0, rtol=0)
        assert pieces(cache, 24).codes.shape == (4, 3, 16, 24 if form == "fp8" else 12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_decodes_write_first_and_see_what_is_written(form: KVFormat, dtype: torch.dtype) -> None:
    limit = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    case = decode_case("quantized", (400, 7, 129), 32, programs=64, kv_format=form)
    ours, theirs = case.make(CPU, dtype), case.make(CPU, dtype)
    written_first = not decodes_at_once(ours["q"], ours["k_cache"], ours["v_cache"], ours["work"])
    assert written_first, "a step writes K and V by itself, then attends"
    torch.testing.assert_close(decode_attention(**ours), decode_attention_definition(**theirs), atol=limit, rtol=limit)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8))
    with pytest.raises(ConfigError, match="write quantized ones first"):
        decode_attention_kernel(**ours)


def test_names_of_formats() -> None:
    assert [kv_cache_dtype(name) for name in ("auto", "fp8", "fp8_e4m3", "int4")] == ["auto", "fp8", "fp8", "int4"]
    with pytest.raises(ConfigError, match=r"'fp8_e5m2' is not implemented; use auto .*, fp8 .* or int4"):
        kv_cache_dtype("fp8_e5m2")
    with pytest.raises(ConfigError, match="'fp7' is not known"):
        kv_cache_dtype("fp7")
    with pytest.raises(ConfigError, match="two numbers a byte"):
        row_nbytes("int4", 15)
    assert (row_nbytes("bfloat16", 128), row_nbytes("fp8", 128), row_nbytes("int4", 128)) == (256, 129, 72)
