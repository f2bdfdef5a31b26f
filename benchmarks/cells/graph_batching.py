"""Graph batching: whole batches run from beginning to end, and nothing joins or leaves (BatchMaker §2.2.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from benchmarks.cells.clock import Clock, WallClock
from benchmarks.cells.padding import Padded
from benchmarks.cells.system import Answer


class Queue(Protocol):
    """Decides which requests run together."""

    def add(self, request: int, length: int) -> None:
        """Queue a request."""

    def next(self) -> Padded | None:
        """The batch to run now; None if nothing waits."""

    def clear(self) -> None:
        """Forget all."""


class Executor(Protocol):
    """Computes one batch at a time."""

    def start(self, batch: Padded) -> None:
        """Begin; may return when the batch is done, or before."""

    def done(self, timeout: float) -> bool:
        """True once everything of the batch is computed; waits up to `timeout` seconds for it."""


class GraphBatching:
    """A `System` that runs batch after batch; all answers of a batch come at its end."""

    def __init__(
        self,
        name: str,
        queue: Queue,
        executor: Executor,
        length: Callable[[int], int],
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.queue = queue
        self._executor = executor
        self._length = length
        self.clock = clock or WallClock()
        self._running: tuple[Padded, float] | None = None

    def expect(self, count: int) -> None:
        """Nothing is to be done beforehand."""

    def arrive(self, requests: Sequence[int], now: float) -> None:
        """Queue them."""
        for request in requests:
            self.queue.add(request, self._length(request))

    def turn(self, timeout: float) -> Sequence[Answer]:
        """Start the next batch if none runs; answers if the one that runs is done."""
        if self._running is None:
            batch = self.queue.next()
            if batch is None:
                self.clock.sleep(timeout)
                return ()
            self._running = batch, self.clock()
            self._executor.start(batch)
        batch, began = self._running
        if not self._executor.done(timeout):
            return ()
        self._running = None
        ended = self.clock()
        return [(request, began, ended) for request in batch.requests]

    def drop(self) -> None:
        """Wait for the running batch and forget the others."""
        self.queue.clear()
        while self._running is not None:
            self.turn(1.0)
