"""What it is worth to keep a chunk: value = cost(context) * weight(idle times); the least worth goes first.

A policy says both factors and orders nothing; comparing is done when a slot is needed, because values change with time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellar.core.specs import ModelSpec

Floats = NDArray[np.float64]


class Policy(Protocol):
    """Both factors must be positive; of equal values the longest idle goes first, then the leading chunk."""

    def cost(self, contexts: NDArray[np.integer]) -> Floats:
        """Of computing a chunk again whose end has a context of so many tokens: [n] -> [n]."""

    def weight(self, idle: Floats) -> Floats:
        """Of chunks whose conversations have been idle so long, in seconds, inf where there is none: [n, k] -> [n]."""


class LeastRecentlyUsed:
    """The chunk whose conversation was active longest ago; of one conversation the leading chunk."""

    def cost(self, contexts: NDArray[np.integer]) -> Floats:
        """The same for all."""
        return np.ones(len(contexts))

    def weight(self, idle: Floats) -> Floats:
        """Of the one that was active last."""
        found: Floats = 1.0 / idle.min(1)
        return found


class RetentionValue:
    """Cost(l) / T (Pensieve §3.4.3.1, equation 3.4): leading chunks are cheap, the long idle unlikely to return.

    A chunk that several conversations share is worth the sum over them, or a common system prompt, cheapest of all,
    would go first. `costs` are seconds at context lengths (the paper measures powers of two); between them they are
    interpolated, beyond the last extended.
    """

    def __init__(self, costs: Mapping[int, float]) -> None:
        self._contexts = np.array(sorted(costs), np.float64)
        self._costs = np.array([costs[c] for c in sorted(costs)], np.float64)

    @classmethod
    def of(cls, spec: ModelSpec) -> RetentionValue:
        """From the FLOPs of the model, where nothing was measured."""
        size = spec.kv.chunk_size
        contexts = [2**k for k in range(max(1, spec.max_position).bit_length() + 1)]
        return cls({c: float(spec.flops(size, c, 0)) for c in contexts})

    def cost(self, contexts: NDArray[np.integer]) -> Floats:
        """Interpolated between the lengths that were measured."""
        found = np.interp(contexts, self._contexts, self._costs)
        if len(self._contexts) > 1:
            (a, b), (x, y) = self._contexts[-2:], self._costs[-2:]
            found = np.where(contexts > b, y + (contexts - b) * (y - x) / (b - a), found)
        return np.asarray(found, np.float64)

    def weight(self, idle: Floats) -> Floats:
        """The sum of 1 / T."""
        found: Floats = (1.0 / idle).sum(1)
        return found
