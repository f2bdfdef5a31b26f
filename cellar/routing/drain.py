"""Which conversations of a draining replica are written to the remote tier, and which leave as tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cellar.core.messages import Tier
from cellar.routing.prices import RoutePrices


@dataclass(frozen=True, slots=True)
class HeldConversation:
    """A conversation with so many whole chunks at a replica, from its beginning; with `chance` it goes on elsewhere."""

    name: bytes
    num_chunks: int
    chance: float = 1.0


@dataclass(frozen=True, slots=True)
class Move:
    """Of a conversation `num_chunks` are written, the last ones, which are the dearest to compute; 0: tokens only.

    `saved` are the seconds that computing them elsewhere is expected to take more than loading them.
    """

    name: bytes
    num_chunks: int
    first_chunk: int
    saved: float


def moves(held: Sequence[HeldConversation], prices: RoutePrices, seconds: float) -> tuple[Move, ...]:
    """All conversations, in the order in which they are to be written, for which there are `seconds`.

    Written is what the profile says pays: last chunks of which loading from the remote tier takes less than computing.
    Who saves most for a second of writing goes first, as far as time allows. Without a remote tier to write to all
    leave as tokens.
    """
    best = [_move(conversation, prices, conversation.num_chunks) for conversation in held]
    order = sorted(range(len(held)), key=lambda k: -best[k].saved / max(best[k].num_chunks, 1))
    left, found = seconds, []
    for k in order:
        room = held[k].num_chunks if not prices.move else int(left / prices.move + 1e-9)
        move = best[k] if best[k].num_chunks <= room else _move(held[k], prices, room)
        left -= move.num_chunks * (prices.move or 0.0)
        found.append(move)
    return tuple(found)


def _move(conversation: HeldConversation, prices: RoutePrices, room: int) -> Move:
    """The best run of last chunks, of at most `room`."""
    remote, count = prices.load.get(Tier.REMOTE), conversation.num_chunks
    if remote is None or prices.move is None:
        return Move(conversation.name, 0, count, 0.0)
    gains = (prices.chunks(count) - remote.per_chunk)[::-1][: max(room, 0)]
    sums = np.concatenate(([0.0], np.cumsum(gains) - remote.fixed))
    number = int(np.argmax(sums))
    return Move(conversation.name, number, count - number, conversation.chance * float(sums[number]))
