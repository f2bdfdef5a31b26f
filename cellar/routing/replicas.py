"""Replicas: names and columns of the replicas that a router knows, and how busy each is, as a struct of arrays."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from cellar.routing.columns import WORD
from cellar.routing.costs import Company
from cellar.routing.flights import Flight, Unseen
from cellar.routing.report import ReplicaReport


class Replicas:
    """Arrays over columns c, which are reused.

    clear     when the prompts that are there have been computed, on the router's clock
    requests  that are there, with `context` tokens       free, cached   tokens of the device's K and V
    reports   that have come                              life           which replica of all that ever were
    turn      when something was sent there last, in numbers of requests
    """

    def __init__(self) -> None:
        self._columns: dict[str, int] = {}
        self.names: list[str] = []
        self._free: list[int] = []
        self._lives = 0
        self._grow(WORD)

    def _grow(self, count: int) -> None:
        self.clear, self.requests, self.context, self.free, self.cached = (np.zeros(count) for _ in range(5))
        self.reports, self.life, self.turn = (np.zeros(count, np.int64) for _ in range(3))
        self.present, self.draining = np.zeros(count, np.bool_), np.zeros(count, np.bool_)

    @property
    def width(self) -> int:
        """Columns that were ever used."""
        return len(self.names)

    def column(self, name: str) -> int | None:
        """Of a replica, if it is known."""
        return self._columns.get(name)

    def add(self, name: str) -> int:
        """A replica that is not known yet; -> its column."""
        if self._free:
            column = self._free.pop()
            self.names[column] = name
        else:
            column = len(self.names)
            self.names.append(name)
            if column == len(self.clear):
                self._widen()
        self._columns[name] = column
        self._lives += 1
        self.life[column], self.reports[column], self.turn[column] = self._lives, 0, 0
        self.present[column] = True
        return column

    def _widen(self) -> None:
        arrays = {name: part for name, part in vars(self).items() if isinstance(part, np.ndarray)}
        for name, part in arrays.items():
            setattr(self, name, np.concatenate((part, np.zeros(len(part), part.dtype))))

    def remove(self, name: str) -> int | None:
        """-> the column that it had, which holds nobody now."""
        column = self._columns.pop(name, None)
        if column is not None:
            self.present[column] = self.draining[column] = False
            self.life[column] = 0
            self._free.append(column)
        return column

    def reported(self, column: int, report: ReplicaReport, unseen: Unseen, now: float) -> None:
        """What a report says, and what it cannot know."""
        self.clear[column] = now + report.waiting_seconds + unseen.work
        self.requests[column] = report.requests + unseen.requests
        self.context[column] = report.context_tokens + unseen.context
        self.free[column] = report.free_tokens - unseen.memory
        self.cached[column] = report.cached_tokens
        self.draining[column] = report.draining

    def sent(self, flight: Flight, now: float) -> None:
        """A request is on its way."""
        column = flight.column
        self.clear[column] = max(now, float(self.clear[column])) + flight.work
        self.requests[column] += 1
        self.context[column] += flight.context
        self.free[column] -= flight.memory
        self.turn[column] = flight.number

    def ended(self, flight: Flight, now: float) -> None:
        """A request is there no more."""
        column = flight.column
        if not flight.begun:
            self.clear[column] = max(now, float(self.clear[column]) - flight.work)
        self.requests[column] = max(0.0, float(self.requests[column]) - 1)
        self.context[column] = max(0.0, float(self.context[column]) - flight.context)
        self.cached[column] += flight.memory

    def company(self, now: float) -> Company:
        """Of all columns, at a moment."""
        n = self.width
        wait = np.maximum(self.clear[:n] - now, 0.0)
        return Company(wait, self.requests[:n], self.context[:n], self.free[:n], self.cached[:n])

    def candidates(self, among: Collection[str] | None) -> NDArray[np.int64]:
        """Columns that may be chosen: those that drain only if there are no others."""
        n = self.width
        allowed = self.present[:n].copy()
        if among is not None:
            named = [column for name in among if (column := self._columns.get(name)) is not None]
            allowed &= np.isin(np.arange(n), named)
        steady = allowed & ~self.draining[:n]
        return np.flatnonzero(steady if steady.any() else allowed)
