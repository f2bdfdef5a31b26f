"""ReplicaReport: what a replica pushes to every router, and Reporter, which makes it from the engine's Outlook."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cellar.core.errors import ConfigError
from cellar.core.messages import Outlook, Tier
from cellar.routing.digest import Bits, Digest, DigestKeeper, DigestShape, Positions
from cellar.routing.prices import RoutePrices


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaReport:
    """A replica at one moment.

    `waiting_seconds`: prompts that are yet to be computed there. `requests` wait or run there, and
    have `context_tokens` in all. Of the device's `total_tokens` of K and V `free_tokens` hold nothing, and
    `cached_tokens` nothing that a request uses. `seen` says of each router the highest number of a request that has
    come from it.
    """

    replica: str
    digest: Digest
    waiting_seconds: float
    requests: int
    context_tokens: int
    free_tokens: int
    cached_tokens: int
    total_tokens: int
    seen: Mapping[str, int]
    draining: bool = False

    def to_bytes(self) -> bytes:
        """For a wire: a line of JSON, then the digest's arrays."""
        said = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("digest", "seen")}
        parts = {tier.name: part for tier, part in self.digest.tiers.items()}
        sizes = {name: part.nbytes for name, part in parts.items()}
        said |= {"seen": dict(self.seen), "version": self.digest.version, "base": self.digest.base, "sizes": sizes}
        data = [part.astype(part.dtype.newbyteorder("<")).tobytes() for part in parts.values()]
        return json.dumps(said).encode() + b"\n" + b"".join(data)

    @classmethod
    def from_bytes(cls, data: bytes) -> ReplicaReport:
        """The report that `to_bytes` wrote. Raises ConfigError for anything else."""
        try:
            end = data.index(b"\n")
            said = json.loads(data[:end])
            version, base, sizes = (said.pop(name) for name in ("version", "base", "sizes"))
            at, tiers = end + 1, dict[Tier, Bits | Positions]()
            for name, size in sizes.items():
                part = data[at : at + size]
                tiers[Tier[name]] = (
                    np.frombuffer(part, np.uint8) if base is None else np.frombuffer(part, "<u4").astype(np.uint32)
                )
                at += size
            if at != len(data):
                raise ValueError(f"{len(data) - at} bytes more than it names")
            return cls(digest=Digest(version, base, tiers), **said)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"a replica's report cannot be read ({error!r}); run the same version of Cellar on all hosts."
            ) from error


class Reporter:
    """Makes the reports of the replica `name`. `shape` and `prices` are those of its routers."""

    def __init__(self, name: str, prices: RoutePrices, shape: DigestShape) -> None:
        self._name = name
        self._prices = prices
        self._keeper = DigestKeeper(shape)

    def reprice(self, prices: RoutePrices) -> None:
        """Go by other prices from now on."""
        self._prices = prices

    def report(
        self, outlook: Outlook, seen: Mapping[str, int], *, whole: bool = False, draining: bool = False
    ) -> ReplicaReport:
        """Each is a delta to the one before it, the first one and one asked for as `whole` is not."""
        return ReplicaReport(
            replica=self._name,
            digest=self._keeper.digest(outlook.keys, whole),
            waiting_seconds=self._prices.ranges(outlook.pending),
            requests=outlook.requests,
            context_tokens=outlook.context_tokens,
            free_tokens=outlook.free_tokens,
            cached_tokens=outlook.cached_tokens,
            total_tokens=outlook.total_tokens,
            seen=dict(seen),
            draining=draining,
        )
