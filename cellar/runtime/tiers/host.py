"""The host's memory as a tier: one mapping, in which a chunk is one contiguous piece.

What is asked for is taken: a thread has the system give all pages beside the start (about 1 s for 4 GiB), in ranges of
whole chunks, and asks it afterwards how much it has given. On an accelerator the ranges are registered with the driver,
so that copies are DMA and overlap with steps; until its range is registered, and if the driver registers no more (a
limit of locked memory), a chunk is copied through the driver's own buffer, which is slower and as right.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch

from cellar.core.errors import CapacityError
from cellar.core.messages import ChunkLabel, KeptChunk
from cellar.runtime.memory import host_available, human
from cellar.runtime.pages import take, taken_nbytes
from cellar.runtime.registered import Registered
from cellar.runtime.tiers.storage import Bytes

logger = logging.getLogger(__name__)

_REGISTERED_AT_ONCE = 512 * 2**20
_TAKEN_AT_ONCE = 32 * 2**20
"""While pages are taken, nobody else in this process maps or unmaps memory."""
_GIVEN = 0.98
"""Of what was asked for, what the system must have given for it to be all."""
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
        self._map = mmap.mmap(-1, max(nbytes, 1))
        self.chunks: Bytes = np.frombuffer(self._map, np.uint8, nbytes).reshape(num_slots, chunk_nbytes)
        self._closing = threading.Event()
        self._registered = Registered(device)
        self._registers = device.type == "cuda"
        self._thread = threading.Thread(target=self._take, name="cellar-host-memory", daemon=True)
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

    def taken(self) -> int | None:
        """Bytes that the system counts of it, once all have been asked for; None where it does not say."""
        self._thread.join()
        return taken_nbytes(self.chunks)

    def close(self) -> None:
        """Give the memory back."""
        self._closing.set()
        self._thread.join()
        self._registered.close()
        self.chunks = np.empty((0, 0), np.uint8)

    def _take(self) -> None:
        """Have all pages, and say what the system has given."""
        begin, chunk_nbytes = time.perf_counter(), self.chunks.shape[1]
        registers, first = self._registers, 0
        while first < self._num_slots:
            if self._closing.is_set():
                return
            size = _REGISTERED_AT_ONCE if registers else _TAKEN_AT_ONCE
            part = self.chunks[first : first + max(1, size // chunk_nbytes)]
            if registers and not self._registered.add(part):
                registers = False
                continue
            if not registers and not take(part):
                break
            first += len(part)
        self._read_back(time.perf_counter() - begin)

    def _read_back(self, seconds: float) -> None:
        asked, taken = self.chunks.nbytes, taken_nbytes(self.chunks)
        if taken is None:
            return
        all_there = taken >= _GIVEN * asked
        logger.log(
            logging.INFO if all_there else logging.WARNING,
            "host memory of KV: %s asked for, %s taken after %.1f s%s",
            human(asked),
            human(taken),
            seconds,
            "" if all_there else "; the rest is taken when it is first used, if it is there then",
        )
