"""AffinityRouter: a request goes where it and those who are there lose least time. See docs/decisions/0046."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import CapacityError
from cellar.core.messages import Tier
from cellar.routing.costs import Costs, costs
from cellar.routing.digest import DigestShape, Keys, keys_of
from cellar.routing.flights import Flight, Flights
from cellar.routing.holdings import Holdings
from cellar.routing.prices import RoutePrices
from cellar.routing.replicas import Replicas
from cellar.routing.report import ReplicaReport
from cellar.routing.request import RoutedRequest
from cellar.routing.sessions import Session, Sessions

FIRST_OUTPUT = 128.0
"""Tokens of an answer, until some have ended."""

MEMORY = 0.98
"""What the mean of answers so far weighs against the next one."""

SAVED = 0.01
"""Shares of a prompt's seconds that are worth no word."""


class Why(StrEnum):
    """What made a replica the one."""

    ONLY = "only"  # no other may be chosen
    CHUNKS = "chunks"  # it holds chunks that save time
    SESSION = "session"  # the conversation was there last, and no digest can say so yet
    LOAD = "load"  # others hold more, but going there costs more
    NEW = "new"  # nobody holds any to speak of
    RULE = "rule"  # a baseline's


@dataclass(frozen=True, slots=True)
class Choice:
    """The `replica`, and the `number` that goes there with the request. `seconds` until its first token are expected.

    It pays to have `source` write the prompt's chunks to the remote tier first.
    """

    replica: str
    number: int
    seconds: float
    why: Why
    source: str | None = None


class Router(Protocol):
    """Decides for one front, in one thread. `now` is in seconds, on any clock that does not go back."""

    @property
    def name(self) -> str:
        """What replicas' reports call it."""

    def report(self, report: ReplicaReport, now: float) -> bool:
        """Take in what a replica says of itself; one that is not known yet may be chosen from then on. False if its
        digest does not follow the one before it: a whole one is needed.
        """

    def remove(self, replica: str) -> None:
        """A replica is gone, and its requests with it; unknown names are ignored."""

    def choose(self, request: RoutedRequest, now: float, among: Collection[str] | None = None) -> Choice:
        """Where a request goes, of the replicas `among` (default: all). It counts as sent there until `ended`.

        Raises CapacityError if there is none.
        """

    def started(self, number: int, now: float) -> None:
        """The first token of that request has come; unknown numbers are ignored."""

    def ended(self, number: int, num_output: int, now: float) -> None:
        """That request ended after so many tokens, whatever ended it; unknown numbers are ignored."""


class AffinityRouter:
    """Implements `Router` by cost: wait, load, compute, decode, and what that costs the requests that are there."""

    def __init__(self, prices: RoutePrices, shape: DigestShape, name: str = "router") -> None:
        self.name = name
        self._prices = prices
        self._holdings = Holdings(shape)
        self._replicas = Replicas()
        self._flights = Flights()
        self._sessions = Sessions()
        self._number = 0
        self._output = FIRST_OUTPUT

    @property
    def nbytes(self) -> int:
        """Memory of the tables of digests."""
        return self._holdings.nbytes

    def report(self, report: ReplicaReport, now: float) -> bool:
        """Raises ConfigError for a digest of another shape."""
        replicas = self._replicas
        column = replicas.column(report.replica)
        if column is None:
            column = replicas.add(report.replica)
            self._holdings.open(column)
        taken = self._holdings.take(column, report.digest)
        if taken:
            replicas.reports[column] += 1
        seen = report.seen.get(self.name, 0)
        unseen, settled = self._flights.reported(column, seen, int(replicas.reports[column]))
        if settled.gone:
            self._holdings.settle(column, np.concatenate(settled.gone), self._flights.left(column))
        replicas.reported(column, report, unseen, now)
        return taken

    def reprice(self, prices: RoutePrices) -> None:
        """Go by other prices from now on, of the same size of chunks."""
        self._prices = prices

    def remove(self, replica: str) -> None:
        column = self._replicas.remove(replica)
        if column is not None:
            self._flights.drop(column)
            self._holdings.close(column)

    def choose(self, request: RoutedRequest, now: float, among: Collection[str] | None = None) -> Choice:
        replicas = self._replicas
        allowed = replicas.candidates(among)
        if not len(allowed):
            raise CapacityError("no replica may be chosen; start one, or wait until one has reported.")
        keys = self._keys(request)
        found, home = self._costs(request, keys, now)
        column = self._least(found, allowed)
        why = self._why(found, allowed, column, home)
        self._number += 1
        flight = self._flight(request, keys, column, found)
        self._flights.add(flight)
        self._holdings.send(column, keys)
        replicas.sent(flight, now)
        first = float(found.first[column])
        return Choice(replicas.names[column], self._number, first, why, self._source(found, allowed, column))

    def costs(self, request: RoutedRequest, now: float) -> dict[str, float]:
        """Seconds that a request is expected to take at each replica until its last token, and to cost others."""
        keys = self._keys(request)
        found, _ = self._costs(request, keys, now)
        columns = np.flatnonzero(self._replicas.present[: self._replicas.width]).tolist()
        return {self._replicas.names[column]: float(found.total[column]) for column in columns}

    def started(self, number: int, now: float) -> None:
        flight = self._flights.get(number)
        if flight is not None and not flight.begun:
            self._flights.begun(flight, int(self._replicas.reports[flight.column]))

    def ended(self, number: int, num_output: int, now: float) -> None:
        flight = self._flights.get(number)
        if flight is None or flight.ended:
            return
        column, reports = flight.column, int(self._replicas.reports[flight.column])
        self._replicas.ended(flight, now)
        self._flights.ended(flight, reports)
        if num_output:
            self._output = MEMORY * self._output + (1 - MEMORY) * num_output
        if flight.session is not None and (flight.begun or num_output):
            life, until = int(self._replicas.life[column]), flight.until or 0
            self._sessions.note(flight.session, Session(life, flight.context + num_output, until))
        for place, keys in self._flights.surplus().items():
            self._holdings.settle(place, np.concatenate(keys), self._flights.left(place))

    # -- how --------------------------------------------------------------------------------------

    def _keys(self, request: RoutedRequest) -> Keys:
        """Of the chunks that need not be computed if they are there: all before the last token."""
        return keys_of(request.chunks[: max(0, request.prompt_tokens - 1) // self._prices.chunk_size])

    def _costs(self, request: RoutedRequest, keys: Keys, now: float) -> tuple[Costs, int]:
        """-> the costs at each column, and the one where the conversation is known to be though no digest says so."""
        count, replicas = self._replicas.width, self._replicas
        held, false = self._holdings.held(keys, count), self._holdings.false_share(count)
        num_chunks, home = len(keys), -1
        session = self._sessions.get(request.session)
        if session is not None:
            places = np.flatnonzero(replicas.life[:count] == session.life)
            if len(places) and (not len(keys) or replicas.reports[places[0]] < session.until):
                home = int(places[0])
                if not len(keys):
                    num_chunks = max(0, request.prompt_tokens - 1) // self._prices.chunk_size
                known = min(session.tokens // self._prices.chunk_size, num_chunks)
                _credit(held, home, known, num_chunks, count)
        output = self._output if request.max_tokens is None else min(self._output, request.max_tokens)
        company = replicas.company(now)
        return costs(self._prices, request.prompt_tokens, output, num_chunks, held, company, false), home

    def _least(self, found: Costs, allowed: NDArray[np.int64]) -> int:
        """The least cost; of equal ones the most free memory, then the longest without work."""
        replicas, total = self._replicas, found.total[allowed]
        equal = allowed[total <= total.min() * (1 + 1e-6) + 1e-9]
        keys = (replicas.turn[equal], -replicas.free[equal])
        return int(equal[np.lexsort(keys)[0]])

    def _why(self, found: Costs, allowed: NDArray[np.int64], column: int, home: int) -> Why:
        if len(allowed) == 1:
            return Why.ONLY
        most = float(found.saved[allowed].max())
        if most < SAVED * float(found.compute[column] + found.load[column]):
            return Why.NEW
        if found.saved[column] < (1 - SAVED) * most:
            return Why.LOAD
        return Why.SESSION if column == home else Why.CHUNKS

    def _flight(self, request: RoutedRequest, keys: Keys, column: int, found: Costs) -> Flight:
        work = float(found.load[column] + found.compute[column])
        return Flight(self._number, column, work, request.prompt_tokens, request.prompt_tokens, keys, request.session)

    def _source(self, found: Costs, allowed: NDArray[np.int64], column: int) -> str | None:
        """Who holds most of what it pays to move."""
        if not len(found.movable):
            return None
        best = int(np.argmax(np.where(self._replicas.present[: len(found.movable)], found.movable, -1.0)))
        more = found.movable[best] > found.movable[column]
        return self._replicas.names[best] if best != column and more else None


def _credit(held: dict[Tier, NDArray[np.float32]], column: int, known: int, num_chunks: int, count: int) -> None:
    """A column has the first `known` chunks on its device."""
    device = held.setdefault(Tier.DEVICE, np.zeros((num_chunks, count), np.float32))
    device[:known, column] = 1
    for tier, where in held.items():
        if tier is not Tier.DEVICE:
            where[:known, column] = 0
