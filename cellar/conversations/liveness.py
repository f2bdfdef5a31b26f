"""Who is alive: each worker holds a lock that the system takes from the dead."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from cellar.conversations.errors import StoreUnavailable


class Liveness(Protocol):
    """The lock of one worker, and a look at others'. A worker's name is a number of 62 bits in hexadecimal digits."""

    def hold(self) -> None:
        """Take the lock, or take it again if it was lost."""

    def clear(self) -> int:
        """Remove what the dead left; -> of how many workers."""

    def alive(self, worker: str) -> bool:
        """True while a worker holds its lock."""

    def close(self) -> None:
        """Let it go."""


class FileLocks:
    """A file per worker in `directory`, locked with flock; the files of the dead are removed by who finds them.

    Raises StoreUnavailable where the system refuses a lock or a file: it is not known then who lives.
    """

    def __init__(self, directory: Path, worker: str) -> None:
        self._directory = directory
        self._worker = worker
        self._file: int | None = None

    def hold(self) -> None:
        """Take the lock."""
        if self._file is not None:
            return
        path = self._directory / self._worker
        with _answered(self._directory):
            while True:
                self._directory.mkdir(mode=0o700, exist_ok=True)
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX)  # waits for who looks whether its owner lives, no longer
                    if _is_at(path, file):
                        break
                except BaseException:
                    os.close(file)
                    raise
                os.close(file)  # removed between its making and its lock, as a dead worker's
        self._file = file

    def alive(self, worker: str) -> bool:
        """True while a worker holds its lock."""
        if worker == self._worker:
            return self._file is not None
        with _answered(self._directory):
            return not self._removed(self._directory / worker)

    def clear(self) -> int:
        """Remove the files of the dead."""
        with _answered(self._directory):
            others = [path for path in self._directory.iterdir() if path.name != self._worker]
            return sum(self._removed(path) for path in others)

    def close(self) -> None:
        """Let it go."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the directory may be gone
                (self._directory / self._worker).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _removed(self, path: Path) -> bool:
        """True if nobody holds the file's lock; then the file is gone."""
        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(
                file, fcntl.LOCK_SH | fcntl.LOCK_NB
            )  # shared: two who look do not take each other for the owner
        except BlockingIOError:
            return False
        else:
            path.unlink(missing_ok=True)
            return True
        finally:
            os.close(file)


def _is_at(path: Path, file: int) -> bool:
    """True if the open file is the one that the path names."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


@contextmanager
def _answered(directory: Path) -> Iterator[None]:
    """The system's refusals as errors of the store."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(
            f"the locks in {str(directory)!r} do not work ({error.strerror}); the conversation store needs a directory "
            "that it may write, on a disk of this machine."
        ) from error


class AdvisoryLocks:
    """A session's advisory lock in PostgreSQL per worker, on a connection of its own."""

    def __init__(self, engine: Engine, worker: str) -> None:
        self._engine = engine
        self._worker = worker
        self._guard = threading.Lock()
        self._connection: Connection | None = None

    def hold(self) -> None:
        """Take the lock, on a new connection if the old one is gone. Raises DBAPIError if there is none to be had."""
        with self._guard:
            if self._connection is not None:
                try:
                    self._connection.execute(text("SELECT 1"))
                    return
                except DBAPIError:
                    self._drop()
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            try:
                key = int(self._worker, 16)
                # No other has our name: who holds its lock is the session that we have lost and the server has not.
                connection.execute(_END_HOLDER, {"high": key >> 32, "low": key & 0xFFFFFFFF})
                connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": key})
            except BaseException:
                connection.close()
                raise
            self._connection = connection

    def alive(self, worker: str) -> bool:
        """True while a worker holds its lock."""
        if worker == self._worker:
            return True
        with self._guard:
            if self._connection is None:
                raise StoreUnavailable("the conversation store's database is out of reach; try again soon.")
            key = {"key": int(worker, 16)}
            # shared: two who look do not take each other for the owner
            free = self._connection.execute(text("SELECT pg_try_advisory_lock_shared(:key)"), key).scalar_one()
            if free:
                self._connection.execute(text("SELECT pg_advisory_unlock_shared(:key)"), key)
            return not free

    def clear(self) -> int:
        """PostgreSQL removes them itself."""
        return 0

    def close(self) -> None:
        """Let it go."""
        with self._guard:
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(DBAPIError):
                self._connection.close()
            self._connection = None


_END_HOLDER = text(
    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted "
    "AND classid = :high AND objid = :low AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
"""A key of 64 bits is shown as two of 32 (PostgreSQL, 52.12, "pg_locks")."""
