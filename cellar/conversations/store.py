"""Store: operations on conversations, in transactions; and the same for coroutines.

    found = store.read(conversations.get, owner, id)
    made = await async_store.write(responses.begin, response)

An operation is a function over a `Session`; those of `conversations.py`, `items.py`, `responses.py` and `events.py`
are what there is. A function of several operations is one transaction.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy.exc import DBAPIError

from cellar.conversations import responses, sweep
from cellar.conversations.database import READERS, Database, meaning, open_database
from cellar.conversations.errors import StoreError
from cellar.conversations.inbox import Inbox
from cellar.conversations.migrate import migrate
from cellar.conversations.reach import OutOfReach
from cellar.conversations.records import Thread
from cellar.conversations.session import Clock, Session
from cellar.conversations.statements import Cursor, Statements
from cellar.conversations.sweep import StoreLimits
from cellar.conversations.writer import Writer

logger = logging.getLogger(__name__)

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
Operation = Callable[Concatenate[Session, P], ResultT]

SWEEP_SECONDS = 10.0

SHRINK_SECONDS = 1.0
"""How long one sweep gives pages back to the disk, at most; the next one goes on."""


def open_store(
    place: str | Path | None = None,
    limits: StoreLimits | None = None,
    *,
    clock: Clock = time.time,
    sweep_seconds: float | None = SWEEP_SECONDS,
    deleted: Callable[[Sequence[Thread]], None] | None = None,
) -> Store:
    """The store at a PostgreSQL's URL or in a directory (default: `default_directory()`), brought to this version.

    What dead processes left unended is ended. `sweep_seconds` None: nothing is swept but by `Store.sweep`, which tells
    `deleted` of what it has deleted, in its own thread.
    Raises ConfigError, StoreUnavailable.
    """
    worker = f"{secrets.randbits(62):016x}"
    database = open_database(default_directory() if place is None else place, worker)
    try:
        with database.alone(), database.writer.begin() as connection:
            migrate(connection)
        database.liveness.hold()
    except (DBAPIError, sqlite3.Error) as error:
        database.close()
        raise meaning(error) from error
    except BaseException:
        database.close()
        raise
    return Store(database, worker, limits or StoreLimits(), clock, sweep_seconds, deleted)


def default_directory() -> Path:
    """Where a user's programs keep their data: $XDG_DATA_HOME/cellar, or ~/.local/share/cellar."""
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "cellar"


class Store:
    """Reads in the calling thread, writes by the writer's. For many threads; `close` it at the end."""

    def __init__(
        self,
        database: Database,
        worker: str,
        limits: StoreLimits,
        clock: Clock,
        sweep_seconds: float | None,
        deleted: Callable[[Sequence[Thread]], None] | None,
    ) -> None:
        self.worker = worker
        self._database = database
        self._limits = limits
        self._deleted = deleted
        self._clock = Steady(clock)
        self._statements = Statements(database.writer.dialect)
        self._writer = Writer(database, self._statements)
        self._ended = threading.Event()
        self.write(responses.fail_dead)
        self._sweeper: threading.Thread | None = None
        if sweep_seconds is not None:
            self._sweeper = threading.Thread(
                target=self._keep, args=(sweep_seconds,), name="cellar-conversations-sweep", daemon=True
            )
            self._sweeper.start()

    def read(self, operation: Operation[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """What an operation finds, at one moment. Raises what it raises, and StoreUnavailable."""
        return self.read_asked(time.monotonic(), operation, *args, **kwargs)

    def read_asked(self, asked: float, operation: Operation[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """The same of what was asked at that time of `time.monotonic()`, and has waited since."""
        try:
            with self._database.reach.connection(self._database.readers, asked) as connection:
                return operation(self._session(Cursor(connection, self._statements)), *args, **kwargs)
        except DBAPIError as error:
            raise meaning(error) from error
        except OutOfReach as error:
            raise error.why from error

    def write(self, operation: Operation[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """What an operation does, when it is stored for good. Raises what it raises, and StoreUnavailable."""
        return self.submit(operation, *args, **kwargs).result()

    def submit(self, operation: Operation[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> Future[ResultT]:
        """`write` without waiting."""
        return self.submit_told(None, operation, *args, **kwargs)

    def submit_told(
        self, told: Callable[[], None] | None, operation: Operation[P, ResultT], *args: P.args, **kwargs: P.kwargs
    ) -> Future[ResultT]:
        """The same; `told` is called when all writes of a transaction that came with it are done."""
        return self._writer.submit(lambda cursor: operation(self._session(cursor), *args, **kwargs), told)

    def submit_read(
        self, told: Callable[[], None] | None, operation: Operation[P, ResultT], *args: P.args, **kwargs: P.kwargs
    ) -> Future[ResultT]:
        """`read` in the writer's thread, between its transactions: for what takes little time. See `submit_told`."""
        return self._writer.submit_read(lambda cursor: operation(self._session(cursor), *args, **kwargs), told)

    @property
    def waits_for_network(self) -> bool:
        """True if reading is waiting rather than working, so that several should be done at once."""
        return self._database.is_remote

    def sweep(self) -> int:
        """End what the dead left, delete until the store is within its limits, and give what is free back to the disk.

        -> how many threads were deleted. Other writes go on between the steps.
        """
        self._database.liveness.hold()
        self.write(responses.fail_dead)
        self._database.liveness.clear()
        count = 0
        while not self._ended.is_set() and self.read(sweep.due, self._limits):
            deleted = self.write(sweep.step, self._limits).threads
            count += len(deleted)
            if not deleted:
                break
            if self._deleted is not None:
                self._deleted(deleted)
        end = time.monotonic() + SHRINK_SECONDS
        while not self._ended.is_set() and time.monotonic() < end and self.write(sweep.shrink):
            pass
        return count

    def close(self) -> None:
        """Finish what is being written, and leave."""
        self._ended.set()
        if self._sweeper is not None:
            self._sweeper.join()
        self._writer.close()
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _session(self, cursor: Cursor) -> Session:
        return Session(cursor, self.worker, self._database.liveness.alive, self._clock())

    def _keep(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            try:
                self.sweep()
            except (StoreError, DBAPIError) as error:
                logger.error("the conversation store was not swept (%s)", error)
            except Exception:  # whatever it is, the next sweep is due
                logger.exception("the conversation store was not swept")


class Steady:
    """A clock that never goes back: what happens later has the later time, even where somebody sets the clock back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = 0.0
        self._guard = threading.Lock()

    def __call__(self) -> float:
        with self._guard:
            self._last = max(self._last + _TICK, self._clock())
            return self._last


_TICK = 1e-6


class AsyncStore:
    """A store for coroutines: nothing of it runs in the event loop. `close` closes the store, too."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._readers = ThreadPoolExecutor(READERS, "cellar-conversations-read")
        self._last: Inbox | None = None

    async def read(self, operation: Operation[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """See `Store.read`; for what takes little time."""
        if self.store.waits_for_network:
            return await self.read_long(operation, *args, **kwargs)
        inbox = self._inbox()
        found: ResultT = await inbox.announced(self.store.submit_read(inbox.wake, operation, *args, **kwargs))
        return found

    async def read_long(self, operation: Operation[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """The same for what may take long: beside all else."""
        asked = time.monotonic()
        work = self._readers.submit(lambda: self.store.read_asked(asked, operation, *args, **kwargs))
        found: ResultT = await self._inbox().result(work)
        return found

    async def write(self, operation: Operation[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """See `Store.write`. Who stops waiting does not undo it."""
        inbox = self._inbox()
        made: ResultT = await inbox.announced(self.store.submit_told(inbox.wake, operation, *args, **kwargs))
        return made

    def _inbox(self) -> Inbox:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        if self._last is None or self._last.loop is not loop:
            self._last = Inbox(loop)
        return self._last

    async def close(self) -> None:
        """Finish what is being written, and leave."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._readers.shutdown()
        self.store.close()
