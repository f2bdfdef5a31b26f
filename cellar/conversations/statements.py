"""Statements: SQLAlchemy's, each compiled once, and executed by the driver itself.

What `Connection.execute` does for each execution (events, cache keys, results that know their columns) takes several
times as long as a small statement in SQLite. Here nothing is left of it but the SQL, the order of its parameters, and
what their types ask for.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from sqlalchemy import Boolean, Connection, Select
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import ExpandedState, SQLCompiler
from sqlalchemy.sql.dml import UpdateBase

Statement = Select[Any] | UpdateBase
Convert = Callable[[Any], Any]

MOST_PLANS = 512
"""Statements that are made on the fly are forgotten some time; the others number a few dozen."""


class Row(Protocol):
    """A row: values by the names of their columns, or by number."""

    def __getattr__(self, name: str) -> Any: ...
    def __getitem__(self, index: int) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a statement is executed with values of certain names."""

    sql: str
    order: tuple[str, ...] | None  # names of the parameters by position, where the driver wants them so
    fixed: Mapping[str, Any]  # parameters that the statement itself brings
    converted: tuple[tuple[str, Convert], ...]
    row: Convert
    expanded: _Expanded | None  # where it has lists

    def ready(self, values: dict[str, Any]) -> tuple[str, Any]:
        """The SQL and its parameters as the driver takes them. `values` may be changed."""
        if self.fixed:
            values = {**self.fixed, **values}
        for name, convert in self.converted:
            values[name] = convert(values[name])
        if self.expanded is None:
            return self.sql, values if self.order is None else [values[name] for name in self.order]
        return self.expanded.ready(values)


class _Expanded:
    """A statement with lists: its SQL depends on how long they are, and is made once for each length."""

    def __init__(self, compiled: SQLCompiler) -> None:
        self._compiled = compiled
        self._lists = tuple(name for bound, name in compiled.bind_names.items() if bound.expanding)
        self._made = lru_cache(MOST_PLANS)(self._make)

    def ready(self, values: dict[str, Any]) -> tuple[str, Any]:
        """The SQL and its parameters as the driver takes them."""
        state = self._made(tuple(len(values[name]) for name in self._lists))
        found = dict(values)
        for name in self._lists:
            found.update(zip(state.parameter_expansion[name], found.pop(name), strict=True))
        return state.statement, found if state.positiontup is None else [found[name] for name in state.positiontup]

    def _make(self, lengths: tuple[int, ...]) -> ExpandedState:
        lists = dict(zip(self._lists, lengths, strict=True))
        placeholders = {
            name: [None] * lists[name] if name in lists else None for name in self._compiled.bind_names.values()
        }
        return self._compiled.construct_expanded_state(placeholders)


class Statements:
    """The statements of one database, for all threads."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.plan = lru_cache(MOST_PLANS)(self._plan)

    def _plan(self, statement: Statement, names: tuple[str, ...]) -> _Plan:
        compiled = statement.compile(dialect=self._dialect, column_keys=names)
        assert isinstance(compiled, SQLCompiler)
        fixed = compiled.construct_params(_check=False)
        converted = [
            (name, bound.type.dialect_impl(self._dialect).bind_processor(self._dialect))
            for bound, name in compiled.bind_names.items()
        ]
        expanding = any(bound.expanding for bound in compiled.binds.values())
        return _Plan(
            compiled.string,
            None if compiled.positiontup is None else tuple(compiled.positiontup),
            {name: value for name, value in fixed.items() if name not in names},
            tuple((name, convert) for name, convert in converted if convert is not None),
            self._row(statement),
            _Expanded(compiled) if expanding else None,
        )

    def _row(self, statement: Statement) -> Convert:
        """What makes a row of a tuple of the driver."""
        columns = list(statement.exported_columns)
        kind = namedtuple("kind", [str(column.key) for column in columns], rename=True)  # type: ignore[misc]
        if self._dialect.supports_native_boolean or not any(isinstance(column.type, Boolean) for column in columns):
            return kind._make
        converts = [_boolean if isinstance(column.type, Boolean) else _same for column in columns]
        return lambda values: kind._make([convert(value) for convert, value in zip(converts, values, strict=True)])


def _boolean(value: Any) -> Any:
    return None if value is None else bool(value)


def _same(value: Any) -> Any:
    return value


class Cursor:
    """Executes on one connection, inside its transaction. Raises SQLAlchemy's DBAPIError, as the connection would."""

    __slots__ = ("_cursor", "_statements", "changes", "connection")

    def __init__(self, connection: Connection, statements: Statements) -> None:
        self.connection = connection
        self.changes = 0  # how often it may have changed the database
        self._statements = statements
        self._cursor: Any = connection.connection.cursor()

    def rows(self, statement: Statement, values: dict[str, Any]) -> list[Any]:
        """What the statement returns. All is fetched at once: SQLite ends a read with its last row."""
        plan = self._statements.plan(statement, tuple(values))
        cursor = self._cursor
        if not isinstance(statement, Select):
            self.changes += 1
        try:
            cursor.execute(*plan.ready(values))
            found = cursor.fetchall()
        except Exception as error:
            raise self._wrapped(error) from error
        return [plan.row(values) for values in found]

    def do(self, statement: Statement, values: dict[str, Any]) -> None:
        """Execute what returns nothing."""
        plan = self._statements.plan(statement, tuple(values))
        self.changes += 1
        try:
            self._cursor.execute(*plan.ready(values))
        except Exception as error:
            raise self._wrapped(error) from error

    def do_many(self, statement: Statement, several: Sequence[dict[str, Any]]) -> None:
        """The same with several values of the same names."""
        plan = self._statements.plan(statement, tuple(several[0]))
        ready = [plan.ready(values) for values in several]
        self.changes += 1
        try:
            if len(ready) == 1:
                self._cursor.execute(*ready[0])
            else:
                self._cursor.executemany(ready[0][0], [parameters for _, parameters in ready])
        except Exception as error:
            raise self._wrapped(error) from error

    def driver_rows(self, sql: str) -> list[Any]:
        """What a pragma returns, as the driver has it; every step of it has been made then."""
        self.changes += 1
        try:
            return list(self._cursor.execute(sql).fetchall())
        except Exception as error:
            raise self._wrapped(error) from error

    def close(self) -> None:
        """Execute no more."""
        self._cursor.close()

    def _wrapped(self, error: Exception) -> Exception:
        dialect = self.connection.dialect
        module = dialect.loaded_dbapi
        if not isinstance(error, module.Error):
            return error
        lost = dialect.is_disconnect(error, self.connection.connection.dbapi_connection, self._cursor)
        made = DBAPIError.instance(None, None, error, module.Error, connection_invalidated=lost, dialect=dialect)
        if lost:
            self.connection.invalidate(error)
        assert isinstance(made, Exception)
        return made
