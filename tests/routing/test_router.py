"""The affinity router: where a request goes, and what it remembers of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from cellar.core.errors import CapacityError
from cellar.core.messages import Tier
from cellar.routing.digest import DigestShape
from cellar.routing.flights import MAX_ENDED
from cellar.routing.prices import LoadPrice, RoutePrices, StepPrice
from cellar.routing.request import RoutedRequest
from cellar.routing.router import FIRST_OUTPUT, AffinityRouter, Why
from cellar.routing.sessions import Session, Sessions
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


def test_a_prompt_that_was_computed_is_not_waited_for_whatever_a_report_has_seen() -> None:
    replicas = fleet(2)
    router = routed(replicas)
    choice = router.choose(request(range(10)), 0.0)
    busy = next(r for r in replicas if r.name == choice.replica)
    other = next(r for r in replicas if r is not busy)
    router.started(choice.number, 0.0)
    router.report(busy.report({"router": choice.number - 1}), 0.0)  # made while the request was on its way
    other.waiting = 7
    router.report(other.report(), 0.0)
    # Who is there stands still for 50 ms, against 70 ms of waiting: not 100 more.
    assert router.choose(request(range(500, 505)), 0.0).replica == busy.name


@pytest.mark.parametrize("begun", [False, True])
def test_what_has_ended_counts_no_more_whatever_a_report_has_seen(begun: bool) -> None:
    prices = RoutePrices(CHUNK, {1: 0.01}, {}, StepPrice(0.0, 0.001))
    router = AffinityRouter(prices, SHAPE)
    replica = Replica("r0", prices=prices)
    router.report(replica.report(), 0.0)
    asked = request(range(50, 55))
    idle = router.costs(asked, 0.0)["r0"]
    choice = router.choose(request(range(10)), 0.0)
    assert router.costs(asked, 0.0)["r0"] > idle + 0.1
    if begun:
        router.started(choice.number, 0.0)
        assert router.costs(asked, 0.0)["r0"] > idle + 0.1  # who computes it is not asked yet
    for _ in range(2):
        router.ended(choice.number, 0, 0.0)
    router.report(replica.report({"router": 0}), 0.3)
    assert router.costs(asked, 0.3)["r0"] == pytest.approx(idle)


def test_a_request_ends_once() -> None:
    prices = RoutePrices(CHUNK, {1: 0.01}, {}, StepPrice(0.0, 0.001))
    router = AffinityRouter(prices, SHAPE)
    router.report(Replica("r0", requests=5, prices=prices).report(), 0.0)
    asked = request(range(50, 55))
    before = router.costs(asked, 1.0)["r0"]
    choice = router.choose(request(range(10)), 0.0)
    for _ in range(3):
        router.ended(choice.number, 0, 1.0)
    assert router.costs(asked, 1.0)["r0"] == pytest.approx(before)


def test_chunks_of_two_requests_are_known_until_digests_speak_of_both() -> None:
    replicas = fleet(2)
    router = routed(replicas)
    first = router.choose(request(range(10)), 0.0)
    router.started(first.number, 0.2)
    mine = next(r for r in replicas if r.name == first.replica)
    router.report(mine.report({"router": first.number}), 1.0)
    second = router.choose(request(range(12)), 1.0)
    assert second.replica == first.replica
    router.report(mine.report({"router": first.number}), 2.0)  # the first one's are its digest's now, which has none
    third = router.choose(request(range(12)), 3.0)
    assert (third.replica, third.why) == (first.replica, Why.CHUNKS)
    assert third.seconds < 0.01


def test_time_without_work_is_not_saved_up() -> None:
    router = routed(fleet(1))
    router.choose(request(range(10)), 100.0)
    assert router.costs(request(range(20, 25)), 100.0)["r0"] > 0.15


def test_a_chunk_in_two_tiers_is_there_once() -> None:
    replica = Replica("r0", {Tier.DEVICE: set(range(4)), Tier.HOST: set(range(6))})
    choice = routed([replica]).choose(request(range(10)), 0.0)
    assert choice.seconds == pytest.approx(2 * 0.001 + 4 * 0.01, rel=0.02)


def test_later_chunks_cost_what_they_cost_and_a_load_begins_with_its_own_time() -> None:
    prices = RoutePrices(CHUNK, {CHUNK: 0.01, 11 * CHUNK: 0.11}, {Tier.HOST: LoadPrice(0.05, 0.001)})
    cold, warm = (cost(request(range(10)), prices, held={Tier.HOST: held}) for held in (set[int](), set(range(5, 10))))
    assert cold == pytest.approx(sum(0.01 * k for k in range(1, 11)), rel=0.02)
    assert cold - warm == pytest.approx(sum(0.01 * k for k in range(6, 11)) - 0.05 - 5 * 0.001)


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
    assert len(router._flights) == 1


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
    replicas[0].requests = 0
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
    assert len(router._flights) == 0
    assert all(router.choose(request(range(10)), 100.0 * k).replica != "r1" for k in range(9))
    assert router.report(Replica("r3").report(), 0.0)  # has the same column
    assert router.choose(request(range(10)), 1e4, among=["r3"]).seconds == pytest.approx(0.1, rel=0.01)
    with pytest.raises(CapacityError, match="no replica"):
        router.choose(request(range(10)), 0.0, among=["r1"])


def test_who_is_gone_is_not_chosen_however_idle_it_was() -> None:
    replicas = fleet(2)
    replicas[1].requests = 5
    router = routed(replicas)
    router.remove("r0")
    assert router.choose(request(range(3)), 0.0).replica == "r1"
    assert set(router.costs(request(range(3)), 0.0)) == {"r1"}


def test_the_last_token_is_computed_wherever_its_chunk_lies() -> None:
    router = routed(fleet(1, r0=range(4)))
    assert router.choose(request(range(4), more=0), 0.0).seconds == pytest.approx(0.01, rel=0.01)


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


def test_equal_replicas_get_requests_in_turn() -> None:
    replicas = fleet(4)
    router = routed(replicas)
    found = []
    for k in range(8):
        choice = router.choose(request([], more=5), float(k))
        router.ended(choice.number, 1, float(k))
        for replica in replicas:
            router.report(replica.report({"router": choice.number}), float(k))
        found.append(choice.replica)
    assert found[:4] == found[4:]
    assert len(set(found[:4])) == 4


MEMORY = RoutePrices(CHUNK, {1: 0.01}, {}, StepPrice(0.01))


def cost(asked: RoutedRequest, prices: RoutePrices = MEMORY, **replica: Any) -> float:
    """At the only replica."""
    router = AffinityRouter(prices, SHAPE)
    router.report(Replica("r0", prices=prices, **replica).report(), 0.0)
    return router.costs(asked, 0.0)["r0"]


def test_what_does_not_fit_waits_for_who_is_there() -> None:
    asked = request(range(4), more=0)  # 128 tokens, and as many of an answer
    steps = FIRST_OUTPUT * 0.01
    roomy = cost(asked, requests=1, context=1000)
    assert cost(asked, requests=1, context=1000, free=156) == pytest.approx(roomy + 100 / 1000 * steps)
    assert cost(asked, requests=1, context=1000, free=100, cached=56) == pytest.approx(roomy + 100 / 1000 * steps)
    assert cost(asked, requests=1, context=1000, free=56, cached=200) == pytest.approx(roomy)


def test_what_an_ended_request_held_makes_room() -> None:
    router = AffinityRouter(MEMORY, SHAPE)
    router.report(Replica("r0", prices=MEMORY, requests=1, context=1000, free=300).report(), 0.0)
    asked = request(range(50, 54), more=0)
    before = router.costs(asked, 0.0)["r0"]
    choice = router.choose(request(range(4), more=0), 0.0)
    assert router.costs(asked, 9.0)["r0"] > before + 0.01
    router.started(choice.number, 0.1)
    router.ended(choice.number, 0, 0.2)
    assert router.costs(asked, 9.0)["r0"] == pytest.approx(before)


def test_an_answer_is_as_long_as_those_before_it_and_as_it_may_be() -> None:
    router = AffinityRouter(MEMORY, SHAPE)
    router.report(Replica("r0", prices=MEMORY).report(), 0.0)
    asked = request([], more=5)
    prompt = 5 / CHUNK * 0.01
    assert router.costs(asked, 0.0)["r0"] == pytest.approx(prompt + FIRST_OUTPUT * 0.01)
    assert router.costs(replace(asked, max_tokens=7), 0.0)["r0"] == pytest.approx(prompt + 7 * 0.01)
    for _ in range(400):
        router.ended(router.choose(asked, 0.0).number, 20, 0.0)
    assert router.costs(asked, 0.0)["r0"] == pytest.approx(prompt + 20 * 0.01, rel=0.01)
    assert router.costs(replace(asked, max_tokens=90), 0.0)["r0"] == pytest.approx(prompt + 20 * 0.01, rel=0.01)


def test_the_conversations_that_were_heard_of_last_are_remembered() -> None:
    sessions = Sessions(capacity=3)
    for k in (0, 1, 2, 0, 3):
        sessions.note(b"%d" % k, Session(1, k, 1))
    assert len(sessions) == 3
    assert [sessions.get(b"%d" % k) is not None for k in range(4)] == [True, False, True, True]


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


# Llama-3-8B on an H200: 32 tokens of a prompt take 0.8 ms; a step of 40 rows of 1,100 tokens takes 6 ms.
H200 = RoutePrices(CHUNK, {1: 8e-4, 2: 8e-4}, {}, StepPrice(0.004, 1e-5, 3.3e-8))


def moderate(home: int = 40, waiting: int = 0, draining: bool = False) -> AffinityRouter:
    """Four replicas of which one, with so many requests, has 30 chunks; the others have 36 requests each."""
    router = AffinityRouter(H200, SHAPE)
    for replica in fleet(4, r0=range(30)):
        is_home = replica.name == "r0"
        replica.prices, replica.requests = H200, home if is_home else 36
        replica.context = 1100 * replica.requests
        replica.waiting = waiting if is_home else 0
        replica.__post_init__()
        router.report(replica.report(draining=draining and is_home), 0.0)
    return router


@pytest.mark.parametrize("home", [36, 40, 44, 52])
def test_a_few_requests_more_do_not_send_a_conversation_from_its_chunks(home: int) -> None:
    """Longer steps cost it up to 150 ms more than elsewhere, but there its prompt would hold up 36 others for 24 ms."""
    choice = moderate(home).choose(request(range(30), more=20), 0.0)
    assert (choice.replica, choice.why) == ("r0", Why.CHUNKS)


def test_a_crowded_or_draining_replica_is_left_by_its_conversations() -> None:
    asked = request(range(30), more=20)
    for router in (moderate(200), moderate(40, waiting=2000), moderate(draining=True)):
        assert router.choose(asked, 0.0).replica != "r0"


def test_a_new_prompt_goes_where_it_holds_up_the_fewest() -> None:
    """It waits 40 ms at the others; at r0 16 more would stand still for 24 ms."""
    router = AffinityRouter(H200, SHAPE)
    for name, requests, waiting in (("r0", 52, 0), ("r1", 36, 50)):
        replica = Replica(name, requests=requests, waiting=waiting, prices=H200)
        router.report(replica.report(), 0.0)
    assert router.choose(request(range(100, 130)), 0.0).replica == "r1"


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
    assert len(router._flights) <= MAX_ENDED + 50
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
