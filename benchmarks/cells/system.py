"""What is measured: something that takes requests and answers them, driven by one thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from benchmarks.cells.clock import Clock

Answer = tuple[int, float, float]
"""A request that is done, and two times of the clock, in seconds: its first cell began, its result was there."""


class System(Protocol):
    """Serves the requests of one workload, named by their numbers."""

    @property
    def name(self) -> str:
        """What figures call it."""

    @property
    def clock(self) -> Clock:
        """Its time."""

    def expect(self, count: int) -> None:
        """Requests 0 to `count` - 1 will come: whatever may be done before the clock starts."""

    def arrive(self, requests: Sequence[int], now: float) -> None:
        """Requests have come; returns at once."""

    def turn(self, timeout: float) -> Sequence[Answer]:
        """Work; returns when something is done, or after `timeout` seconds with nothing to do, or earlier."""

    def drop(self) -> None:
        """Forget every request that is not done."""
