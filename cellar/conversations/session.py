"""Session: what an operation works with, one transaction long."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Executable, Row, bindparam, update

from cellar.conversations.schema import threads

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Session:
    """A connection inside a transaction, who works (`worker`), who is alive, and the time, seconds since 1970."""

    connection: Connection
    worker: str
    alive: Callable[[str], bool]
    now: float

    def one(self, statement: Executable, **values: Any) -> Row[Any] | None:
        """The first row, if there is any."""
        return self.connection.execute(statement, values).first()

    def rows(self, statement: Executable, **values: Any) -> list[Row[Any]]:
        """All rows."""
        return list(self.connection.execute(statement, values))

    def do(self, statement: Executable, **values: Any) -> int:
        """Execute; -> how many rows it concerned."""
        count: int = self.connection.execute(statement, values).rowcount
        return count

    def touch(self, thread: str, size: int, **changes: Any) -> None:
        """A thread has been active and has become larger by `size` bytes; `changes` are columns of it."""
        self.connection.execute(
            update(threads)
            .where(threads.c.id == bindparam("thread"))
            .values(active_at=bindparam("now"), size=threads.c.size + bindparam("more"), **bound(changes)),
            {"thread": thread, "now": self.now, "more": size, **prefixed(changes)},
        )


def bound(changes: dict[str, Any]) -> dict[str, ColumnElement[Any]]:
    """A bind parameter for each column, so that the statement's compiled form is found again."""
    return {name: bindparam(f"to_{name}") for name in changes}


def prefixed(changes: dict[str, Any]) -> dict[str, Any]:
    """The values for `bound`."""
    return {f"to_{name}": value for name, value in changes.items()}


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
