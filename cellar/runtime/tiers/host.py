"""The host's memory as a tier: one mapping, in which a chunk is one contiguous piece.

What is asked for is taken: threads have the system give all pages beside the start, in ranges of whole chunks, and ask
it afterwards how much it has given. On an accelerator the ranges are registered with the driver, so that copies are DMA
and overlap with steps; until its range is registered, and if the driver registers no more (a limit of locked memory), a
chunk is copied through the driver's own buffer, which is slower and as right.

Whoever else asks the driver or the system for memory waits while that is done: under requests steps took 1.07 to 1.9
times as long. So ranges are small, their pages are there before they are registered, and a pause follows each. It is
done beside the start, which waits for what is left (`settle`), but not for ever: then it goes on slowly.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from cellar.core.cores import num_cores
from cellar.core.errors import CapacityError
from cellar.core.messages import ChunkLabel, KeptChunk
from cellar.runtime.memory import host_available, human
from cellar.runtime.pages import take, taken_nbytes, zeros
from cellar.runtime.registered import Registered
from cellar.runtime.tiers.storage import Bytes

logger = logging.getLogger(__name__)

_REGISTERED_AT_ONCE = 64 * 2**20
_TAKEN_AT_ONCE = 8 * 2**20
"""While pages are taken, nobody else in this process maps or unmaps memory."""
_TAKERS = 4
"""Threads that take pages at most: each takes 2 to 4 GB a second, which others hardly notice."""
_BESIDE_A_START = 1
"""While weights are loaded, the driver is left to others for so many times as long as registering a range took."""
_ALONE = 0
"""The same when nothing is left of the start but that."""
_UNDER_REQUESTS = 49
"""The same when requests run: a tenth of the time would cost them 7 to 12 %, so much costs 1 to 2 % (H200)."""
_PATIENCE_SECONDS = 10.0
"""So long a start waits for it: 20 to 100 GiB, whether the machine has to get the memory itself or has it."""
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
        self.chunks: Bytes = zeros(nbytes).reshape(num_slots, chunk_nbytes)
        self._closing = threading.Event()
        self._reached = 0  # chunks whose memory is there
        self._pause: float = _BESIDE_A_START
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

    def settle(self) -> None:
        """All else of a start is done. Take what is left, with nothing to wait for; after some seconds requests run
        none the less, and the rest comes slowly.
        """
        self._pause = _ALONE
        self._thread.join(_PATIENCE_SECONDS)
        if self._thread.is_alive():
            logger.info(
                "host memory of KV: %s of %s are taken; the rest comes slowly, so that requests do not wait for it",
                human(self._reached * self.chunks.shape[1]),
                human(self.chunks.nbytes),
            )
        self._pause = _UNDER_REQUESTS

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
        begin, registers = time.perf_counter(), self._registers
        with ThreadPoolExecutor(min(_TAKERS, max(1, num_cores() // 2)), "cellar-host-pages") as threads:
            for part, given in self._given(threads):
                if self._closing.is_set():
                    return
                registers = registers and self._register(part)
                if not registers and not given:
                    break
                self._reached += len(part)
        self._read_back(time.perf_counter() - begin)

    def _given(self, threads: ThreadPoolExecutor) -> Iterator[tuple[Bytes, bool]]:
        """Ranges of chunks one after another, and whether the system has given all their pages. The next one's are on
        their way.
        """
        of_range, of_piece = (max(1, size // self.chunks.shape[1]) for size in (_REGISTERED_AT_ONCE, _TAKEN_AT_ONCE))
        ahead: deque[tuple[Bytes, list[Future[bool]]]] = deque()
        for first in range(0, self._num_slots, of_range):
            part = self.chunks[first : first + of_range]
            pieces = (part[k : k + of_piece] for k in range(0, len(part), of_piece))
            ahead.append((part, [threads.submit(take, piece) for piece in pieces]))
            if len(ahead) > 1:
                part, asked = ahead.popleft()
                yield part, _all_given(asked)
        for part, asked in ahead:
            yield part, _all_given(asked)

    def _register(self, part: Bytes) -> bool:
        """Register a range with the driver, and leave it to others for a while; False if it does not."""
        begin = time.perf_counter()
        done = self._registered.add(part)
        self._closing.wait(self._pause * (time.perf_counter() - begin))
        return done

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


def _all_given(pieces: Sequence[Future[bool]]) -> bool:
    """Waits for all of them."""
    given = [piece.result() for piece in pieces]
    return all(given)
