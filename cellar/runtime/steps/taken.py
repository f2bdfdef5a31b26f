"""TakenPages: the pages of a CPU's KV cache, taken from the system before a step is the first to write to them.

The system clears a page when it is first touched: 2 MiB take 0.3 to 3 ms, and the keys and the values of each layer
have pages of their own. So a prompt's or a crowd's first steps lasted tens of milliseconds longer than later ones.
Taking all of a cache would have a chat hold gigabytes that it never uses: so some more than is used is taken, in a
thread. It rests while there are steps: they and those who bring requests want the cores, and nobody in a process maps
memory while pages are taken.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from cellar.core.messages import IntArray
from cellar.core.priority import yield_to_steps
from cellar.runtime.pages import take
from cellar.runtime.steps.arena import Arena

AHEAD_NBYTES = 128 * 2**20
"""Of a cache, what is taken beyond the slots in use, which are the lowest ones."""

_AT_ONCE = 2 * 2**20
"""Of each layer's keys or values: a large page."""


class TakenPages:
    """Of `arena`, which lies in memory of its own. `begins` is called before each step, `ended` after it; `close` ends
    the thread.
    """

    def __init__(self, arena: Arena, ahead_nbytes: int = AHEAD_NBYTES) -> None:
        each = [part for buffer in arena.buffers for layer in buffer for part in layer]  # [slots, ...] of K or V
        self._parts: list[NDArray[np.uint8]] = [part.flatten(1).view(torch.uint8).numpy() for part in each]
        self._ahead = max(1, ahead_nbytes * arena.num_slots // max(1, arena.nbytes))
        self._num_slots = arena.num_slots
        self._most = 0
        self._steps = 0  # under way
        self.num_taken = 0
        """Slots, the lowest ones."""
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._take, name="cellar-kv-pages", daemon=True)
        self._thread.start()

    def begins(self, slots: IntArray) -> None:
        """There is a step, which is about to write to these."""
        with self._changed:
            self._steps += 1
            if len(slots):
                self._most = max(self._most, int(slots.max()) + 1)

    def ended(self) -> None:
        """One step less."""
        with self._changed:
            self._steps -= 1
            if not self._steps and self.num_taken < self._wanted():
                self._changed.notify()

    def close(self) -> None:
        """The cache is let go of."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._parts = []

    def _wanted(self) -> int:
        return min(self._num_slots, self._most + self._ahead)

    def _may_take(self) -> bool:
        """Waits until more is wanted, and no step is under way; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (not self._steps and self.num_taken < self._wanted()))
        return not self._closed

    def _take(self) -> None:
        yield_to_steps()
        slots = max(1, _AT_ONCE // max(1, max((part[:1].nbytes for part in self._parts), default=1)))
        while self.num_taken < self._num_slots:
            last = min(self.num_taken + slots, self._num_slots)
            for part in self._parts:
                if not self._may_take() or not take(part[self.num_taken : last]):
                    return  # a system that cannot be asked gives each page when it is touched
            self.num_taken = last
