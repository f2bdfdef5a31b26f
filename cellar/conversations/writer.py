"""Writer: the thread that writes, many requests' writes in one transaction (group commit)."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from cellar.conversations.database import meaning
from cellar.conversations.errors import StoreUnavailable

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_SAVEPOINT, _RELEASE = text("SAVEPOINT job"), text("RELEASE SAVEPOINT job")
_ROLLBACK = text("ROLLBACK TO SAVEPOINT job")
"""As text: what SQLAlchemy does for a nested transaction takes longer than a whole write."""

MAX_GROUP = 128
MAX_WAITING = 8192


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[Connection], Any]
    future: Future[Any]


class Writer:
    """Runs writes in the order of their coming. A write is done when its transaction has been committed, not before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: queue.Queue[_Job | None] = queue.Queue(MAX_WAITING)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cellar-conversations", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Connection], ResultT]) -> Future[ResultT]:
        """Have something written. Raises StoreUnavailable if too many wait, or none is done any more.

        The future's error is what `work` raised, or StoreError; then nothing of it is stored.
        """
        if self._closed.is_set():
            raise StoreUnavailable("the conversation store is closed.")
        future: Future[ResultT] = Future()
        try:
            self._jobs.put_nowait(_Job(work, future))
        except queue.Full:
            raise StoreUnavailable("too many writes wait for the conversation store; try again soon.") from None
        return future

    def close(self) -> None:
        """Do what waits, then end."""
        if not self._closed.is_set():
            self._closed.set()
            self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        going = True
        while going:
            group = [self._jobs.get()]
            while len(group) < MAX_GROUP:
                try:
                    group.append(self._jobs.get_nowait())
                except queue.Empty:
                    break
            going = None not in group
            jobs = [job for job in group if job is not None and job.future.set_running_or_notify_cancel()]
            if jobs and not self._commit(jobs):
                for job in jobs:
                    self._commit([job])

    def _commit(self, jobs: Sequence[_Job]) -> bool:
        """One transaction; -> False if the jobs are to be tried again, each alone."""
        results: list[tuple[_Job, Any, BaseException | None]] = []
        committing = False
        try:
            with self._engine.connect() as connection:
                transaction = connection.begin()
                try:
                    for job in jobs:
                        results.append((job, *_attempt(connection, job)))
                    committing = True
                    transaction.commit()
                except BaseException:
                    transaction.rollback()
                    raise
        except DBAPIError as error:
            if len(jobs) > 1 and not (committing and error.connection_invalidated):
                return False
            if not isinstance(error, IntegrityError):
                logger.error("the conversation store refused a write: %s", error.orig)
            for job in jobs:
                job.future.set_exception(meaning(error))
            return True
        except BaseException as error:  # whatever it is, nobody may wait for ever
            for job in jobs:
                job.future.set_exception(error)
            return True
        for job, result, failure in results:
            if failure is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(failure)
        return True


def _attempt(connection: Connection, job: _Job) -> tuple[Any, BaseException | None]:
    """The result, or what the job itself did wrong, of which nothing remains. Raises DBAPIError of the database."""
    connection.execute(_SAVEPOINT)
    try:
        result = job.work(connection)
    except IntegrityError as error:
        connection.execute(_ROLLBACK)
        return None, meaning(error)
    except DBAPIError:
        raise
    except BaseException as error:
        connection.execute(_ROLLBACK)
        return None, error
    connection.execute(_RELEASE)
    return result, None
