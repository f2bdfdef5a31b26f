"""Session: what an operation works with, one transaction long."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Connection, Update, bindparam, update

from cellar.conversations.schema import responses, threads
from cellar.conversations.statements import Cursor, Row, Statement

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Session:
    """A cursor inside a transaction, who works (`worker`), who is alive, and the time, seconds since 1970."""

    cursor: Cursor
    worker: str
    alive: Callable[[str], bool]
    now: float

    @property
    def connection(self) -> Connection:
        """SQLAlchemy's, for what is no statement of ours."""
        return self.cursor.connection

    def one(self, statement: Statement, **values: Any) -> Row | None:
        """The first row, if there is any."""
        found = self.cursor.rows(statement, values)
        return found[0] if found else None

    def rows(self, statement: Statement, **values: Any) -> list[Row]:
        """All rows."""
        return self.cursor.rows(statement, values)

    def do(self, statement: Statement, **values: Any) -> None:
        """Execute what returns nothing."""
        self.cursor.do(statement, values)

    def do_many(self, statement: Statement, several: Sequence[dict[str, Any]]) -> None:
        """The same once for each of several values, which have the same names."""
        if several:
            self.cursor.do_many(statement, several)

    def touch(self, thread: str, size: int, **changes: Any) -> None:
        """A thread has been active and has become larger by `size` bytes; `changes` are columns of it."""
        values = {f"to_{name}": value for name, value in changes.items()}
        self.do(_touching(tuple(changes)), which=thread, to_now=self.now, more=size, **values)

    def change(self, response: str, **changes: Any) -> None:
        """Change columns of a response."""
        values = {f"to_{name}": value for name, value in changes.items()}
        self.do(_changing(tuple(changes)), which=response, **values)


@cache
def _touching(columns: tuple[str, ...]) -> Update:
    """Made once, as all statements are: to build one takes longer than to execute it."""
    values: dict[str, Any] = {name: bindparam(f"to_{name}") for name in columns}
    grown: dict[str, Any] = {"active_at": bindparam("to_now"), "size": threads.c.size + bindparam("more")}
    return update(threads).where(threads.c.id == bindparam("which")).values(**grown, **values)


@cache
def _changing(columns: tuple[str, ...]) -> Update:
    values: dict[str, Any] = {name: bindparam(f"to_{name}") for name in columns}
    return update(responses).where(responses.c.id == bindparam("which")).values(**values)


def to_text(value: Any) -> str:
    """JSON as it is stored: short, searchable, and such that every database takes it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character, which only an escape can express
        text = json.dumps(value, separators=(",", ":"))
    return text


def of_text(text: str) -> Any:
    """The JSON value."""
    return json.loads(text)


def of_texts(texts: Iterable[str]) -> list[Any]:
    """The JSON values of several, read at once: to begin with each takes longer than a short one itself."""
    found: list[Any] = json.loads(f"[{','.join(texts)}]")
    return found
