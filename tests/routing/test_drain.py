"""What leaves a draining replica through the remote tier, and what as tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.core.messages import Tier
from cellar.routing.drain import HeldConversation, moves
from cellar.routing.prices import LoadPrice, RoutePrices
from tests.routing.fleet import CHUNK

# Chunk k takes (k + 1) ms to compute, and 4 ms to load: those from the fifth on are worth it.
LINE = {CHUNK: 0.001, 100 * CHUNK: 0.1}
PRICES = RoutePrices(CHUNK, LINE, {Tier.REMOTE: LoadPrice(0.0, 0.004)}, move=0.002)


def test_late_chunks_are_written_and_early_ones_computed() -> None:
    (move,) = moves([HeldConversation(b"a", 10)], PRICES, 60.0)
    assert move.num_chunks in (6, 7)  # the fourth gains nothing
    assert move.first_chunk + move.num_chunks == 10
    assert move.saved == pytest.approx(sum(0.001 * (k + 1) - 0.004 for k in range(4, 10)))


def test_short_conversations_leave_as_tokens() -> None:
    found = moves([HeldConversation(b"a", 3), HeldConversation(b"b", 0)], PRICES, 60.0)
    assert [(move.num_chunks, move.saved) for move in found] == [(0, 0.0), (0, 0.0)]


@pytest.mark.parametrize(
    "prices",
    [RoutePrices(CHUNK, LINE, move=0.002), RoutePrices(CHUNK, LINE, {Tier.REMOTE: LoadPrice(0.0, 0.004)})],
)
def test_without_a_way_all_leave_as_tokens(prices: RoutePrices) -> None:
    assert [move.num_chunks for move in moves([HeldConversation(b"a", 90)], prices, 60.0)] == [0]


def test_who_saves_most_for_a_second_goes_first_as_far_as_time_allows() -> None:
    held = [HeldConversation(b"short", 20), HeldConversation(b"long", 60), HeldConversation(b"idle", 60, 0.01)]
    found = moves(held, PRICES, 70 * 0.002)
    assert [move.name for move in found] == [b"long", b"short", b"idle"]
    assert [move.num_chunks for move in found][1:] == [70 - found[0].num_chunks, 0]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.floats(0.0, 1.0)), max_size=8),
    st.floats(0.0, 0.2),
    st.floats(0.0, 0.02),
)
def test_all_leave_and_no_more_is_written_than_time_allows(
    talks: list[tuple[int, float]], seconds: float, fixed: float
) -> None:
    prices = RoutePrices(CHUNK, LINE, {Tier.REMOTE: LoadPrice(fixed, 0.004)}, move=0.002)
    held = [HeldConversation(b"%d" % k, count, chance) for k, (count, chance) in enumerate(talks)]
    found = moves(held, prices, seconds)
    assert sorted(move.name for move in found) == sorted(conversation.name for conversation in held)
    assert sum(move.num_chunks for move in found) * 0.002 <= seconds + 1e-9
    sizes = {conversation.name: conversation for conversation in held}
    for move in found:
        conversation = sizes[move.name]
        assert move.first_chunk + move.num_chunks == conversation.num_chunks
        gain = sum(0.001 * (k + 1) - 0.004 for k in range(move.first_chunk, conversation.num_chunks)) - fixed
        assert move.saved == pytest.approx(conversation.chance * gain if move.num_chunks else 0.0, abs=1e-9)
        assert move.saved >= 0
    rates = [m.saved / m.num_chunks for m in found if m.num_chunks and sizes[m.name].chance == 1.0]
    assert all(a >= 0 and b >= 0 for a, b in itertools.pairwise(rates))
