"""What this process has of the machine's memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path


def resident_bytes(path: Path = Path("/proc/self/statm")) -> int:
    """Bytes of memory that this process has; 0 where the system does not say (not Linux)."""
    try:
        return int(path.read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


def give_back() -> None:
    """Return to the system whatever whole pages of the heap are free, also between pieces that are in use: 250 MB take
    40 ms, in which no other thread gets memory. Without glibc nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
