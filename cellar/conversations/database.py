"""The two databases: how a connection to each is made, and what its errors mean."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool, QueuePool, StaticPool

from cellar.conversations.errors import Duplicate, StoreError, StoreFull, StoreUnavailable
from cellar.conversations.liveness import AdvisoryLocks, FileLocks, Liveness
from cellar.conversations.reach import Reach
from cellar.core.errors import ConfigError

FILE = "conversations.db"
READERS = 4
BUSY_SECONDS = 5.0
"""How long a write waits for another process's transaction before it is refused."""

SILENCE_SECONDS = 10
"""After this time without a sign of PostgreSQL's host a connection is lost, and half of it is too long to make one."""

GONE_SECONDS = 60
"""So long PostgreSQL waits for a sign of ours; what it was asked to do for who was only cut off for a while goes on."""


@dataclass(frozen=True)
class Database:
    """Engines to read and to write with, to be connected through `reach`, and who is alive. Who migrates does so within
    `alone`.

    `check` raises StoreUnavailable if what is written would not be found again.
    """

    readers: Engine
    writer: Engine
    liveness: Liveness
    alone: Callable[[], AbstractContextManager[None]]
    name: str
    is_remote: bool
    check: Callable[[], None]
    reach: Reach

    def close(self) -> None:
        """Close all connections."""
        self.liveness.close()
        self.readers.dispose()
        self.writer.dispose()


def is_url(place: str) -> bool:
    """True for a URL, False for a directory."""
    return "://" in place


def open_database(place: str | Path, worker: str) -> Database:
    """A PostgreSQL by URL, or SQLite's file in a directory, which is made. Raises ConfigError."""
    if is_url(str(place)):
        return _postgresql(str(place), worker)
    return _sqlite(Path(place), worker)


def _sqlite(directory: Path, worker: str) -> Database:
    path = directory / FILE
    alone = partial(_alone, directory / f"{FILE}.lock")
    # Whoever closes a descriptor of a file loses all locks that its process has on it, so a file that may be open is
    # left to SQLite (sqlite.org, "How To Corrupt An SQLite Database File", 2.2).
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with alone():
            if not path.exists():
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))  # -wal and -shm get the same mode
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(
            f"the data directory {str(directory)!r} cannot be used ({error.strerror}); choose another one."
        ) from error
    url = f"sqlite:///{path}"
    arguments = {"timeout": BUSY_SECONDS, "check_same_thread": False, "cached_statements": 512}
    readers = create_engine(
        url, poolclass=QueuePool, pool_size=READERS, max_overflow=0, pool_timeout=60, connect_args=arguments
    )
    writer = create_engine(url, poolclass=StaticPool, connect_args=arguments)
    _prepare(readers, "BEGIN", "query_only = ON")
    _prepare(
        writer,
        "BEGIN IMMEDIATE",
        "auto_vacuum = INCREMENTAL",
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
        "journal_size_limit = 67108864",
    )
    workers = directory / f"{FILE}.workers"
    return Database(
        readers,
        writer,
        FileLocks(workers, worker),
        alone,
        str(path),
        is_remote=False,
        check=partial(_check, path, path.stat()),
        reach=Reach(meaning),
    )


def _prepare(engine: Engine, begin: str, *pragmas: str) -> None:
    def connected(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # SQLAlchemy begins transactions, not the driver
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}").close()

    def began(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", began)


def _check(path: Path, opened: os.stat_result) -> None:
    """Of a file that was removed or replaced SQLite says nothing: it goes on in the old one, which nobody sees."""
    try:
        if os.path.samestat(path.stat(), opened):
            return
        what = "was replaced"
    except FileNotFoundError:
        what = "was removed"
    except OSError as error:
        what = f"cannot be looked at any more ({error.strerror})"
    raise StoreUnavailable(
        f"the conversation store's file {what} while it was open; what is written would be lost: "
        "put the same file back, or start the server again."
    )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _postgresql(place: str, worker: str) -> Database:
    try:
        url = make_url(place)
    except ArgumentError as error:
        raise ConfigError(f"the conversation store's URL cannot be read ({error}).") from error
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigError(
            f"the conversation store cannot be a {url.get_backend_name()} database; "
            "give a directory for SQLite, or a URL postgresql://user@host/name."
        )
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise ConfigError("PostgreSQL needs psycopg; install cellar-llm[postgres].") from error
    url = url.set(drivername="postgresql+psycopg")
    arguments = _watched(SILENCE_SECONDS) | {"options": _session_options(), "application_name": "cellar"}
    readers = create_engine(
        url, pool_size=READERS, max_overflow=0, pool_timeout=60, pool_pre_ping=True, connect_args=arguments
    )
    writer = create_engine(url, pool_size=1, max_overflow=0, pool_pre_ping=True, connect_args=arguments)
    alone = create_engine(url, poolclass=NullPool, connect_args=arguments)
    name = url.render_as_string(hide_password=True)
    locks = AdvisoryLocks(alone, worker)
    return Database(readers, writer, locks, nullcontext, name, True, lambda: None, Reach(meaning))


def _watched(seconds: int) -> dict[str, int]:
    """How libpq finds out that nobody is there any more: a system left to itself goes on sending for a quarter of an
    hour, and waits for an answer for two."""
    probe = max(1, seconds // 6)
    return {
        "connect_timeout": max(2, seconds // 2),
        "tcp_user_timeout": seconds * 1000,
        "keepalives_idle": max(1, seconds // 2),
        "keepalives_interval": probe,
        "keepalives_count": 3,
    }


def _session_options() -> str:
    """What the server is told for our sessions; those of a host that is gone, and their locks, end within a minute."""
    probe = GONE_SECONDS // 6
    return (
        f"-c synchronous_commit=on -c lock_timeout={int(BUSY_SECONDS * 1e3)} "
        f"-c idle_in_transaction_session_timeout={int(4 * BUSY_SECONDS * 1e3)} "
        f"-c tcp_user_timeout={GONE_SECONDS * 1000} -c tcp_keepalives_idle={3 * probe} "
        f"-c tcp_keepalives_interval={probe} -c tcp_keepalives_count=3"
    )


def meaning(error: DBAPIError | sqlite3.Error) -> StoreError:
    """What went wrong, for the client."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    state = getattr(cause, "sqlstate", None) or ""
    if isinstance(error, IntegrityError):
        return Duplicate("record", "that was given")
    kind = None if code is None else code & 0xFF
    if kind == sqlite3.SQLITE_FULL or state == "53100":
        return StoreFull("the conversation store is full; delete conversations, or give it more room.")
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or state.startswith("55"):
        return StoreUnavailable("the conversation store is locked by another program; try again soon.")
    if kind in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return StoreUnavailable(
            f"the conversation store's file is damaged or no database ({_first_line(cause)}); put a copy of it back, "
            "or move it away with its -wal file to begin a new one."
        )
    if kind in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return StoreUnavailable(
            f"the conversation store cannot be opened to write ({_first_line(cause)}); its directory must exist, and "
            "this program must be allowed to write it."
        )
    if kind == sqlite3.SQLITE_PROTOCOL or (code is not None and code in _LOCK_ERRORS):
        return StoreUnavailable(
            f"the locks of the conversation store's file do not work ({_first_line(cause)}); "
            "keep it on a disk of this machine, not on one of the network."
        )
    if kind == sqlite3.SQLITE_IOERR:
        return StoreFull(f"the conversation store cannot be written ({cause}); look after its disk.")
    return StoreUnavailable(f"the conversation store does not answer as it should ({_first_line(cause)}).")


_LOCK_ERRORS = (
    sqlite3.SQLITE_IOERR_LOCK,
    sqlite3.SQLITE_IOERR_UNLOCK,
    sqlite3.SQLITE_IOERR_RDLOCK,
    sqlite3.SQLITE_IOERR_SHMLOCK,
    sqlite3.SQLITE_IOERR_SHMMAP,
    sqlite3.SQLITE_IOERR_SHMOPEN,
)


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0]
