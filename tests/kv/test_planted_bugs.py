"""Each planted bug must be found by the random operations of `driver.py`: a check that cannot fail checks nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cellar.core.errors import CellarError
from cellar.kv import store as store_module
from cellar.kv.hashing import Chain, chunk_identity
from cellar.kv.pool import ChunkPool
from cellar.kv.store import KVStore
from tests.kv.driver import drive, random_case

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Plant] = {}


def bug(plant: Plant) -> Plant:
    BUGS[plant.__name__] = plant
    return plant


@bug
def shared_lookup_takes_no_reference(patch: pytest.MonkeyPatch) -> None:
    def hold(pool: ChunkPool, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            pool._cached.pop(slot, None)
            pool._references[slot] = max(1, pool._references[slot])

    patch.setattr(ChunkPool, "hold", hold)


@bug
def referenced_chunk_stays_reclaimable(patch: pytest.MonkeyPatch) -> None:
    def hold(pool: ChunkPool, slots: np.ndarray) -> None:
        pool._references[slots] += 1

    patch.setattr(ChunkPool, "hold", hold)


@bug
def trailing_chunks_are_lost_first(patch: pytest.MonkeyPatch) -> None:
    drop = ChunkPool.drop
    patch.setattr(ChunkPool, "drop", lambda pool, slots: drop(pool, slots[::-1]))


@bug
def most_recently_used_is_lost_first(patch: pytest.MonkeyPatch) -> None:
    take = ChunkPool.take

    def backwards(pool: ChunkPool, count: int) -> np.ndarray | None:
        for slot in reversed(list(pool._cached)):
            pool._cached.move_to_end(slot)
        return take(pool, count)

    patch.setattr(ChunkPool, "take", backwards)


@bug
def reclaimed_chunk_keeps_its_identity(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChunkPool, "_unname", lambda pool, slot: None)


@bug
def later_equal_chunk_takes_the_identity_over(patch: pytest.MonkeyPatch) -> None:
    def name(pool: ChunkPool, slot: int, identity: bytes) -> bool:
        pool._identity[slot] = identity
        pool._slot[identity] = slot
        return True

    patch.setattr(ChunkPool, "name", name)


@bug
def lookup_stops_at_the_first_hole(patch: pytest.MonkeyPatch) -> None:
    find = ChunkPool.find

    def walk(pool: ChunkPool, identities: list[bytes]) -> np.ndarray:
        found = find(pool, identities)
        return np.where(np.cumsum(found < 0) > 0, -1, found)

    patch.setattr(ChunkPool, "find", walk)


@bug
def last_chunk_is_looked_up_though_its_logits_are_wanted(patch: pytest.MonkeyPatch) -> None:
    def find(store: KVStore, chain: Chain, tokens: np.ndarray) -> np.ndarray:
        count = len(tokens) // store.chunk_size
        return store._pool.find(chain.grow(tokens, count)[:count])

    patch.setattr(KVStore, "find", find)


@bug
def identity_ignores_what_came_before(patch: pytest.MonkeyPatch) -> None:
    from cellar.kv import hashing

    patch.setattr(hashing, "chunk_identity", lambda parent, tokens: chunk_identity(b"", tokens))


@bug
def salt_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_module, "root_identity", lambda namespace, salt: b"root")


@bug
def holes_are_not_computed(patch: pytest.MonkeyPatch) -> None:
    ranges = store_module._ranges
    patch.setattr(store_module, "_ranges", lambda *args: ranges(*args)[-1:])


@bug
def hits_are_counted_as_available(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChunkPool, "num_unreferenced", lambda pool, slots: 0)


@bug
def failed_reservation_keeps_its_hits(patch: pytest.MonkeyPatch) -> None:
    reserve = KVStore.reserve

    def leaky(store: KVStore, found: np.ndarray, num_tokens: int, keep_free: int = 0) -> object:
        reservation = reserve(store, found, num_tokens, keep_free)
        if reservation is None:
            store._pool.hold(found[found >= 0])
        return reservation

    patch.setattr(KVStore, "reserve", leaky)


@bug
def forget_takes_the_identity_of_shared_chunks(patch: pytest.MonkeyPatch) -> None:
    def forget(pool: ChunkPool, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            if pool._identity[slot] is not None:
                pool._unname(slot)

    patch.setattr(ChunkPool, "forget", forget)


@bug
def released_chunk_is_free_and_cached(patch: pytest.MonkeyPatch) -> None:
    drop = ChunkPool.drop

    def twice(pool: ChunkPool, slots: np.ndarray) -> None:
        drop(pool, slots)
        pool._free.extend(slot for slot in slots.tolist() if slot in pool._cached)

    patch.setattr(ChunkPool, "drop", twice)


def hunt(cases: int) -> None:
    for seed in range(cases):
        drive(*random_case(seed))


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises((AssertionError, CellarError, KeyError, IndexError)):
        hunt(100)


def test_without_a_bug_nothing_is_found() -> None:
    hunt(40)
