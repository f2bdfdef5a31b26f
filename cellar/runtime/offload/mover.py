"""The seam for streams: moves into slots, and what each side waits for before it touches one.

The loader moves rows into a slot and makes a fence behind the moves; whoever computes waits for that fence. When the
slot is given back, a fence behind the computation is what the loader waits for. On the CPU both are over when the call
returns, so its fences are open. On an accelerator moves run on a stream of their own, and a fence is an event: the
thread that waits for one goes on at once, and its stream waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cellar.runtime.offload.channels import Channel

Fence = Callable[[], None]
"""Returns when, or makes the caller's stream wait until, all that was begun before it is done."""


def opened() -> None:
    """The fence of what is done already."""


class Mover(Protocol):
    """Moves bytes towards one device."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether moves go on while the thread that began them does something else."""

    def move(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy: uint8, equally long. An accelerator wants host memory that is registered."""

    def moved(self) -> Fence:
        """Behind the moves so far, for whoever computes."""

    def computed(self) -> Fence:
        """Behind what was computed so far, for whoever moves."""

    def over(self) -> Fence:
        """Behind the moves so far, for a thread that waits for them itself."""

    def mark(self) -> Any:
        """Where moves have come to; None where they are not timed."""

    def count(self, channel: Channel, begun: Any) -> None:
        """The time from that mark to here is the channel's."""

    def computing(self, channel: Channel) -> AbstractContextManager[None]:
        """The time of what is computed in the block is the channel's."""


class HostMover:
    """Copies by the calling thread alone. NumPy lets other threads run meanwhile, and brings no team of its own."""

    @property
    def is_asynchronous(self) -> bool:
        """No."""
        return False

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy."""
        np.copyto(target.numpy(), source.numpy())

    def moved(self) -> Fence:
        """Nothing is left to wait for."""
        return opened

    def computed(self) -> Fence:
        """Nothing is left to wait for."""
        return opened

    def over(self) -> Fence:
        """Nothing is left to wait for."""
        return opened

    def mark(self) -> Any:
        """Now."""
        return time.perf_counter()

    def count(self, channel: Channel, begun: Any) -> None:
        """Of the calling thread."""
        channel.add(time.perf_counter() - begun)

    def computing(self, channel: Channel) -> AbstractContextManager[None]:
        """By the calling thread."""
        return channel.busy()


class StreamMover:
    """Copies of a copy engine, on a stream of its own. What computes is the current stream of who asks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def is_asynchronous(self) -> bool:
        """Yes."""
        return True

    def move(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def moved(self) -> Fence:
        """An event for the stream that computes."""
        event = self._event(self._stream)
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)

    def computed(self) -> Fence:
        """An event for the stream of the moves."""
        event = self._event(torch.cuda.current_stream(self._device))
        return lambda: self._stream.wait_event(event)

    def over(self) -> Fence:
        """An event for a thread, which sleeps."""
        return self._event(self._stream, blocking=True).synchronize  # type: ignore[no-any-return]

    def mark(self) -> Any:
        """An event of the stream of the moves, which comes when those before are over."""
        return self._event(self._stream, timing=True)

    def count(self, channel: Channel, begun: Any) -> None:
        """Of the stream; a move that waits for a slot counts as well."""
        channel.between(begun, self._event(self._stream, timing=True))

    @contextmanager
    def computing(self, channel: Channel) -> Iterator[None]:
        """By the current stream."""
        stream = torch.cuda.current_stream(self._device)
        begun = self._event(stream, timing=True)
        try:
            yield
        finally:
            channel.between(begun, self._event(stream, timing=True))

    def _event(self, stream: Any, blocking: bool = False, timing: bool = False) -> Any:
        event: Any = torch.cuda.Event(blocking=blocking, enable_timing=timing)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def mover_for(device: torch.device) -> Mover:
    """What moves bytes to this device."""
    return HostMover() if device.type == "cpu" else StreamMover(device)
