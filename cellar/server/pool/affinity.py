"""Who gets a request: the engine where it ends soonest, by what each says of itself. See decisions 0046 and 0055."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cellar.core.messages import EngineRates, Outlook, Request
from cellar.routing.basis import Basis
from cellar.routing.report import Reporter
from cellar.routing.router import AffinityRouter, Why
from cellar.server.pool.choice import Sticky
from cellar.server.pool.pool import Place
from cellar.server.wire import Reported

Chosen = Callable[[str, float], None]
"""Told of each choice: why, and in how many seconds."""


@dataclass(slots=True)
class _Replica:
    """An engine as the router knows it. Of what was sent there and no report has seen: the number on the wire, and the
    router's.
    """

    name: str
    rates: EngineRates = field(default_factory=EngineRates)
    sent: deque[tuple[int, int]] = field(default_factory=deque)
    seen: int = 0


class Affinity:
    """A `Chooser` over an `AffinityRouter`, which begins with the first engine. Engines that say nothing of themselves
    are chosen as by `Sticky`.
    """

    def __init__(self, chosen: Chosen = lambda why, seconds: None, clock: Callable[[], float] = time.monotonic) -> None:
        self._chosen = chosen
        self._clock = clock
        self._basis: Basis | None = None
        self._router: AffinityRouter | None = None
        self._replicas: dict[Place, _Replica] = {}
        self._numbers: dict[str, int] = {}
        self._lives = 0
        self._plain = Sticky()

    def joined(self, place: Place) -> None:
        """It counts as empty until it has reported."""
        basis = self._basis or place.engine.ready.basis
        if basis is None:
            return
        prices = basis.prices(EngineRates())
        if self._router is None:
            self._basis, self._router = basis, AffinityRouter(prices, basis.shape)
        self._lives += 1
        self._replicas[place] = _Replica(str(self._lives))
        stats = place.engine.stats()
        free, total = stats.free_chunks * basis.chunk_size, stats.total_chunks * basis.chunk_size
        empty = Outlook(np.empty((0, 2), np.int32), 0, 0, free, total - free, total, {})
        report = Reporter(str(self._lives), prices, basis.shape).report(empty, {})
        self._router.report(report, self._clock())
        place.engine.watch(basis.shape)

    def gone(self, place: Place) -> None:
        """What it had is chosen for again."""
        replica = self._replicas.pop(place, None)
        if replica is not None and self._router is not None:
            self._router.remove(replica.name)
        self._plain.gone(place)

    def reported(self, place: Place, reported: Reported) -> None:
        """Take in what an engine says, and how fast it has been."""
        replica, router = self._replicas.get(place), self._router
        if replica is None or router is None or self._basis is None:
            return
        while replica.sent and replica.sent[0][0] <= reported.seen:
            replica.seen = replica.sent.popleft()[1]
        report = replace(reported.report, replica=replica.name, seen={router.name: replica.seen})
        router.report(report, self._clock())
        if reported.rates != replica.rates:
            replica.rates = reported.rates
            router.reprice(self._basis.prices(_mean([one.rates for one in self._replicas.values()])))

    def choose(self, request: Request, places: Sequence[Place]) -> Place:
        """One of `places`."""
        router, basis = self._router, self._basis
        if router is None or basis is None or not all(place in self._replicas for place in places):
            return self._plain.choose(request, places)
        begun = time.perf_counter()
        self.ended(request.id, 0)  # where it was before
        if len(places) == 1:  # nothing to weigh; what it has there by now the engine itself says, should another join
            self._chosen(Why.ONLY, time.perf_counter() - begun)
            return places[0]
        now = self._clock()
        names = {self._replicas[place].name: place for place in places}
        choice = router.choose(basis.request(request), now, names)
        place = names[choice.replica]
        self._numbers[request.id] = choice.number
        self._replicas[place].sent.append((place.engine.next_number, choice.number))
        self._chosen(choice.why, time.perf_counter() - begun)
        return place

    def started(self, request_id: str) -> None:
        """Its first token has come."""
        number = self._numbers.get(request_id)
        if number is not None and self._router is not None:
            self._router.started(number, self._clock())

    def ended(self, request_id: str, num_output: int) -> None:
        """It is nowhere any more."""
        number = self._numbers.pop(request_id, None)
        if number is not None and self._router is not None:
            self._router.ended(number, num_output, self._clock())


def _mean(all: Sequence[EngineRates]) -> EngineRates:
    """Of those that have learned something."""
    tiers = {tier for one in all for tier in one.load}
    load = {}
    for tier in tiers:
        known = [one.load[tier] for one in all if tier in one.load]
        load[tier] = (sum(fixed for fixed, _ in known) / len(known), sum(each for _, each in known) / len(known))
    return EngineRates(_known([one.cost for one in all]), _known([one.decode for one in all]), load)


def _known(values: Sequence[float]) -> float:
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0
