"""Writer: the thread that writes, many requests' writes in one transaction (group commit), and reads between them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy.exc import DBAPIError, IntegrityError

from cellar.conversations.database import Database, meaning
from cellar.conversations.errors import StoreUnavailable
from cellar.conversations.reach import OutOfReach
from cellar.conversations.statements import Cursor, Statements

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

MAX_GROUP = 128
MAX_WAITING = 8192


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[Cursor], Any]
    future: Future[Any]
    told: Callable[[], None] | None
    reads: bool
    asked: float = field(default_factory=time.monotonic)


class Writer:
    """Runs writes in the order of their coming. A write is done when its transaction has been committed, not before.

    Reads that are given to it, too, are done before the writes that wait with them, on another connection. Small ones
    are done sooner here than beside it, because two threads take Python's lock from each other at each statement.
    """

    def __init__(self, database: Database, statements: Statements) -> None:
        self._database = database
        self._statements = statements
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()  # guards the jobs and `_closed`
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cellar-conversations", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Cursor], ResultT], told: Callable[[], None] | None = None) -> Future[ResultT]:
        """Have something written. Raises StoreUnavailable if too many wait, or none is done any more.

        The future's error is what `work` raised, or StoreError; then nothing of it is stored. `told` is called once
        when all futures of a transaction that came with it are done: waking a loop for each costs as much as a write.
        """
        return self._submit(work, told, reads=False)

    def submit_read(self, work: Callable[[Cursor], ResultT], told: Callable[[], None] | None = None) -> Future[ResultT]:
        """Have something read that takes little time, since writes wait for it. The rest is as with `submit`.

        It sees all writes that were done when it was submitted.
        """
        return self._submit(work, told, reads=True)

    def _submit(
        self, work: Callable[[Cursor], ResultT], told: Callable[[], None] | None, reads: bool
    ) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        with self._changed:
            if self._closed:
                raise StoreUnavailable("the conversation store is closed.")
            if len(self._jobs) >= MAX_WAITING:
                raise StoreUnavailable("too many requests wait for the conversation store; try again soon.")
            self._jobs.append(_Job(work, future, told, reads))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Do what waits, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while group := self._next():
            jobs = [job for job in group if job.future.set_running_or_notify_cancel()]
            self._do(self._read, [job for job in jobs if job.reads])
            self._do(self._write, [job for job in jobs if not job.reads])

    def _next(self) -> list[_Job]:
        """Wait for jobs; -> those that wait, or none if none will come any more."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            return [self._jobs.popleft() for _ in range(min(MAX_GROUP, len(self._jobs)))]

    def _do(self, what: Callable[[Sequence[_Job]], None], jobs: Sequence[_Job]) -> None:
        """Do jobs, if there are any, and tell who waits for them."""
        if not jobs:
            return
        what(jobs)
        for told in {job.told for job in jobs if job.told is not None}:
            told()

    def _read(self, jobs: Sequence[_Job]) -> None:
        """All of one moment; each fails by itself."""
        left = deque(jobs)
        try:
            with self._database.reach.connection(self._database.readers, left[-1].asked) as connection:
                cursor = Cursor(connection, self._statements)
                while left:
                    result, error = _tried(cursor, left[0])
                    _answer(left.popleft(), result, error)
                cursor.close()
        except OutOfReach as error:
            for job in left:
                _answer(job, None, error.why)
        except BaseException as error:  # whatever it is, nobody may wait for ever
            for job in left:
                _answer(job, None, meaning(error) if isinstance(error, DBAPIError) else error)

    def _write(self, jobs: Sequence[_Job]) -> None:
        """All at once; with a savepoint for each if one of them has to be taken back; each alone if that fails, too."""
        if self._commit(jobs, _straight) or (len(jobs) > 1 and self._commit(jobs, _guarded)):
            return
        for job in jobs:
            self._commit([job], _straight)

    def _commit(self, jobs: Sequence[_Job], attempt: _Attempt) -> bool:
        """One transaction; -> False if nothing of it was kept and the jobs are to be tried in another way."""
        results: list[tuple[_Job, Any, BaseException | None]] = []
        committing = False
        try:
            self._database.check()
            with self._database.reach.connection(self._database.writer, jobs[-1].asked) as connection:
                transaction = connection.begin()
                try:
                    cursor = Cursor(connection, self._statements)
                    for job in jobs:
                        results.append((job, *attempt(cursor, job)))
                    cursor.close()
                    committing = True
                    transaction.commit()
                except BaseException:
                    transaction.rollback()
                    raise
        except OutOfReach as error:
            logger.error("the conversation store is out of reach: %s", error.why)
            for job in jobs:
                job.future.set_exception(error.why)
            return True
        except DBAPIError as error:
            if len(jobs) > 1 and not (committing and error.connection_invalidated):
                return False
            if not isinstance(error, IntegrityError):
                logger.error("the conversation store refused a write: %s", error.orig)
            for job in jobs:
                job.future.set_exception(meaning(error))
            return True
        except BaseException as error:  # whatever it is, nobody may wait for ever
            if len(jobs) > 1 and attempt is _straight:
                return False
            for job in jobs:
                job.future.set_exception(error)
            return True
        for answer in results:
            _answer(*answer)
        return True


_Attempt = Callable[[Cursor, _Job], tuple[Any, BaseException | None]]


def _answer(job: _Job, result: Any, error: BaseException | None) -> None:
    if error is None:
        job.future.set_result(result)
    else:
        job.future.set_exception(error)


def _tried(cursor: Cursor, job: _Job) -> tuple[Any, BaseException | None]:
    """The result, or what went wrong with this read."""
    try:
        return job.work(cursor), None
    except DBAPIError as error:
        return None, meaning(error)
    except BaseException as error:
        return None, error


def _straight(cursor: Cursor, job: _Job) -> tuple[Any, BaseException | None]:
    """The result, or what the job itself did wrong before it changed anything. Raises what it did wrong afterwards."""
    before = cursor.changes
    try:
        return job.work(cursor), None
    except DBAPIError:
        raise
    except BaseException as error:
        if cursor.changes != before:
            raise
        return None, error


def _guarded(cursor: Cursor, job: _Job) -> tuple[Any, BaseException | None]:
    """The result, or what the job itself did wrong, of which nothing remains. Raises DBAPIError of the database."""
    connection = cursor.connection
    connection.exec_driver_sql("SAVEPOINT job")
    try:
        result = job.work(cursor)
    except IntegrityError as error:
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT job")
        return None, meaning(error)
    except DBAPIError:
        raise
    except BaseException as error:
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT job")
        return None, error
    connection.exec_driver_sql("RELEASE SAVEPOINT job")
    return result, None
