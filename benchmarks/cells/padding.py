"""The baseline of padding with bucketing (BatchMaker §2.7.1): whole batches of requests of similar length."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Padded:
    """Requests that run together, each padded to `length`."""

    requests: tuple[int, ...]
    length: int


class Buckets:
    """Bucket i holds requests of length in (width * i, width * (i + 1)]; they are served by turns.

    There are no time-outs: a bucket starts on its turn with what it has, at most `max_batch`, first come first
    served, and empty ones are passed over.
    """

    def __init__(self, width: int, max_batch: int) -> None:
        self.width = width
        self.max_batch = max_batch
        self._queues: dict[int, deque[int]] = {}
        self._last = -1

    def add(self, request: int, length: int) -> None:
        """Queue a request."""
        self._queues.setdefault((length - 1) // self.width, deque()).append(request)

    def next(self) -> Padded | None:
        """The batch whose turn it is; None if nothing waits."""
        if not self._queues:
            return None
        bucket = min(self._queues, key=lambda i: (i <= self._last, i))
        queue = self._queues[bucket]
        taken = tuple(queue.popleft() for _ in range(min(self.max_batch, len(queue))))
        if not queue:
            del self._queues[bucket]
        self._last = bucket
        return Padded(taken, (bucket + 1) * self.width)

    def clear(self) -> None:
        """Forget all."""
        self._queues.clear()


class Fixed:
    """The ideal line: all requests have one shape, whatever waits runs as one batch of at most `max_batch`."""

    def __init__(self, length: int, max_batch: int) -> None:
        self._length = length
        self._max_batch = max_batch
        self._queue: deque[int] = deque()

    def add(self, request: int, length: int) -> None:
        """Queue a request. Raises ValueError for another shape."""
        if length != self._length:
            raise ValueError(f"the fixed graph has length {self._length}, not {length}.")
        self._queue.append(request)

    def next(self) -> Padded | None:
        """What waits, up to the largest batch."""
        if not self._queue:
            return None
        taken = tuple(self._queue.popleft() for _ in range(min(self._max_batch, len(self._queue))))
        return Padded(taken, self._length)

    def clear(self) -> None:
        """Forget all."""
        self._queue.clear()


def waste(batches: Sequence[Padded], lengths: Sequence[int]) -> float:
    """Share of the computed steps that were padding."""
    computed = sum(batch.length * len(batch.requests) for batch in batches)
    needed = sum(lengths[request] for batch in batches for request in batch.requests)
    return 1 - needed / max(computed, 1)
