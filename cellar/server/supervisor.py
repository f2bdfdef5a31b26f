"""Who keeps an engine's process alive, and who keeps a front connected with it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import wait
from typing import cast

from cellar.core.errors import CellarError
from cellar.core.messages import SchedulerStats
from cellar.core.priority import yield_to_engine
from cellar.engine.client import StepClient
from cellar.engine.front import Front
from cellar.engine.opened import Opened, open_reader, open_text
from cellar.engine.stream import AsyncLLM
from cellar.server.directory import PrivateDirectory
from cellar.server.endpoint import Address
from cellar.server.engine_process import OUT_OF_MEMORY, EngineProcess
from cellar.server.engine_start import EngineStart, Opener
from cellar.server.pool.choice import Sticky
from cellar.server.pool.pool import Pool
from cellar.server.remote import RemoteEngine
from cellar.server.routing_figures import RoutingFigures
from cellar.server.shared import Shared
from cellar.server.wire import Ready

logger = logging.getLogger(__name__)

Attach = Callable[[Ready, StepClient], Opened]

STABLE_SECONDS = 30.0
LONGEST_PAUSE = 30.0
KNOCK_SECONDS = (0.02, 0.5)
"""A front without an engine asks for one after the first pause, then at up to the second."""

MAX_LOST = 2
"""The only engine may go down so often with one request: whoever takes it down takes it from all others."""


def nothing() -> None:
    """What is done when nobody wants anything done."""


class FrontMaker:
    """Makes this process's front over an engine in another; the tokenizer is read once."""

    def __init__(self) -> None:
        self._text: tuple[object, ...] | None = None

    def __call__(self, ready: Ready, engine: StepClient) -> Opened:
        """The front. Raises CheckpointError."""
        if self._text is None:
            self._text = open_text(ready.config.model, ready.checkpoint)
        tokenizer, templates = cast(tuple[None, None], self._text)
        reader = open_reader(ready.spec, ready.max_model_len, tokenizer, ready.config.model.seed, ready.generation)
        front = Front(engine, reader, tokenizer, templates)
        return Opened(front, ready.config, ready.spec, ready.checkpoint, ready.generation)


class EngineKeeper:
    """Keeps an engine's process alive at `address`. Raises CellarError if it does not start the first time, as `start`
    if that is given.

    A process that dies within 30 s of its start is started again after a pause that doubles each time.
    """

    def __init__(
        self,
        opener: Opener,
        address: str,
        log_level: str = "warning",
        first_pause: float = 0.5,
        on_restart: Callable[[], None] = nothing,
        persist_seconds: float = 0.0,
        start: EngineStart | None = None,
    ) -> None:
        self._start = partial(EngineProcess, opener, address, log_level, persist_seconds)
        self._first_pause = first_pause
        self._on_restart = on_restart
        self._closing = threading.Event()
        self._renewing = threading.Event()
        self._tried = threading.Event()  # to start the one that is to be there after a renewal
        self.process = self._start(start=start)
        self._thread = threading.Thread(target=self._watch, name="cellar-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the process and start it no more."""
        self._closing.set()
        self.process.close()
        self._thread.join()

    def renew(self) -> bool:
        """End the process, which writes what outlives it first, and start another at once; -> whether that is there.
        If it is not, it is tried again.
        """
        self._tried.clear()
        self._renewing.set()
        self.process.close()
        self._tried.wait()
        return self.process.process.is_alive()

    def _watch(self) -> None:
        try:
            self._keep()
        finally:
            self._tried.set()

    def _keep(self) -> None:
        pause, started = self._first_pause, time.monotonic()
        while True:
            wait([self.process.process.sentinel])
            if self._closing.is_set():
                return
            renewed = self._renewing.is_set()
            if not renewed:
                if time.monotonic() - started > STABLE_SECONDS:
                    pause = self._first_pause
                how = self.process.how_it_ended() + (OUT_OF_MEMORY if self.process.was_killed else "")
                logger.error("%s; it is started again in %.1f s", how, pause)
            self.process.close()
            if not renewed and self._closing.wait(pause):
                return
            self._renewing.clear()
            pause, started = min(2 * pause, LONGEST_PAUSE), time.monotonic()
            try:
                self.process = self._start()
            except (CellarError, OSError) as error:
                logger.error("the engine did not start (%s)", error)
                self._tried.set()
                continue
            if not renewed:
                self._on_restart()
            self._tried.set()
            if self._closing.is_set():
                self.process.close()
                return


class Link:
    """An `EngineHost` that keeps a front connected with the engine at `address`, whenever there is one.

    What streams when the engine is lost goes on at the next one; new requests are refused until that is there.
    Where the engine listens elsewhere each time, `address` is a function that says where now, and raises OSError if
    nowhere. The constructor waits for the engine. `reason` says why a connection was lost; `begin` is done first by the
    front's thread.
    """

    def __init__(
        self,
        address: Address | Callable[[], Address],
        attach: Attach | None = None,
        reason: Callable[[], str] = lambda: "the engine process has ended",
        begin: Callable[[], None] = nothing,
    ) -> None:
        self._address: Callable[[], Address] = address if callable(address) else lambda: address
        self._attach = attach or FrontMaker()
        self._reason = reason
        self._on_return: Callable[[], None] = nothing
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._figures: RoutingFigures | None = None
        self._pool = Pool(Sticky(), max_lost=MAX_LOST, migrated=self._migrated)
        try:
            self._remote, at = self._knock()
            self.opened = self._made(self._remote)
        except BaseException:
            self._pool.close()
            raise
        self._pool.join(at, self._remote)
        self._llm = AsyncLLM.over(self.opened, begin)
        self._there = True
        self._thread = threading.Thread(target=self._keep, name="cellar-link", daemon=True)
        self._thread.start()

    @property
    def llm(self) -> AsyncLLM | None:
        """The engine, if it runs now."""
        return self._llm if self._there and not self._remote.ended.is_set() and self._llm.running else None

    def stats(self) -> SchedulerStats | None:
        """The last snapshot, with what engines before it have counted; None while the engine does not run."""
        llm = self.llm
        return None if llm is None else llm.stats()

    def engines(self) -> Mapping[str, SchedulerStats | None]:
        """It is the only one."""
        return {}

    def count_by(self, figures: RoutingFigures) -> None:
        """What goes on at the next engine is counted."""
        self._figures = figures

    def on_return(self, call: Callable[[], None]) -> None:
        """Have something called, from another thread, whenever the engine is there again."""
        self._on_return = call

    async def close(self) -> None:
        """Leave the engine."""
        await asyncio.to_thread(self.leave)

    def leave(self) -> None:
        """Leave the engine."""
        self._closing.set()
        self._llm.close()
        with self._lock:
            self._remote.close()  # one that came too late for the pool
        self._thread.join()

    def _migrated(self, count: int) -> None:
        if self._figures is not None:
            self._figures.migrated(count)

    def _made(self, remote: RemoteEngine) -> Opened:
        """The front, over whatever engine there is; it reads what the first one serves."""
        try:
            return self._attach(remote.ready, self._pool)
        except BaseException:
            remote.close()
            raise

    def _knock(self) -> tuple[RemoteEngine, Address]:
        """A connection, as soon as there is an engine; CellarError when there shall be none any more."""
        pause, longest = KNOCK_SECONDS
        while not self._closing.is_set():
            try:
                at = self._address()
                return RemoteEngine(at, self._reason), at
            except (CellarError, OSError):
                self._closing.wait(pause)
                pause = min(2 * pause, longest)
        raise CellarError("the server ends.")

    def _keep(self) -> None:
        while True:
            self._remote.ended.wait()
            self._there = False
            try:
                remote, at = self._knock()
            except CellarError:
                return
            with self._lock:
                self._remote = remote
                if self._closing.is_set():
                    remote.close()
                    return
            self._pool.post(partial(self._pool.join, at, remote))
            self._there = True
            self._on_return()


class Supervisor(Link):
    """An `EngineHost` with an engine's process of its own, for a server with one front. `start`: see `EngineKeeper`.

    Raises CellarError if it does not start the first time.
    """

    def __init__(
        self,
        opener: Opener,
        attach: Attach | None = None,
        log_level: str = "warning",
        first_pause: float = 0.5,
        persist_seconds: float = 0.0,
        start: EngineStart | None = None,
    ) -> None:
        self._directory = PrivateDirectory()
        try:
            (address,) = Shared(self._directory.path, 0, 1).addresses
            self._keeper = EngineKeeper(
                opener, address, log_level, first_pause, persist_seconds=persist_seconds, start=start
            )
            try:
                super().__init__(address, attach, lambda: self._keeper.process.how_it_ended(), yield_to_engine)
            except BaseException:
                self._keeper.close()
                raise
        except BaseException:
            self._directory.cleanup()
            raise

    @property
    def pid(self) -> int | None:
        """The engine process's id."""
        return self._keeper.process.process.pid

    def on_restart(self, call: Callable[[], None]) -> None:
        """Have something called, from another thread, whenever the engine was started again."""
        self.on_return(call)

    def leave(self) -> None:
        """End the engine's process."""
        super().leave()
        self._keeper.close()
        self._directory.cleanup()
