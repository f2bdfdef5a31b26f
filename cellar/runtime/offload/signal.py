"""The seam between the CPU's jobs and a device: how either one learns how far the other has come.

    device --arrived--> CPU     a number behind what the device was told so far
    CPU ----set, hold-> device  a number that grows: jobs that are over

On a GPU both are entries of its stream, which writes a number to pinned memory, and waits for one there; the thread
that makes the entries goes on. Where streams cannot do so, and on a CPU, that thread waits itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cellar.ops.cuda.waits import streams_wait, wait_for, write
from cellar.runtime.offload.mover import Fence, opened

_LOG = logging.getLogger(__name__)

# Between two looks: the interpreter, which whoever launches wants, too, is free in them.
_SHORT_PAUSE, _PAUSE = 2e-6, 2e-5
_LOOK_SECONDS = 30.0


class Signal(Protocol):
    """`set` is for one thread, the others for the one that tells the device what to do."""

    @property
    def runs_ahead(self) -> bool:
        """Whether the device alone waits in `hold`."""

    def arrived(self, *, soon: bool) -> Fence:
        """Behind what the device was told so far, for a thread that waits for it: awake, if it comes `soon`."""

    def hold(self, value: int) -> None:
        """What the device is told from now on waits until so much, or more, has been set."""

    def set(self, value: int) -> None:
        """The number now; it never falls. What this thread has written before is there for who waited."""


class WaitingSignal:
    """Whoever calls `hold` waits in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._value = 0
        self._grown = threading.Condition()

    @property
    def runs_ahead(self) -> bool:
        """No."""
        return False

    def arrived(self, *, soon: bool) -> Fence:
        """On a CPU what was told is done."""
        return opened if self._device.type == "cpu" else _event(soon)

    def hold(self, value: int) -> None:
        """Sleeps."""
        with self._grown:
            self._grown.wait_for(lambda: self._value >= value)

    def set(self, value: int) -> None:
        """Wakes who sleeps."""
        with self._grown:
            self._value = value
            self._grown.notify_all()


class StreamSignal:
    """Two words of pinned memory: one for which the current stream waits, and one that it writes.

    The CPU looks at the second one and asks the driver nothing: the driver may have the other thread wait for the
    stream, to load a kernel that is new, and then answers nobody, but the stream waits for the CPU.

    x86 makes one processor's writes seen in their order, so what was written before the word is there before it. Those
    that go past the caches are ended by a lock, which whoever counts a channel's seconds takes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._here = self._word.numpy().view("uint32")
        self._told = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._there = self._told.numpy().view("uint32")
        self._asked = 0

    @property
    def works(self) -> bool:
        """Whether this device's streams can wait so. Nothing has been set yet."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device).query()  # the driver's calls want a context that this thread uses
            return streams_wait(self._stream(), self._word.data_ptr())

    @property
    def runs_ahead(self) -> bool:
        """Yes."""
        return True

    def arrived(self, *, soon: bool) -> Fence:
        """An entry of the current stream, and a look at what it writes, again and again."""
        self._asked += 1
        stream: Any = torch.cuda.current_stream(self._device)
        write(stream.cuda_stream, self._told.data_ptr(), self._asked)
        return partial(until, self._there, self._asked, _SHORT_PAUSE if soon else _PAUSE, stream.query)

    def hold(self, value: int) -> None:
        """An entry of the current stream."""
        wait_for(self._stream(), self._word.data_ptr(), value)

    def set(self, value: int) -> None:
        """One write."""
        self._here[0] = value & 0xFFFFFFFF

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)


def signal_for(device: torch.device) -> Signal:
    """What the device can do; a line in the log where that is less than a GPU should."""
    if device.type == "cpu":
        return WaitingSignal(device)
    signal = StreamSignal(device)
    if signal.works:
        return signal
    _LOG.warning(
        "streams of %s cannot wait for host memory, so the thread that launches waits for the CPU's products; passes "
        "that use them take longer, with a newer driver they would not.",
        device,
    )
    return WaitingSignal(device)


def until(
    word: NDArray[np.uint32], value: int, pause: float, ask: Callable[[], object], patience: float = _LOOK_SECONDS
) -> None:
    """Return when `word` [1] is `value`, modulo 2**32, or has gone beyond it. A device that has failed writes nothing:
    `ask` is called every so many seconds, and raises then.
    """
    look = time.monotonic() + patience
    while 0 < (value - int(word[0])) % 2**32 < 2**31:
        time.sleep(pause)
        if time.monotonic() > look:
            ask()
            look += patience


def _event(soon: bool) -> Fence:
    event: Any = torch.cuda.Event(blocking=not soon)  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize  # type: ignore[no-any-return]
