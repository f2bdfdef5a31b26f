"""Token bit masks of structured output, handed in while a step runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cellar.runtime.company import Company

Mask = NDArray[np.int32]


class Closed(Exception):
    """The runtime was closed while a step waited."""


class MaskBox:
    """Joins the thread that computes masks with the one that samples.

    mask: int32 [ceil(vocab / 32)]; token t is allowed if bit t % 32 of word t // 32 is set. None: it is late.
    `company`: who computes masks beside the steps.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps: dict[int, dict[int, Mask | None]] = {}
        self._closed = False
        self.company = Company()

    def expect(self, step: int) -> None:
        """Masks for `step` may come from now on."""
        with self._changed:
            self._steps[step] = {}

    def supply(self, step: int, masks: Mapping[int, Mask | None]) -> None:
        """Masks of some rows. Those for a step that expects none, because it failed or is over, are dropped."""
        with self._changed:
            if step in self._steps:
                self._steps[step].update(masks)
                self._changed.notify_all()

    def complete(self, step: int, rows: Sequence[int]) -> bool:
        """True if `wait` would return at once."""
        with self._changed:
            there = self._steps[step]
            return all(row in there for row in rows)

    def wait(self, step: int, rows: Sequence[int]) -> list[Mask | None]:
        """The masks of `rows`, once all are there. Raises Closed if the runtime is closed before."""
        with self._changed:
            there = self._steps[step]
            self._changed.wait_for(lambda: self._closed or all(row in there for row in rows))
            if self._closed:
                raise Closed
            return [there[row] for row in rows]

    def forget(self, step: int) -> None:
        """The step is over, or has failed."""
        with self._changed:
            self._steps.pop(step, None)

    def close(self) -> None:
        """Wake whoever waits, with Closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
