"""Lanes: where collectives go on beside the products, a stream of a GPU or a thread of a CPU."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from cellar.models.loop import Ahead, Lane

T = TypeVar("T")


class _Job(NamedTuple):
    """Work, where its result goes, and whether it runs in inference mode as its giver does."""

    work: Callable[[], Any]
    found: Future[Any]
    inference: bool


def lane_on(device: torch.device) -> Lane:
    """A lane beside what a rank computes on this device."""
    return HostLane() if device.type == "cpu" else DeviceLane(device)


class HostLane:
    """Implements `Lane` by a thread, which ends with the lane. It never keeps a process from ending."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._begun = False

    def run(self, work: Callable[[], T]) -> Ahead[T]:
        """See `Lane`."""
        if not self._begun:
            self._begun = True
            threading.Thread(target=_work, args=(self._jobs,), name="collectives", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        found: Future[T] = Future()
        self._jobs.put(_Job(work, found, torch.is_inference_mode_enabled()))
        return found

    def open(self) -> bool:
        """A CPU records no graphs."""
        return True


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            with torch.inference_mode(job.inference):
                job.found.set_result(job.work())
        except BaseException as error:
            job.found.set_exception(error)
        del job  # what it holds is not held until the next one comes


class DeviceLane:
    """Implements `Lane` by a stream. Work begins when all that the current stream has been given is done.

    Memory: a block that the lane made is given out again only to later work of the lane, which waits for all that the
    caller has begun by then, its last reads among it. What the work takes is held until its result is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def run(self, work: Callable[[], T]) -> Ahead[T]:
        """See `Lane`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            found = work()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return _Recorded(self._device, work, found, done)

    def open(self) -> bool:
        """Not while the current stream is recorded."""
        return not torch.cuda.is_current_stream_capturing()


class _Recorded(Generic[T]):
    """Work that a stream was given."""

    def __init__(self, device: torch.device, work: Callable[[], T], found: T, done: torch.cuda.Event) -> None:
        self._device = device
        self._work: Callable[[], T] | None = work
        self._found = found
        self._done = done

    def result(self) -> T:
        """The current stream waits for it; nobody else does."""
        torch.cuda.current_stream(self._device).wait_event(self._done)
        self._work = None
        return self._found
