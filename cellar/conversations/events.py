"""Events of background responses, kept so that any front can resume their streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import bindparam, insert, select

from cellar.conversations.errors import Ended, NotFound
from cellar.conversations.records import Event, Status
from cellar.conversations.schema import events, responses
from cellar.conversations.session import Session

_OF_OWNER = select(responses.c.status, responses.c.worker, responses.c.thread).where(
    responses.c.id == bindparam("id"), responses.c.owner == bindparam("owner"), ~responses.c.is_deleted
)
_INSERT = insert(events)
_AFTER = (
    select(events.c.number, events.c.data)
    .where(events.c.response == bindparam("id"), events.c.number > bindparam("number"))
    .order_by(events.c.number)
    .limit(bindparam("limit"))
)


@dataclass(frozen=True, slots=True)
class Resumed:
    """Kept events, and where the response was then. If it has ended and `events` is empty, that is all."""

    events: tuple[Event, ...]
    status: Status


def append(session: Session, owner: str, response: str, new: Sequence[Event]) -> None:
    """Keep events of a response that this process makes. Raises NotFound, Ended (as after a cancellation)."""
    row = session.one(_OF_OWNER, id=response, owner=owner)
    if row is None:
        raise NotFound("response", response)
    if row.worker != session.worker:
        raise Ended(response, row.status)
    session.touch(row.thread, put(session, response, new))


def after(session: Session, owner: str, response: str, number: int = -1, limit: int = 1024) -> Resumed:
    """The events behind the one with this number, `limit` at most. Raises NotFound."""
    row = session.one(_OF_OWNER, id=response, owner=owner)
    if row is None:
        raise NotFound("response", response)
    found = session.rows(_AFTER, id=response, number=number, limit=limit)
    return Resumed(tuple(Event(one.number, one.data) for one in found), Status(row.status))


def put(session: Session, response: str, new: Sequence[Event]) -> int:
    """Write events; -> their size in bytes."""
    session.do_many(_INSERT, [{"response": response, "number": event.number, "data": event.data} for event in new])
    return sum(len(event.data) for event in new)
