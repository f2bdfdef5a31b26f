"""Items by their ids alone, wherever their owner has them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import bindparam, func, or_, select

from cellar.conversations.errors import TooLarge
from cellar.conversations.items import AT_ONCE, items_of
from cellar.conversations.records import Item
from cellar.conversations.schema import items, responses, threads
from cellar.conversations.session import Session

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
_LENGTHS = _BY_IDS.with_only_columns(func.length(items.c.body).label("length")).order_by(None)


def find(session: Session, owner: str, ids: Sequence[str], most: int | None = None) -> dict[str, Item]:
    """The items of these ids, as far as a conversation or a response of the owner shows them.

    Of several with one id, which clients may have chosen, the one that came last. Raises TooLarge for items of more
    than `most` characters together.
    """
    found: dict[str, Item] = {}
    length = 0
    for k in range(0, len(ids), AT_ONCE):
        wanted = list(ids[k : k + AT_ONCE])
        if most is not None:
            length += sum(row.length for row in session.rows(_LENGTHS, owner=owner, ids=wanted))
            if length > most:
                raise TooLarge(length, most)
        found |= {item.id: item for item in items_of(session.rows(_BY_IDS, owner=owner, ids=wanted))}
    return found
