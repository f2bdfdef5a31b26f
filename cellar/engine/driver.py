"""Driver: turns an engine, in a thread of its own or in the caller's, until it is closed or fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from cellar.core.errors import CellarError
from cellar.engine.client import Message

logger = logging.getLogger(__name__)


class Driven(Protocol):
    """The part of an `EngineClient` that its driver needs."""

    def post(self, message: Message) -> None: ...

    def read(self) -> None: ...

    def has_work(self) -> bool: ...


class Driver:
    """Calls `turn` again and again. What ends it is kept in `ended`, and `end` is called with it, once.

    Nobody waits for ever: a message is read, or `post` raises, or both.
    """

    def __init__(
        self, engine: Driven, turn: Callable[[], object], end: Callable[[BaseException], None], name: str
    ) -> None:
        self.ended: BaseException | None = None
        self._engine = engine
        self._turn = turn
        self._end = end
        self._name = name
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def started(self) -> bool:
        """Whether there is a thread for it."""
        return self._thread is not None

    def post(self, message: Message) -> None:
        """Have something done between two turns. Raises CellarError if there will be no more."""
        self.check()
        self._engine.post(message)
        self.check()  # again: the last message may have been read before this one came

    def check(self) -> None:
        """Raise CellarError if it has ended."""
        if self.ended is not None:
            raise CellarError(str(self.ended)) from self.ended

    def start(self, begin: Callable[[], None] | None = None) -> None:
        """Turn in a thread until `close`; `begin` is called first in it. A second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(begin,), name=self._name, daemon=True)
            self._thread.start()

    def drive(self) -> None:
        """Turn in this thread until there is no work left. Raises what a turn raises, which is the end of it."""
        try:
            while self._engine.has_work():
                self._turn()
        except BaseException as error:
            self._fail(error)
            raise

    def close(self) -> None:
        """End the thread, and all that is open with a CellarError; a second call does nothing."""
        self._closing = True
        self._engine.post(_nothing)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._thread is None:
            self._fail(_closed())

    def _run(self, begin: Callable[[], None] | None) -> None:
        try:
            if begin is not None:
                begin()
            while not self._closing:
                self._turn()
        except BaseException as error:  # whatever it is
            self._fail(error)
        else:
            self._fail(_closed())

    def _fail(self, error: BaseException) -> None:
        if self.ended is None:
            self.ended = error
            while not self._has_read():
                pass
            self._end(error)

    def _has_read(self) -> bool:
        """Read what is left; False if a message failed, and there may be more."""
        try:
            self._engine.read()
        except Exception as error:  # the engine has ended, so much of what is asked of it must fail
            logger.debug("a message came too late", exc_info=error)
            return False
        return True


def _closed() -> CellarError:
    return CellarError("the engine was closed; open a new one.")


def _nothing() -> None:
    """A message that only wakes."""
