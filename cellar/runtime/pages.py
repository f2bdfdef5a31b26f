"""Pages of the host's memory: huge ones where the system has them, taken before they are used, counted by it."""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: take pages as if each were written, and leave what they hold."""

_HUGE = 2**21
_SHELF = 2**28
_LINE = 64
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def zeros(nbytes: int) -> NDArray[np.uint8]:
    """A private mapping of its own, from the start of a huge page on: zeros, which the system hands out when they are
    first touched. Forked processes have none of it: else a device that copies to it would write to pages of theirs.

    Huge pages are a 512th as many to take, to look up and to name to a driver. An allocator would give what its heap
    has free, all of it in use at once; shared mappings get no huge pages from most systems. Raises OSError, ValueError
    or OverflowError if there is not so much.
    """
    mapping = mmap.mmap(-1, nbytes + 2 * _HUGE, **_PRIVATE)
    memory = np.frombuffer(mapping, np.uint8)
    begin = _HUGE - memory.ctypes.data % _HUGE  # something stays before and behind it, so that it joins no other one
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, name):
            with suppress(OSError):  # a system that has none
                mapping.madvise(getattr(mmap, name), begin, max(nbytes, 1))
    return memory[begin : begin + nbytes]


class Shelf:
    """Copies of tensors that live as long as each other, one behind the other in mappings of `zeros`: many are smaller
    than a huge page, or end within one. Several threads may put.
    """

    def __init__(self, nbytes: int = _SHELF) -> None:
        """`nbytes` of each mapping, of which pages are taken when they are first written."""
        self._nbytes = nbytes
        self._free = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def put(self, tensor: Tensor) -> Tensor:
        """A contiguous copy, from the start of a cache line on. Raises as `zeros` does."""
        nbytes = tensor.numel() * tensor.element_size()
        there = self._carved(nbytes).view(tensor.dtype).view(tensor.shape)
        return there.copy_(tensor)

    def _carved(self, nbytes: int) -> Tensor:
        whole = -(-nbytes // _LINE) * _LINE
        with self._lock:
            if whole > len(self._free):
                self._free = torch.from_numpy(zeros(max(whole, self._nbytes)))
            here, self._free = self._free[:nbytes], self._free[whole:]
        return here


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
