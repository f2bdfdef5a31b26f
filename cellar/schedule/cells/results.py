"""Outbox: the values that nodes of one cell sent back to the host, until their request ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellar.core.tasks import CellSpec, Values
from cellar.schedule.cells.store import Places

_FEW = 8
"""So few results are copied faster one by one than together."""


class Outbox:
    """Every request with results owns a run of places, and every emitted output has an array over all places."""

    def __init__(self, spec: CellSpec) -> None:
        self.places = Places()
        self.nothing: tuple[Values | None, ...] = (None,) * len(spec.outputs)
        self._spec = spec
        self._arrays: list[Values | None] = [None] * len(spec.outputs)

    def put(self, output: int, places: NDArray[Any], values: Values) -> None:
        """values: [places, *shape]."""
        array = self._arrays[output]
        if array is None or len(array) < self.places.top:
            array = self._wider(output, array, values.dtype)
        array[places] = values

    def get(self, starts: list[int], count: int, emitted: Sequence[int]) -> list[tuple[Values | None, ...]]:
        """What the nodes of some requests sent back, `count` places each: per request, by output, [count, *shape].

        One copy is made for all of them.
        """
        columns: list[Sequence[Values | None]] = [(None,) * len(starts)] * len(self._arrays)
        end = max(starts) + count
        for o in emitted:
            array = self._arrays[o]
            if array is None or len(array) < end:
                dtype = self._spec.outputs[o].dtype
                array = self._wider(o, array, np.dtype("float32" if dtype == "bfloat16" else dtype))
            if len(starts) < _FEW:
                columns[o] = [array[start : start + count].copy() for start in starts]
            elif count == 1:
                columns[o] = list(array.take(starts, axis=0)[:, None])
            else:
                columns[o] = list(array.take(np.array(starts)[:, None] + np.arange(count), axis=0))
        return list(zip(*columns, strict=True))

    def _wider(self, output: int, array: Values | None, dtype: np.dtype[Any]) -> Values:
        shape = self._spec.outputs[output].shape
        room = max(64, 2 * self.places.top)
        wider = np.zeros((room, *shape), dtype)
        if array is not None:
            wider[: len(array)] = array
        self._arrays[output] = wider
        return wider
