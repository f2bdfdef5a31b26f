"""Systems in processes of their own: thread teams, caches and interpreters of one do not slow down another."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from benchmarks.cells.arrivals import FloatArray
from benchmarks.cells.clock import WorkClock
from benchmarks.cells.drive import Trace, all_at_once, one_at_a_time, open_loop
from benchmarks.cells.system import System
from cellar.core.errors import CellarError, DeviceError

Opener = Callable[[], System]

START_SECONDS = 600.0


class Subject(Protocol):
    """A system that can be measured in three ways; see `drive.py`."""

    @property
    def name(self) -> str:
        """What figures call it."""

    def unloaded(self, count: int) -> Trace:
        """`count` requests, one at a time."""

    def saturated(self, count: int) -> Trace:
        """`count` requests at once."""

    def loaded(self, arrived: FloatArray, grace: float) -> Trace:
        """Requests at given times."""

    def close(self) -> None:
        """Free what it holds."""


class Local:
    """A subject in this process. Where a system's clock counts its work, its traces say at which pace that went."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._clock = system.clock if isinstance(system.clock, WorkClock) else None
        self._beside = None if self._clock is None else self._clock.tick

    @property
    def name(self) -> str:
        return self.system.name

    def unloaded(self, count: int) -> Trace:
        return self._paced(one_at_a_time(self.system, count, self._beside))

    def saturated(self, count: int) -> Trace:
        return self._paced(all_at_once(self.system, count, self._beside))

    def loaded(self, arrived: FloatArray, grace: float) -> Trace:
        return self._paced(open_loop(self.system, arrived, grace, beside=self._beside))

    def _paced(self, trace: Trace) -> Trace:
        return trace if self._clock is None else replace(trace, pace=self._clock.pace())

    def close(self) -> None:
        close = getattr(self.system, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True)
class _Failed:
    """What went wrong in the process."""

    message: str


class Remote:
    """A subject in another process, which sleeps while it is not measured. Raises DeviceError if it does not start."""

    def __init__(self, name: str, opener: Opener) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")  # a forked thread pool does not work
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(opener, theirs), name=f"cells-{name}", daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it has started."""
        self._answer(START_SECONDS)

    def unloaded(self, count: int) -> Trace:
        return self._call("unloaded", count)

    def saturated(self, count: int) -> Trace:
        return self._call("saturated", count)

    def loaded(self, arrived: FloatArray, grace: float) -> Trace:
        return self._call("loaded", np.asarray(arrived), grace)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.terminate()

    def _call(self, method: str, *arguments: Any) -> Trace:
        self._pipe.send((method, arguments))
        answer: Trace = self._answer(None)
        return answer

    def _answer(self, seconds: float | None) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise DeviceError(f"{self.name} did not start in {seconds:.0f} s.")
            answer = self._pipe.recv()
        except EOFError:
            raise DeviceError(f"the process of {self.name} has ended; its messages say why.") from None
        if isinstance(answer, _Failed):
            raise DeviceError(f"{self.name} failed: {answer.message}")
        return answer


def _serve(opener: Opener, pipe: Connection) -> None:
    """The process: open, then measure when asked, until the pipe closes."""
    try:
        subject = Local(opener())
    except Exception as error:
        pipe.send(_Failed(_said(error)))
        return
    pipe.send(subject.name)
    try:
        while True:
            method, arguments = pipe.recv()
            try:
                pipe.send(getattr(subject, method)(*arguments))
            except Exception as error:
                pipe.send(_Failed(_said(error)))
    except EOFError:
        subject.close()


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, CellarError) else "".join(traceback.format_exception(error))
