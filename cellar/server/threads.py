"""Threads that are there before they are needed.

An executor starts its threads as work comes, and whoever gives it work waits until they run. A loop that waits so keeps
all its streams waiting: 0.16 s where eight large bodies come at once, since a new thread needs the interpreter, too.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

_MOST = 32
"""Threads of a loop, as asyncio has it."""


def ready_threads(executor: ThreadPoolExecutor, count: int) -> None:
    """Have an executor start so many threads, which is at most as many as it may have; none of them works yet."""
    barrier = threading.Barrier(count + 1)
    for _ in range(count):
        executor.submit(barrier.wait)
    barrier.wait()


def ready_loop() -> None:
    """Have the running loop's own threads, those of `asyncio.to_thread`, started: as many as it would start itself."""
    count = min(_MOST, (os.cpu_count() or 1) + 4)
    executor = ThreadPoolExecutor(count, thread_name_prefix="cellar-beside")
    ready_threads(executor, count)
    asyncio.get_running_loop().set_default_executor(executor)
