"""Identities: a function of salt and all tokens so far, and of nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cellar.kv.hashing import IDENTITY_BYTES, Chain, root_identity

tokens_of = st.lists(st.integers(0, 3), min_size=12, max_size=12)


def chain(tokens: list[int], *steps: int, salt: bytes = b"") -> list[bytes]:
    grown = Chain(root_identity(b"model", salt), 4)
    for step in steps:
        grown.grow(np.array(tokens, np.int32), step)
    return grown.identities


@given(tokens_of, tokens_of, st.integers(0, 3))
def test_equal_identities_mean_equal_prefixes(a: list[int], b: list[int], cut: int) -> None:
    b = a[: cut * 4] + b[cut * 4 :]
    for i, (x, y) in enumerate(zip(chain(a, 3), chain(b, 3), strict=True)):
        assert (x == y) == (a[: (i + 1) * 4] == b[: (i + 1) * 4])
        assert len(x) == IDENTITY_BYTES


@given(tokens_of)
def test_growing_in_steps_changes_nothing(a: list[int]) -> None:
    assert chain(a, 1, 1, 3) == chain(a, 3)


def test_root_depends_on_namespace_and_salt_and_on_where_they_part() -> None:
    roots = {root_identity(n, s) for n, s in [(b"", b""), (b"ab", b"c"), (b"a", b"bc"), (b"abc", b""), (b"", b"abc")]}
    assert len(roots) == 5


def test_rows_of_a_matrix_hash_like_plain_arrays() -> None:
    matrix = np.arange(24, dtype=np.int32).reshape(2, 12)
    grown = Chain(root_identity(b"model", b""), 4)
    assert grown.grow(matrix[1], 3) == chain(list(range(12, 24)), 3)
