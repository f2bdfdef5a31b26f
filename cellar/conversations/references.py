"""Items by their ids alone, wherever their owner has them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import bindparam, or_, select

from cellar.conversations.items import items_of
from cellar.conversations.records import Item
from cellar.conversations.schema import items, responses, threads
from cellar.conversations.session import Session

_AT_ONCE = 500
"""Ids in one statement: every database takes so many parameters."""

_BY_IDS = (
    select(items.c.id, items.c.body)
    .select_from(
        threads.join(items, items.c.thread == threads.c.id).outerjoin(responses, responses.c.id == items.c.response)
    )
    .where(
        threads.c.owner == bindparam("owner"),
        items.c.id.in_(bindparam("ids", expanding=True)),
        or_(items.c.position.is_not(None), ~responses.c.is_deleted),
    )
    .order_by(items.c.key)
)


def find(session: Session, owner: str, ids: Sequence[str]) -> dict[str, Item]:
    """The items of these ids, as far as a conversation or a response of the owner shows them.

    Of several with one id, which clients may have chosen, the one that came last.
    """
    found: dict[str, Item] = {}
    for k in range(0, len(ids), _AT_ONCE):
        rows = session.rows(_BY_IDS, owner=owner, ids=list(ids[k : k + _AT_ONCE]))
        found |= {item.id: item for item in items_of(rows)}
    return found
