"""Which chunks of a replica that goes are written to the remote tier, and which conversations leave as tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cellar.core.messages import IntArray, Resting, Tier
from cellar.routing.basis import Basis
from cellar.routing.prices import RoutePrices


@dataclass(frozen=True, slots=True, eq=False)
class HeldConversation:
    """Chunks that a replica alone has of a conversation: `ends`, ascending, [n], are their ends in tokens of context.

    `chance` says how likely it goes on elsewhere, compared with others.
    """

    ends: IntArray
    chance: float = 1.0


@dataclass(frozen=True, slots=True)
class Move:
    """Of conversation number `index` the last `num_chunks` are written, which are the dearest to compute; 0: it leaves
    as tokens only.

    `saved`: seconds that computing them elsewhere takes more than writing and loading them, times the chance.
    """

    index: int
    num_chunks: int
    saved: float


def moves(held: Sequence[HeldConversation], prices: RoutePrices, seconds: float) -> tuple[Move, ...]:
    """All conversations, in the order in which they are to be written, for which there are `seconds`.

    Written is what the profile says pays: last chunks of which writing them and loading them from the remote tier takes
    less than computing. Who saves most for a second of writing goes first, as far as time allows. Without a remote tier
    to write to all leave as tokens.
    """
    best = [_move(k, conversation, prices, len(conversation.ends)) for k, conversation in enumerate(held)]
    left, found = seconds, []
    for move in sorted(best, key=lambda move: -move.saved / max(move.num_chunks, 1)):
        if prices.move and move.num_chunks > (room := int(left / prices.move + 1e-9)):
            move = _move(move.index, held[move.index], prices, room)
        left -= move.num_chunks * (prices.move or 0.0)
        found.append(move)
    return tuple(found)


def written(basis: Basis, resting: Resting, seconds: float) -> IntArray:
    """The chunks of an engine that goes which are to be written within `seconds`, in that order.

    Prices are what the engine has learned. As long as it has written nothing, a chunk's writing takes what its loading
    does.
    """
    prices = basis.prices(resting.rates)
    remote = prices.load.get(Tier.REMOTE)
    if remote is not None:
        prices = replace(prices, move=resting.write or remote.per_chunk)
    order = np.lexsort((resting.ends, resting.users))
    first = np.flatnonzero(np.diff(resting.users[order], prepend=-1))
    parts = np.split(order, first[1:])
    held = [HeldConversation(resting.ends[part], float(resting.weights[part[0]])) for part in parts if len(part)]
    last = [parts[move.index][len(parts[move.index]) - move.num_chunks :] for move in moves(held, prices, seconds)]
    chosen: IntArray = resting.chunks[np.concatenate([np.empty(0, np.intp), *last])]
    return chosen


def _move(index: int, conversation: HeldConversation, prices: RoutePrices, room: int) -> Move:
    """The best run of last chunks, of at most `room`."""
    remote = prices.load.get(Tier.REMOTE)
    if remote is None or prices.move is None:
        return Move(index, 0, 0.0)
    gains = (prices.at(conversation.ends) - remote.per_chunk - prices.move)[::-1][: max(room, 0)]
    sums = np.concatenate(([0.0], np.cumsum(gains) - remote.fixed))
    number = int(np.argmax(sums))
    return Move(index, number, conversation.chance * float(sums[number]))
