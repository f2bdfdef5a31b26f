"""Who is alive: each worker holds a lock that the system takes from the dead."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError


class Liveness(Protocol):
    """The lock of one worker, and a look at others'. A worker's name is a number of 62 bits in hexadecimal digits."""

    def hold(self) -> None:
        """Take the lock, or take it again if it was lost."""

    def alive(self, worker: str) -> bool:
        """True while a worker holds its lock."""

    def close(self) -> None:
        """Let it go."""


class FileLocks:
    """A file per worker in `directory`, locked with flock; the files of the dead are removed by who finds them."""

    def __init__(self, directory: Path, worker: str) -> None:
        self._directory = directory
        self._worker = worker
        self._file: int | None = None

    def hold(self) -> None:
        """Take the lock."""
        if self._file is None:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(self._directory / self._worker, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def alive(self, worker: str) -> bool:
        """True while a worker holds its lock."""
        if worker == self._worker:
            return self._file is not None
        path = self._directory / worker
        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            path.unlink(missing_ok=True)
            return False
        finally:
            os.close(file)

    def close(self) -> None:
        """Let it go."""
        if self._file is not None:
            (self._directory / self._worker).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


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
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": int(self._worker, 16)})

    def alive(self, worker: str) -> bool:
        """True while a worker holds its lock."""
        if worker == self._worker:
            return True
        with self._guard:
            assert self._connection is not None
            key = {"key": int(worker, 16)}
            free = self._connection.execute(text("SELECT pg_try_advisory_lock(:key)"), key).scalar_one()
            if free:
                self._connection.execute(text("SELECT pg_advisory_unlock(:key)"), key)
            return not free

    def close(self) -> None:
        """Let it go."""
        with self._guard:
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(DBAPIError):
                self._connection.close()
            self._connection = None
