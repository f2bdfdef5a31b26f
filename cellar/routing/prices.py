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

    def __post_init__(self) -> None:
        object.__setattr__(self, "_curve", CostCurve(self.compute))

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
        """Seconds of computing each of the first `count` chunks of a sequence: [count]."""
        return self._curve(np.arange(1, count + 1) * self.chunk_size)

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
