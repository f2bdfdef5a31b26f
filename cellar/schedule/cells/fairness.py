"""FairShare: which model's turn it is. Start-time fair queueing over the seconds that models take from the workers."""

from __future__ import annotations

from collections.abc import Iterable

_UNKNOWN_SECONDS = 1e-3
_WEIGHT = 0.2


class FairShare:
    """Each model has a clock that runs while it is served; the model whose clock is furthest behind goes first.

    A model that had nothing to do does not save up: its clock is set to that of the model served last.
    """

    def __init__(self, cells: tuple[int, ...]) -> None:
        self._clock = [0.0] * len(cells)
        self._idle = [True] * len(cells)
        self._now = 0.0
        self._seconds = [[_UNKNOWN_SECONDS] * count for count in cells]

    def order(self, models: Iterable[int]) -> list[int]:
        """Of the models that have work, those with least service first; all others count as idle."""
        wanting = set(models)
        for m in range(len(self._clock)):
            if m not in wanting:
                self._idle[m] = True
            elif self._idle[m]:
                self._idle[m] = False
                self._clock[m] = max(self._clock[m], self._now)
        return sorted(wanting, key=lambda m: (self._clock[m], m))

    def charge(self, model: int, cell: int, tasks: int) -> None:
        """A call of so many tasks was handed to a worker."""
        self._now = self._clock[model]
        self._clock[model] += tasks * self._seconds[model][cell]

    def measured(self, model: int, cell: int, seconds: float) -> None:
        """A task lasted so long; 0 if unknown."""
        if seconds > 0:
            known = self._seconds[model]
            known[cell] = (
                seconds if known[cell] == _UNKNOWN_SECONDS else known[cell] + _WEIGHT * (seconds - known[cell])
            )
