"""Pace: the number of threads of a worker's operations, from the clock and `threads.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch

from cellar.ops.cpu.launch import use_threads
from cellar.runtime.company import Company
from cellar.runtime.threads import ThreadChoice


class Pace:
    """Sets the number of threads of the calling thread's operations: always the same (`fixed`), or as its laps suggest.

    It belongs to one thread, and must be made in it. Without `fixed` the most is what torch has there. `company` says
    whether other threads of the process compute beside it, by the same clock.
    """

    def __init__(
        self,
        fixed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        company: Company | None = None,
    ) -> None:
        if fixed is not None:
            torch.set_num_threads(fixed)
        self.threads = torch.get_num_threads()
        self._clock = clock
        self._company = Company() if company is None else company
        self._piece: tuple[Hashable, float, float | None] = None, 1.0, None
        self._choice = ThreadChoice(self.threads) if fixed is None and self.threads > 1 else None

    def begin(self, kind: Hashable, size: float, work: float | None = None) -> None:
        """A piece of work begins; its laps take about the same time per `size` as others of its kind. `work` compares
        it with pieces of other kinds; without it `size` does.
        """
        if self._choice is not None:
            self._piece = kind, size, work
            self._go_on(self._clock())

    def lap(self) -> None:
        """A lap of the piece has ended."""
        if self._choice is not None:
            now = self._clock()
            self._choice.lap(now)
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        """The next lap of the piece begins, in whatever company."""
        assert self._choice is not None
        kind, size, work = self._piece
        self._set(self._choice.begin(kind, size, now, work, beside=self._company.is_busy(now)))

    def _set(self, threads: int) -> None:
        if threads != self.threads:
            use_threads(threads)
            self.threads = threads


def magnitude(count: int) -> int:
    """Counts that differ by less than a quarter mostly have the same one: a kind of laps."""
    shift = max(count.bit_length() - 3, 0)
    return count >> shift << shift
