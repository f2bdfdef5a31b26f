"""Replicas that only report, for the router's tests: what they hold is a set of chunk numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

import numpy as np

from cellar.core.messages import Outlook, Tier
from cellar.routing.digest import DigestShape, keys_of
from cellar.routing.prices import LoadPrice, RoutePrices, StepPrice
from cellar.routing.report import ReplicaReport, Reporter
from cellar.routing.request import RoutedRequest

CHUNK = 32
SHAPE = DigestShape({Tier.DEVICE: 1 << 16, Tier.HOST: 1 << 16, Tier.DISK: 1 << 16})
# A chunk takes 10 ms at any context, and 1 ms to load from the host; the disk is slower than computing.
PRICES = RoutePrices(
    CHUNK,
    {1: 0.01, 2: 0.01},
    {Tier.HOST: LoadPrice(0.0, 0.001), Tier.DISK: LoadPrice(0.0, 0.05)},
    StepPrice(),
)


@cache
def identity(chunk: int) -> bytes:
    return blake2b(b"%d" % chunk, digest_size=16).digest()


def request(chunks: Iterable[int], *, session: bytes | None = None, more: int = 1, known: bool = True) -> RoutedRequest:
    """A prompt that begins with these chunks and goes on for `more` tokens."""
    numbers = list(chunks)
    names = tuple(identity(k) for k in numbers) if known else ()
    return RoutedRequest(len(numbers) * CHUNK + more, names, session)


@dataclass
class Replica:
    name: str
    held: dict[Tier, set[int]] = field(default_factory=dict)
    waiting: int = 0  # chunks to be computed
    requests: int = 0
    context: int = 0
    free: int = 100_000
    cached: int = 0
    prices: RoutePrices = PRICES
    shape: DigestShape = SHAPE

    def __post_init__(self) -> None:
        self.reporter = Reporter(self.name, self.prices, self.shape)

    def report(
        self, seen: Mapping[str, int] | None = None, *, whole: bool = False, draining: bool = False
    ) -> ReplicaReport:
        outlook = Outlook(
            pending=np.array([[0, self.waiting * CHUNK]], np.int32),
            requests=self.requests,
            context_tokens=self.context,
            free_tokens=self.free,
            cached_tokens=self.cached,
            total_tokens=self.free + self.cached,
            keys={tier: keys_of([identity(k) for k in sorted(there)]) for tier, there in self.held.items()},
        )
        return self.reporter.report(outlook, seen or {}, whole=whole, draining=draining)


def fleet(count: int, **held: Collection[int]) -> list[Replica]:
    """r0, r1 ...; r1={1, 2} holds those on its device."""
    return [Replica(f"r{k}", {Tier.DEVICE: set(held.get(f"r{k}", ()))}) for k in range(count)]
