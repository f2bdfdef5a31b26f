"""Conversations: made, listed, renamed, deleted, continued."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Float, String, bindparam, delete, func, insert, select, tuple_

from cellar.conversations.errors import NotFound
from cellar.conversations.items import conversation_row, items_of, page_of, put, refuse_known
from cellar.conversations.portions import fitting
from cellar.conversations.records import Conversation, History, Item, Page
from cellar.conversations.schema import items, threads
from cellar.conversations.session import Session, of_text, to_text
from cellar.conversations.statements import Row
from cellar.conversations.tokens import context

_INSERT = insert(threads)
_GET = select(threads).where(
    threads.c.id == bindparam("id"), threads.c.owner == bindparam("owner"), threads.c.is_conversation
)
_ITEMS = (
    select(items.c.id, items.c.body, items.c.position)
    .where(items.c.thread == bindparam("id"), items.c.position >= bindparam("begin"))
    .order_by(items.c.position)
)
_NEWEST = (
    select(items.c.position, func.length(items.c.body).label("length"))
    .where(items.c.thread == bindparam("id"), items.c.position.is_not(None))
    .order_by(items.c.position.desc())
)
_KEY = tuple_(threads.c.active_at, threads.c.id)
_AT = tuple_(bindparam("active_at", type_=Float), bindparam("after", type_=String))
_LISTED = select(threads).where(threads.c.owner == bindparam("owner"), threads.c.is_conversation)
_ASCENDING = _LISTED.where(_KEY > _AT).order_by(threads.c.active_at, threads.c.id).limit(bindparam("limit"))
_DESCENDING = (
    _LISTED.where(_KEY < _AT).order_by(threads.c.active_at.desc(), threads.c.id.desc()).limit(bindparam("limit"))
)
ROW_BYTES = 256
"""What a row is counted with beside its texts and ids."""


def create(session: Session, owner: str, id: str, metadata: dict[str, Any], new: Sequence[Item] = ()) -> Conversation:
    """Begin a conversation, with its first items. Raises Duplicate."""
    text = to_text(metadata)
    size = ROW_BYTES + len(text.encode()) + sum(len(to_text(item.body).encode()) for item in new)
    session.do(
        _INSERT,
        id=id,
        owner=owner,
        is_conversation=True,
        created_at=session.now,
        active_at=session.now,
        size=size,
        metadata=text,
        next_position=len(new),
        head=None,
        head_until=0,
        running=None,
    )
    if new:
        refuse_known(session, id, new)
        put(session, id, new, 0)
    return Conversation(id, owner, session.now, session.now, metadata)


def get(session: Session, owner: str, id: str) -> Conversation:
    """One conversation. Raises NotFound."""
    row = session.one(_GET, id=id, owner=owner)
    if row is None:
        raise NotFound("conversation", id)
    return conversation_of(row)


def page(
    session: Session, owner: str, after: str | None = None, limit: int = 20, ascending: bool = False
) -> Page[Conversation]:
    """An owner's conversations, by default the last active first, those behind `after`. Raises NotFound."""
    at = (-math.inf, "") if ascending else (math.inf, "")
    if after is not None:
        begin = get(session, owner, after)
        at = (begin.updated_at, begin.id)
    rows = session.rows(
        _ASCENDING if ascending else _DESCENDING, owner=owner, active_at=at[0], after=at[1], limit=limit + 1
    )
    return page_of([conversation_of(row) for row in rows], limit)


def update(session: Session, owner: str, id: str, metadata: dict[str, Any]) -> Conversation:
    """Give a conversation other metadata. Raises NotFound."""
    row = conversation_row(session, owner, id)
    text = to_text(metadata)
    session.touch(id, len(text.encode()) - len(row.metadata.encode()), metadata=text)
    return get(session, owner, id)


def remove(session: Session, owner: str, id: str) -> None:
    """Delete a conversation with its items, its responses, and whatever goes on from them. Raises NotFound.

    A response that is being made in it has then ended (`Ended` or `NotFound` for who makes it).
    """
    conversation_row(session, owner, id)
    session.do(delete(threads).where(threads.c.id == bindparam("id")), id=id)


def history(session: Session, owner: str, id: str, most: int | None = None) -> History:
    """What the next turn goes on from: the newest items, of `most` characters at most. Raises NotFound."""
    row = session.one(_GET, id=id, owner=owner)
    if row is None:
        raise NotFound("conversation", id)
    conversation, begin = conversation_of(row), 0
    if most is not None and row.size > most:
        newest = session.rows(_NEWEST, id=id)
        count = fitting(newest, most)
        begin = newest[count].position + 1 if count < len(newest) else 0
    rows = session.rows(_ITEMS, id=id, begin=begin)
    if begin:
        return History(tuple(items_of(rows)), thread=id, is_cut=True)
    tokens = None if conversation.head is None else context(session, conversation.head)
    covered = 0 if tokens is None else sum(row.position < conversation.head_until for row in rows)
    return History(tuple(items_of(rows)), covered, tokens, id)


def conversation_of(row: Row) -> Conversation:
    """The record."""
    return Conversation(
        row.id, row.owner, row.created_at, row.active_at, of_text(row.metadata), row.head, row.head_until
    )
