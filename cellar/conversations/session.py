"""Session: what an operation works with, one transaction long."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Connection, Executable, Row, Update, bindparam, update

from cellar.conversations.schema import responses, threads

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
        values = {f"to_{name}": value for name, value in changes.items()}
        self.connection.execute(
            _touching(tuple(changes)), {"which": thread, "to_now": self.now, "more": size, **values}
        )

    def change(self, response: str, **changes: Any) -> None:
        """Change columns of a response."""
        values = {f"to_{name}": value for name, value in changes.items()}
        self.connection.execute(_changing(tuple(changes)), {"which": response, **values})


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
