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
from cellar.kv import identity
from cellar.kv.identity import IDENTITY_BYTES, Chain, Recalled, root_identity, salted_identity
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


Sequences = list[tuple[int, int, list[int], bytes]]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9), st.integers(0, 60), st.lists(st.integers(0, 1), max_size=30), st.sampled_from(b"ab")
        ),
        min_size=2,
        max_size=12,
    ),
    st.integers(20, 200),
)
def test_what_is_recalled_is_what_would_be_hashed(asked: Sequences, most: int) -> None:
    """Sequences that begin as an earlier one does, wherever they part, with another salt or the same, in steps."""
    recalled, seen = Recalled(most), [[0] * 60]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "DEPTHS", (1, 3, 8))
        for which, cut, rest, salt in asked:
            tokens = seen[which % len(seen)][:cut] + rest
            seen.append(tokens)
            root = salted_identity(b"model", bytes([salt]))
            grown, whole = Chain(root, 4, recalled), len(tokens) // 4
            for step in (whole // 2, whole):
                found = grown.grow(np.array(tokens, np.int32), step)
            assert found == Chain(root, 4).grow(np.array(tokens, np.int32), whole)
            assert len(recalled) <= most


def test_the_next_turn_is_hashed_from_where_it_parts_and_whoever_shares_a_system_prompt_hides_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recalled, hashed = Recalled(), [0]
    original = identity.chunk_identity

    def counted(parent: bytes, tokens: bytes) -> bytes:
        hashed[0] += 1
        return original(parent, tokens)

    monkeypatch.setattr(identity, "chunk_identity", counted)
    rng = np.random.default_rng(0)
    system = rng.integers(0, 99, 4 * 40, np.int32)
    talks = [np.concatenate((system, rng.integers(0, 99, 4 * 260, np.int32))) for _ in range(3)]
    for talk in talks:
        Chain(b"root", 4, recalled).grow(talk, 300)
    for talk in talks:
        longer = np.concatenate((talk, rng.integers(0, 99, 4 * 10, np.int32)))
        hashed[0] = 0
        assert Chain(b"root", 4, recalled).grow(longer, 310) == Chain(b"root", 4).grow(longer, 310)
        assert hashed[0] - 310 <= 64 + 10, "and 310 for the chain that recalls nothing"
    longer[:] = 0
    assert recalled.after(original(b"x", b""), 8, longer, 4) == [], "nobody begins so"


def test_tokens_that_change_later_are_not_those_that_were_kept() -> None:
    recalled, tokens = Recalled(), np.arange(4 * 20, dtype=np.int32)
    before = list(Chain(b"root", 4, recalled).grow(tokens, 20))
    tokens[4 * 15 :] = 7
    after = Chain(b"root", 4, recalled).grow(tokens, 20)
    assert after[:15] == before[:15]
    assert after == Chain(b"root", 4).grow(tokens, 20)
    recalled.clear()
    assert len(recalled) == 0
    assert recalled.after(after[7], 8, tokens, 4) == []


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
