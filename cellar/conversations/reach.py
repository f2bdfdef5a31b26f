"""Reach: whether a database can be reached. Who finds out that it cannot spares the others the wait."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from cellar.conversations.errors import StoreError, StoreUnavailable


class OutOfReach(Exception):
    """There was no connection to be had; `why` is for the client."""

    def __init__(self, why: StoreError) -> None:
        super().__init__(str(why))
        self.why = why


class Reach:
    """For many threads. A host that does not answer takes seconds to be given up; who has waited while another gave it
    up does not begin anew. `meaning` says what an error means for the client.
    """

    def __init__(self, meaning: Callable[[DBAPIError], StoreError]) -> None:
        self._meaning = meaning
        self._failed = -math.inf
        self._why: StoreError = StoreUnavailable("")

    @contextmanager
    def connection(self, engine: Engine, asked: float) -> Iterator[Connection]:
        """A connection for what was asked at that time of `time.monotonic()`. Raises OutOfReach."""
        if asked <= self._failed:
            raise OutOfReach(self._why)
        try:
            connection = engine.connect()
        except PoolTimeout as error:
            why = StoreUnavailable("too many reads wait for the conversation store; try again soon.")
            raise OutOfReach(why) from error
        except DBAPIError as error:
            self._why = self._meaning(error)
            self._failed = time.monotonic()
            raise OutOfReach(self._why) from error
        with connection:
            yield connection
