"""How a server's processes ask the system for memory."""

from __future__ import annotations

import contextlib
import ctypes

_M_ARENA_MAX = -8


def one_heap() -> None:
    """Have all threads share one heap; to be called before there are several. Without glibc nothing happens.

    glibc gives each thread a heap of its own, in pieces of 64 MiB. Large buffers of steps, made by one thread and freed
    by another, leave holes in them that no other heap can use: the process grows long after its load has settled.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
