"""Few tokens times a plain matrix of 16 bits on the CPU, by the kernels that read it as it lies: one of every processor
and one of matrix units where there are any.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cellar.ops.cpu.launch import multiplies_in_units
from cellar.ops.linear import dense
from cellar.ops.linear.dense import MOST_FEW, MOST_IN_UNITS, DenseWeight

DTYPES = (torch.float16, torch.bfloat16)
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Of one number of the result, beside which sums in float32 lose nothing."""


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[False, True], ids=["lanes", "units"])
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether bfloat16 is multiplied by matrix units."""
    asked = bool(request.param)
    if asked and not multiplies_in_units():
        pytest.skip("this processor has no matrix units")
    monkeypatch.setattr(dense, "multiplies_in_units", lambda: asked)
    return asked


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(x: Tensor, matrix: Tensor, bias: Tensor | None) -> None:
    got = DenseWeight(matrix).multiply(x, bias)
    wanted = x.double() @ matrix.double().t() + (0 if bias is None else bias.double())
    assert got.shape == wanted.shape
    assert got.dtype == x.dtype
    # Where a sum is nearly nothing, what it was made of says how far it may be off.
    made_of = x.double().abs() @ matrix.double().abs().t()
    allowed = ROUNDING[matrix.dtype] * wanted.abs() + 1e-6 * made_of
    if bias is not None:
        allowed += 1e-6 * bias.double().abs()
    assert bool(((got.double() - wanted).abs() <= allowed).all())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, MOST_IN_UNITS),
    rows=st.integers(1, 70),
    blocks=st.sampled_from([1, 2, 5, 31, 32, 33, 65, 97]),
    dtype=st.sampled_from(DTYPES),
    apart=st.sampled_from([0, 32, 40]),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_products_are_those_of_the_definition(
    units: bool, tokens: int, rows: int, blocks: int, dtype: torch.dtype, apart: int, biased: bool, seed: int
) -> None:
    """Any number of rows and tokens; columns of one part and of several; rows that lie apart."""
    columns = 32 * blocks
    whole = random(rows, columns + apart, seed=seed, dtype=dtype)
    x = random(tokens, columns, seed=seed + 1, dtype=dtype)
    bias = random(rows, seed=seed + 2, dtype=dtype) if biased else None
    check(x, whole[:, :columns], bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_token_has_its_bits_alone_and_in_company(dtype: torch.dtype, units: bool) -> None:
    most = MOST_IN_UNITS if units and dtype == torch.bfloat16 else MOST_FEW
    matrix, x = random(530, 2080, seed=1, dtype=dtype), random(most, 2080, seed=2, dtype=dtype)
    weight = DenseWeight(matrix)
    torch.set_num_threads(1)
    alone = torch.cat([weight.multiply(x[k : k + 1]) for k in range(most)])
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        for count in range(1, most + 1):
            for first in (0, most - count):
                assert torch.equal(weight.multiply(x[first : first + count]), alone[first : first + count])


@pytest.mark.parametrize("tokens", [1, 3, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_in_its_row_and_token(dtype: torch.dtype, tokens: int, units: bool) -> None:
    matrix, x = random(19, 64, seed=1, dtype=dtype), random(tokens, 64, seed=2, dtype=dtype)
    matrix[5, 33] = torch.nan
    x[tokens - 1, 7] = torch.inf
    got = DenseWeight(matrix).multiply(x)
    assert bool(got[:, 5].isnan().all())
    assert not bool(got[tokens - 1].isfinite().any())
    fine = got[: tokens - 1, [r for r in range(19) if r != 5]]
    assert bool(fine.isfinite().all())


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float16, 7), (torch.bfloat16, 7), (torch.bfloat16, 71)])
def test_memory_behind_the_matrix_is_not_part_of_it(dtype: torch.dtype, rows: int, units: bool) -> None:
    """Rows are computed by fours, or by 64; the memory behind the last holds no numbers, and is not written to."""
    memory = torch.full(((rows + 64) * 96,), torch.nan, dtype=dtype)
    matrix = memory[: rows * 96].view(rows, 96)
    matrix.copy_(random(rows, 96, seed=1, dtype=dtype))
    for tokens in (1, 2, 5):
        check(random(tokens, 96, seed=2, dtype=dtype), matrix, None)
    assert bool(memory[rows * 96 :].isnan().all())


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
def test_products_are_written_where_they_are_wanted(dtype: torch.dtype, tokens: int, units: bool) -> None:
    """All of them, and nothing behind them; 416 columns are more than are multiplied at once."""
    weight, x = DenseWeight(random(150, 416, seed=1, dtype=dtype)), random(tokens, 416, seed=2, dtype=dtype)
    memory = torch.full((tokens + 1, 150), torch.nan, dtype=dtype)
    weight.multiply_into(memory[:tokens], x)
    assert torch.equal(memory[:tokens], weight.multiply(x))
    assert bool(memory[tokens].isnan().all())


def test_matrix_units_take_what_is_bfloat16_and_has_enough_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, few = list[str](), dense._few
    monkeypatch.setattr(dense, "multiplies_in_units", lambda: True)
    monkeypatch.setattr(dense, "_in_units", lambda *given: (taken.append("units"), given[0])[1])
    monkeypatch.setattr(dense, "_few", lambda *given: (taken.append("lanes"), few(*given))[1])
    brain, half = torch.bfloat16, torch.float16
    for rows, of_x, of_matrix in ((16, brain, brain), (15, brain, brain), (16, half, half), (16, torch.float32, brain)):
        DenseWeight(random(rows, 64, seed=1, dtype=of_matrix)).multiply(random(2, 64, seed=2, dtype=of_x))
    assert taken == ["units", "lanes", "lanes", "lanes"]
    for tokens in (MOST_FEW + 1, MOST_IN_UNITS, MOST_IN_UNITS + 1):
        DenseWeight(random(16, 64, seed=1, dtype=brain)).multiply(random(tokens, 64, seed=2, dtype=brain))
    assert taken[4:] == ["units", "units"]


def test_units_and_lanes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the order of sums in float32: a rounding to bfloat16, here and there."""
    if not multiplies_in_units():
        pytest.skip("this processor has no matrix units")
    matrix, x = random(4096, 1024, seed=1, dtype=torch.bfloat16), random(16, 1024, seed=2, dtype=torch.bfloat16)
    found = []
    for units in (True, False):
        monkeypatch.setattr(dense, "multiplies_in_units", lambda units=units: units)
        found.append(DenseWeight(matrix).multiply(x).float())
    differ = (found[0] - found[1]).abs()
    assert bool((differ <= 2.0**-7 * found[1].abs() + 1e-4).all())
    assert float((differ > 0).float().mean()) < 0.01


@pytest.mark.parametrize(
    ("tokens", "columns", "by_kernel"), [(16, 64, True), (17, 64, False), (1, 60, False), (0, 64, False)]
)
def test_what_the_kernel_does_not_take_is_the_librarys(
    tokens: int, columns: int, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, asked = dense._few, list[int]()
    monkeypatch.setattr(dense, "_few", lambda x, *rest: (asked.append(len(x)), few(x, *rest))[1])
    matrix = random(5, columns, seed=1, dtype=torch.float16)
    check(random(tokens, columns, seed=2, dtype=torch.float16), matrix, None)
    assert asked == ([tokens] if by_kernel else [])


def test_the_library_sets_the_units_for_itself(units: bool) -> None:
    """Its products of many tokens, which may use them too, are what they were, between ours."""
    matrix, many = random(512, 512, seed=1, dtype=torch.bfloat16), random(64, 512, seed=2, dtype=torch.bfloat16)
    weight = DenseWeight(matrix)
    library, ours = functional.linear(many, matrix), weight.multiply(many[:5])
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        assert torch.equal(weight.multiply(many[:5]), ours)
        assert torch.equal(functional.linear(many, matrix), library)
        assert torch.equal(weight.multiply(many[: 33 if units else 16])[:5], ours)
