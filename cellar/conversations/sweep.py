"""What is bounded: how long an idle conversation is kept, and how much room all take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqlalchemy import bindparam, delete, func, select

from cellar.conversations.records import RUNNING, Deleted
from cellar.conversations.schema import responses, threads
from cellar.conversations.session import Session
from cellar.core.errors import ConfigError

THREADS_A_STEP = 64
"""Most threads that one step deletes, so that a sweep holds up other writes for milliseconds only."""


@dataclass(frozen=True, kw_only=True)
class StoreLimits:
    """Seconds that an idle thread is kept (None: for ever), and bytes of bodies, ids and events of all together."""

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
    select(threads.c.id, threads.c.size, threads.c.active_at)
    .where(~_busy)
    .order_by(threads.c.active_at)
    .limit(THREADS_A_STEP)
)


def total(session: Session) -> int:
    """Bytes that all threads take."""
    row = session.one(select(func.coalesce(func.sum(threads.c.size), 0)))
    return 0 if row is None else int(row[0])


def step(session: Session, limits: StoreLimits) -> Deleted:
    """Delete the oldest idle threads that are too old or too much, `THREADS_A_STEP` at most."""
    excess = total(session) - limits.max_bytes
    before = -math.inf if limits.ttl is None else session.now - limits.ttl
    chosen, freed = [], 0
    for row in session.rows(_OLDEST):
        if row.active_at >= before and freed >= excess:
            break
        chosen.append(row.id)
        freed += row.size
    if chosen:
        session.do(delete(threads).where(threads.c.id.in_(bindparam("ids", expanding=True))), ids=chosen)
    return Deleted(len(chosen), freed)
