"""Two clocks: the wall's, and one that counts a thread's own computing and skips its waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

LOOK_SECONDS = 0.02
"""Between two looks at the processor's pace."""


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


class Pace:
    """How fast the processor is at the moment: the time that a small, fixed piece of work takes.

    What others do on the same machine is not counted by a clock of work, but slows down what is: by up to a half, for
    minutes at a time. The piece lies in the nearest cache, so that it takes equally long beside every system.
    """

    def __init__(self, spent: Callable[[], float] = time.thread_time) -> None:
        self._spent = spent
        self._tensors = [torch.ones(64, 64) for _ in range(3)]

    def look(self) -> float:
        """Seconds that the piece takes now."""
        x, weight, out = self._tensors
        torch.mm(x, weight, out=out)  # what was in the cache may be gone
        start = self._spent()
        for _ in range(8):
            torch.mm(x, weight, out=out)
        total = 0
        for k in range(400):
            total += k
        return self._spent() - start

    def fastest(self, looks: int = 3000) -> float:
        """The shortest of many looks, which nobody has disturbed."""
        return min(self.look() for _ in range(looks))


class WorkClock:
    """CPU time of the calling thread, plus what it would have waited: the wall's clock of a machine of its own.

    For systems that do everything in one thread: others that use the same cores meanwhile do not count, and a wait
    takes no time. With `pace`, what `Pace` takes on the undisturbed processor, time goes by the slower the longer that
    takes now: a clock of the undisturbed machine, as far as one piece of work can tell. Caches that others empty
    still count.
    """

    def __init__(self, spent: Callable[[], float] = time.thread_time, pace: float | None = None) -> None:
        self._spent = spent
        self._undisturbed = pace
        self._pace = Pace(spent)
        self._read = spent()
        self._time = self._read
        self._scale = 1.0
        self._next = 0.0
        self._recent: float | None = None
        self._looks: list[float] = []

    def __call__(self) -> float:
        spent = self._spent()
        self._time += (spent - self._read) * self._scale
        self._read = spent
        return self._time

    def sleep(self, seconds: float) -> None:
        self._time += max(0.0, seconds)

    def tick(self) -> None:
        """Look at the pace now and then; that takes no time."""
        now = self()
        if now < self._next:
            return
        self._next = now + LOOK_SECONDS
        taken = self._pace.look()
        self._looks.append(taken)
        self._recent = taken if self._recent is None else (self._recent + taken) / 2
        if self._undisturbed is not None:
            self._scale = min(1.0, self._undisturbed / self._recent)
        self._read = self._spent()

    def pace(self) -> float:
        """Mean seconds of the looks since the last call; 0 without any."""
        looks, self._looks, self._next = self._looks, [], 0.0
        return sum(looks) / len(looks) if looks else 0.0
