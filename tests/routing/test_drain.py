"""What leaves a draining replica through the remote tier, and what as tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.core.messages import EngineRates, Resting, Tier
from cellar.routing.basis import Basis
from cellar.routing.digest import DigestShape
from cellar.routing.drain import HeldConversation, Move, moves, written
from cellar.routing.prices import LoadPrice, RoutePrices
from tests.routing.fleet import CHUNK

# Chunk k takes (k + 1) ms to compute, 2 to write and 2 to load: those from the fifth on are worth it.
LINE = {CHUNK: 0.001, 100 * CHUNK: 0.1}
WRITE, LOAD = 0.002, 0.002
PRICES = RoutePrices(CHUNK, LINE, {Tier.REMOTE: LoadPrice(0.0, LOAD)}, move=WRITE)


def held(count: int, chance: float = 1.0, first: int = 0) -> HeldConversation:
    return HeldConversation((np.arange(first, count, dtype=np.int32) + 1) * CHUNK, chance)


def gain(conversation: HeldConversation, move: Move) -> float:
    """By one chunk after the other."""
    last = conversation.ends[len(conversation.ends) - move.num_chunks :]
    return sum(0.001 * int(end) / CHUNK - WRITE - LOAD for end in last)


def test_late_chunks_are_written_and_early_ones_computed() -> None:
    (move,) = moves([held(10)], PRICES, 60.0)
    assert move.num_chunks in (6, 7)  # the fourth gains nothing
    assert move.saved == pytest.approx(sum(0.001 * (k + 1) - 0.004 for k in range(4, 10)))


def test_what_is_there_already_is_no_part_of_it() -> None:
    (move,) = moves([held(10, first=8)], PRICES, 60.0)
    assert move.num_chunks == 2
    assert move.saved == pytest.approx(0.009 + 0.010 - 2 * 0.004)


def test_short_conversations_leave_as_tokens() -> None:
    assert [(move.num_chunks, move.saved) for move in moves([held(3), held(0)], PRICES, 60.0)] == [(0, 0.0), (0, 0.0)]


def test_what_is_slower_to_write_than_to_compute_is_not_written() -> None:
    slow = RoutePrices(CHUNK, LINE, {Tier.REMOTE: LoadPrice(0.0, 0.0)}, move=0.05)
    assert [move.num_chunks for move in moves([held(40)], slow, 60.0)] == [0]


def test_a_load_has_to_be_worth_its_beginning() -> None:
    far = RoutePrices(CHUNK, LINE, {Tier.REMOTE: LoadPrice(0.030, LOAD)}, move=WRITE)
    found = moves([held(10), held(40)], far, 60.0)
    assert {move.index: bool(move.num_chunks) for move in found} == {0: False, 1: True}


@pytest.mark.parametrize(
    "prices",
    [RoutePrices(CHUNK, LINE, move=0.002), RoutePrices(CHUNK, LINE, {Tier.REMOTE: LoadPrice(0.0, 0.004)})],
)
def test_without_a_way_all_leave_as_tokens(prices: RoutePrices) -> None:
    assert [move.num_chunks for move in moves([held(90)], prices, 60.0)] == [0]


def test_who_saves_most_for_a_second_goes_first_as_far_as_time_allows() -> None:
    short, long, idle = range(3)
    found = moves([held(20), held(60), held(60, 0.01)], PRICES, 70 * WRITE)
    assert [move.index for move in found] == [long, short, idle]
    assert [move.num_chunks for move in found] == [57, 13, 0] or [move.num_chunks for move in found] == [56, 14, 0]


TALKS = st.lists(st.tuples(st.integers(0, 30), st.floats(0.0, 1.0)), max_size=8)


def check(talks: list[tuple[int, float]], seconds: float, fixed: float) -> None:
    """All leave, what is written pays and fits into the time, and with time enough no other run would save more."""
    prices = RoutePrices(CHUNK, LINE, {Tier.REMOTE: LoadPrice(fixed, LOAD)}, move=WRITE)
    there = [held(count, chance) for count, chance in talks]
    found = moves(there, prices, seconds)
    assert sorted(move.index for move in found) == list(range(len(there)))
    assert sum(move.num_chunks for move in found) * WRITE <= seconds + 1e-9
    for move in found:
        whose = there[move.index]
        whole = gain(whose, move) - fixed
        assert move.saved == pytest.approx(whose.chance * whole if move.num_chunks else 0.0, abs=1e-9)
        assert not move.num_chunks or whole > 0
        if seconds >= WRITE * sum(len(one.ends) for one in there):
            runs = [gain(whose, Move(move.index, n, 0.0)) - fixed for n in range(1, len(whose.ends) + 1)]
            assert (whole if move.num_chunks else 0.0) == pytest.approx(max([0.0, *runs]), abs=1e-9)


@given(TALKS, st.floats(0.0, 0.4), st.floats(0.0, 0.02))
def test_all_leave_and_no_more_is_written_than_time_allows_and_pays(
    talks: list[tuple[int, float]], seconds: float, fixed: float
) -> None:
    check(talks, seconds, fixed)


BASIS = Basis(b"root", CHUNK, LINE, DigestShape({Tier.DEVICE: 1 << 10, Tier.REMOTE: 1 << 10}))


def resting(write: float, load: tuple[float, float] | None, cost: float = 1.0) -> Resting:
    """Chunks 7, 8 ... of conversations 2 and 5, of 20 chunks each, mixed."""
    ends = np.repeat(np.arange(1, 21, dtype=np.int32) * CHUNK, 2)
    users = np.tile(np.array([5, 2], np.int32), 20)
    weights = np.where(users == 5, 0.5, 2.0)
    rates = EngineRates(cost, 0.0, {} if load is None else {Tier.REMOTE: load})
    return Resting(np.arange(7, 47, dtype=np.int32), ends, users, weights, write, rates)


def test_what_an_engine_writes_when_it_goes() -> None:
    there = resting(WRITE, (0.0, LOAD))
    found = written(BASIS, there, 60.0)
    which = found - 7
    half = len(found) // 2
    assert there.users[which[:half]].tolist() == [2] * half, "who is sooner to go on goes first"
    assert set(there.ends[which].tolist()) >= {k * CHUNK for k in range(5, 21)}
    assert there.ends[which].min() >= 4 * CHUNK
    few = written(BASIS, there, 6.5 * WRITE)
    assert (few - 7).tolist() == np.flatnonzero((there.users == 2) & (there.ends > 14 * CHUNK)).tolist()


def test_nothing_is_written_if_computing_is_faster_and_all_if_nothing_is_known() -> None:
    assert len(written(BASIS, resting(WRITE, (0.0, LOAD), cost=1e-3), 60.0)) == 0
    assert len(written(BASIS, resting(0.0, None, cost=0.0), 60.0)) == 40
    nobody = resting(WRITE, (0.0, LOAD))
    none = Resting(*(getattr(nobody, name)[:0] for name in ("chunks", "ends", "users", "weights")), 0.0, nobody.rates)
    assert len(written(BASIS, none, 60.0)) == 0
