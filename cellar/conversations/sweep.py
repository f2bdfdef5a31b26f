"""What is bounded: how long an idle conversation is kept, and how much room all take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqlalchemy import bindparam, delete, func, select

from cellar.conversations.records import RUNNING, Deleted, Thread
from cellar.conversations.schema import responses, threads
from cellar.conversations.session import Session
from cellar.core.errors import ConfigError

THREADS_A_STEP = 64
"""Most threads that one step deletes, so that a sweep holds up other writes for milliseconds only."""

PAGES_A_STEP = 256
"""Most pages that one step gives back to the disk, for the same reason."""


@dataclass(frozen=True, kw_only=True)
class StoreLimits:
    """Seconds that an idle thread is kept (None: for ever), and bytes that all together take (see `used`)."""

    ttl: float | None = 30 * 86400.0
    max_bytes: int = 8 * 2**30

    def __post_init__(self) -> None:
        if self.ttl is not None and not 0 < self.ttl < math.inf:
            raise ConfigError(f"ttl is {self.ttl}; it must be a positive number of seconds, or None to keep all.")
        if self.max_bytes < 1:
            raise ConfigError(f"max_bytes is {self.max_bytes}; it must be at least 1.")


_busy = (
    select(responses.c.id)
    .where(responses.c.thread == threads.c.id, responses.c.status.in_([str(status) for status in RUNNING]))
    .exists()
)
_OLDEST = (
    select(threads.c.id, threads.c.owner, threads.c.size, threads.c.active_at)
    .where(~_busy)
    .order_by(threads.c.active_at)
    .limit(THREADS_A_STEP)
)


_TOTAL = select(func.coalesce(func.sum(threads.c.size), 0))
_FIRST = select(func.min(threads.c.active_at))
_DELETE = delete(threads).where(threads.c.id.in_(bindparam("ids", expanding=True)))


def total(session: Session) -> int:
    """Bytes of bodies, ids and events that all threads have."""
    row = session.one(_TOTAL)
    return 0 if row is None else int(row[0])


def used(session: Session) -> int:
    """Bytes that the store takes of the disk: in SQLite its pages but the free ones; in PostgreSQL, whose pages are
    freed when it likes to, `total`."""
    if session.connection.dialect.name != "sqlite":
        return total(session)
    pages = _pragma(session, "page_count") - _pragma(session, "freelist_count")
    return pages * _pragma(session, "page_size")


def due(session: Session, limits: StoreLimits) -> bool:
    """True if `step` may find something to delete. Reads only: no write waits for it."""
    first = session.one(_FIRST)
    if first is None or first[0] is None:
        return False
    too_old = limits.ttl is not None and first[0] < session.now - limits.ttl
    return too_old or used(session) > limits.max_bytes


def step(session: Session, limits: StoreLimits) -> Deleted:
    """Delete the oldest idle threads that are too old or too much, `THREADS_A_STEP` at most."""
    taken = used(session)
    excess = taken - limits.max_bytes
    share = taken / max(1, total(session)) if excess > 0 else 1.0  # of the disk, for a byte of a thread
    before = -math.inf if limits.ttl is None else session.now - limits.ttl
    chosen, freed = list[Thread](), 0
    for row in session.rows(_OLDEST):
        if row.active_at >= before and freed >= excess:
            break
        chosen.append(Thread(row.owner, row.id))
        freed += int(row.size * share)
    if chosen:
        session.do(_DELETE, ids=[thread.id for thread in chosen])
    return Deleted(tuple(chosen), freed)


def shrink(session: Session) -> bool:
    """Give some free pages at the end of SQLite's file back to the disk; -> whether there are more to give back.

    An eighth of the file may stay free: what comes next goes there. The file is shorter after the next checkpoint.
    """
    if session.connection.dialect.name != "sqlite":
        return False
    free = _pragma(session, "freelist_count")
    surplus = free - max(PAGES_A_STEP, _pragma(session, "page_count") // 8)
    if surplus <= 0:
        return False
    for _ in range(min(surplus, PAGES_A_STEP)):  # the driver makes one step of this pragma, which is one page
        session.cursor.driver_rows("PRAGMA incremental_vacuum(1)")
    return surplus > PAGES_A_STEP and _pragma(session, "freelist_count") < free


def _pragma(session: Session, name: str) -> int:
    return int(session.cursor.driver_rows(f"PRAGMA {name}")[0][0])
