"""Arrivals: loads that were answered before their last bytes came, and what a step has to wait for (decision 0057).

copier: add -> [answer] -> remove once all has come      executor: touching(slots) -> before(layer), for each layer
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cellar.core.errors import DeviceError


class Mark(Protocol):
    """The end of one part of a load."""

    def follow(self) -> None:
        """What this thread does next on the device comes after it."""

    def join(self) -> None:
        """Wait for it."""


class EventMark:
    """In a queue of the device: `record` there, once, or `fail`. Who follows it waits until it is recorded; that it is
    reached their queue waits for.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._recorded = ThreadMark()

    def record(self) -> None:
        """It is reached when all that was put into the current queue so far is done."""
        self._event.record()
        self._recorded.set()

    def fail(self, error: Exception) -> None:
        """What was to be in front of it will not be."""
        self._recorded.set(error)

    def follow(self) -> None:
        """The current queue waits. Raises DeviceError if it failed."""
        self._recorded.follow()
        torch.cuda.current_stream().wait_event(self._event)

    def reached(self) -> bool:
        """Whether it has come."""
        return self._recorded.is_good() and bool(self._event.query())  # type: ignore[no-untyped-call]

    def join(self) -> None:
        """Wait for it, or until it fails."""
        self._recorded.join()
        if self._recorded.is_good():
            self._event.synchronize()


class ThreadMark:
    """Where copies are made by a thread: `set` there, with what went wrong, if anything did."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._error: Exception | None = None

    def set(self, error: Exception | None = None) -> None:
        """It is reached."""
        self._error = error
        self._event.set()

    def reached(self) -> bool:
        """Whether it has come."""
        return self._event.is_set()

    def is_good(self) -> bool:
        """Whether it has come, and nothing went wrong."""
        return self.reached() and self._error is None

    def follow(self) -> None:
        """Wait for it. Raises DeviceError if what was to come did not."""
        self._event.wait()
        if self._error is not None:
            raise DeviceError(f"chunks that were on their way from host memory have not come: {self._error}")

    def join(self) -> None:
        """Wait for it."""
        self._event.wait()


class Arrival:
    """A load into `slots` [n] of the device: layer j is there when mark `part_of_layer[j]` is reached."""

    def __init__(self, slots: NDArray[np.int32], marks: Sequence[Mark], part_of_layer: Sequence[int]) -> None:
        self.slots = slots
        self._marks = marks
        self._part_of_layer = part_of_layer

    def before(self, layer: int) -> None:
        """What follows in the current queue may read and write that layer."""
        self._marks[self._part_of_layer[layer]].follow()

    def follow(self) -> None:
        """What follows in the current queue may read and write all layers."""
        for mark in self._marks:
            mark.follow()

    def join(self) -> None:
        """Wait for all of it."""
        for mark in self._marks:
            mark.join()


class Arrivals:
    """The loads that are answered and under way. Any thread asks; those that copy add and remove."""

    def __init__(self) -> None:
        self._under_way: list[Arrival] = []
        self._lock = threading.Lock()

    def add(self, arrival: Arrival) -> None:
        """A load is about to be answered."""
        with self._lock:
            self._under_way.append(arrival)

    def remove(self, arrival: Arrival) -> None:
        """All of it has come."""
        with self._lock:
            self._under_way.remove(arrival)

    def __bool__(self) -> bool:
        """Whether any is under way."""
        return bool(self._under_way)

    def touching(self, slots: NDArray[np.int32]) -> list[Arrival]:
        """Those that fill any of `slots`."""
        if not self._under_way:
            return []
        with self._lock:
            return [arrival for arrival in self._under_way if np.isin(arrival.slots, slots).any()]
