"""Waiting for connections, and for a thread that wants to end the waiting."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
from multiprocessing.connection import Connection


class Bell:
    """One thread waits at it, for connections that it listens to; all may `ring`.

    `multiprocessing.connection.wait` does the same, and sets up what it waits by at every call: 20 us each time, where
    this takes 2.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def listen(self, connection: Connection) -> None:
        """Wait for this one, too, until `ignore`."""
        self._poll.register(connection.fileno(), select.POLLIN)

    def ignore(self, connection: Connection) -> None:
        """Wait for it no more; to be called before it is closed."""
        self._poll.unregister(connection.fileno())

    def ring(self) -> None:
        """End the waiting, or the next one; once it is closed nobody waits."""
        with self._lock:
            if self._write >= 0:
                with contextlib.suppress(BlockingIOError):  # full: it will be heard anyhow
                    os.write(self._write, b"\0")

    def wait(self, timeout: float | None) -> None:
        """Until a connection has news or has ended, somebody rings, or so many seconds are over (None: never)."""
        found = self._poll.poll(None if timeout is None else math.ceil(1000 * max(0.0, timeout)))
        if any(descriptor == self._read for descriptor, _ in found):
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 4096)

    def close(self) -> None:
        """A second call does nothing."""
        with self._lock:
            if self._write >= 0:
                os.close(self._write)
                os.close(self._read)
                self._write = -1
