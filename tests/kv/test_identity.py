"""Identities: a function of salt and all tokens so far, and of nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.core.specs import ModelSpec
from cellar.kv.identity import IDENTITY_BYTES, Chain, root_identity, salted_identity
from cellar.models import registry

tokens_of = st.lists(st.integers(0, 3), min_size=12, max_size=12)


def chain(tokens: list[int], *steps: int, salt: bytes = b"") -> list[bytes]:
    grown = Chain(salted_identity(b"model", salt), 4)
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


def test_parent_depends_on_root_and_salt_and_on_where_they_part() -> None:
    roots = {salted_identity(n, s) for n, s in [(b"", b""), (b"ab", b"c"), (b"a", b"bc"), (b"abc", b""), (b"", b"abc")]}
    assert len(roots) == 5


def test_rows_of_a_matrix_hash_like_plain_arrays() -> None:
    matrix = np.arange(24, dtype=np.int32).reshape(2, 12)
    grown = Chain(salted_identity(b"model", b""), 4)
    assert grown.grow(matrix[1], 3) == chain(list(range(12, 24)), 3)


def spec(**changed: object) -> ModelSpec:
    config: dict[str, object] = dict(registry.shipped_config("llama-2-7b") or {})
    config.update({key: value for key, value in changed.items() if key not in ("dtype", "chunk", "length")})
    length = changed.get("length", 512)
    dtype, chunk = str(changed.get("dtype", "bfloat16")), int(str(changed.get("chunk", 32)))
    return registry.open_model(config, dtype, chunk, length).spec  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "float32"},
        {"chunk": 16},
        {"rope_theta": 5e5},
        {"rms_norm_eps": 1e-3},
        {"num_hidden_layers": 31},
        {"num_key_value_heads": 8},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_changes_k_or_v_changes_the_root(changed: dict[str, object]) -> None:
    assert root_identity(spec(**changed), b"w") != root_identity(spec(), b"w")


def test_root_knows_the_weights_and_not_how_long_a_sequence_may_get() -> None:
    assert root_identity(spec(), b"w") == root_identity(spec(), b"w")
    assert root_identity(spec(), b"w") != root_identity(spec(), b"v")
    assert root_identity(spec(length=1024), b"w") == root_identity(spec(), b"w")
    stretched = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    longer = root_identity(spec(**stretched, length=8192), b"w")
    assert longer != root_identity(spec(**stretched, length=6144), b"w"), "its frequencies follow from the length"


@pytest.mark.long
def test_root_is_the_same_in_every_process() -> None:
    script = (
        "from tests.kv.test_identity import spec; from cellar.kv.identity import root_identity;"
        "print(root_identity(spec(), b'w').hex())"
    )
    roots = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env).stdout
        for env in ({**os.environ, "PYTHONHASHSEED": seed} for seed in "12")
    }
    assert roots == {root_identity(spec(), b"w").hex() + "\n"}
