"""Responses: begun, finished, cancelled, deleted, continued. Who makes one is its worker until it has ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import BindParameter, bindparam, delete, func, insert, literal, or_, select, update

from cellar.conversations import events, items
from cellar.conversations.conversations import ROW_BYTES
from cellar.conversations.errors import Ended, NotFound
from cellar.conversations.portions import fitting
from cellar.conversations.records import ANSWERED, RUNNING, Event, History, Item, Response, Status, Tokens
from cellar.conversations.schema import items as item_table
from cellar.conversations.schema import responses, threads
from cellar.conversations.session import Session, of_text, to_text
from cellar.conversations.statements import Row
from cellar.conversations.tokens import context, to_bytes

_RUNNING = tuple(map(str, RUNNING))
_OF_OWNER = (
    select(responses)
    .where(responses.c.id == bindparam("id"), responses.c.owner == bindparam("owner"), ~responses.c.is_deleted)
    .with_for_update()
)
_NEXT_POSITION = select(threads.c.next_position).where(threads.c.id == bindparam("id"))
_INSERT_THREAD, _INSERT = insert(threads), insert(responses)

_begin = (
    select(responses.c.id, responses.c.previous, responses.c.in_conversation, literal(0).label("depth"))
    .where(responses.c.id == bindparam("id"))
    .cte("chain", recursive=True)
)
_chain = _begin.union_all(
    select(responses.c.id, responses.c.previous, responses.c.in_conversation, _begin.c.depth + 1).where(
        responses.c.id == _begin.c.previous, ~_begin.c.in_conversation
    )
)
_CHAIN_ITEMS = (
    select(item_table.c.id, item_table.c.body)
    .select_from(_chain.join(item_table, item_table.c.response == _chain.c.id))
    .where(~_chain.c.in_conversation)
    .order_by(_chain.c.depth.desc(), item_table.c.key)
)
_CHAIN_ROOT = (
    select(responses.c.thread, responses.c.until)
    .select_from(_chain.join(responses, responses.c.id == _chain.c.id))
    .where(_chain.c.in_conversation)
)
_ITEMS_UNTIL = (
    select(item_table.c.id, item_table.c.body)
    .where(item_table.c.thread == bindparam("thread"), item_table.c.position < bindparam("until"))
    .order_by(item_table.c.position)
)
_LENGTH = func.length(item_table.c.body).label("length")
_chain_newest = (
    select(item_table.c.id, item_table.c.body)
    .select_from(_chain.join(item_table, item_table.c.response == _chain.c.id))
    .where(~_chain.c.in_conversation)
    .order_by(_chain.c.depth, item_table.c.key.desc())
)
_until_newest = (
    select(item_table.c.id, item_table.c.body)
    .where(item_table.c.thread == bindparam("thread"), item_table.c.position < bindparam("until"))
    .order_by(item_table.c.position.desc())
)
_CHAIN_LENGTHS, _CHAIN_NEWEST = _chain_newest.with_only_columns(_LENGTH), _chain_newest.limit(bindparam("limit"))
_LENGTHS_UNTIL, _NEWEST_UNTIL = _until_newest.with_only_columns(_LENGTH), _until_newest.limit(bindparam("limit"))
_SIZE = select(threads.c.size).where(threads.c.id == bindparam("id"))


def begin(session: Session, response: Response) -> Response:
    """Store a response that is being made from now on, with its input; `output` is ignored.

    In a conversation it takes the conversation for itself until it ends, and follows the conversation's head. Raises
    NotFound for a conversation or `previous` that the owner does not have, ConversationLocked, Duplicate.
    """
    owner, previous = response.owner, response.previous
    thread = response.conversation or response.id
    if response.conversation is not None:
        row = items.conversation_row(session, owner, response.conversation)
        items.check_free(session, row)
        if row.running is not None:
            _end(session, [row.running], Status.FAILED)
        items.refuse_known(session, response.conversation, response.input)
        previous = row.head
    elif previous is not None:
        thread = _row(session, owner, previous).thread
    else:
        session.do(
            _INSERT_THREAD,
            id=thread,
            owner=owner,
            is_conversation=False,
            created_at=session.now,
            active_at=session.now,
            size=0,
            metadata="{}",
            next_position=0,
            head=None,
            head_until=0,
            running=None,
        )
    body = to_text(response.body)
    session.do(
        _INSERT,
        id=response.id,
        owner=owner,
        thread=thread,
        in_conversation=response.conversation is not None,
        until=0,
        previous=previous,
        status=str(response.status),
        worker=session.worker,
        background=response.background,
        created_at=response.created_at,
        body=body,
        base=None,
        ids=None,
        num_answer=0,
        text_length=0,
        text_digest=b"",
        is_deleted=False,
    )
    size = ROW_BYTES + len(body.encode()) + items.put(session, thread, response.input, response=response.id)
    taken = {} if response.conversation is None else {"running": response.id}
    session.touch(thread, size, **taken)
    return replace(response, previous=previous, output=())


def proceed(session: Session, owner: str, id: str, body: dict[str, Any]) -> None:
    """A queued response is in progress from now on. Raises NotFound, Ended."""
    row = _mine(session, owner, id)
    text = to_text(body)
    session.change(id, status=str(Status.IN_PROGRESS), body=text)
    session.touch(row.thread, len(text.encode()) - len(row.body.encode()))


def finish(
    session: Session,
    owner: str,
    id: str,
    status: Status,
    body: dict[str, Any],
    output: Sequence[Item] = (),
    tokens: Tokens | None = None,
    last_events: Sequence[Event] = (),
) -> None:
    """End a response. If it answered, its items become part of its conversation, whose head it is if it has `tokens`.

    Raises NotFound, Ended (also for another process's response), Duplicate.
    """
    row = _mine(session, owner, id)
    if tokens is not None and tokens.base not in (None, row.previous):
        raise ValueError(f"the tokens of {id} are based on {tokens.base!r}, but it follows {row.previous!r}.")
    text, ids = to_text(body), None if tokens is None else to_bytes(tokens)
    size = len(text.encode()) - len(row.body.encode()) + len(ids or b"")
    size += events.put(session, id, last_events)
    answered = status in ANSWERED
    changes: dict[str, Any] = {}
    if row.in_conversation and answered:
        items.refuse_known(session, row.thread, output)
    size += items.put(session, row.thread, output, response=id, is_output=True)
    if row.in_conversation:
        changes["running"] = None
        if answered:
            thread = session.one(_NEXT_POSITION, id=row.thread)
            assert thread is not None  # its responses would be gone with it
            until = items.place(session, id, thread.next_position)
            head = {"head": id, "head_until": until} if tokens is not None else {"head": None, "head_until": 0}
            changes |= {"next_position": until, **head}
    session.change(
        id,
        status=str(status),
        worker=None,
        body=text,
        base=None if tokens is None else tokens.base,
        ids=ids,
        num_answer=0 if tokens is None else tokens.num_answer,
        text_length=0 if tokens is None else tokens.text_length,
        text_digest=b"" if tokens is None else tokens.text_digest,
        until=changes.get("next_position", 0),
    )
    session.touch(row.thread, size, **changes)


def add(session: Session, response: Response, tokens: Tokens | None = None) -> None:
    """Store a response that has ended. Raises as `begin` and `finish`."""
    begin(session, replace(response, status=Status.IN_PROGRESS))
    finish(session, response.owner, response.id, response.status, response.body, response.output, tokens)


def get(session: Session, owner: str, id: str) -> Response:
    """One response with its items. Raises NotFound."""
    row = _row(session, owner, id)
    return _response(row, *items.of_response(session, id))


def history(session: Session, owner: str, id: str, most: int | None = None) -> History:
    """What a response goes on from that names this one as `previous`: the newest items, of `most` characters at most.

    Raises NotFound.
    """
    row = _row(session, owner, id)
    root = session.one(_CHAIN_ROOT, id=id)
    until = {} if root is None else {"thread": root.thread, "until": root.until}
    thread = session.one(_SIZE, id=row.thread)
    if most is not None and thread is not None and thread.size > most:
        newest = [*session.rows(_CHAIN_LENGTHS, id=id), *(session.rows(_LENGTHS_UNTIL, **until) if until else ())]
        count = fitting(newest, most)
        if count < len(newest):
            return History(_newest(session, id, until, count), thread=row.thread, is_cut=True)
    before = session.rows(_ITEMS_UNTIL, **until) if until else []
    found = tuple(items.items_of([*before, *session.rows(_CHAIN_ITEMS, id=id)]))
    tokens = context(session, id)
    return History(found, 0 if tokens is None else len(found), tokens, row.thread)


def _newest(session: Session, id: str, until: dict[str, Any], count: int) -> tuple[Item, ...]:
    """The newest of a chain and of what it began from."""
    rows = list(session.rows(_CHAIN_NEWEST, id=id, limit=count))
    if until and len(rows) < count:
        rows += session.rows(_NEWEST_UNTIL, limit=count - len(rows), **until)
    return tuple(items.items_of(rows[::-1]))


def running(session: Session, ids: Collection[str]) -> frozenset[str]:
    """Those of the ids whose responses have not ended; who makes one asks whether it shall go on."""
    statement = select(responses.c.id).where(
        responses.c.id.in_(bindparam("ids", expanding=True)), responses.c.status.in_(_RUNNING)
    )
    return frozenset(row.id for row in session.rows(statement, ids=list(ids)))


def cancel(session: Session, owner: str, id: str) -> Response:
    """End a response from outside, if it has not ended; -> it as it is now. Raises NotFound."""
    row = _row(session, owner, id)
    if Status(row.status).running:
        _end(session, [id], Status.CANCELLED)
    return get(session, owner, id)


def remove(session: Session, owner: str, id: str) -> None:
    """Delete a response. What its conversation has of it stays; the conversation's head is forgotten if it was it.

    Its items and ids stay, unseen, while other responses go on from it. Raises NotFound.
    """
    row = _row(session, owner, id)
    if Status(row.status).running:
        _end(session, [id], Status.CANCELLED)
    session.do(
        update(threads).where(threads.c.head == bindparam("of")).values(head=None, head_until=0),
        of=id,
    )
    gone = {"is_deleted": True, "body": "{}"}
    session.change(id, **gone)
    session.touch(row.thread, 2 - len(row.body.encode()))
    _prune(session, row.thread, id)


def fail_dead(session: Session) -> int:
    """End what workers that live no more left unended; -> how many responses."""
    workers = session.rows(select(responses.c.worker).where(responses.c.worker.is_not(None)).distinct())
    dead = [row.worker for row in workers if not session.alive(row.worker)]
    if not dead:
        return 0
    left = session.rows(select(responses.c.id).where(responses.c.worker.in_(bindparam("w", expanding=True))), w=dead)
    _end(session, [row.id for row in left], Status.FAILED)
    return len(left)


def _row(session: Session, owner: str, id: str) -> Row:
    row = session.one(_OF_OWNER, id=id, owner=owner)
    if row is None:
        raise NotFound("response", id)
    return row


def _mine(session: Session, owner: str, id: str) -> Row:
    """A response that this process makes."""
    row = _row(session, owner, id)
    if row.worker != session.worker:
        raise Ended(id, row.status)
    return row


def _end(session: Session, ids: Sequence[str], status: Status) -> None:
    """End running responses without an answer, and free their conversations."""
    named: BindParameter[Any] = bindparam("which", expanding=True)
    session.do(
        update(responses)
        .where(responses.c.id.in_(named), responses.c.status.in_(_RUNNING))
        .values(status=str(status), worker=None),
        which=list(ids),
    )
    session.do(update(threads).where(threads.c.running.in_(named)).values(running=None), which=list(ids))


def _prune(session: Session, thread: str, id: str | None) -> None:
    """Take away deleted responses that nothing goes on from, and the thread of a chain that is empty then."""
    while id is not None:
        row = session.one(select(responses).where(responses.c.id == bindparam("id")), id=id)
        if row is None or not row.is_deleted:
            break
        needed = session.one(
            select(responses.c.id)
            .where(or_(responses.c.previous == bindparam("id"), responses.c.base == bindparam("id")))
            .limit(1),
            id=id,
        )
        if needed is not None:
            return
        in_conversation = item_table.c.position.is_not(None)
        mine = item_table.c.response == bindparam("of")
        size = session.one(select(func.sum(func.length(item_table.c.body))).where(mine, ~in_conversation), of=id)
        session.do(delete(item_table).where(mine, ~in_conversation), of=id)
        session.do(update(item_table).where(mine).values(response=None), of=id)
        session.do(delete(responses).where(responses.c.id == bindparam("of")), of=id)
        freed = ROW_BYTES + len(row.ids or b"") + (0 if size is None else size[0] or 0)
        session.touch(thread, -freed)
        id = row.previous
    left = select(responses.c.id).where(responses.c.thread == threads.c.id).exists()
    session.do(
        delete(threads).where(threads.c.id == bindparam("of"), ~threads.c.is_conversation, ~left),
        of=thread,
    )


def _response(row: Row, taken: tuple[Item, ...], made: tuple[Item, ...]) -> Response:
    return Response(
        row.id,
        row.owner,
        Status(row.status),
        row.created_at,
        of_text(row.body),
        row.thread if row.in_conversation else None,
        row.previous,
        row.background,
        taken,
        made,
    )
