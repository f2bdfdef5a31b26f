"""Company: whether other threads of this process keep a core busy, as those do that compute masks beside steps.

They come and go many times within a step, so what counts is for how much of the latest time they were there.

A decision: no clock is read here, `now` is an argument.
"""

from __future__ import annotations

import math

MEMORY_SECONDS = 0.1
"""What is so long ago counts for 1 / e of what is now: a few steps."""

BUSY = 0.5
"""A core is busy if threads were there for so much of the time."""


class Company:
    """`now` is told how many threads compute beside steps, `is_busy` asked; each in any thread."""

    def __init__(self) -> None:
        self._state = 0, 0.0, 0.0  # threads, share and time of the latest change, set at once

    def now(self, threads: int, now: float) -> None:
        """So many from now on, in seconds of any clock. One caller at a time."""
        self._state = threads, self.share(now), now

    def share(self, now: float) -> float:
        """Of the latest time, that in which at least one was there: 0 to 1."""
        threads, share, since = self._state
        there = 1.0 if threads > 0 else 0.0
        return there + (share - there) * math.exp(-max(0.0, now - since) / MEMORY_SECONDS)

    def is_busy(self, now: float) -> bool:
        """True if they take about a core."""
        return self.share(now) > BUSY
