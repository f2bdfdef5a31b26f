"""How a server's processes ask the system for memory, and what a front gives back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable

from cellar.core.memory import give_back, resident_bytes
from cellar.core.specs import ModelSpec

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_LARGEST_FROM_HEAP = 32 * 2**20
"""The most that glibc lets come from the heap; anything larger is a mapping of its own."""

_MOST = 256 * 2**20
"""A large model's largest steps are rare; what they take beyond this is taken when they come."""

_KERNELS = 64 * 2**20
"""Half a MiB for each of some hundred kernels that oneDNN compiles in a server's first minutes (decision 0087)."""

LOOK_SECONDS = 10.0

_STILL = 2 * 2**20
"""A process that has grown or shrunk by less between two looks has found what it needs."""

_WORTH = 12 * 2**20

_SELDOM = 1_000
"""Collections of what is young to one of everything, should no look come before."""


class SpareMemory:
    """What large requests leave free in a front's heap, returned once nobody has asked for more for a while.

    glibc returns by itself what is free at the heap's end alone, and what large texts leave lies between small pieces
    that stay: 8 clients' 8 MB each left a front at 1.9 of what it had, of which 0.8 were free. A look is a reading of
    one small file. A process that has grown for good is told so once and then left alone.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes, give: Callable[[], None] = give_back) -> None:
        self._resident = resident
        self._give = give
        self._least = self._last = resident()

    def look(self) -> bool:
        """Whether memory was returned."""
        now = self._resident()
        returns = now > self._least + _WORTH and abs(now - self._last) < _STILL
        if returns:
            self._give()
            now = self._least = self._resident()
        self._least = min(self._least, now)
        self._last = now
        return returns


def return_spare_memory() -> None:
    """Look at it from now on, in a thread of its own that ends with the process.

    The collector of cycles walks over all that has come since the start then, and not whenever that has grown by a
    quarter: a request of a thousand prompts grows it several times a second, and steps, which go first, stretch a walk
    of 10 ms to 0.1 s, in which nobody gets a token. Cycles that live shortly are collected as ever.
    """
    spare, never = SpareMemory(), threading.Event()
    gc.set_threshold(*gc.get_threshold()[:2], _SELDOM)

    def watch() -> None:
        while not never.wait(LOOK_SECONDS):
            gc.collect()
            spare.look()

    threading.Thread(target=watch, name="cellar-heap", daemon=True).start()


def one_heap() -> None:
    """Have all threads share one heap; to be called before there are several. Without glibc nothing happens.

    glibc gives each thread a heap of its own, in pieces of 64 MiB. Large buffers of steps, made by one thread and freed
    by another, leave holes in them that no other heap can use: the process grows long after its load has settled.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def reserve_steps(spec: ModelSpec, tokens: int, rows: int) -> None:
    """Take what steps of up to `tokens` tokens and `rows` requests will use, and give nothing back later.

    Steps of all sizes leave holes in the heap, so that it grows in jumps, to about twice what the largest one uses:
    memory that is better taken at the start than in the middle of a service (docs/log/cpu-engine.md). Without glibc
    nothing happens.
    """
    projected = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    floats = tokens * (4 * spec.hidden_size + 2 * projected + 3 * spec.intermediate_size) + 3 * rows * spec.vocab_size
    _reserve(min(2 * 4 * floats, _MOST) + _KERNELS)


def _reserve(nbytes: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        libc.malloc.argtypes = [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        piece = _LARGEST_FROM_HEAP // 2
        pieces = [libc.malloc(piece) for _ in range(-(-nbytes // piece))]
        for address in pieces:
            if address is not None:
                ctypes.memset(address, 0, piece)
                libc.free(address)
