"""A device without a GPU: a thread that does what it is told, in order, while whoever tells it goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from cellar.runtime.offload.mover import Fence
from tests.limits import SECONDS


class Stream:
    """What was told and not done yet is in a queue. `close` waits for all of it."""

    def __init__(self) -> None:
        self._told: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.num_done = 0

    def tell(self, work: Callable[[], None]) -> None:
        """Have it done behind all else."""
        self._told.put(work)

    def event(self) -> threading.Event:
        """Comes when all that was told before is done."""
        event = threading.Event()
        self.tell(event.set)
        return event

    def close(self) -> None:
        """Raises AssertionError if the stream stands still."""
        self._told.put(None)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the stream waits for ever"

    def _run(self) -> None:
        while (work := self._told.get()) is not None:
            work()
            self.num_done += 1


class StreamedSignal:
    """Implements `Signal`: the stream waits, and nobody else."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._value = 0
        self._grown = threading.Condition()

    @property
    def runs_ahead(self) -> bool:
        """Yes."""
        return True

    def arrived(self, *, soon: bool) -> Fence:
        """An event of the stream."""
        event = self._stream.event()

        def wait() -> None:
            assert event.wait(SECONDS)

        return wait

    def hold(self, value: int) -> None:
        """An entry of the stream."""

        def wait() -> None:
            with self._grown:
                assert self._grown.wait_for(lambda: self._value >= value, SECONDS)

        self._stream.tell(wait)

    def set(self, value: int) -> None:
        """Wakes the stream."""
        with self._grown:
            self._value = value
            self._grown.notify_all()
