"""Waiting with a limit: what hangs fails its test, and does not keep the run.

No test may depend on how fast the machine is: a thread may be stopped for seconds at any moment. So tests wait for
what they need, and have requests that would run for much longer than anybody is ever stopped.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
SECONDS = 120.0
"""Far more than anything here takes on a busy machine."""


def run_python(code: str, *arguments: str) -> str:
    """Run a piece of Python in a process of its own; -> what it printed. Fails if the process does."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not so after {seconds:g} s"
        time.sleep(0.005)


async def eventually(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until it holds, beside other coroutines."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not so after {seconds:g} s"
        await asyncio.sleep(0.005)


class Posted(Protocol):
    """An engine."""

    def post(self, message: Callable[[], None]) -> None: ...


def asked(engine: Posted, question: Callable[[], T]) -> T:
    """The answer of the thread that turns an engine, between two of its turns."""
    answer: Future[T] = Future()

    def message() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    engine.post(message)
    return answer.result(SECONDS)


def join_all(threads: Sequence[threading.Thread], seconds: float = SECONDS) -> None:
    """Wait for the end of all of them."""
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    alive = [thread.name for thread in threads if thread.is_alive()]
    assert not alive, f"{alive} still run after {seconds:g} s"
