"""The beginning of an engine's process, before whoever starts it has imported the rest of a server.

A server and its engine each import for seconds. So the engine's process is started first, and opens its model while
the other imports; it is told where to listen once it is asked (`engine_process.py`).
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING

from cellar.core.collector import collector_rests
from cellar.core.config import DeviceConfig, EngineConfig
from cellar.core.driver import retain_context

if TYPE_CHECKING:
    from cellar.engine.opened import Opened

Opener = Callable[[], "Opened"]


def open_config(config: EngineConfig, persist_seconds: float) -> Opened:
    """What the engine process runs; a name that can be sent to it."""
    from cellar.engine.opened import open_front

    return open_front(config, persist_seconds=persist_seconds)


class EngineStart:
    """A process that opens an engine, and the pipe over which it says so. An `EngineProcess` takes it over; who leaves
    the context ends a process that nobody took, or that has not ended since.

    `device`: where it will compute, if that is known before the opener is read.
    """

    def __init__(self, opener: Opener, log_level: str = "warning", device: DeviceConfig | None = None) -> None:
        # Spawned, not forked: a fork would copy this process's threads in the middle of what they do.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_begin, args=(device, theirs, opener, log_level), name="cellar-engine"
        )
        self.process.start()
        theirs.close()  # else its end would not be seen

    @classmethod
    def of(cls, config: EngineConfig, log_level: str, persist_seconds: float) -> EngineStart:
        """Of the only engine of a server."""
        config = config.serving()
        return cls(partial(open_config, config, persist_seconds), log_level, config.device)

    def __enter__(self) -> EngineStart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _begin(device: DeviceConfig | None, pipe: Connection, opener: Opener, log_level: str) -> None:
    """In the new process."""
    # The server decides when to end; a terminal's Ctrl-C reaches all processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if device is not None:
        retain_context(device)
    with collector_rests():
        from cellar.server.engine_process import run_engine
    run_engine(pipe, opener, log_level)
