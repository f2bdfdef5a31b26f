"""Lanes: where the micro-batches of one step are computed side by side."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from torch import Tensor

from cellar.core.messages import IntArray
from cellar.models.model import Comm, Hidden, LayerContext
from cellar.runtime.steps.inputs import StepInputs


class Lanes(Protocol):
    """What a step's micro-batches, numbered in the order of its tokens, are given. A lane has every so many of them."""

    def sizes(self, tokens: int) -> list[int]:
        """Tokens of each micro-batch of a step; one: it is computed whole. Every rank cuts alike."""

    def comm(self, k: int) -> Comm:
        """The other ranks, for the layers of micro-batch k."""

    def whole(self, k: int, h: Hidden) -> Hidden:
        """What the last layer leaves of micro-batch k, with all its rows and nothing left to be added up."""

    def step(self) -> AbstractContextManager[None]:
        """Micro-batches run inside; what follows finds what they made."""

    def at(self, k: int) -> AbstractContextManager[None]:
        """What is begun inside is of micro-batch k."""

    def await_turn(self, k: int) -> None:
        """Go on when the micro-batch before has written its K and V of the layer at hand."""

    def end_turn(self, k: int) -> None:
        """Micro-batch k has begun to write them."""


class InTurn:
    """The context of micro-batch k: its attention finds what those before it have written."""

    def __init__(self, inner: LayerContext, lanes: Lanes, k: int) -> None:
        self._inner = inner
        self._lanes = lanes
        self._k = k
        self.positions = inner.positions
        self.cos_sin = inner.cos_sin
        self.comm = inner.comm

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        """See `LayerContext`."""
        self._lanes.await_turn(self._k)
        attended = self._inner.attend(j, q, k, v, rotate=rotate)
        self._lanes.end_turn(self._k)
        return attended


def cut(inputs: StepInputs, sizes: Sequence[int]) -> list[tuple[IntArray, IntArray, IntArray]]:
    """Rows, starts and stops of the spans of each so many tokens: those that a cut goes through are in two parts."""
    lengths = inputs.stop - inputs.start
    ends = np.cumsum(lengths)
    begins = ends - lengths
    found, first = [], 0
    for size in sizes:
        last = first + size
        inside = np.flatnonzero((begins < last) & (ends > first))
        start = inputs.start[inside] + np.maximum(first - begins[inside], 0)
        stop = inputs.stop[inside] - np.maximum(ends[inside] - last, 0)
        found.append((inputs.row[inside], start.astype(np.int32), stop.astype(np.int32)))
        first = last
    return found
