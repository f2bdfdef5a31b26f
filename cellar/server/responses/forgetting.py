"""Forgetting: what the store deletes by itself, for its age or for room, leaves no KV either."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence
from itertools import groupby

from cellar.conversations.records import Thread
from cellar.core.errors import CellarError
from cellar.server.desk import Desk
from cellar.server.errors import ApiError

logger = logging.getLogger(__name__)

MAX_WAITING = 100_000
"""Threads whose KV waits to be forgotten while there is no engine; the KV of older ones leaves with time."""

AT_ONCE = 64
AGAIN_SECONDS = 1.0


class Forgetting:
    """Has the engine forget the threads that a sweep has deleted, soon after; again and again while there is none.

    `deleted` may be called by any thread, before `start`, too. The rest is for one event loop.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._guard = threading.Lock()
        self._left: deque[Thread] = deque(maxlen=MAX_WAITING)  # with the guard
        self._loop: asyncio.AbstractEventLoop | None = None
        self._come = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def deleted(self, threads: Sequence[Thread]) -> None:
        """Have their KV forgotten."""
        with self._guard:
            self._left.extend(threads)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends
                self._loop.call_soon_threadsafe(self._come.set)

    def start(self) -> None:
        """Begin."""
        self._loop = asyncio.get_running_loop()
        self._come.set()  # for what has come before
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End. What has not been forgotten leaves with time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while await self._come.wait():
            self._come.clear()
            while some := self._some():
                for owner, threads in groupby(sorted(some, key=_owner), _owner):
                    await self._forget(owner, [thread.id for thread in threads])

    async def _forget(self, owner: str, names: list[str]) -> None:
        while True:
            try:
                await self._desk.memory(owner, names, forget=True)
                return
            except (ApiError, CellarError) as error:
                logger.debug("the KV of %d expired conversations waits to be forgotten (%s)", len(names), error)
                await asyncio.sleep(AGAIN_SECONDS)

    def _some(self) -> list[Thread]:
        with self._guard:
            return [self._left.popleft() for _ in range(min(AT_ONCE, len(self._left)))]


def _owner(thread: Thread) -> str:
    return thread.owner
