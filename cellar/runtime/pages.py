"""Pages of the host's memory: taken before they are used, and counted by the system."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: take pages as if each were written, and leave what they hold."""


def take(memory: NDArray[np.uint8]) -> bool:
    """Have the system give all pages of a mapping's part now, also while others write to them. False where it does not
    (before Linux 5.14, or there are no more): then each is taken when it is first written.
    """
    madvise = _madvise()
    if madvise is None or not memory.nbytes:
        return madvise is not None
    begin = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    return madvise(begin, memory.ctypes.data + memory.nbytes - begin, _POPULATE_WRITE) == 0


def taken_nbytes(memory: NDArray[np.uint8], maps: Path = Path("/proc/self/smaps")) -> int | None:
    """Bytes of a mapping of its own that this process has, as the system counts; None where it does not (not Linux)."""
    begin = memory.ctypes.data
    end, inside, found = begin + memory.nbytes, False, 0
    try:
        with maps.open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                name, *fields = line.split()
                if not name.endswith(":"):  # a mapping begins: its addresses
                    first, _, _ = name.partition("-")
                    inside = begin <= int(first, 16) < end
                elif inside and name == "Rss:":
                    found += int(fields[0]) * 1024
    except OSError:
        return None
    return found


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C library's: while it works other threads have the interpreter, which Python's own keeps."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
