"""Conversations by what their titles and messages say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, select

from cellar.conversations import conversations
from cellar.conversations.records import Conversation
from cellar.conversations.schema import items
from cellar.conversations.session import Session, of_texts

MAX_CONVERSATIONS = 1_000
MAX_CHARACTERS = 16_000_000
"""Looked through in one search: conversations, the last active first, and what is read of their items."""

_AT_ONCE = 50

_BODIES = (
    select(items.c.body)
    .where(items.c.thread == bindparam("thread"), items.c.position.is_not(None))
    .order_by(items.c.position)
)


@dataclass(frozen=True, slots=True)
class Found:
    """`last` is the conversation that was looked at last, None if there was none; `more` tells whether any follows."""

    records: tuple[Conversation, ...]
    last: str | None
    more: bool


def find(session: Session, owner: str, words: str, after: str | None = None, limit: int = 20) -> Found:
    """An owner's conversations in whose title or messages all words stand, in either case, the last active first.

    It ends at `limit`, or at a bound above. Raises NotFound for a conversation `after` which they do not have.
    """
    wanted, found = words.casefold().split(), list[Conversation]()
    last, looked, read = after, 0, 0
    while True:
        page = conversations.page(session, owner, last, _AT_ONCE)
        for k, one in enumerate(page.records, 1):
            bodies = [row.body for row in session.rows(_BODIES, thread=one.id)]
            last, looked, read = one.id, looked + 1, read + sum(map(len, bodies))
            text = "\n".join(
                [_title(one.metadata), *(text for body in of_texts(bodies) for text in _texts(body))]
            ).casefold()
            if all(word in text for word in wanted):
                found.append(one)
            if len(found) == limit or looked == MAX_CONVERSATIONS or read > MAX_CHARACTERS:
                return Found(tuple(found), last, page.more or k < len(page.records))
        if not page.more:
            return Found(tuple(found), last, False)


def _title(metadata: dict[str, Any]) -> str:
    title = metadata.get("title")
    return title if isinstance(title, str) else ""


def _texts(item: dict[str, Any]) -> Iterator[str]:
    """What a message says; of calls and reasoning nothing."""
    content = item.get("content") if item.get("type") == "message" else None
    return (part["text"] for part in content or () if isinstance(part.get("text"), str))
