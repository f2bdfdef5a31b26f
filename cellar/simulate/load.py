"""What is sent to a simulated engine: the shape of loads, and Talks, who speak as their turns come."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import IntArray
from cellar.simulate.runtime import generated


class Turn(Protocol):
    """What a user says, and how many tokens answer it; `think_time` seconds pass before it, after the last answer."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int: ...

    @property
    def think_time(self) -> float: ...


TurnT = TypeVar("TurnT", bound=Turn)
TurnT_co = TypeVar("TurnT_co", bound=Turn, covariant=True)


class Conversation(Protocol[TurnT_co]):
    """Turns, each sent with all before it and their answers."""

    @property
    def turns(self) -> Sequence[TurnT_co]: ...


class Load(Protocol[TurnT_co]):
    """Conversation k begins arrivals[k] seconds after the start; arrivals ascend. `bench/workloads.py` makes them."""

    @property
    def conversations(self) -> Sequence[Conversation[TurnT_co]]: ...

    @property
    def arrivals(self) -> NDArray[np.float64]: ...


class Talks(Generic[TurnT]):
    """Conversations of a load: whose turn comes when, and what has been said in those that are open.

    `spell` gives a turn's tokens. At most `max_concurrency` are open at a time, later ones begin when one ends. Turns
    that are due after `last` are not sent.
    """

    def __init__(
        self, load: Load[TurnT], spell: Callable[[TurnT], IntArray], max_concurrency: int | None, last: float
    ) -> None:
        self._load = load
        self._spell = spell
        self._last = last
        self._arrivals = [moment for moment in load.arrivals.tolist() if moment <= last]
        self._max_open = max_concurrency or len(load.conversations)
        self._histories: dict[int, IntArray] = {}
        # Turns to come: (moment, conversation, turn). The first turns come from the load, in its order.
        self._due: list[tuple[float, int, int]] = []
        self._begun = 0

    @property
    def start(self) -> float:
        """When the first turn is due."""
        return float(self._arrivals[0])

    @property
    def _may_open(self) -> bool:
        """True if the next conversation may begin."""
        return len(self._histories) < self._max_open

    def next(self, now: float) -> float | None:
        """The moment of the next turn that no end of another must come before; None if there is none."""
        moments = [self._due[0][0]] if self._due else []
        if self._begun < len(self._arrivals) and self._may_open:
            moments.append(max(self._arrivals[self._begun], now))
        return min(moments, default=None)

    def due(self, now: float) -> list[tuple[float, int, int]]:
        """All turns that are due: (moment, conversation, turn)."""
        found = []
        while self._due and self._due[0][0] <= now:
            found.append(heapq.heappop(self._due))
        while self._begun < len(self._arrivals) and self._arrivals[self._begun] <= now and self._may_open:
            # What waited for its turn counts from now, as in a client that bounds its concurrency.
            bounded = self._max_open < len(self._arrivals)
            number = self._begun
            length = sum(t.num_tokens + t.output_tokens for t in self._load.conversations[number].turns)
            self._histories[number] = np.empty(length, np.int32)
            found.append((now if bounded else self._arrivals[number], number, 0))
            self._begun += 1
        return found

    def prompt(self, number: int, turn: int) -> tuple[IntArray, TurnT, int]:
        """What a turn sends, the turn, and how many of the tokens are of those before it."""
        turns = self._load.conversations[number].turns
        asked = turns[turn]
        before = sum(t.num_tokens + t.output_tokens for t in turns[:turn])
        history = self._histories[number]
        stop = before + asked.num_tokens
        history[before:stop] = self._spell(asked)
        end = stop + asked.output_tokens
        history[stop:end] = generated(number, stop, end)  # what the runtime is going to answer
        return history[:stop], asked, before

    def ended(self, number: int, turn: int, now: float, well: bool) -> None:
        """A turn was answered, or failed: the next one comes after a pause, or none."""
        turns = self._load.conversations[number].turns
        following = turn + 1
        goes_on = well and following < len(turns)
        due = now + turns[following].think_time if goes_on else 0.0
        if goes_on and due <= self._last:
            heapq.heappush(self._due, (due, number, following))
        else:
            del self._histories[number]
