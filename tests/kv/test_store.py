"""KVStore against a model that knows only token sequences, and its answers one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.core.errors import IntegrityError
from cellar.core.messages import Tier
from cellar.kv.identity import Chain
from cellar.kv.pool import SlotPool
from cellar.kv.states import PRIVATE
from cellar.kv.store import KVStore, Reservation, Residency
from tests.kv.driver import KINDS, drive

byte = st.integers(0, 255)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from((3, 6, 9, 16, 30)),
    st.lists(st.tuples(st.sampled_from(KINDS), byte, byte, byte), max_size=50),
    st.booleans(),
)
def test_random_operations_agree_with_the_model(
    num_slots: int, ops: list[tuple[str, int, int, int]], values: bool
) -> None:
    drive(num_slots, ops, values)


def numbers(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def find(store: KVStore, tokens: np.ndarray, salt: bytes = b"") -> Residency:
    return store.find(store.chain(salt), tokens)


def slots(store: KVStore, tokens: np.ndarray, salt: bytes = b"") -> list[int]:
    """Of the whole chunks before the last token."""
    return find(store, tokens, salt).slot.tolist()[: (len(tokens) - 1) // store.chunk_size]


def grown(store: KVStore, tokens: np.ndarray, salt: bytes = b"") -> Chain:
    chain = store.chain(salt)
    chain.grow(tokens, len(tokens) // store.chunk_size)
    return chain


def filled(store: KVStore, tokens: np.ndarray, salt: bytes = b"", **more: object) -> Reservation:
    """Reserve, commit all whole chunks."""
    reservation = store.reserve(find(store, tokens, salt), len(tokens), **more)  # type: ignore[arg-type]
    assert reservation is not None
    whole = len(tokens) // store.chunk_size
    store.names.commit(reservation.slots[:whole].tolist(), grown(store, tokens, salt), 0, reservation.conversation)
    return reservation


def release(store: KVStore, reservation: Reservation, now: float = 0.0) -> None:
    store.release(reservation.slots, reservation.conversation, now)


def test_leading_chunks_are_lost_first_and_the_answer_goes_on_past_them() -> None:
    store = KVStore(6, 4)
    tokens = numbers(21)
    held = filled(store, tokens)
    release(store, held)
    assert slots(store, tokens) == held.slots[:5].tolist()
    taken = store.extend(3)  # one free slot, then the two leading chunks
    assert taken is not None
    assert slots(store, tokens) == [-1, -1, *held.slots[2:5].tolist()]
    store.release(taken, store.reserve(None, 0).conversation)  # type: ignore[union-attr]
    reservation = store.reserve(find(store, tokens), 21)
    assert reservation is not None
    assert reservation.compute == ((0, 8), (20, 21))
    assert reservation.num_cached_tokens == 12


def test_a_full_device_is_cleared_for_a_few_requests_at_once_of_what_would_go_next() -> None:
    """A choice costs much the same for one chunk or for many, so not every request pays for one."""
    store = KVStore(16 * 64, 4)
    prompts = [np.array([k, *range(3)], np.int32) for k in range(store.num_available)]
    for now, prompt in enumerate(prompts):
        release(store, filled(store, prompt, now=float(now)), float(now))
    assert store.stats().free == 0
    assert store.extend(1, 2_000.0) is not None
    assert store.stats().free == 16
    there = [store.find(store.chain(b""), np.append(prompt, np.int32(0))).num_tokens for prompt in prompts]
    assert there == [0] * 17 + [4] * (len(prompts) - 17)
    store.check_integrity()


def test_hole_in_the_middle_is_a_range_of_its_own() -> None:
    store = KVStore(12, 4)
    held = filled(store, numbers(22))
    store.forget(held.slots[[1, 3]])
    reservation = store.reserve(find(store, numbers(22)), 22)
    assert reservation is not None
    assert reservation.compute == ((4, 8), (12, 16), (20, 22))
    assert reservation.slots[[0, 2, 4]].tolist() == held.slots[[0, 2, 4]].tolist()


@pytest.mark.parametrize(("count", "answers"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_last_token_is_never_looked_up(count: int, answers: int) -> None:
    store = KVStore(8, 4)
    filled(store, numbers(12))
    found = find(store, numbers(count))
    assert found.num_tokens == 4 * answers
    assert (found.slot >= 0).tolist() == [True] * answers + [False], "and behind them a tail is looked for"


def test_salt_and_root_keep_equal_tokens_apart() -> None:
    store = KVStore(8, 4)
    filled(store, numbers(9), b"a")
    assert min(slots(store, numbers(9), b"a")) >= 0
    assert slots(store, numbers(9), b"b") == [-1, -1]
    assert KVStore(8, 4, b"m").chain(b"").grow(numbers(4), 1) != store.chain(b"").grow(numbers(4), 1)


def test_equal_chunks_computed_twice_have_one_identity() -> None:
    store = KVStore(8, 4)
    first, second = store.reserve(None, 8), store.reserve(None, 8)
    assert first is not None
    assert second is not None
    for held in (first, second):
        store.names.commit(held.slots.tolist(), grown(store, numbers(8)), 0, held.conversation)
    assert slots(store, numbers(9)) == first.slots.tolist()
    release(store, second)
    assert store.stats().free == 6
    release(store, first)
    assert store.stats().cached == 2


def test_refused_reservation_changes_nothing() -> None:
    store = KVStore(4, 4)
    tokens = numbers(13)
    release(store, filled(store, tokens))
    before = slots(store, tokens)
    assert store.reserve(find(store, tokens), 20) is None
    assert store.reserve(find(store, tokens), 13, keep_free=1) is None
    assert slots(store, tokens) == before
    store.check_integrity(np.zeros(4, np.int32))
    # the order of loss is as before, too
    assert store.extend(2) is not None
    assert slots(store, tokens) == [-1, *before[1:]]


def test_hits_are_not_reclaimed_for_the_rest_of_the_same_reservation() -> None:
    store = KVStore(4, 4)
    tokens = numbers(16)
    held = filled(store, tokens)
    release(store, held)
    longer = np.concatenate((tokens[:8], [99] * 8)).astype(np.int32)
    reservation = store.reserve(find(store, longer), 16)
    assert reservation is not None
    assert reservation.slots[:2].tolist() == held.slots[:2].tolist()
    assert sorted(reservation.slots.tolist()) == [0, 1, 2, 3]


def test_forgotten_chunks_stay_if_others_use_them() -> None:
    store = KVStore(8, 4)
    tokens = numbers(9)
    first = filled(store, tokens)
    second = store.reserve(find(store, tokens), 9)
    assert second is not None
    store.forget(first.slots)
    assert min(slots(store, tokens)) >= 0
    release(store, second)
    store.forget(first.slots)
    assert slots(store, tokens) == [-1, -1]


def test_a_change_of_state_that_the_table_does_not_know_is_refused() -> None:
    pool = SlotPool(Tier.DEVICE, 2)
    with pytest.raises(IntegrityError, match="cannot go from FREE to RESIDENT"):
        pool.move(np.array([1], np.int32), 3)
    taken = pool.take(1, PRIVATE)
    pool.hold(taken)
    pool.drop(taken)
    with pytest.raises(IntegrityError, match="released more often"):
        pool.drop(taken)


def test_integrity_compares_references_with_users() -> None:
    store = KVStore(3, 4)
    filled(store, numbers(5))
    with pytest.raises(IntegrityError, match="users"):
        store.check_integrity(np.zeros(3, np.int32))
