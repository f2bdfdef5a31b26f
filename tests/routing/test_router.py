"""The affinity router: where a request goes, and what it remembers of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from types import FrameType

import pytest

from cellar.core.errors import CapacityError
from cellar.core.messages import Tier
from cellar.routing.digest import DigestShape
from cellar.routing.flights import MAX_ENDED
from cellar.routing.prices import LoadPrice, RoutePrices, StepPrice
from cellar.routing.router import AffinityRouter, Why
from tests.routing.fleet import CHUNK, PRICES, SHAPE, Replica, fleet, request


def routed(replicas: Sequence[Replica]) -> AffinityRouter:
    router = AffinityRouter(PRICES, SHAPE)
    for replica in replicas:
        assert router.report(replica.report(whole=True), 0.0)
    return router


def test_a_conversation_goes_where_its_chunks_are() -> None:
    router = routed(fleet(4, r2=range(10)))
    choice = router.choose(request(range(10)), 0.0)
    assert (choice.replica, choice.why) == ("r2", Why.CHUNKS)
    assert choice.seconds == pytest.approx(0.01 / CHUNK, rel=1e-3)  # the last token alone


@pytest.mark.parametrize(("waiting", "there"), [(9, True), (11, False)])
def test_unless_waiting_there_takes_longer_than_computing_elsewhere(waiting: int, there: bool) -> None:
    replicas = fleet(3, r1=range(10))
    replicas[1].waiting = waiting
    choice = routed(replicas).choose(request(range(10)), 0.0)
    assert (choice.replica == "r1") == there
    assert choice.why is (Why.CHUNKS if there else Why.LOAD)


def test_a_queue_empties_while_no_report_comes() -> None:
    replicas = fleet(2, r1=range(10))
    replicas[1].waiting = 20
    assert routed(replicas).choose(request(range(10)), 0.05).replica == "r0"
    assert routed(replicas).choose(request(range(10)), 0.15).replica == "r1"


def test_a_faster_tier_is_nearer_and_one_slower_than_computing_is_none() -> None:
    replicas = fleet(4)
    replicas[1].held = {Tier.HOST: set(range(10))}
    replicas[2].held = {Tier.DISK: set(range(10))}
    replicas[3].held = {Tier.DEVICE: set(range(3))}
    choice = routed(replicas).choose(request(range(10)), 0.0)
    assert choice.replica == "r1"  # 10 ms of loading against 70 ms of computing
    assert choice.seconds == pytest.approx(0.01 + 0.01 / CHUNK, rel=1e-3)
    replicas[3].held = {Tier.DEVICE: set(range(10))}
    assert routed(replicas).choose(request(range(10)), 0.0).replica == "r3"
    replicas[1].held = replicas[3].held = {}
    replicas[2].requests = 1
    assert routed(replicas).choose(request(range(10)), 0.0).replica != "r2"  # what its disk has is worth nothing


def test_chunks_behind_a_hole_count() -> None:
    replicas = fleet(2, r0=[0, 1], r1=[5, 6, 7])
    assert routed(replicas).choose(request(range(8)), 0.0).replica == "r1"


def test_requests_between_two_reports_do_not_herd() -> None:
    router = routed(fleet(8))
    sent = Counter(router.choose(request(range(100 * k, 100 * k + 10)), 0.0).replica for k in range(80))
    assert set(sent.values()) == {10}


def test_equal_prompts_between_two_reports_stay_together_while_that_pays() -> None:
    router = routed(fleet(4))
    first = router.choose(request(range(10)), 0.0)
    assert first.why is Why.NEW
    # 100 ms of waiting for the first against 100 ms of computing all: 10 ms more later it pays to wait.
    assert router.choose(request(range(10)), 0.05).replica == first.replica


def test_what_a_report_has_seen_counts_once() -> None:
    replicas = fleet(2)
    router = routed(replicas)
    choice = router.choose(request(range(10)), 0.0)
    busy = next(r for r in replicas if r.name == choice.replica)
    other = next(r for r in replicas if r is not busy)
    busy.waiting = 10
    router.report(busy.report({"router": choice.number}), 0.0)
    other.waiting = 15
    router.report(other.report(), 0.0)
    assert router.choose(request(range(500, 505)), 0.0).replica == busy.name  # 100 ms against 150: not 200
    router.report(busy.report({"router": 0}), 0.0)
    assert router.choose(request(range(600, 605)), 0.0).replica == other.name


def test_what_a_report_has_not_seen_still_counts() -> None:
    replicas = fleet(2)
    router = routed(replicas)
    choice = router.choose(request(range(10)), 0.0)
    busy = next(r for r in replicas if r.name == choice.replica)
    other = next(r for r in replicas if r is not busy)
    router.report(busy.report({"router": choice.number - 1}), 0.0)  # made while the request was on its way
    other.waiting = 5
    router.report(other.report(), 0.0)
    assert router.choose(request(range(500, 505)), 0.0).replica == other.name  # 50 ms against 100


def test_chunks_that_no_digest_names_yet_are_known() -> None:
    replicas = fleet(3)
    router = routed(replicas)
    choice = router.choose(request(range(10)), 0.0)
    router.started(choice.number, 0.2)
    router.ended(choice.number, 5, 0.3)
    for replica in replicas:
        router.report(replica.report({"router": 1}), 0.4)  # made before, perhaps
    again = router.choose(request(range(11)), 1.0)
    assert (again.replica, again.why) == (choice.replica, Why.CHUNKS)


def test_what_two_digests_do_not_name_is_gone() -> None:
    replicas = fleet(3)
    router = routed(replicas)
    choice = router.choose(request(range(10)), 0.0)
    router.started(choice.number, 0.2)
    router.ended(choice.number, 5, 0.3)
    for at in (1, 2):
        for replica in replicas:
            router.report(replica.report({"router": 1}), at)
    assert router.choose(request(range(10)), 3.0).why is Why.NEW
    assert router.num_in_flight == 1


def test_the_answer_of_a_conversation_is_known_before_a_digest_names_it() -> None:
    replicas = fleet(3, r0=range(40, 48))
    replicas[0].requests = 1
    router = routed(replicas)
    first = router.choose(request(range(10), session=b"talk"), 0.0)
    assert first.replica != "r0"
    router.started(first.number, 0.2)
    router.ended(first.number, 30 * CHUNK, 0.3)
    # Chunks 0 to 39 are its prompt and answer; r0 happens to have the eight behind them.
    again = router.choose(request(range(48), session=b"talk"), 1.0)
    assert (again.replica, again.why) == (first.replica, Why.SESSION)
    router.ended(again.number, 0, 1.5)
    for at in (2, 3):
        for replica in replicas:
            router.report(replica.report({"router": 2}), at)
    assert router.choose(request(range(48), session=b"talk"), 4.0).replica == "r0"  # evicted, the digests say


def test_a_conversation_is_found_by_its_name_alone() -> None:
    router = routed(fleet(5))
    for _ in range(3):
        router.choose(request(range(3)), 0.0)
    first = router.choose(request(range(10), session=b"talk", known=False), 0.0)
    router.started(first.number, 0.1)
    router.ended(first.number, 64, 0.2)
    again = router.choose(request(range(12), session=b"talk", known=False), 60.0)
    assert (again.replica, again.why) == (first.replica, Why.SESSION)
    router.remove(first.replica)
    router.report(Replica(first.replica).report(), 61.0)  # another process of the same name
    assert router.choose(request(range(12), session=b"talk", known=False), 61.0).why is Why.NEW


def test_who_drains_is_chosen_only_if_nobody_else_may_be() -> None:
    replicas = fleet(3, r1=range(10))
    router = routed(replicas)
    router.report(replicas[1].report(draining=True), 0.0)
    assert all(router.choose(request(range(10)), 0.0).replica != "r1" for _ in range(10))
    assert router.choose(request(range(10)), 0.0, among=["r1"]).replica == "r1"


def test_who_is_gone_is_not_chosen_and_its_successor_holds_nothing() -> None:
    replicas = fleet(3, r1=range(10))
    router = routed(replicas)
    sent = router.choose(request(range(10)), 0.0)
    router.remove("r1")
    router.remove("never heard of")
    router.started(sent.number, 0.0)
    router.ended(sent.number, 3, 0.0)
    assert router.num_in_flight == 0
    assert all(router.choose(request(range(10)), 100.0 * k).replica != "r1" for k in range(9))
    assert router.report(Replica("r3").report(), 0.0)  # has the same column
    assert router.choose(request(range(10)), 1e4, among=["r3"]).seconds == pytest.approx(0.1, rel=0.01)
    with pytest.raises(CapacityError, match="no replica"):
        router.choose(request(range(10)), 0.0, among=["r1"])


def test_a_delta_that_does_not_follow_asks_for_a_whole_digest() -> None:
    replica = fleet(1, r0=range(5))[0]
    router = AffinityRouter(PRICES, SHAPE)
    replica.report()  # went elsewhere
    replica.held[Tier.DEVICE] |= set(range(5, 10))
    assert not router.report(replica.report(), 0.0)
    assert router.report(replica.report(whole=True), 0.0)
    assert router.choose(request(range(10)), 0.0).seconds < 0.01


def test_ties_go_to_the_least_loaded_then_to_free_memory_then_in_turn() -> None:
    replicas = fleet(3)
    for replica, requests in zip(replicas, (2, 1, 1), strict=True):
        replica.requests = requests
    replicas[1].free, replicas[2].free = 1000, 2000
    router = routed(replicas)
    assert router.choose(request([1], more=1), 0.0).replica == "r2"
    idle = routed(fleet(4))
    found = []
    for k in range(8):
        choice = idle.choose(request([], more=5), float(k))
        idle.started(choice.number, float(k))
        idle.ended(choice.number, 1, float(k))
        found.append(choice.replica)
    assert Counter(found) == dict.fromkeys(("r0", "r1", "r2", "r3"), 2)


def test_company_slows_decodes_and_full_memory_waits() -> None:
    prices = RoutePrices(CHUNK, {1: 0.01}, {}, StepPrice(0.01, 0.0, 1e-5))
    replicas = [Replica(f"r{k}", prices=prices) for k in range(2)]
    replicas[0].requests, replicas[0].context = 10, 10_000
    router = AffinityRouter(prices, SHAPE)
    for replica in replicas:
        router.report(replica.report(), 0.0)
    assert router.choose(request(range(4)), 0.0).replica == "r1"
    full = [Replica(f"r{k}", prices=prices, requests=1, context=1000) for k in range(2)]
    full[0].free = 10
    for replica in full:
        router.report(replica.report({"router": 1}), 9.0)
    assert router.choose(request(range(4)), 9.0).replica == "r1"


REMOTE = RoutePrices(
    CHUNK,
    {1: 0.01},
    {Tier.HOST: LoadPrice(0.0, 0.001), Tier.REMOTE: LoadPrice(0.0, 0.002)},
    StepPrice(),
    move=0.003,
)
REMOTE_SHAPE = DigestShape({Tier.DEVICE: 1 << 16, Tier.HOST: 1 << 16, Tier.REMOTE: 1 << 16})


def remote_fleet() -> tuple[AffinityRouter, list[Replica]]:
    router = AffinityRouter(REMOTE, REMOTE_SHAPE)
    return router, [Replica(f"r{k}", prices=REMOTE, shape=REMOTE_SHAPE) for k in range(3)]


def test_the_remote_tier_is_everybodys() -> None:
    router, replicas = remote_fleet()
    replicas[0].held = {Tier.REMOTE: set(range(10))}
    replicas[0].waiting = 50
    for replica in replicas:
        router.report(replica.report(), 0.0)
    choice = router.choose(request(range(10)), 0.0)
    assert choice.replica != "r0"
    assert choice.seconds == pytest.approx(10 * 0.002 + 0.01 / CHUNK, rel=0.01)
    assert choice.source is None


@pytest.mark.parametrize("move", [0.003, 0.009, None])
def test_what_another_holds_is_moved_if_that_pays(move: float | None) -> None:
    prices = RoutePrices(REMOTE.chunk_size, REMOTE.compute, REMOTE.load, REMOTE.step, move)
    router = AffinityRouter(prices, REMOTE_SHAPE)
    replicas = [Replica(f"r{k}", prices=prices, shape=REMOTE_SHAPE) for k in range(3)]
    replicas[0].held = {Tier.DEVICE: set(range(10))}
    replicas[0].waiting = 50
    for replica in replicas:
        router.report(replica.report(), 0.0)
    choice = router.choose(request(range(10)), 0.0)
    assert choice.replica != "r0"
    pays = move == 0.003
    assert choice.source == ("r0" if pays else None)
    expected = 10 * (0.003 + 0.002) if pays else 10 * 0.01
    assert choice.seconds == pytest.approx(expected + 0.01 / CHUNK, rel=0.01)


def test_memory_is_bounded() -> None:
    replicas = fleet(2)
    router = routed(replicas)
    before = router.nbytes
    for k in range(MAX_ENDED * 5 // 4 + 50):
        choice = router.choose(request([k, k + 1]), 0.0)
        router.ended(choice.number, 1, 0.0)
    assert router.num_in_flight <= MAX_ENDED + 50
    assert router.nbytes == before
    for k in range(64):
        router.report(Replica(f"more{k}").report(), 0.0)
    assert router.nbytes == 2 * before  # a word more


def calls_of_a_choice(num_replicas: int, num_chunks: int) -> int:
    """Calls of Python and C functions that one choice makes, after another of a prompt as long."""
    router = routed(fleet(num_replicas, r1=range(num_chunks)))
    asked = request(range(num_chunks))
    router.costs(asked, 0.0)
    count = 0

    def tell(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tell)
    try:
        router.choose(asked, 0.0)
    finally:
        sys.setprofile(None)
    return count


def test_a_choice_takes_as_many_calls_for_one_replica_as_for_64_whatever_the_prompt() -> None:
    few, many = calls_of_a_choice(2, 10), calls_of_a_choice(64, 3000)
    assert many <= few + 10 < 600
