"""Items: written with their response or into a conversation, listed, deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import bindparam, delete, func, insert, select, update

from cellar.conversations.errors import ConversationLocked, Duplicate, NotFound
from cellar.conversations.portions import fitting
from cellar.conversations.records import Item, Page
from cellar.conversations.schema import items, responses, threads
from cellar.conversations.session import Session, of_text, of_texts, to_text
from cellar.conversations.statements import Row

_INSERT = insert(items).inline()
_BY_ID = select(items).where(
    items.c.thread == bindparam("thread"), items.c.id == bindparam("id"), items.c.position.is_not(None)
)
_OF_RESPONSE = select(items).where(items.c.response == bindparam("response")).order_by(items.c.key)
_CONVERSATION = (
    select(threads)
    .where(threads.c.id == bindparam("id"), threads.c.owner == bindparam("owner"), threads.c.is_conversation)
    .with_for_update()
)
_VISIBLE = select(threads.c.id, threads.c.size).where(
    threads.c.id == bindparam("id"), threads.c.owner == bindparam("owner"), threads.c.is_conversation
)
_LISTED = select(items.c.id, items.c.body).where(items.c.thread == bindparam("thread"))
_ASCENDING = _LISTED.where(items.c.position > bindparam("at")).order_by(items.c.position).limit(bindparam("limit"))
_DESCENDING = (
    _LISTED.where(items.c.position < bindparam("at")).order_by(items.c.position.desc()).limit(bindparam("limit"))
)
_LENGTH = func.length(items.c.body).label("length")
_ASCENDING_LENGTHS, _DESCENDING_LENGTHS = (one.with_only_columns(_LENGTH) for one in (_ASCENDING, _DESCENDING))
AT_ONCE = 500
"""Ids in one statement: every database takes so many parameters."""

NEVER = 2**31 - 1
"""Beyond all positions."""

_KNOWN = select(items.c.id).where(
    items.c.thread == bindparam("thread"),
    items.c.position.is_not(None),
    items.c.id.in_(bindparam("ids", expanding=True)),
)
_earlier = items.alias()
_PLACE = (
    update(items)
    .where(items.c.response == bindparam("of"))
    .values(
        position=bindparam("begin")
        + select(func.count())
        .select_from(_earlier)
        .where(_earlier.c.response == bindparam("of"), _earlier.c.key < items.c.key)
        .scalar_subquery()
    )
    .returning(items.c.key)
)
_MAKER = select(responses.c.worker).where(responses.c.id == bindparam("id"))


def conversation_row(session: Session, owner: str, id: str) -> Row:
    """The conversation's row, locked until the transaction ends where the database does so. Raises NotFound."""
    row = session.one(_CONVERSATION, id=id, owner=owner)
    if row is None:
        raise NotFound("conversation", id)
    return row


def check_free(session: Session, row: Row) -> None:
    """Raises ConversationLocked if a living process makes a response in the conversation."""
    if row.running is None:
        return
    maker = session.one(_MAKER, id=row.running)
    if maker is not None and maker.worker is not None and session.alive(maker.worker):
        raise ConversationLocked(row.id)


def put(
    session: Session,
    thread: str,
    new: Sequence[Item],
    position: int | None = None,
    response: str | None = None,
    is_output: bool = False,
) -> int:
    """Write items, in a conversation from `position` on; -> their size in bytes."""
    rows = [
        {
            "id": item.id,
            "thread": thread,
            "position": None if position is None else position + k,
            "response": response,
            "is_output": is_output,
            "body": to_text(item.body),
        }
        for k, item in enumerate(new)
    ]
    session.do_many(_INSERT, rows)
    return sum(len(row["body"].encode()) for row in rows if isinstance(row["body"], str))


def refuse_known(session: Session, conversation: str, new: Sequence[Item]) -> None:
    """Raises Duplicate if the conversation has an item of the same id, or two of the new ones have the same."""
    ids = [item.id for item in new]
    twice = {id for id, count in Counter(ids).items() if count > 1}
    for k in range(0, len(ids), AT_ONCE):
        twice |= {row.id for row in session.rows(_KNOWN, thread=conversation, ids=ids[k : k + AT_ONCE])}
    if twice:
        raise Duplicate("item", min(twice))


def add(session: Session, owner: str, conversation: str, new: Sequence[Item]) -> None:
    """Write items behind those of a conversation. Raises NotFound, ConversationLocked, Duplicate."""
    row = conversation_row(session, owner, conversation)
    check_free(session, row)
    refuse_known(session, conversation, new)
    size = put(session, conversation, new, row.next_position)
    session.touch(conversation, size, next_position=row.next_position + len(new))


def get(session: Session, owner: str, conversation: str, id: str) -> Item:
    """One item of a conversation. Raises NotFound."""
    _visible(session, owner, conversation)
    row = session.one(_BY_ID, thread=conversation, id=id)
    if row is None:
        raise NotFound("item", id)
    return item_of(row)


def page(
    session: Session,
    owner: str,
    conversation: str,
    after: str | None = None,
    limit: int = 20,
    ascending: bool = False,
    most: int | None = None,
) -> Page[Item]:
    """Items of a conversation, by default the newest first, those behind the item `after`; fewer than `limit`, but one
    at least, if more would have more than `most` characters. Raises NotFound.
    """
    size = _visible(session, owner, conversation).size
    at = -1 if ascending else NEVER
    if after is not None:
        begin = session.one(_BY_ID, thread=conversation, id=after)
        if begin is None:
            raise NotFound("item", after)
        at = begin.position
    if most is not None and size > most:
        lengths = _ASCENDING_LENGTHS if ascending else _DESCENDING_LENGTHS
        limit = max(1, fitting(session.rows(lengths, thread=conversation, at=at, limit=limit), most))
    rows = session.rows(_ASCENDING if ascending else _DESCENDING, thread=conversation, at=at, limit=limit + 1)
    return page_of(items_of(rows), limit)


def remove(session: Session, owner: str, conversation: str, id: str) -> None:
    """Take an item out of a conversation. Its response shows it still. Raises NotFound, ConversationLocked."""
    row = conversation_row(session, owner, conversation)
    check_free(session, row)
    item = session.one(_BY_ID, thread=conversation, id=id)
    if item is None:
        raise NotFound("item", id)
    size = 0
    if item.response is None:
        session.do(delete(items).where(items.c.key == bindparam("item")), item=item.key)
        size = -len(item.body.encode())
    else:
        session.do(update(items).where(items.c.key == bindparam("item")).values(position=None), item=item.key)
    forgotten = {"head": None, "head_until": 0} if item.position < row.head_until else {}
    session.touch(conversation, size, **forgotten)


def of_response(session: Session, id: str) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """What went into a response's turn, and what came out."""
    rows = session.rows(_OF_RESPONSE, response=id)
    found = list(zip(rows, items_of(rows), strict=True))
    taken = tuple(item for row, item in found if not row.is_output)
    return taken, tuple(item for row, item in found if row.is_output)


def place(session: Session, response: str, position: int) -> int:
    """Put a response's items into its conversation, from `position` on; -> the position behind them."""
    return position + len(session.rows(_PLACE, of=response, begin=position))


def item_of(row: Row) -> Item:
    """The record."""
    return Item(row.id, of_text(row.body))


def items_of(rows: Sequence[Row]) -> list[Item]:
    """The records of several rows."""
    return [Item(row.id, body) for row, body in zip(rows, of_texts(row.body for row in rows), strict=True)]


def page_of(records: list[Any], limit: int) -> Page[Any]:
    """Of `limit + 1` records, if there are as many."""
    return Page(tuple(records[:limit]), len(records) > limit)


def _visible(session: Session, owner: str, conversation: str) -> Row:
    found = session.one(_VISIBLE, id=conversation, owner=owner)
    if found is None:
        raise NotFound("conversation", conversation)
    return found
