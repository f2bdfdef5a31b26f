"""Fleet: simulated replicas behind a real router, which hears of them by reports that are as old as they would be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cellar.core.messages import IntArray, Tier
from cellar.kv.identity import owner_identity
from cellar.planner.steps import StepPrices
from cellar.routing.baselines import least_loaded, round_robin, two_choices
from cellar.routing.digest import DigestShape
from cellar.routing.prices import LoadPrice, RoutePrices
from cellar.routing.report import Reporter
from cellar.routing.request import RoutedRequest
from cellar.routing.router import AffinityRouter, Choice, Router, Why
from cellar.runtime.protocol import Capacity
from cellar.simulate.link import LinkModel
from cellar.simulate.options import RoutingOptions
from cellar.simulate.replica import SimulatedReplica, chunk_nbytes

WRONG = 1e-3
"""Seconds: a placement that costs so much more than the best one was wrong."""


@dataclass(frozen=True)
class Placements:
    """What the router did: `reasons` count why replicas were chosen, `digest_bytes` what they pushed.

    Of each placement that was judged, `losses` are the seconds that it costs more than the best one.
    """

    losses: tuple[float, ...] = ()
    reasons: Mapping[Why, int] = field(default_factory=dict)
    reports: int = 0
    digest_bytes: int = 0

    @property
    def wrong(self) -> int:
        """Judged placements that cost at least a millisecond more than the best."""
        return sum(loss >= WRONG for loss in self.losses)


def route_prices(prices: StepPrices, capacity: Capacity, links: Mapping[Tier, LinkModel]) -> RoutePrices:
    """What the router is told: the prices that the replicas run by."""
    nbytes = chunk_nbytes(prices, capacity)
    load = {tier: LoadPrice(0.0, nbytes / model.load_rate + model.chunk_seconds) for tier, model in links.items()}
    return RoutePrices.of(prices, capacity.chunk_size, capacity.max_model_len, load)


class Fleet:
    """Chooses for each request. Reports of the replicas are spread over the interval. One replica needs none.

    `num_requests` are expected: as many of them as `options` ask for are judged.
    """

    def __init__(
        self, replicas: Sequence[SimulatedReplica], options: RoutingOptions, prices: RoutePrices, num_requests: int
    ) -> None:
        self._replicas = replicas
        self._prices = prices
        self._numbers = {replica.name: k for k, replica in enumerate(replicas)}
        self._flights: dict[str, Choice] = {}
        self._reasons: Counter[Why] = Counter()
        self._reports = self._digest_bytes = self._turn = 0
        self._start: float | None = None
        self._interval = options.digest_interval / len(replicas)
        self._alone = len(replicas) == 1
        capacity = replicas[0].runtime.capacity
        shape = DigestShape.of({Tier.DEVICE: capacity.num_slots, **capacity.tiers})
        self._router = _router(options, prices, shape)
        self._reporters = [Reporter(replica.name, prices, shape) for replica in replicas]
        judged = options.judged and not self._alone
        self._judge = Judge(replicas, prices, shape, max(1, num_requests // options.judged)) if judged else None

    @property
    def next_push(self) -> float:
        """When the next replica reports."""
        return math.inf if self._start is None else self._start + self._turn * self._interval

    def push(self, now: float) -> None:
        """The replica whose turn it is reports."""
        k = self._turn % len(self._replicas)
        self._turn += 1
        # In the simulation nothing is on its way: a replica has seen all that was sent to it.
        seen = {self._router.name: 1 << 60}
        report = self._reporters[k].report(self._replicas[k].scheduler.outlook(), seen)
        self._reports += 1
        self._digest_bytes += report.digest.nbytes
        self._router.report(report, now)

    def place(self, id: str, prompt: IntArray, conversation: int, max_tokens: int, now: float) -> int:
        """-> the number of the replica that gets a request."""
        if self._alone:
            return 0
        if self._start is None:  # all are known from the beginning
            for _ in self._replicas:
                self.push(now)
            self._start, self._turn = now, 1
        session = owner_identity(b"", str(conversation))
        asked = RoutedRequest.of(b"", b"", prompt, self._prices.chunk_size, session, max_tokens)
        choice = self._router.choose(asked, now)
        if self._judge is not None:
            self._judge.placed(id, asked, choice.replica, now)
        self._flights[id] = choice
        self._reasons[choice.why] += 1
        return self._numbers[choice.replica]

    def started(self, id: str, now: float) -> None:
        """A first token has come."""
        if (choice := self._flights.get(id)) is not None:
            self._router.started(choice.number, now)
            if self._judge is not None:
                self._judge.started(id, now)

    def ended(self, id: str, num_output: int, now: float) -> None:
        """A request has ended."""
        if (choice := self._flights.pop(id, None)) is not None:
            self._router.ended(choice.number, num_output, now)
            if self._judge is not None:
                self._judge.ended(id, num_output, now)

    def placements(self) -> Placements:
        """What was done so far."""
        losses = () if self._judge is None else tuple(self._judge.losses)
        return Placements(losses, dict(self._reasons), self._reports, self._digest_bytes)


class Judge:
    """A second router that is told of everything, and hears from all replicas before it is asked: each `every`-th
    request. What its costs say of the replica that was chosen, less those of the best, is lost by what was not known.
    """

    def __init__(
        self, replicas: Sequence[SimulatedReplica], prices: RoutePrices, shape: DigestShape, every: int
    ) -> None:
        self.losses: list[float] = []
        self._replicas = replicas
        self._router = AffinityRouter(prices, shape)
        self._reporters = [Reporter(replica.name, prices, shape) for replica in replicas]
        self._numbers: dict[str, int] = {}
        self._every = every
        self._count = 0
        self._hear(0.0)

    def _hear(self, now: float) -> None:
        for replica, reporter in zip(self._replicas, self._reporters, strict=True):
            report = reporter.report(replica.scheduler.outlook(), {self._router.name: 1 << 60})
            self._router.report(report, now)

    def placed(self, id: str, asked: RoutedRequest, replica: str, now: float) -> None:
        """A request was sent to a replica."""
        if self._count % self._every == 0:
            self._hear(now)
            costs = self._router.costs(asked, now)
            self.losses.append(costs[replica] - min(costs.values()))
        self._count += 1
        self._numbers[id] = self._router.choose(asked, now, among=[replica]).number

    def started(self, id: str, now: float) -> None:
        """Its first token has come."""
        self._router.started(self._numbers[id], now)

    def ended(self, id: str, num_output: int, now: float) -> None:
        """It has ended."""
        self._router.ended(self._numbers.pop(id), num_output, now)


def _router(options: RoutingOptions, prices: RoutePrices, shape: DigestShape) -> Router:
    match options.routing:
        case "affinity":
            return AffinityRouter(prices, shape)
        case "round-robin":
            return round_robin()
        case "least-loaded":
            return least_loaded()
        case "two-choices":
            return two_choices()
