"""Outbox: the values that nodes of one cell sent back to the host, until their request ends."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellar.core.cell_graphs import GraphPart
from cellar.core.tasks import CellSpec, Values
from cellar.schedule.cell_store import Places


class Outbox:
    """Every request with results owns a run of places, and every emitted output has an array over all places."""

    def __init__(self, spec: CellSpec) -> None:
        self.places = Places()
        self._spec = spec
        self._arrays: list[Values | None] = [None] * len(spec.outputs)

    def put(self, output: int, places: NDArray[Any], values: Values) -> None:
        """values: [places, *shape]."""
        array = self._arrays[output]
        if array is None or len(array) < self.places.top:
            array = self._wider(output, array, values.dtype)
        array[places] = values

    def get(self, part: GraphPart, start: int) -> tuple[Values | None, ...]:
        """Copies of what a request's nodes sent back, one [num_results, *shape] per emitted output."""
        values: list[Values | None] = [None] * len(self._arrays)
        end = start + part.num_results
        for o in part.emitted:
            array = self._arrays[o]
            if array is None or len(array) < end:
                dtype = self._spec.outputs[o].dtype
                array = self._wider(o, array, np.dtype("float32" if dtype == "bfloat16" else dtype))
            values[o] = array[start:end].copy()
        return tuple(values)

    def _wider(self, output: int, array: Values | None, dtype: np.dtype[Any]) -> Values:
        shape = self._spec.outputs[output].shape
        room = max(64, 2 * self.places.top)
        wider = np.zeros((room, *shape), dtype)
        if array is not None:
            wider[: len(array)] = array
        self._arrays[output] = wider
        return wider
