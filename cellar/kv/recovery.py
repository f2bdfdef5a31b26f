"""Recovery: which chunks of slower tiers a request loads, and which it computes again (Pensieve §3.4.3.4).

By what lets its computing end earlier, with what is queued on the links before it. See docs/decisions/0035.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cellar.kv.costs import CostCurve, Floats
from cellar.kv.links import MEMORY, Link

RecoveryRule = Literal["faster", "load", "compute"]

MARGIN = 0.1
"""Computing takes the device from others: what is longer by so much to load is loaded none the less."""

RETRY_SECONDS = 30.0
"""A tier from which nothing came for so long is asked again, though it was too slow."""

RETRY_SHARE = 20
"""It is asked again sooner, if what it is asked for should take one in so many of the seconds since."""

BESIDE_A_LOAD = 1.1
"""What a step takes while chunks are loaded, times what it takes alone: 1.06 to 1.14 (H200, 512 tokens)."""

TURN_SECONDS = 0.004
"""From a load's answer to the first layer of the step that needs it: it is taken in, a plan is made and brought to the
device (measured on an H200's host: 5 ms for 5,888 tokens).
"""

Sums = tuple[float, float]
"""Of costs * seconds and of costs * costs."""


class Recovery:
    """`rule` "load" and "compute" force one or the other; "faster" decides.

    `costs` are what computing a chunk costs by context length, in any unit: seconds per unit are learned from steps
    (`measured`). Until there is one, everything is loaded.
    """

    def __init__(self, rule: RecoveryRule = "load", costs: Mapping[int, float] | None = None) -> None:
        self.rule = rule
        self._curve = CostCurve(costs or {1: 1.0})
        self._decode_seconds = 0.0  # of a step without prompts
        self._sums: Sums = (0.0, 0.0)
        self._like: dict[int, Sums] = {}  # of steps alone whose cost has the same power of two

    def cost(self, start: NDArray[np.integer], stop: NDArray[np.integer], chunk_size: int) -> Floats:
        """Of computing positions [start, stop), which lie in one chunk or many: [n], [n] -> [n]."""
        found: Floats = (stop - start) / chunk_size * self._curve((start + stop) / 2)
        return found

    def total(self, ranges: NDArray[np.int32], chunk_size: int) -> float:
        """The cost of positions [start, stop) in all: [n, 2]."""
        return float(self.cost(ranges[:, 0], ranges[:, 1], chunk_size).sum()) if len(ranges) else 0.0

    def measured(self, cost: float, seconds: float) -> None:
        """A step took so long, in which prompts of so much cost were computed: 0 for decodes alone."""
        if cost <= 0:
            share = 1 - MEMORY if self._decode_seconds else 1.0
            self._decode_seconds += share * (seconds - self._decode_seconds)
            return
        # What a step takes anyhow is no part of it; at least half is, or a short prompt would seem to cost nothing.
        alone = min(self._decode_seconds, seconds / 2)
        size = _size(cost)
        self._sums = _with(self._sums, cost, seconds - alone)
        self._like[size] = _with(self._like.get(size, (0.0, 0.0)), cost, seconds - alone)

    @property
    def decode_seconds(self) -> float:
        """Of a step without prompts; 0: none has run."""
        return self._decode_seconds

    @property
    def seconds_per_cost(self) -> float | None:
        """Seconds of one unit of cost; None: no step with prompts has run."""
        both, square = self._sums
        return both / square if square else None

    def least_seconds(self, count: int) -> float:
        """Of computing `count` chunks again, wherever they were in their contexts: a leading one is the cheapest. 0:
        nothing is known.
        """
        rate = self.seconds_per_cost
        return 0.0 if rate is None or count <= 0 else count * rate * float(self._curve(np.ones(1))[0])

    def step_seconds(self, ranges: Sequence[tuple[int, int]], chunk_size: int, most: int) -> float:
        """Of a step that computes the first `most` of the positions in ascending half-open `ranges` beside decodes; 0:
        nothing is known. Short steps take longer for what they compute than long ones, so those of its size count.
        """
        cost = 0.0
        for start, stop in ranges:
            stop = min(stop, start + most)
            most -= stop - start
            cost += float(self.cost(np.array([start]), np.array([stop]), chunk_size)[0])
        both, square = self._like.get(_size(cost), self._sums)
        return self._decode_seconds + cost * both / square if square else 0.0

    def lead(self, ranges: Sequence[tuple[int, int]], chunk_size: int, most: int) -> float:
        """Seconds before a load's end at which whoever is to compute `ranges` may be told of it, see `step_seconds`."""
        seconds = self.step_seconds(ranges, chunk_size, most)
        return BESIDE_A_LOAD * seconds + TURN_SECONDS if seconds else 0.0

    def loads(
        self, tier: NDArray[np.integer], cost: Floats, links: Sequence[Link], now: float, floor: float = 0.0
    ) -> NDArray[np.bool_]:
        """Which chunks to load: [n], of each the tier that has it (0: a copy within the device) and its cost [n].

        `links` [tier] are the ways from the tiers. Nothing is computed for the request before `floor` seconds have
        gone by.
        """
        load = np.ones(len(tier), np.bool_)
        if self.rule == "load" or not len(tier):
            return load
        if self.rule == "compute":
            return np.asarray(tier == 0)
        rate = self.seconds_per_cost
        asked = [t for t in np.unique(tier).tolist() if t > 0 and links[t].known]
        if rate is None or not asked:
            return load
        if len(asked) == 1 and self._gains_throughout(links[asked[0]], cost[tier == asked[0]], rate, now, floor):
            return load
        orders, times, gains = [], [], []
        for t in asked:
            places = np.flatnonzero(tier == t)
            order = places[np.argsort(-cost[places], kind="stable")]
            fixed, each = links[t].rate()
            orders.append(order)
            times.append(links[t].wait(now) + fixed + each * np.arange(1, len(order) + 1))
            gains.append(np.concatenate(([0.0], np.cumsum(cost[order]))) * (rate * (1 + MARGIN)))
        # If all loads are to be done at a moment, each tier brings what it can until then.
        moments = np.concatenate(([0.0], *times))
        counts = [np.searchsorted(ready, moments, side="right") for ready in times]
        ends = np.maximum(moments, floor) - sum(gain[count] for gain, count in zip(gains, counts, strict=True))
        good = np.flatnonzero(ends <= ends.min() + 1e-12 * np.abs(ends).max())
        best = good[np.argmax(np.sum(counts, 0)[good])]
        for t, order, count, ready, gain in zip(asked, orders, counts, times, gains, strict=True):
            number = int(count[best])
            if not number:
                number = _asked_again(links[t], gain[-1], ready, now)
            load[order[number:]] = False
        return load

    def _gains_throughout(self, link: Link, cost: Floats, rate: float, now: float, floor: float) -> bool:
        """Whether loading all chunks of one tier is best, as it mostly is: each of them is loaded faster than computed,
        and together they make up for what a load takes anyhow.
        """
        fixed, each = link.rate()
        gain = rate * (1 + MARGIN) * cost
        end = link.wait(now) + fixed + each * len(cost)
        return bool(each <= gain.min() and max(end, floor) - gain.sum() < floor)


def _asked_again(link: Link, compute: float, ready: Floats, now: float) -> int:
    """How many chunks of a tier that was too slow are loaded, to learn whether it still is: `ready` [n] is when each
    should be there. As many as should take no longer than to `compute` all, or one: of a few only what is fixed is
    learned, and one slow load would be believed for ever.
    """
    number = max(1, int(np.searchsorted(ready, compute, side="right")))
    pause = min(RETRY_SECONDS, RETRY_SHARE * float(ready[number - 1]))
    return number if now >= link.last + pause else 0


def _size(cost: float) -> int:
    return math.frexp(cost)[1]


def _with(sums: Sums, cost: float, seconds: float) -> Sums:
    return MEMORY * sums[0] + cost * seconds, MEMORY * sums[1] + cost * cost
