"""Basis: what whoever routes to the engines of a model must know of it, and what prices follow from their speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cellar.core.messages import EngineRates, Request, Tier
from cellar.kv.identity import owner_identity
from cellar.routing.digest import DigestShape
from cellar.routing.prices import LoadPrice, RoutePrices, StepPrice
from cellar.routing.request import RoutedRequest

ASSUMED_SECONDS = 1e-3
"""What a chunk takes, as long as no engine has computed any."""

ASSUMED_LOAD = 0.1
"""Loading a chunk, in shares of computing it, as long as nothing was loaded."""


@dataclass(frozen=True)
class Basis:
    """`root` is what the identities of chunks begin with; None: prefixes are not kept. `costs` says by context length
    what computing a chunk of `chunk_size` tokens costs, in a unit of which `EngineRates.cost` are the seconds. Digests
    have the `shape`.
    """

    root: bytes | None
    chunk_size: int
    costs: Mapping[int, float]
    shape: DigestShape

    def prices(self, rates: EngineRates) -> RoutePrices:
        """Seconds. What a row and a token of context add to a step of decodes is what they take in a prompt."""
        contexts = sorted(self.costs)
        least = self.costs[contexts[0]]
        unit = rates.cost or ASSUMED_SECONDS / least
        slope = 0.0
        if len(contexts) > 1:
            a, b = contexts[-2:]
            slope = (self.costs[b] - self.costs[a]) / (b - a) / self.chunk_size
        assumed = 0.0, ASSUMED_LOAD * unit * least
        slower = [tier for tier in self.shape.bits if tier > Tier.DEVICE]
        load: dict[Tier, LoadPrice] = {tier: LoadPrice(*rates.load.get(tier, assumed)) for tier in slower}
        step = StepPrice(rates.decode, unit * least / self.chunk_size, unit * slope)
        return RoutePrices(self.chunk_size, {c: unit * cost for c, cost in self.costs.items()}, load, step)

    def request(self, request: Request) -> RoutedRequest:
        """What the router is told of a request."""
        if self.root is None:
            return RoutedRequest(len(request.prompt), max_tokens=request.max_tokens)
        session = None if request.conversation is None else owner_identity(request.salt, request.conversation)
        return RoutedRequest.of(self.root, request.salt, request.prompt, self.chunk_size, session, request.max_tokens)
