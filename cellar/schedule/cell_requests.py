"""Seats: all that a running request owns, kept together for the next request that needs as much."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from cellar.core.cell_graphs import CellGraph, CellRequest, CellResults
from cellar.core.tasks import BankSpec, Values
from cellar.schedule.cell_queue import IndexArray
from cellar.schedule.cell_rows import BankRows, RowRuns
from cellar.schedule.cell_store import RunStore
from cellar.schedule.cell_types import CellType

Emitted = tuple[Values | None, ...]


class RunningRequest:
    """A seat, and the request that sits there.

    number      its column in `Seats.owned`
    starts      first place in the outbox of each part
    values      where its values in each bank begin in their store

    request, serial  who sits here now
    subgraphs   its slots in the order of the graph, or the one slot (a slot is its own while `Subgraphs.owner` says so)
    unfinished  how many subgraphs have not ended
    num_dead    how many ended early, and have a node in flight
    growing     slots of the growing chains, and in `lengths` how far they came and whether they met their symbol
    """

    __slots__ = (
        "growing",
        "lengths",
        "num_dead",
        "number",
        "request",
        "serial",
        "starts",
        "subgraphs",
        "unfinished",
        "values",
    )

    def __init__(self, number: int, starts: list[int], values: list[int]) -> None:
        self.number = number
        self.starts = starts
        self.values = values
        self.request: CellRequest
        self.serial = -1
        self.subgraphs: IndexArray | int = 0
        self.unfinished = 0
        self.num_dead = 0
        self.growing: Sequence[int] = ()
        self.lengths: list[tuple[int, bool]] | None = None

    @property
    def model(self) -> int:
        """Index of the model."""
        return self.request.model

    def slots(self) -> IndexArray:
        """`subgraphs` as an array."""
        return np.atleast_1d(np.asarray(self.subgraphs))

    def part_of(self, cell: int) -> int:
        """Index of the part of the graph that holds the nodes of a cell."""
        return next(p for p, part in enumerate(self.request.graph.parts) if part.cell == cell)

    def results(self, types: Sequence[CellType]) -> CellResults:
        """Copies of what its nodes sent back."""
        parts = self.request.graph.parts
        if len(parts) == 1:
            emitted: tuple[Emitted, ...] = (types[parts[0].cell].outbox.get(parts[0], self.starts[0]),)
        else:
            emitted = tuple([types[p.cell].outbox.get(p, start) for p, start in zip(parts, self.starts, strict=True)])
        if self.lengths is None:
            return CellResults(emitted)
        return CellResults(
            emitted, tuple([n for n, _ in self.lengths]), tuple([stopped for _, stopped in self.lengths])
        )


class Owned(IntEnum):
    """Rows of `Seats.owned`; where the values in each bank begin follow.

    RUN       where its rows begin in the store of rows
    SIBLINGS  where the slots of its subgraphs begin in the store of slots
    DEST      `starts[0]`
    """

    RUN = 0
    SIBLINGS = 1
    DEST = 2


class Seats:
    """The seats of one model, and the stores in which they own runs.

    rows       by code, the row
    values[b]  [room, *shape]: by number, the value
    slots      by number of a subgraph in its request, its slot
    owned      int64 [Owned + B, seats]: where the runs of each seat begin

    A seat that is empty is kept for the next request with an equal `CellGraph.seat`, so most requests start without
    anything being counted out for them. When rows run short the empty seats are dissolved.
    """

    def __init__(self, banks: Sequence[BankRows], types: Sequence[CellType]) -> None:
        self.rows = RowRuns(banks)
        self.values = [RunStore(np.zeros((256, *bank.spec.shape), _host(bank.spec))) for bank in banks]
        self.slots = RunStore(np.zeros(1024, np.int64))
        self.owned: IndexArray = np.zeros((len(Owned) + len(banks), 64), np.int64)
        self._types = types
        self._unused: list[int] = list(range(63, -1, -1))
        self._empty: dict[tuple[int, ...], list[tuple[RunningRequest, CellGraph]]] = {}

    def take(self, request: CellRequest, serial: int) -> RunningRequest | None:
        """A seat for a request; None if there are not so many rows."""
        graph = request.graph
        empty = self._empty.get(graph.seat)
        seat = empty.pop()[0] if empty else self._make(graph)
        if seat is None:
            return None
        seat.request = request
        seat.serial = serial
        seat.unfinished = len(graph.subgraphs)
        for b in graph.valued:
            given = request.values[b]
            if given is not None:
                start = seat.values[b]
                self.values[b].data[start : start + len(given)] = given
        if graph.special:
            self._count(request, 1)
        return seat

    def leave(self, seat: RunningRequest) -> None:
        """A request whose graph is special has ended, though its rows may still be in use."""
        self._count(seat.request, -1)

    def give(self, seat: RunningRequest) -> None:
        """No task in flight names its rows any more."""
        graph = seat.request.graph
        seat.lengths = None
        empty = self._empty.get(graph.seat)
        if empty is None:
            self._empty[graph.seat] = [(seat, graph)]
        else:
            empty.append((seat, graph))

    def dissolve(self) -> None:
        """What empty seats own is free."""
        for empty in self._empty.values():
            for seat, graph in empty:
                run, siblings = self.owned[[Owned.RUN, Owned.SIBLINGS], seat.number].tolist()
                self._unused.append(seat.number)
                self.rows.give(run, graph.frames)
                for part, start in zip(graph.parts, seat.starts, strict=True):
                    if part.num_results:
                        self._types[part.cell].outbox.places.give(start, part.num_results)
                for store, start, count in zip(self.values, seat.values, graph.num_values, strict=True):
                    if count:
                        store.places.give(start, count)
                self.slots.places.give(siblings, len(graph.subgraphs))
        self._empty.clear()

    def _make(self, graph: CellGraph) -> RunningRequest | None:
        run = self.rows.take(graph.frames)
        if run is None:
            self.dissolve()
            run = self.rows.take(graph.frames)
            if run is None:
                return None
        starts = [self._types[p.cell].outbox.places.take(p.num_results) if p.num_results else 0 for p in graph.parts]
        values = [store.take(n) if n else 0 for store, n in zip(self.values, graph.num_values, strict=True)]
        if not self._unused:
            count = self.owned.shape[1]
            self.owned = np.concatenate([self.owned, np.zeros_like(self.owned)], axis=1)
            self._unused = list(range(2 * count - 1, count - 1, -1))
        number = self._unused.pop()
        self.owned[:, number] = (run, self.slots.take(len(graph.subgraphs)), starts[0], *values)
        return RunningRequest(number, starts, values)

    def frames(self, seat: RunningRequest) -> list[IndexArray]:
        """The frames that a seat owns in each bank."""
        return self.rows.frames(int(self.owned[Owned.RUN, seat.number]), seat.request.graph.frames)

    def _count(self, request: CellRequest, by: int) -> None:
        """What matters for batching."""
        for part in request.graph.parts:
            if part.special:
                kind = self._types[part.cell]
                kind.num_branching += by * (not part.plain)
                kind.num_waited_for += by * part.waited_for
                kind.num_growing += by * part.growing
                kind.num_streaming += by * (part.growing and request.stream)


def _host(bank: BankSpec) -> np.dtype[Any]:
    return np.dtype("float32" if bank.dtype == "bfloat16" else bank.dtype)
