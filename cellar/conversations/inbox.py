"""Inbox: results of other threads, brought into an event loop many at a time."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Inbox:
    """Waits for futures of threads in one event loop.

    asyncio.wrap_future wakes the loop once for each; results that come together wake it once here.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: deque[tuple[Future[Any], asyncio.Future[Any]]] = deque()
        self._guard = threading.Lock()
        self._called = False

    async def result(self, future: Future[Any]) -> Any:
        """What becomes of the future. Who stops waiting does not cancel it."""
        return await self._awaited(future, self.wake)

    async def announced(self, future: Future[Any]) -> Any:
        """The same of a future whose maker calls `wake` when it and others are done."""
        return await self._awaited(future, None)

    def wake(self) -> None:
        """Have the loop take what has arrived. From any thread."""
        with self._guard:
            if self._called:
                return
            self._called = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._arrived.clear()

    async def _awaited(self, future: Future[Any], wake: Callable[[], None] | None) -> Any:
        waiting: asyncio.Future[Any] = self.loop.create_future()

        def arrived(done: Future[Any]) -> None:
            self._arrived.append((done, waiting))
            if wake is not None:
                wake()

        future.add_done_callback(arrived)
        if future.done():  # perhaps before it was waited for, and announced already
            self.wake()
        return await waiting

    def _deliver(self) -> None:
        with self._guard:
            self._called = False
        while self._arrived:
            done, waiting = self._arrived.popleft()
            if waiting.done():  # nobody waits any more
                continue
            error = done.exception()
            if error is None:
                waiting.set_result(done.result())
            else:
                waiting.set_exception(error)
