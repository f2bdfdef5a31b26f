"""KVStore and ChunkPool against a model that knows only token sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.core.errors import IntegrityError
from cellar.kv.pool import ChunkPool
from cellar.kv.store import NO_SLOTS, KVStore
from tests.kv.driver import KINDS, drive

byte = st.integers(0, 255)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from((3, 12, 30)), st.lists(st.tuples(st.sampled_from(KINDS), byte, byte, byte), max_size=50))
def test_random_operations_agree_with_the_model(num_slots: int, ops: list[tuple[str, int, int, int]]) -> None:
    drive(num_slots, ops)


def numbers(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def filled(store: KVStore, tokens: np.ndarray, salt: bytes = b"") -> np.ndarray:
    """Reserve, commit all whole chunks; -> slots."""
    reservation = store.reserve(store.lookup(tokens, salt), len(tokens))
    assert reservation is not None
    whole = len(tokens) // store.chunk_size
    identities = store.chain(salt).grow(tokens, whole)
    store.commit(reservation.slots[:whole].tolist(), identities)
    return reservation.slots


def test_leading_chunks_are_lost_first_and_lookup_goes_on_past_them() -> None:
    store = KVStore(6, 4)
    tokens = numbers(21)
    slots = filled(store, tokens)
    store.release(slots)
    assert store.lookup(tokens).tolist() == slots[:5].tolist()
    taken = store.extend(3)  # one free slot, then the two oldest cached chunks
    assert taken is not None
    assert store.lookup(tokens).tolist() == [-1, -1, *slots[2:5].tolist()]
    store.release(taken)
    reservation = store.reserve(store.lookup(tokens), 21)
    assert reservation is not None
    assert reservation.compute == ((0, 8), (20, 21))
    assert reservation.num_cached_tokens == 12
    assert reservation.copies_in == ()


def test_hole_in_the_middle_is_a_range_of_its_own() -> None:
    store = KVStore(12, 4)
    slots = filled(store, numbers(22))
    found = store.lookup(numbers(22))
    found[1] = found[3] = -1
    reservation = store.reserve(found, 22)
    assert reservation is not None
    assert reservation.compute == ((4, 8), (12, 16), (20, 22))
    assert reservation.slots[[0, 2, 4]].tolist() == slots[[0, 2, 4]].tolist()


@pytest.mark.parametrize(("count", "answers"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_last_token_is_never_looked_up(count: int, answers: int) -> None:
    store = KVStore(8, 4)
    filled(store, numbers(12))
    found = store.lookup(numbers(count))
    assert len(found) == answers
    assert (found >= 0).all()


def test_salt_and_namespace_keep_equal_tokens_apart() -> None:
    store = KVStore(8, 4)
    filled(store, numbers(9), b"a")
    assert store.lookup(numbers(9), b"a").min() >= 0
    assert store.lookup(numbers(9), b"b").tolist() == [-1, -1]
    assert KVStore(8, 4, b"m").chain(b"").grow(numbers(4), 1) != store.chain(b"").grow(numbers(4), 1)


def test_equal_chunks_computed_twice_have_one_identity() -> None:
    store = KVStore(8, 4)
    nothing = NO_SLOTS
    first, second = store.reserve(nothing, 8), store.reserve(nothing, 8)
    assert first is not None
    assert second is not None
    identities = store.chain(b"").grow(numbers(8), 2)
    store.commit(first.slots.tolist(), identities)
    store.commit(second.slots.tolist(), identities)
    assert store.lookup(numbers(9)).tolist() == first.slots.tolist()
    store.release(second.slots)
    assert store.stats().free == 6
    store.release(first.slots)
    assert store.stats().cached == 2


def test_refused_reservation_changes_nothing() -> None:
    store = KVStore(4, 4)
    tokens = numbers(13)
    store.release(filled(store, tokens))
    before = store.lookup(tokens).tolist()
    assert store.reserve(store.lookup(tokens), 20) is None
    assert store.reserve(store.lookup(tokens), 13, keep_free=1) is None
    assert store.lookup(tokens).tolist() == before
    store.check_integrity(np.zeros(4, np.int32))
    # the order of loss is as before, too
    assert store.extend(2) is not None
    assert store.lookup(tokens).tolist() == [-1, *before[1:]]


def test_hits_are_not_reclaimed_for_the_rest_of_the_same_reservation() -> None:
    store = KVStore(4, 4)
    tokens = numbers(16)
    slots = filled(store, tokens)
    store.release(slots)
    longer = np.concatenate((tokens[:8], [99] * 8)).astype(np.int32)
    reservation = store.reserve(store.lookup(longer), 16)
    assert reservation is not None
    assert reservation.slots[:2].tolist() == slots[:2].tolist()
    assert sorted(reservation.slots.tolist()) == [0, 1, 2, 3]


def test_forgotten_chunks_stay_if_others_use_them() -> None:
    store = KVStore(8, 4)
    tokens = numbers(9)
    first = filled(store, tokens)
    second = store.reserve(store.lookup(tokens), 9)
    assert second is not None
    store.forget(first)
    assert store.lookup(tokens).min() >= 0
    store.release(second.slots)
    store.forget(first)
    assert store.lookup(tokens).tolist() == [-1, -1]


def test_release_of_what_is_not_held_is_found() -> None:
    pool = ChunkPool(2)
    slots = pool.take(1)
    assert slots is not None
    pool.drop(slots)
    with pytest.raises(IntegrityError, match="released more often"):
        pool.drop(slots)


def test_integrity_compares_references_with_users() -> None:
    store = KVStore(3, 4)
    filled(store, numbers(5))
    with pytest.raises(IntegrityError, match="users"):
        store.check_integrity(np.zeros(3, np.int32))
