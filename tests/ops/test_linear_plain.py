"""Few tokens times a plain matrix of 16 bits on the CPU, by the kernel that reads it as it lies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cellar.ops.linear import dense
from cellar.ops.linear.dense import MOST_FEW, DenseWeight

DTYPES = (torch.float16, torch.bfloat16)
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Of one number of the result, beside which sums in float32 lose nothing."""


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, MOST_FEW),
    rows=st.integers(1, 70),
    blocks=st.sampled_from([1, 2, 5, 31, 32, 33, 65, 97]),
    dtype=st.sampled_from(DTYPES),
    apart=st.sampled_from([0, 32, 40]),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_products_are_those_of_the_definition(
    tokens: int, rows: int, blocks: int, dtype: torch.dtype, apart: int, biased: bool, seed: int
) -> None:
    """Any number of rows and tokens; columns of one part and of several; rows that lie apart."""
    columns = 32 * blocks
    whole = random(rows, columns + apart, seed=seed, dtype=dtype)
    x = random(tokens, columns, seed=seed + 1, dtype=dtype)
    bias = random(rows, seed=seed + 2, dtype=dtype) if biased else None
    check(x, whole[:, :columns], bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_token_has_its_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    matrix, x = random(530, 2080, seed=1, dtype=dtype), random(MOST_FEW, 2080, seed=2, dtype=dtype)
    weight = DenseWeight(matrix)
    torch.set_num_threads(1)
    alone = torch.cat([weight.multiply(x[k : k + 1]) for k in range(MOST_FEW)])
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        for count in range(1, MOST_FEW + 1):
            for first in (0, MOST_FEW - count):
                assert torch.equal(weight.multiply(x[first : first + count]), alone[first : first + count])


@pytest.mark.parametrize("tokens", [1, 3, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_in_its_row_and_token(dtype: torch.dtype, tokens: int) -> None:
    matrix, x = random(9, 64, seed=1, dtype=dtype), random(tokens, 64, seed=2, dtype=dtype)
    matrix[5, 33] = torch.nan
    x[tokens - 1, 7] = torch.inf
    got = DenseWeight(matrix).multiply(x)
    assert bool(got[:, 5].isnan().all())
    assert not bool(got[tokens - 1].isfinite().any())
    fine = got[: tokens - 1, [r for r in range(9) if r != 5]]
    assert bool(fine.isfinite().all())


def test_memory_behind_the_matrix_is_not_part_of_it() -> None:
    """Seven rows are computed by fours; the memory behind the last holds no numbers."""
    memory = torch.full((8 * 96,), torch.nan, dtype=torch.float16)
    matrix = memory[: 7 * 96].view(7, 96)
    matrix.copy_(random(7, 96, seed=1, dtype=torch.float16))
    for tokens in (1, 2, 5):
        check(random(tokens, 96, seed=2, dtype=torch.float16), matrix, None)


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
