"""The threads of the engine's steps go before those beside them, where both want a core at the same moment."""

from __future__ import annotations

import ctypes
import os
import sys

NICER = 5
"""Steps of Unix's niceness; two are not enough for a waking engine to take a core at once."""


_SET_TIMERSLACK = 29  # of prctl; in nanoseconds


def yield_to_engine() -> None:
    """Step back by `NICER`: on Linux the calling thread and those that it starts, elsewhere the process."""
    level = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, min(level + NICER, 19))


def yield_to_steps() -> None:
    """Have the calling thread alone step back, in the engine's own process; only Linux can."""
    if sys.platform == "linux":
        yield_to_engine()


def wake_on_time() -> None:
    """Have the calling thread's sleeps end when they should: Linux adds up to 50 us, so that others end with them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_TIMERSLACK, 1, 0, 0, 0)
