"""Contexts: the ids that responses keep, put together along their bases."""

from __future__ import annotations

import numpy as np
from sqlalchemy import bindparam, literal, select

from cellar.conversations.records import Tokens
from cellar.conversations.schema import responses
from cellar.conversations.session import Session

_COLUMNS = (
    responses.c.base,
    responses.c.ids,
    responses.c.num_answer,
    responses.c.text_length,
    responses.c.text_digest,
)
_begin = (
    select(*_COLUMNS, literal(0).label("depth")).where(responses.c.id == bindparam("id")).cte("walk", recursive=True)
)
_walk = _begin.union_all(select(*_COLUMNS, _begin.c.depth + 1).where(responses.c.id == _begin.c.base))
_CONTEXT = select(_walk).order_by(_walk.c.depth.desc())


def context(session: Session, response: str) -> Tokens | None:
    """The whole context of a response as int32 ids; None if it keeps none."""
    rows = session.rows(_CONTEXT, id=response)
    if not rows or any(row.ids is None for row in rows) or rows[0].base is not None:
        return None
    ids = np.frombuffer(b"".join(row.ids for row in rows), "<i4").astype(np.int32, copy=False)
    last = rows[-1]
    return Tokens(ids, response, last.num_answer, last.text_length, last.text_digest)


def to_bytes(tokens: Tokens) -> bytes:
    """The ids as they are stored."""
    return np.asarray(tokens.ids, "<i4").tobytes()
