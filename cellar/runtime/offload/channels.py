"""How long each way of an offloaded model has been busy: what a prediction is compared with, way by way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Channel:
    """Seconds that something has taken in all: of threads (`busy`), or between pairs of a device's events."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._inside = 0
        self._since = 0.0
        self._open: deque[tuple[Any, Any]] = deque()

    @property
    def seconds(self) -> float:
        """Of all that has ended."""
        with self._lock:
            while self._open and self._open[0][1].query():
                begin, end = self._open.popleft()
                self._seconds += begin.elapsed_time(end) / 1e3
            return self._seconds

    def add(self, seconds: float) -> None:
        """So much more."""
        with self._lock:
            self._seconds += seconds

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While the block runs; where several threads are inside, the time counts once."""
        with self._lock:
            if not self._inside:
                self._since = self._clock()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._seconds += self._clock() - self._since

    def between(self, begin: Any, end: Any) -> None:
        """Two events of one stream, with timing."""
        self._open.append((begin, end))
        if len(self._open) > 64:
            _ = self.seconds


class Channels:
    """`link`: copies of weights to the device. `disk`: reads of weights. `rows` and `attention`: of the CPU for an
    accelerator. `device`: layers and head, weights being there; on an accelerator with what they wait for of the CPU.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.link = Channel(clock)
        self.disk = Channel(clock)
        self.rows = Channel(clock)
        self.attention = Channel(clock)
        self.device = Channel(clock)

    def seconds(self) -> dict[str, float]:
        """By channel, so far: disk, link, cpu and device."""
        cpu = self.rows.seconds + self.attention.seconds
        return {"disk": self.disk.seconds, "link": self.link.seconds, "cpu": cpu, "device": self.device.seconds}
