"""Watchdog: ends user code that runs too long, in the thread in which it runs."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LINGER_SECONDS = 5.0

_PATIENCE = 5


class TookTooLongError(BaseException):
    """Raised in the watched thread; no Exception, so that `except Exception` in user code does not swallow it."""


class Watchdog:
    """Runs functions with a time limit, from any number of threads.

    `seconds` are of the processor, which a busy machine may give to others: who waits is ended after `_PATIENCE` times
    as many on the clock.

    Python code is interrupted between two bytecodes; one long call into C (a sleep) only after it returns. A
    watching thread exists only while there is something to watch.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}
        self._fired: set[int] = set()
        self._watching = False
        self._work = threading.Event()

    def run(self, function: Callable[[], T]) -> T:
        """-> function(); raises TookTooLongError when it does not return in time."""
        thread = threading.get_ident()
        try:
            try:
                self._enter(thread)
                return function()
            finally:
                self._leave(thread)
        except TookTooLongError:
            self._leave(thread)  # it may have come while the other call held the lock
            raise

    def _enter(self, thread: int) -> None:
        with self._lock:
            self._deadlines[thread] = time.monotonic() + _PATIENCE * self.seconds
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="cellar-watchdog", daemon=True).start()
        if not self._work.is_set():
            self._work.set()

    def _leave(self, thread: int) -> None:
        with self._lock:
            self._deadlines.pop(thread, None)
            fired = thread in self._fired
            self._fired.discard(thread)
        if fired:
            # What is on its way comes here. To take it back would tell the interpreter that something is, forever: all
            # its threads would look for it at each call, and under a profiler the first call would never end.
            for _ in range(100):
                pass

    def _watch(self) -> None:
        watched: dict[int, tuple[float, float]] = {}  # thread -> its deadline, and when its own clock will be there
        while True:
            if not self._work.wait(_LINGER_SECONDS):
                with self._lock:
                    if not self._deadlines:
                        self._watching = False
                        return
            with self._lock:
                now = time.monotonic()
                for thread, deadline in self._deadlines.items():
                    own = _seconds_of(thread)
                    if watched.get(thread, (0.0,))[0] != deadline:
                        watched[thread] = deadline, own + self.seconds
                    if now >= deadline or own >= watched[thread][1]:
                        self._fired.add(thread)
                        error = ctypes.py_object(TookTooLongError)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
                if not self._deadlines:
                    watched.clear()
                    self._work.clear()
            time.sleep(min(0.25, self.seconds / 4))


def _seconds_of(thread: int) -> float:
    """Of the processor that a thread has had; where a system does not say, those of the clock."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
