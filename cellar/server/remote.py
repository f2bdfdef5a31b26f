"""The engine in a process of its own: what runs there, and its stand-in here.

    server's process                                engine's process
    AsyncLLM -> Front -> RemoteEngine -- add, finish, abort --> reader thread -> Engine
                              ^                                                    |
                              +------- frames of a step, a snapshot <-- sender thread

One message a step holds the token ids of all requests. Text is made on this side only, and the engine never waits
for it: frames that have not left yet go together.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from cellar.core.config import EngineConfig
from cellar.core.errors import CellarError
from cellar.core.messages import FinishReason, Request, SchedulerStats, StepOutput
from cellar.core.specs import ModelSpec
from cellar.front import Opened

logger = logging.getLogger(__name__)

Opener = Callable[[], Opened]

CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Ready:
    """The engine's first message: what was opened."""

    config: EngineConfig
    spec: ModelSpec
    checkpoint: Path | None
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Step:
    """What some turns brought, and how things stand after them."""

    frames: list[StepOutput]
    stats: SchedulerStats


@dataclass(frozen=True, slots=True)
class _Call:
    """A method of the engine to be called."""

    method: str
    arguments: tuple[Any, ...]


class RemoteEngine:
    """Stands for an `Engine` in another process; `turn` belongs to one thread, `wake` to any.

    Raises CellarError from the constructor if the engine could not be opened, and from `turn` once it is gone.
    `ended` is set by `close`.
    """

    def __init__(self, opener: Opener, log_level: str = "warning") -> None:
        # Spawned, not forked: a fork would copy this process's threads in the middle of what they do.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=run_engine, args=(theirs, opener, log_level), name="cellar-engine", daemon=True
        )
        self.process.start()
        theirs.close()  # else its end would not be seen
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.ended = threading.Event()
        # An engine process ends with its pipe; at exit multiprocessing waits for it.
        atexit.register(self._pipe.close)
        first = self._receive()
        if not isinstance(first, Ready):
            self.close()
            raise first if isinstance(first, CellarError) else CellarError(f"the engine began with {first!r}")
        self.ready = first
        self._stats = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        self.turn(None)

    def add(self, request: Request) -> None:
        """Queue a request; one that could never run comes back as finished with an error."""
        self._send(_Call("add", (request,)))

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason) -> None:
        """End a request after `num_tokens` output tokens; later ones are void."""
        self._send(_Call("finish", (request_id, num_tokens, reason)))

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown ids are ignored."""
        self._send(_Call("abort", (request_id,)))

    def wake(self) -> None:
        """End a waiting `turn`."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake anyhow; closed: nobody waits
            os.write(self._wake_write, b"\0")

    def turn(self, timeout: float | None = None) -> list[StepOutput]:
        """Frames that have come; waits up to `timeout` seconds (None: for ever) for one, or for a `wake`."""
        frames: list[StepOutput] = []
        if self._wake_read in wait([self._pipe, self._wake_read], timeout):
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        while self._has_message():
            message = self._receive()
            if isinstance(message, CellarError):
                raise message
            frames += message.frames
            self._stats = message.stats
        return frames

    def stats(self) -> SchedulerStats:
        """The last snapshot that came."""
        return self._stats

    def close(self) -> None:
        """End the process; a second call does nothing."""
        if self.ended.is_set():
            return
        atexit.unregister(self._pipe.close)
        self._pipe.close()
        self.process.join(CLOSE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.ended.set()
        write, self._wake_write = self._wake_write, -1
        os.close(write)
        os.close(self._wake_read)

    def _send(self, call: _Call) -> None:
        try:
            self._pipe.send(call)
        except OSError as error:
            raise _gone(self.process) from error

    def _has_message(self) -> bool:
        try:
            return self._pipe.poll()
        except OSError as error:
            raise _gone(self.process) from error

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise _gone(self.process) from error


def _gone(process: BaseProcess) -> CellarError:
    process.join(1.0)
    code = process.exitcode
    how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
    return CellarError(f"the engine process has ended {how}")


# -- the engine's process ---------------------------------------------------------------------------


def run_engine(pipe: Connection, opener: Opener, log_level: str) -> None:
    """Open an engine and run it until the other end of the pipe is closed."""
    # The server decides when to end; a terminal's Ctrl-C reaches both processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    outbox: SimpleQueue[Any] = SimpleQueue()
    sender = threading.Thread(target=_send_all, args=(pipe, outbox), name="cellar-sender", daemon=True)
    sender.start()
    try:
        opened = opener()
    except CellarError as error:
        outbox.put(CellarError(str(error)))
    except Exception as error:
        logger.exception("the engine could not be opened")
        outbox.put(CellarError(f"the engine could not be opened ({type(error).__name__}: {error})."))
    else:
        reader = opened.front.reader
        outbox.put(Ready(opened.config, opened.spec, opened.checkpoint, reader.max_model_len))
        _run(opened, pipe, outbox)
    outbox.put(None)
    sender.join(CLOSE_SECONDS)


def _run(opened: Opened, pipe: Connection, outbox: SimpleQueue[Any]) -> None:
    engine = opened.front.engine
    closing = threading.Event()

    def read() -> None:
        try:
            while True:
                call = pipe.recv()
                getattr(engine, call.method)(*call.arguments)
        except (EOFError, OSError):
            closing.set()
            engine.wake()

    threading.Thread(target=read, name="cellar-reader", daemon=True).start()
    stats = engine.stats()
    outbox.put(_Step([], stats))
    try:
        while not closing.is_set():
            frames = engine.turn()
            before, stats = stats, engine.stats()
            if frames or stats != before:
                outbox.put(_Step(frames, stats))
    except Exception as error:
        logger.exception("the engine's loop has ended")
        outbox.put(CellarError(f"the engine's loop has ended ({type(error).__name__}: {error})"))
    engine.close()


def _send_all(pipe: Connection, outbox: SimpleQueue[Any]) -> None:
    """Send what is put into the outbox, steps that wait as one, until a None."""
    with contextlib.suppress(OSError):
        message = outbox.get()
        while message is not None:
            following = None
            if isinstance(message, _Step):
                try:
                    while isinstance(following := outbox.get_nowait(), _Step):
                        message = _Step(message.frames + following.frames, following.stats)
                    pipe.send(message)
                    message = following
                    continue
                except Empty:
                    pass
            pipe.send(message)
            message = outbox.get()
