"""The host's memory as a tier: one mapping, in which a chunk is one contiguous piece.

On an accelerator the mapping is registered with the driver, so that copies are DMA and overlap with steps. Registering
touches every page (about 1 s for 4 GiB), so a thread does it beside the start, in ranges of whole chunks; until its
range is registered a chunk is copied through the driver's own buffer, which is slower and as right.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import numpy as np
import torch

from cellar.core.errors import CapacityError
from cellar.core.messages import ChunkLabel, KeptChunk
from cellar.runtime.memory import host_available, human
from cellar.runtime.registered import Registered
from cellar.runtime.tiers.storage import Bytes

_REGISTERED_AT_ONCE = 512 * 2**20
_RESERVE = 0.05
"""Of the memory that is free, what is left to others."""


class HostTier:
    """`num_slots` chunks in memory. With `device` an accelerator, the memory is registered with its driver.

    Raises CapacityError if the host has not so much memory.
    """

    def __init__(self, num_slots: int, chunk_nbytes: int, device: torch.device) -> None:
        nbytes, free = num_slots * chunk_nbytes, host_available()
        if nbytes > (1 - _RESERVE) * free:
            raise CapacityError(
                f"kv_offloading_size asks for {human(nbytes)} of host memory, but {human(free)} are free; ask for "
                f"{(1 - _RESERVE) * free / 2**30:.1f} or less (GiB)."
            )
        self._num_slots = num_slots
        # Anonymous pages: they are taken when they are first written, or registered.
        self._map = mmap.mmap(-1, max(nbytes, 1))
        self.chunks: Bytes = np.frombuffer(self._map, np.uint8, nbytes).reshape(num_slots, chunk_nbytes)
        self._closing = threading.Event()
        self._registered = Registered(device)
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._thread = threading.Thread(target=self._register, name="cellar-register", daemon=True)
            self._thread.start()

    @property
    def num_slots(self) -> int:
        """Chunks that it holds."""
        return self._num_slots

    @property
    def num_threads(self) -> int:
        """One: the link to the device is busy with one copy."""
        return 1

    def kept(self) -> Sequence[KeptChunk]:
        """None: the memory was another's."""
        return ()

    def write(self, slot: int, chunk: Bytes, label: ChunkLabel | None = None) -> None:
        """Keep a chunk."""
        self.chunks[slot] = chunk

    def read(self, slot: int, chunk: Bytes, label: ChunkLabel | None = None) -> None:
        """Fill `chunk`."""
        chunk[:] = self.chunks[slot]

    def erase(self, slot: int) -> None:
        """What nobody knows of is found by nobody, and gone with the process."""

    def close(self) -> None:
        """Give the memory back."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._registered.close()
        self.chunks = np.empty((0, 0), np.uint8)

    def _register(self) -> None:
        nbytes = self.chunks.shape[1]
        step = max(1, _REGISTERED_AT_ONCE // nbytes)
        for first in range(0, self._num_slots, step):
            if self._closing.is_set() or not self._registered.add(self.chunks[first : first + step]):
                return
