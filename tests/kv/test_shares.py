"""What a tenant has beyond an equal share of a tier leaves first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.core.messages import CopyResult, Tier
from cellar.kv.conversations import MAX_MEMBERS, PRESENT_SECONDS
from cellar.kv.policy import LeastRecentlyUsed, RetentionValue
from cellar.kv.store import KVStore

CHUNK = 4


def talk(store: KVStore, tenant: str, number: int, now: float, chunks: int = 4, salt: bytes | None = None) -> None:
    """A request of that conversation, from its beginning to its end."""
    tokens = np.arange(chunks * CHUNK + 1, dtype=np.int32) + 1000 * number
    chain = store.chain(tenant.encode() if salt is None else salt)
    chain.grow(tokens, chunks)
    held = store.reserve(store.find(chain, tokens), len(tokens), tenant=tenant, now=now)
    assert held is not None
    store.names.commit(held.slots[:chunks].tolist(), chain, 0, held.conversation)
    store.release(held.slots, held.conversation, now)
    store.check_integrity()


def kept(store: KVStore, tenant: str, number: int, chunks: int = 4, tier: int | None = None) -> int:
    """Chunks of a conversation that are there."""
    tokens = np.arange(chunks * CHUNK + 1, dtype=np.int32) + 1000 * number
    found = store.find(store.chain(tenant.encode()), tokens)
    there = found.tier[:chunks]
    return int((there >= 0).sum()) if tier is None else int((there == tier).sum())


@pytest.mark.parametrize("policy", [LeastRecentlyUsed(), RetentionValue({1: 1.0, 64: 80.0})])
def test_who_sends_much_pushes_out_their_own(policy: LeastRecentlyUsed | RetentionValue) -> None:
    for tenants, left in ((("flood", "few"), 16), (("", ""), 0)):
        store = KVStore(64, CHUNK, policy=policy)
        for number in range(4):
            talk(store, tenants[1], number, now=float(number))
        for number in range(100, 160):
            talk(store, tenants[0], number, now=float(number))
        assert sum(kept(store, tenants[1], number) for number in range(4)) == left, tenants


def test_a_share_that_nobody_uses_is_everybodys() -> None:
    store = KVStore(64, CHUNK)
    talk(store, "few", 0, now=0.0)
    for number in range(100, 130):
        talk(store, "flood", number, now=float(number))
    assert sum(kept(store, "flood", number) for number in range(100, 130)) >= 64 - 4 - 5


def test_a_tenant_that_comes_gets_its_share_back() -> None:
    store = KVStore(64, CHUNK)
    for number in range(100, 130):
        talk(store, "flood", number, now=float(number))
    for number in range(40):
        talk(store, "other", number, now=200.0 + number)
    mine = sum(kept(store, "other", number) for number in range(40))
    theirs = sum(kept(store, "flood", number) for number in range(100, 130))
    assert abs(mine - theirs) <= 8
    assert mine + theirs >= 56


def test_who_has_been_away_for_an_hour_keeps_what_is_worth_it() -> None:
    store = KVStore(64, CHUNK)
    for number in range(4):
        talk(store, "few", number, now=float(number))
    for number in range(100, 160):
        talk(store, "flood", number, now=4.0 + PRESENT_SECONDS + number)
    assert sum(kept(store, "few", number) for number in range(4)) == 0


def test_what_several_share_is_nobodys() -> None:
    """Under one salt: a chunk of two tenants counts for neither, nor does that of a crowd."""
    store = KVStore(64, CHUNK)
    talks = store._shelves.conversations
    for visitor in range(MAX_MEMBERS + 3):
        talk(store, f"tenant {visitor}", 7, now=float(visitor), salt=b"")
    audiences = np.unique(store._shelves.directory.audience)
    assert talks.tenants(audiences[audiences >= 0].astype(np.intp)).tolist() == [-1]
    assert talks.num_tenants == MAX_MEMBERS + 3


def test_a_crowd_of_one_tenant_is_its_own() -> None:
    """Named conversations that begin alike; one of another tenant makes it nobody's."""
    store = KVStore(64, CHUNK)
    talks, tokens = store._shelves.conversations, np.arange(9, dtype=np.int32)

    def visit(name: str, tenant: str) -> list[int]:
        chain = store.chain(b"")
        chain.grow(tokens, 2)
        held = store.reserve(store.find(chain, tokens), 9, name=(b"", name), tenant=tenant)
        assert held is not None
        store.names.commit(held.slots[:2].tolist(), chain, 0, held.conversation)
        store.release(held.slots, held.conversation)
        audiences = np.unique(store._shelves.directory.audience)
        return talks.tenants(audiences[audiences >= 0].astype(np.intp)).tolist()

    for number in range(MAX_MEMBERS + 4):
        assert visit(f"talk {number}", "one") == [0]
    assert visit("talk of another", "two") == [-1]


def test_in_the_host_too_what_is_beyond_a_share_displaces_nothing() -> None:
    store = KVStore(32, CHUNK, tiers={Tier.HOST: 32}, policy=RetentionValue({1: 1.0, 64: 80.0}))

    def moved(now: float) -> None:
        for _ in range(4):
            for order in store.copies(now):
                batch = getattr(order, "batch", order)
                store.commit_copy(CopyResult(batch.number, np.ones(len(batch), np.bool_), 1, 1e-3, None), now)

    for number in range(4):
        talk(store, "few", number, now=float(number))
        moved(float(number))
    for number in range(100, 140):
        talk(store, "flood", number, now=float(number))
        moved(float(number))
    assert sum(kept(store, "few", number) for number in range(4)) == 16


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 6)), min_size=5, max_size=60),
    st.integers(1, 40),
)
def test_nobody_goes_below_a_share_while_another_is_above(talks: list[tuple[int, int, int]], count: int) -> None:
    store = KVStore(60, CHUNK)
    for now, (who, number, chunks) in enumerate(talks):
        talk(store, ("", "a", "b", "c")[who], 10 * who + number, float(now), chunks)
    only, now = store._shelves.leaving.only[0], float(len(talks))
    directory, conversations = store._shelves.directory, store._shelves.conversations

    def held() -> dict[int, int]:
        chunks = np.flatnonzero(only._member)
        whose = conversations.tenants(directory.audience[chunks].astype(np.intp)) if len(chunks) else np.empty(0)
        return {tenant: int((whose == tenant).sum()) for tenant in range(-1, conversations.num_tenants)}

    before, total = held(), len(only)
    left = only.lowest(min(count, total), now)
    after = held()
    assert len({chunk for _, chunk in left}) == len(left) == min(count, total)
    values = [value for value, _ in left]
    assert values == sorted(values)
    share = total / max(1, conversations.num_present(now))
    above = any(number > share for tenant, number in after.items() if tenant >= 0)
    if above and conversations.num_tenants > 1:
        assert all(after[t] == before[t] for t in after if t < 0 or before[t] <= share)
        assert all(after[t] >= share for t in after if t >= 0 and before[t] > share)
