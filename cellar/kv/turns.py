"""NextTurns: how likely a conversation goes on, learned from those seen so far (Pensieve §3.4.3.1, above its (3.4)).

What is learned is the hazard: of conversations that have had so many turns and been idle so long, how many go on per
second of waiting. It is returns / seconds waited, by bucket of idle time and by number of turns. Seconds of those that
never came back, or were forgotten, count as far as they were watched; so few returns are told from few observations.

What is used looks ahead: of all spans of time that one could go on waiting, the one in which most come back per second
of waiting. Who has just been answered is still reading; that is no reason to drop what is asked for in a minute.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_BUCKETS = 14
"""Of idle time: [0, 2), [2, 4), [4, 8) ... seconds, the last without an end."""

NUM_GROUPS = 7
"""Of turns so far: up to 1, 2, 3-4, 5-8, 9-16, 17-32, more."""

PRIOR_RETURNS = 1.0
"""What is assumed before anything is seen weighs as much as so many returns: equation 3.4, a hazard of 1 / T."""

_BEGINS = np.concatenate(([0.0], 2.0 ** np.arange(1, NUM_BUCKETS)))
_ENDS = np.append(_BEGINS[1:], np.inf)
_PRIOR = 1.0 / np.sqrt(np.maximum(_BEGINS, 1.0) * np.append(_BEGINS[1:], 2 * _BEGINS[-1]))


class _Idle(NamedTuple):
    """A conversation that waits for its user since `start`, after a number of turns in `group`."""

    conversation: int
    group: int
    start: float


class NextTurns:
    """Told of every end and beginning of a turn; times never go back. A few additions each, whoever is idle."""

    def __init__(self) -> None:
        shape = (NUM_GROUPS, NUM_BUCKETS)
        self._returns = np.zeros(shape)
        self._waited = np.zeros(shape)  # by idle times that have left the bucket
        self._present = np.zeros(shape)  # how many are in the bucket now
        self._starts = np.zeros(shape)  # the sum of their starts
        self._idle: dict[int, tuple[_Idle, int]] = {}  # conversation -> idle time, bucket
        # Who enters a bucket first leaves it first; entries of those that have gone on stay until then.
        self._queues: tuple[deque[_Idle], ...] = tuple(deque() for _ in range(NUM_BUCKETS - 1))
        self._now = 0.0
        self._chance = best_ahead(np.tile(_PRIOR, (NUM_GROUPS, 1)))
        self._news = 0

    def ended(self, conversation: int, turns: int, now: float) -> None:
        """A turn, the conversation's so-many-th, has been answered: it waits for its user."""
        self._advance(now)
        idle = _Idle(conversation, group_of(turns), now)
        self._enter(idle, 0)

    def began(self, conversation: int, now: float) -> None:
        """The next turn of a conversation; one that did not wait is ignored."""
        self._advance(now)
        if conversation in self._idle:
            idle, bucket = self._leave(conversation)
            self._returns[idle.group, bucket] += 1

    def forgotten(self, conversation: int) -> None:
        """Nothing is known of a conversation any more: whether it would have gone on is not seen."""
        if conversation in self._idle:
            self._leave(conversation)

    def chance(self, idle: Floats, turns: NDArray[np.integer]) -> Floats:
        """Returns per second of waiting on, of those idle for so many seconds after so many turns; any shape."""
        if self._news * 16 > len(self._idle) + 16:
            self._chance, self._news = best_ahead(self._hazard()), 0
        groups = np.minimum(np.ceil(np.log2(np.maximum(turns, 1))).astype(np.intp), NUM_GROUPS - 1)
        # Known at the beginnings of buckets; in between it changes as a power of the time.
        place = np.log2(np.clip(idle, 1.0, _BEGINS[-1]))
        below = np.minimum(place.astype(np.intp), NUM_BUCKETS - 2)
        share = place - below
        found: Floats = self._chance[groups, below] ** (1 - share) * self._chance[groups, below + 1] ** share
        return found

    def observed(self) -> tuple[Floats, Floats]:
        """Returns, and seconds waited up to the last event: [groups of turns, buckets of idle time] each."""
        present = self._present * (self._now - _BEGINS) - self._starts
        return self._returns.copy(), self._waited + np.maximum(present, 0.0)

    def _hazard(self) -> Floats:
        """A group without observations is like all groups; a bucket without any follows equation 3.4, but for a factor:
        as much as all returns are more or fewer than it would have.
        """
        returns, waited = self.observed()
        weight = PRIOR_RETURNS
        assumed = _PRIOR * (returns.sum() + weight) / ((waited.sum(0) * _PRIOR).sum() + weight)
        together = (returns.sum(0) + weight) / (waited.sum(0) + weight / assumed)
        found: Floats = (returns + weight) / (waited + weight / together)
        return found

    def _advance(self, now: float) -> None:
        """Move on whoever has left a bucket meanwhile."""
        self._now = now
        self._news += 1
        for bucket, queue in enumerate(self._queues):
            while queue and now - queue[0].start >= _ENDS[bucket]:
                idle = queue.popleft()
                held = self._idle.get(idle.conversation)
                if held is not None and held[0] is idle:
                    self._exit(idle, bucket, idle.start + _ENDS[bucket])
                    self._enter(idle, bucket + 1)

    def _enter(self, idle: _Idle, bucket: int) -> None:
        self._present[idle.group, bucket] += 1
        self._starts[idle.group, bucket] += idle.start
        self._idle[idle.conversation] = idle, bucket
        if bucket < len(self._queues):
            self._queues[bucket].append(idle)

    def _exit(self, idle: _Idle, bucket: int, at: float) -> None:
        self._present[idle.group, bucket] -= 1
        self._starts[idle.group, bucket] -= idle.start
        self._waited[idle.group, bucket] += at - idle.start - _BEGINS[bucket]

    def _leave(self, conversation: int) -> tuple[_Idle, int]:
        idle, bucket = self._idle.pop(conversation)
        self._exit(idle, bucket, self._now)
        return idle, bucket


def best_ahead(hazard: Floats) -> Floats:
    """For each bucket the most returns per second of waiting, over all ends of waiting: [groups, buckets] each.

    From the begin of bucket b to the end of bucket e the expected returns are the sum of p_i = S_i (1 - exp(-h_i w_i)),
    and the expected seconds that of p_i / h_i, where S_i have not returned before bucket i, which is w_i long.
    """
    best = np.zeros_like(hazard)
    widths = _ENDS - _BEGINS
    for begin in range(NUM_BUCKETS):
        left, returns, seconds = np.ones(len(hazard)), np.zeros(len(hazard)), np.zeros(len(hazard))
        for rate, width in zip(hazard.T[begin:], widths[begin:].tolist(), strict=True):
            share = left * -np.expm1(-rate * width)
            left, returns, seconds = left - share, returns + share, seconds + share / rate
            best[:, begin] = np.maximum(best[:, begin], returns / seconds)
    return best


def group_of(turns: int) -> int:
    """The group of a number of turns."""
    return min((max(turns, 1) - 1).bit_length(), NUM_GROUPS - 1)
