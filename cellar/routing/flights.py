"""Flights: the requests that a router has sent, as long as no report or digest speaks of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cellar.routing.digest import Keys

REPORTS = 2
"""Reports after the first token in which a digest names the prompt's chunks: one may have been under way."""

MAX_ENDED = 4096
"""Ended requests that are remembered, of all replicas, for the chunks that no digest names yet; a quarter more may be
there, so that it is done for many at once."""


@dataclass(slots=True)
class Flight:
    """A request: seconds of device time that it needs before its first token, its context and the memory it takes.

    `seen`: a report counts it. `until`: with how many reports of its replica its chunks are no longer this list's.
    """

    number: int
    column: int
    work: float
    context: int
    memory: int
    keys: Keys
    session: bytes | None
    begun: bool = False
    seen: bool = False
    ended: bool = False
    until: int | None = None


@dataclass(slots=True)
class Unseen:
    """Sums over the requests of a replica that its report does not count."""

    work: float = 0.0
    requests: int = 0
    context: int = 0
    memory: int = 0


@dataclass(slots=True)
class Settled:
    """Keys that are for digests to say from now on, and those that are not."""

    gone: list[Keys] = field(default_factory=list)
    left: list[Keys] = field(default_factory=list)


class Flights:
    """By number, ascending; each belongs to the column of a replica."""

    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}
        self._of: dict[int, dict[int, Flight]] = {}
        self._ended: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights.values())

    def get(self, number: int) -> Flight | None:
        """One of them, or None."""
        return self._flights.get(number)

    def add(self, flight: Flight) -> None:
        """A request was sent."""
        self._flights[flight.number] = flight
        self._of.setdefault(flight.column, {})[flight.number] = flight

    def begun(self, flight: Flight, reports: int) -> None:
        """Its first token has come, after so many reports of its replica."""
        flight.begun = True
        flight.until = reports + REPORTS

    def ended(self, flight: Flight, reports: int) -> None:
        """Nothing comes any more."""
        flight.ended = True
        if flight.until is None:
            flight.until = reports + REPORTS
        self._ended[flight.number] = None

    def surplus(self) -> dict[int, list[Keys]]:
        """Of ended ones that are too many, by column, the keys that no digest names; they are forgotten."""
        found: dict[int, list[Keys]] = {}
        if len(self._ended) > MAX_ENDED * 5 // 4:
            for number in list(self._ended)[: len(self._ended) - MAX_ENDED]:
                flight = self._forget(self._flights[number])
                found.setdefault(flight.column, []).append(flight.keys)
        return found

    def reported(self, column: int, seen: int, reports: int) -> tuple[Unseen, Settled]:
        """A report, the replica's `reports`-th, counts the requests up to number `seen`."""
        unseen, settled = Unseen(), Settled()
        for flight in tuple(self._of.get(column, {}).values()):
            flight.seen = flight.seen or flight.number <= seen
            if not flight.seen and not flight.ended:
                unseen.work += 0.0 if flight.begun else flight.work
                unseen.requests += 1
                unseen.context += flight.context
                unseen.memory += flight.memory
            if flight.until is not None and reports >= flight.until and len(flight.keys):
                settled.gone.append(flight.keys)
                flight.keys = flight.keys[:0]
            elif len(flight.keys):
                settled.left.append(flight.keys)
            if flight.ended and not len(flight.keys):
                self._forget(flight)
        return unseen, settled

    def left(self, column: int) -> Keys:
        """Keys of a replica that no digest names yet."""
        return np.concatenate([np.empty(0, np.uint64), *(f.keys for f in self._of.get(column, {}).values())])

    def drop(self, column: int) -> None:
        """A replica is gone, and its requests with it."""
        for flight in tuple(self._of.get(column, {}).values()):
            self._forget(flight)

    def _forget(self, flight: Flight) -> Flight:
        del self._flights[flight.number], self._of[flight.column][flight.number]
        self._ended.pop(flight.number, None)
        return flight
