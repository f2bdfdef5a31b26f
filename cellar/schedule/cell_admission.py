"""Admission: gives requests their slots, rows and places, for all requests of a model that start at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cellar.core.cell_graphs import CellGraph, Column, Field
from cellar.schedule.cell_queue import IndexArray
from cellar.schedule.cell_requests import Owned, RunningRequest, Seats
from cellar.schedule.cell_subgraphs import FREE, State, Subgraphs
from cellar.schedule.cell_types import CellType

_MOST_GRAPHS = 1 << 15


class GraphBook:
    """What admission needs to know of graphs, as arrays: requests of equal graphs are admitted without a look at them.

    first, count  int64 [graphs]: its subgraphs, among the columns of `states`
    states        int64 [State + B, subgraphs]: the state in which a subgraph starts, but for what is its request's
    """

    def __init__(self, types: Sequence[CellType], subgraphs: Subgraphs) -> None:
        self._types = types
        self._subgraphs = subgraphs
        self.index: dict[CellGraph, int] = {}
        self.first: IndexArray = np.zeros(64, np.int64)
        self.count: IndexArray = np.zeros(64, np.int64)
        self.states: IndexArray = np.zeros((subgraphs.num_fields, 64), np.int64)
        self._num_states = 0
        self._moves = 0

    def lookup(self, graphs: Sequence[CellGraph]) -> IndexArray:
        """-> numbers of graphs; those of requests that run are kept in the tables of their cells."""
        try:
            return np.fromiter(map(self.index.__getitem__, graphs), np.int64, len(graphs))
        except KeyError:
            pass
        if len(self.index) + len(graphs) > _MOST_GRAPHS:
            self._forget()
        while True:
            for graph in graphs:
                if graph not in self.index:
                    self._write(graph)
            if (moves := sum(kind.table.num_moves for kind in self._types)) == self._moves:
                return np.fromiter(map(self.index.__getitem__, graphs), np.int64, len(graphs))
            self._moves = moves  # rows have moved, so what was written is wrong; now there is room for all
            self._forget()

    def _forget(self) -> None:
        self.index.clear()
        self._num_states = 0

    def _write(self, graph: CellGraph) -> None:
        sub, g, s, count = self._subgraphs, len(self.index), self._num_states, len(graph.subgraphs)
        if g >= len(self.first):
            self.first = np.concatenate([self.first, np.zeros_like(self.first)])
            self.count = np.concatenate([self.count, np.zeros_like(self.count)])
        while s + count > self.states.shape[1]:
            self.states = np.concatenate([self.states, np.zeros_like(self.states)], axis=1)
        starts, kinds = [], []
        for part in graph.parts:
            kind = self._types[part.cell]
            kind.valued.update(part.valued)
            starts.append(kind.table.start_of(part, sub.at, sub.end))
            kinds.append(kind.kind)
        columns = []
        blank = [0] * self._subgraphs.num_fields
        for fields, stop, output in zip(
            graph.subgraphs.tolist(), graph.stops.tolist(), graph.stop_outputs, strict=True
        ):
            p, start, rows, nodes, waits, loop = fields
            table = graph.parts[p].table
            state = blank.copy()
            state[State.AT] = starts[p] + start
            state[State.END] = starts[p] + start + rows
            state[State.NODES] = state[State.LEFT] = state[State.UNCOMMITTED] = nodes
            state[State.READY] = int(table[start, Column.READY])
            state[State.WAITS], state[State.LOOP] = waits, loop
            state[State.PINNED], state[State.KIND] = FREE, kinds[p]
            state[State.STOP], state[State.STOP_OUTPUT] = stop, output
            state[State.DEST] = p  # replaced by the place of the part's results
            columns.append(state)
        self.states[:, s : s + count] = np.array(columns).T
        self.first[g], self.count[g] = s, count
        self._num_states += count
        self.index[graph] = g


class Admission:
    """Admits requests of one model."""

    def __init__(self, subgraphs: Subgraphs, types: Sequence[CellType], seats: Seats) -> None:
        self.book = GraphBook(types, subgraphs)
        self._subgraphs = subgraphs
        self._types = types
        self._seats = seats

    def admit(self, requests: Sequence[RunningRequest]) -> None:
        """Start requests that have their seats. Subgraphs that wait for nothing join their queues."""
        sub, book = self._subgraphs, self.book
        g = book.lookup([running.request.graph for running in requests])
        first, count = book.first[g], book.count[g]
        total = int(count.sum())
        slots = sub.take(total)
        own = self._seats.owned.take([running.number for running in requests], axis=1)
        serials = np.array([running.serial for running in requests])
        if total == len(requests):
            states = book.states.take(first, axis=1)
            for running, slot in zip(requests, slots.tolist(), strict=True):
                running.subgraphs = slot
            states[State.DEST] = own[Owned.DEST]
        else:
            ends = count.cumsum()
            mine = np.repeat(np.arange(len(requests)), count)
            states = book.states.take(first[mine] + np.arange(total) - (ends - count)[mine], axis=1)
            begins = own[Owned.SIBLINGS]
            self._seats.slots.data[begins[mine] + np.arange(total) - (ends - count)[mine]] = slots
            for running, begin, end in zip(requests, (ends - count).tolist(), ends.tolist(), strict=True):
                running.subgraphs = slots[begin:end]
            parts = states[State.DEST].tolist()
            states[State.DEST] = [requests[r].starts[p] for r, p in zip(mine.tolist(), parts, strict=True)]
            own, serials = own[:, mine], serials[mine]
        states[State.OWNER], states[State.RUN], states[State.SIBLINGS] = serials, own[Owned.RUN], own[Owned.SIBLINGS]
        states[len(State) : len(State) + len(own) - len(Owned)] = own[len(Owned) :]
        sub.state[:, slots] = states
        self._grow(requests, states)
        self._queue(slots, states)

    def _grow(self, requests: Sequence[RunningRequest], states: IndexArray) -> None:
        """Growing chains get their lengths when they stop; until then, their limits."""
        if not np.count_nonzero(states[State.LOOP]):
            return
        for running in requests:
            fields = running.request.graph.subgraphs
            grows = np.flatnonzero(fields[:, Field.LOOP])
            running.growing = running.slots()[grows].tolist()
            running.lengths = [(n, False) for n in fields[grows, Field.NODES].tolist()]

    def _queue(self, slots: IndexArray, states: IndexArray) -> None:
        ready = states[State.READY]
        if np.count_nonzero(states[State.WAITS]):
            met = states[State.WAITS] == 0
            self._subgraphs.ready[slots[~met]] = 0
            slots, ready, states = slots[met], ready[met], states[:, met]
        if len(self._types) == 1:
            self._types[0].enqueue(slots, int(ready.sum()))
            return
        for kind in self._types:
            mine = states[State.KIND] == kind.kind
            if mine.any():
                kind.enqueue(slots[mine], int(ready[mine].sum()))
