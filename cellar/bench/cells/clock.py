"""Two clocks: the wall's, and one that counts a thread's own computing and skips its waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Seconds, and a way to let them pass."""

    def __call__(self) -> float:
        """Now."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class WallClock:
    """Real time."""

    def __call__(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class WorkClock:
    """CPU time of the calling thread, plus what it would have waited: the wall's clock of a machine of its own.

    For systems that do everything in one thread: others that use the same cores meanwhile do not count, and a wait
    takes no time. Caches that others empty still count.
    """

    def __init__(self, spent: Callable[[], float] = time.thread_time) -> None:
        self._spent = spent
        self._waited = 0.0

    def __call__(self) -> float:
        return self._spent() + self._waited

    def sleep(self, seconds: float) -> None:
        self._waited += max(0.0, seconds)
