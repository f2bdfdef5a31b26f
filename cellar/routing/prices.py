"""RoutePrices: seconds of what a request may need at a replica, from the profile's cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import Tier
from cellar.kv.costs import CostCurve, Floats
from cellar.planner.steps import StepPrices, chunk_costs

MARGIN = 0.1
"""Computing takes the device from others: what is longer by so much to load is loaded none the less (decision 0035)."""


@dataclass(frozen=True, slots=True)
class LoadPrice:
    """Seconds from a slower tier to the device: of each load, and of each of its chunks on top."""

    fixed: float
    per_chunk: float


@dataclass(frozen=True, slots=True)
class StepPrice:
    """Seconds of a step of decodes: at least, and more with each row and with each token of their contexts."""

    fixed: float = 0.0
    per_row: float = 0.0
    per_token: float = 0.0


class ChunkTable:
    """What is known of a sequence's first chunks, whatever is in them; grows to the longest sequence."""

    def __init__(self, curve: CostCurve, chunk_size: int, load: Mapping[Tier, LoadPrice]) -> None:
        self._curve = curve
        self._chunk_size = chunk_size
        self._load = load
        self._seconds: Floats = np.empty(0)
        self._pays: dict[Tier, NDArray[np.float32]] = {}

    def seconds(self, count: int) -> Floats:
        """Of computing each: [count]."""
        if count > len(self._seconds):
            self._grow(count)
        return self._seconds[:count]

    def pays(self, tier: Tier, count: int) -> NDArray[np.float32] | None:
        """See `RoutePrices.pays`."""
        self.seconds(count)
        known = self._pays.get(tier)
        return None if known is None else known[:, :count]

    def _grow(self, count: int) -> None:
        size = max(64, count, 2 * len(self._seconds))
        seconds = self._curve(np.arange(1, size + 1) * self._chunk_size)
        self._pays = {Tier.DEVICE: _weights(seconds, np.ones(size, np.bool_))}
        for tier, price in self._load.items():
            if tier is not Tier.DEVICE:
                self._pays[tier] = _weights(seconds, seconds * (1 + MARGIN) > price.per_chunk)
        seconds.flags.writeable = False
        self._seconds = seconds


def _weights(seconds: Floats, taken: NDArray[np.bool_]) -> NDArray[np.float32]:
    found = np.stack((np.where(taken, seconds, 0.0), taken)).astype(np.float32)
    found.flags.writeable = False
    return found


@dataclass(frozen=True)
class RoutePrices:
    """What all replicas of one model on one kind of machine have in common.

    `compute` are seconds that a chunk of `chunk_size` tokens takes, by context length at its end, as the eviction
    policy has them. `load` has the tiers that chunks can be loaded from; what lies in another one is computed. `move`
    are the seconds that a replica takes to write a chunk to the remote tier; None: chunks are not moved.
    """

    chunk_size: int
    compute: Mapping[int, float]
    load: Mapping[Tier, LoadPrice] = field(default_factory=dict)
    step: StepPrice = StepPrice()
    move: float | None = None
    _curve: CostCurve = field(init=False, repr=False, compare=False)
    _table: ChunkTable = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_curve", CostCurve(self.compute))
        object.__setattr__(self, "_table", ChunkTable(self._curve, self.chunk_size, self.load))

    @classmethod
    def of(
        cls,
        prices: StepPrices,
        chunk_size: int,
        max_context: int,
        load: Mapping[Tier, LoadPrice] | None = None,
        move: float | None = None,
    ) -> RoutePrices:
        """Those of the planner for a model on a machine."""
        cost = prices.cost
        step = StepPrice(
            fixed=cost.weights + cost.launches + cost.head + cost.talk,
            per_row=cost.token_bytes + cost.unhidden * cost.token_flops + cost.token_talk,
            per_token=cost.resident,
        )
        return cls(chunk_size, chunk_costs(prices, chunk_size, max_context), load or {}, step, move)

    def chunks(self, count: int) -> Floats:
        """Seconds of computing each of the first `count` chunks of a sequence: [count]. Not to be written to."""
        return self._table.seconds(count)

    def at(self, ends: NDArray[np.integer]) -> Floats:
        """Seconds of computing the chunks that end at these contexts: [n] -> [n]."""
        return self._curve(ends)

    def pays(self, tier: Tier, count: int) -> NDArray[np.float32] | None:
        """Of the first `count` chunks, [2, count]: the seconds of computing those that are loaded from `tier` rather
        than computed, 0 of the others; and 1 and 0. On the device all lie ready. None: nothing is loaded from there.
        """
        return self._table.pays(tier, count)

    def ranges(self, ranges: NDArray[np.integer]) -> float:
        """Seconds of computing positions [start, stop) of sequences: [n, 2]."""
        if not len(ranges):
            return 0.0
        start, stop = ranges[:, 0], ranges[:, 1]
        return float((self._curve((start + stop + self.chunk_size) / 2) * (stop - start)).sum()) / self.chunk_size

    def decode(self, rows: Floats, tokens: Floats) -> Floats:
        """Seconds of a step of so many rows with so many tokens of context: [n], [n] -> [n]."""
        step = self.step
        return step.fixed + step.per_row * rows + step.per_token * tokens

    def joining(self, tokens: float) -> float:
        """Seconds by which a step of decodes is longer with one row more, of so many tokens of context."""
        return self.step.per_row + self.step.per_token * tokens
