"""Reports: what an engine says of itself, and that it crosses a wire."""

from __future__ import annotations

import numpy as np
import pytest

from cellar.core.config import ScheduleConfig
from cellar.core.errors import ConfigError
from cellar.core.messages import Request, Tier
from cellar.core.sampling import SamplingParams
from cellar.kv.identity import owner_identity
from cellar.routing.digest import keys_of
from cellar.routing.report import ReplicaReport
from cellar.routing.request import RoutedRequest
from cellar.routing.router import AffinityRouter, Why
from cellar.schedule.steps.scheduler import StepScheduler
from tests.routing.fleet import CHUNK, PRICES, SHAPE, Replica, request


@pytest.mark.parametrize("whole", [True, False])
def test_a_report_crosses_a_wire(whole: bool) -> None:
    replica = Replica("r0", {Tier.DEVICE: {1, 2}, Tier.HOST: {3}}, waiting=3, requests=4, context=5)
    replica.report()
    replica.held[Tier.DEVICE] = {2, 7}
    sent = replica.report({"front": 12}, whole=whole, draining=True)
    came = ReplicaReport.from_bytes(sent.to_bytes())
    for name in ReplicaReport.__dataclass_fields__:
        if name != "digest":
            assert getattr(came, name) == getattr(sent, name)
    assert (came.digest.version, came.digest.base) == (sent.digest.version, sent.digest.base)
    for tier, part in sent.digest.tiers.items():
        assert np.array_equal(came.digest.tiers[tier], part)


@pytest.mark.parametrize("data", [b"", b"\n", b"{}\n", b'{"sizes": {"NOWHERE": 0}, "version": 1, "base": null}\n'])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="report"):
        ReplicaReport.from_bytes(data)
    whole = Replica("r0").report().to_bytes()
    with pytest.raises(ConfigError, match="report"):
        ReplicaReport.from_bytes(whole + b"more")


def scheduler(num_slots: int = 64) -> StepScheduler:
    config = ScheduleConfig(max_num_batched_tokens=64)
    return StepScheduler(num_slots, 8, CHUNK, 64 * CHUNK, config, root=b"root", tiers={Tier.HOST: 8})


def asked(id: str, tokens: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Request:
    return Request(id, tokens, SamplingParams(max_tokens=4), frozenset(), 4, salt=b"salt")


def test_a_scheduler_says_what_waits_and_what_it_holds() -> None:
    engine = scheduler()
    first = np.arange(5 * CHUNK + 1, dtype=np.int32)
    engine.add(asked("a", first), 0.0)
    engine.add(asked("b", np.arange(1000, 1040, dtype=np.int32)), 0.0)
    before = engine.outlook()
    assert before.requests == 2
    assert before.context_tokens == len(first) + 40
    assert before.pending.tolist() == [[0, len(first)], [0, 40]]
    assert before.free_tokens == before.total_tokens == 64 * CHUNK
    plan = engine.plan(0, 0.0)
    assert plan is not None
    after = engine.outlook()
    assert PRICES.ranges(after.pending) < PRICES.ranges(before.pending)
    assert after.free_tokens < before.free_tokens


def test_keys_are_those_that_a_front_computes() -> None:
    """One place names chunks: a router finds what a store has, and no other salt's."""
    engine = scheduler()
    store = engine._store
    tokens = np.arange(4 * CHUNK, dtype=np.int32)
    chain = store.chain(b"salt")
    reservation = store.reserve(None, len(tokens))
    assert reservation is not None
    chain.grow(tokens, 4)
    store.names.commit(reservation.slots.tolist(), chain, 0, reservation.conversation)
    store.release(reservation.slots, reservation.conversation)
    held = engine.outlook()
    mine = RoutedRequest.of(b"root", b"salt", np.append(tokens, np.int32(7)), CHUNK)
    assert set(keys_of(mine.chunks).tolist()) == set(held.keys[Tier.DEVICE].tolist())
    assert len(RoutedRequest.of(b"root", b"salt", tokens, CHUNK).chunks) == 3  # the last token is always computed
    other = RoutedRequest.of(b"root", b"pepper", np.append(tokens, np.int32(7)), CHUNK)
    assert not set(keys_of(other.chunks).tolist()) & set(held.keys[Tier.DEVICE].tolist())
    engine.add(asked("again", np.append(tokens, np.int32(7))), 0.0)
    assert engine.outlook().pending.tolist() == [[4 * CHUNK, 4 * CHUNK + 1]]


def test_sessions_of_two_tenants_with_one_name_are_two() -> None:
    router = AffinityRouter(PRICES, SHAPE)
    for k in range(2):
        router.report(Replica(f"r{k}").report(), 0.0)
    one, two = owner_identity(b"one", "talk"), owner_identity(b"two", "talk")
    first = router.choose(request(range(4), session=one, known=False), 0.0)
    router.ended(first.number, 8, 0.1)
    assert router.choose(request(range(5), session=two, known=False), 9.0).why is Why.NEW
    assert router.choose(request(range(5), session=one, known=False), 9.0).why is Why.SESSION
