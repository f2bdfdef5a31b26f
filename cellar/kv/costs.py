"""CostCurve: what computing a chunk costs, by context length."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cellar.core.specs import ModelSpec

Floats = NDArray[np.float64]


class CostCurve:
    """Costs at context lengths (Pensieve §3.4.3.1 measures powers of two), interpolated; extended beyond the last."""

    def __init__(self, costs: Mapping[int, float]) -> None:
        self._contexts = np.array(sorted(costs), np.float64)
        self._costs = np.array([costs[c] for c in sorted(costs)], np.float64)

    def __call__(self, contexts: NDArray[np.integer] | Floats) -> Floats:
        """Of computing a chunk whose end has a context of so many tokens: [n] -> [n]."""
        found = np.interp(contexts, self._contexts, self._costs)
        if len(self._contexts) > 1:
            (a, b), (x, y) = self._contexts[-2:], self._costs[-2:]
            found = np.where(contexts > b, y + (contexts - b) * (y - x) / (b - a), found)
        return np.asarray(found, np.float64)


def model_costs(spec: ModelSpec) -> dict[int, float]:
    """FLOPs of computing a chunk at contexts that are powers of two."""
    size = spec.kv.chunk_size
    contexts = [2**k for k in range(max(1, spec.max_position).bit_length() + 1)]
    return {c: float(spec.flops(size, c, 0)) for c in contexts}
