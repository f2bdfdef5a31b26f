"""Conversations that are forgotten: found nowhere, whatever is under way; what others share stays."""

from __future__ import annotations

import numpy as np
import pytest

from cellar.core.messages import CopyResult, Tier
from cellar.kv.conversations import MAX_MEMBERS
from tests.kv.test_tiers import CHUNK, Bench


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def forget(bench: Bench, name: str) -> None:
    bench.store.forget_conversations(bench.store.named(name))
    bench.store.check_integrity()


def found(bench: Bench, held: list[int]) -> int:
    """Tokens that a request for `held` and one more would not compute."""
    store = bench.store
    return store.find(store.chain(b""), np.array([*held, 999], np.int32)).num_tokens


def memory(bench: Bench, name: str) -> dict[Tier, int]:
    return bench.store.memory(bench.store.named(name))


def spread(bench: Bench, name: str, count: int) -> list[int]:
    """Serve a conversation, and others until some of it lies on the host alone; -> its tokens."""
    mine = tokens(0, count)
    bench.serve(mine, name)
    for k in range(1, 4):
        bench.answer()
        bench.serve(tokens(100 * k, 8), f"other {k}")
    bench.answer()
    assert memory(bench, name)[Tier.HOST] > 0
    return mine


def test_memory_is_counted_where_it_lies() -> None:
    bench = Bench(device=8, host=16)
    bench.serve(tokens(0, 22), "mine")
    assert memory(bench, "mine") == {Tier.DEVICE: 22, Tier.HOST: 0}
    bench = Bench(device=8, host=16)
    mine = spread(bench, "mine", 22)
    assert sum(memory(bench, "mine").values()) == found(bench, mine)
    assert memory(bench, "nobody") == {Tier.DEVICE: 0, Tier.HOST: 0}


def test_nothing_is_recalled_of_what_was_said() -> None:
    """Tokens are held, too, so that the next turn is hashed sooner."""
    bench = Bench(device=64, host=0)
    bench.serve(tokens(0, 10 * CHUNK), "mine")
    assert len(bench.store._recalled) > 8 * CHUNK
    forget(bench, "mine")
    assert len(bench.store._recalled) == 0


@pytest.mark.parametrize("host", [0, 16])
def test_what_is_forgotten_is_found_in_no_tier(host: int) -> None:
    bench = Bench(device=8, host=host)
    mine = tokens(0, 22)
    if host:
        spread(bench, "mine", 22)
    else:
        bench.serve(mine, "mine")
    forget(bench, "mine")
    assert found(bench, mine) == 0
    assert not any(memory(bench, "mine").values())
    assert not host or found(bench, tokens(300, 8)) == 8
    before = bench.store.tier_stats()
    assert [tier.referenced for tier in before] == [0] * len(before)
    bench.serve(mine, "mine")  # and the name may begin anew
    assert found(bench, mine) == 22


def test_what_another_conversation_shares_stays_until_it_goes_too() -> None:
    bench = Bench(device=16, host=16)
    shared = tokens(0, 12)
    for name in ("a", "b", "c"):
        bench.serve([*shared, *(ord(name),) * 8], name)
    forget(bench, "a")
    assert found(bench, [*shared, *(ord("a"),) * 8]) == 12
    assert found(bench, [*shared, *(ord("b"),) * 8]) == 20
    forget(bench, "b")
    assert found(bench, [*shared, *(ord("c"),) * 8]) == 20
    forget(bench, "c")
    assert found(bench, shared) == 0


def test_a_crowds_chunks_stay() -> None:
    """Nobody knows any more whose they are: they are everybody's."""
    bench = Bench(device=64, host=0)
    shared = tokens(0, 2 * CHUNK)
    for k in range(MAX_MEMBERS + 1):
        bench.serve([*shared, 50 + k, 50 + k, 50 + k, 50 + k], f"t{k}")
    forget(bench, "t0")
    assert found(bench, shared) == 2 * CHUNK
    assert found(bench, [*shared, 50, 50, 50, 50]) == 2 * CHUNK


def test_a_copy_under_way_brings_nothing_back() -> None:
    bench = Bench(device=8, host=16)
    bench.serve(tokens(0, 28), "mine")
    held = bench.open(tokens(100, 12), "other")
    batches = bench.store.copies(bench.now)
    bench.close(tokens(100, 12), held)
    out = [batch for batch in batches if batch.target is Tier.HOST]
    assert out
    forget(bench, "mine")
    for batch in batches:
        bench.store.commit_copy(CopyResult(batch.number, np.full(len(batch), True)))
        bench.store.check_integrity()
    bench.answer()
    assert found(bench, tokens(0, 28)) == 0


def test_a_load_under_way_ends_in_its_requests_own_memory() -> None:
    bench = Bench(device=8, host=32)
    mine = spread(bench, "mine", 24)
    held = bench.open([*mine, 7], "mine")
    assert held.awaits
    forget(bench, "mine")
    bench.answer()
    assert found(bench, mine) == 0
    bench.store.release(held.slots, held.conversation, bench.now)
    bench.store.check_integrity()
    assert found(bench, mine) == 0
