"""What must stay in the engine's memory when a response is deleted: the contexts that others go on from."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import bindparam, select

from cellar.conversations.errors import NotFound
from cellar.conversations.records import IntArray
from cellar.conversations.schema import responses
from cellar.conversations.session import Session
from cellar.conversations.tokens import context

MAX_CONTEXTS = 64
"""Of a thread, the newest; what is left out is computed again when somebody goes on from it."""

_ONE = select(responses.c.thread, responses.c.in_conversation).where(
    responses.c.id == bindparam("id"), responses.c.owner == bindparam("owner"), ~responses.c.is_deleted
)
_OTHERS = (
    select(responses.c.id, responses.c.base)
    .where(
        responses.c.thread == bindparam("thread"),
        responses.c.id != bindparam("id"),
        ~responses.c.is_deleted,
        responses.c.ids.is_not(None),
    )
    .order_by(responses.c.created_at.desc(), responses.c.id)
)


@dataclass(frozen=True, slots=True)
class Remains:
    """`contexts` are the ids of all other responses of the thread, but for those that another one extends.

    `thread` is None for a turn of a conversation, which has all that was said in it still.
    """

    thread: str | None
    contexts: tuple[IntArray, ...] = ()


def of_response(session: Session, owner: str, id: str) -> Remains:
    """What is left without a response that is still there. Raises NotFound."""
    row = session.one(_ONE, id=id, owner=owner)
    if row is None:
        raise NotFound("response", id)
    if row.in_conversation:
        return Remains(None)
    others = session.rows(_OTHERS, thread=row.thread, id=id)
    extended = {other.base for other in others}
    last = [other.id for other in others if other.id not in extended][:MAX_CONTEXTS]
    found = (context(session, other) for other in last)
    return Remains(row.thread, tuple(tokens.ids for tokens in found if tokens is not None))
