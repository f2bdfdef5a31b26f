"""Supervisor: keeps an engine process alive, and starts it again when it has died."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import cast

from cellar.core.config import EngineConfig
from cellar.core.errors import CellarError
from cellar.core.messages import SchedulerStats, StepPlan
from cellar.engine import Engine
from cellar.front import Front, Opened, open_reader, open_text
from cellar.server.remote import Opener, Ready, RemoteEngine
from cellar.stream import AsyncLLM

logger = logging.getLogger(__name__)

Attach = Callable[[Ready, Engine[StepPlan]], Opened]

STABLE_SECONDS = 30.0
LONGEST_PAUSE = 30.0


class FrontMaker:
    """Makes this process's front over an engine in another; the tokenizer is read once."""

    def __init__(self) -> None:
        self._text: tuple[object, ...] | None = None

    def __call__(self, ready: Ready, engine: Engine[StepPlan]) -> Opened:
        """The front. Raises CheckpointError."""
        if self._text is None:
            self._text = open_text(ready.config.model, ready.checkpoint)
        tokenizer, templates = cast(tuple[None, None], self._text)
        reader = open_reader(ready.spec, ready.max_model_len, tokenizer, ready.config.model.seed)
        return Opened(Front(engine, reader, tokenizer, templates), ready.config, ready.spec, ready.checkpoint)


class Supervisor:
    """An `EngineHost` whose engine is a process. Raises CellarError if it does not start the first time.

    A process that dies within 30 s of its start is started again after a pause that doubles each time.
    """

    def __init__(
        self, opener: Opener, attach: Attach | None = None, log_level: str = "warning", first_pause: float = 0.5
    ) -> None:
        self._opener = opener
        self._attach = attach or FrontMaker()
        self._log_level = log_level
        self._first_pause = first_pause
        self._closing = threading.Event()
        self._restarted: Callable[[], None] = lambda: None
        self._remote, self.opened = self._start()
        self._llm: AsyncLLM | None = AsyncLLM.over(self.opened)
        self._thread = threading.Thread(target=self._watch, name="cellar-supervisor", daemon=True)
        self._thread.start()

    @property
    def llm(self) -> AsyncLLM | None:
        """The engine, if it runs now."""
        llm = self._llm
        return llm if llm is not None and llm.running else None

    @property
    def pid(self) -> int | None:
        """The engine process's id."""
        return self._remote.process.pid

    def stats(self) -> SchedulerStats | None:
        """The last snapshot; None while the engine does not run."""
        llm = self.llm
        return None if llm is None else llm.stats()

    def on_restart(self, call: Callable[[], None]) -> None:
        """Have something called, from another thread, whenever the engine was started again."""
        self._restarted = call

    async def close(self) -> None:
        """End the engine process and start it no more."""
        self._closing.set()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._llm is not None:
            self._llm.close()
        self._thread.join()

    def _start(self) -> tuple[RemoteEngine, Opened]:
        remote = RemoteEngine(self._opener, self._log_level)
        try:
            # A RemoteEngine has all of an Engine that a front for streams calls.
            return remote, self._attach(remote.ready, cast(Engine[StepPlan], remote))
        except BaseException:
            remote.close()
            raise

    def _watch(self) -> None:
        pause, started = self._first_pause, time.monotonic()
        while True:
            self._remote.ended.wait()
            if self._closing.is_set():
                return
            self._llm = None
            if time.monotonic() - started > STABLE_SECONDS:
                pause = self._first_pause
            logger.error("the engine has ended; it is started again in %.1f s", pause)
            if self._closing.wait(pause):
                return
            pause, started = min(2 * pause, LONGEST_PAUSE), time.monotonic()
            try:
                self._remote, self.opened = self._start()
            except (CellarError, OSError) as error:
                logger.error("the engine did not start (%s)", error)
                continue
            self._llm = AsyncLLM.over(self.opened)
            self._restarted()
            if self._closing.is_set():
                self._llm.close()
                return


def open_config(config: EngineConfig) -> Opened:
    """What the engine process runs; a name that can be sent to it."""
    from cellar.front import open_front

    return open_front(config)
