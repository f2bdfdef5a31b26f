"""Admission: gives requests their slots, rows and places, for all of a model that start at once on a worker."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from cellar.core.cell_graphs import CellGraph, CellRequest, Column, Field
from cellar.schedule.cells.queue import IndexArray
from cellar.schedule.cells.requests import Growth, Owned, RequestSlots, Roster, SlotKind
from cellar.schedule.cells.subgraphs import State, Subgraphs
from cellar.schedule.cells.types import CellType
from cellar.schedule.cells.waiting import Waiting

_MOST_GRAPHS = 1 << 15


class _Fact(IntEnum):
    """Rows of `GraphBook.facts`; how many values of each bank follow.

    FIRST, COUNT  its subgraphs, among the columns of `states`
    SPECIAL       1: see `CellGraph`
    """

    FIRST = 0
    COUNT = 1
    SPECIAL = 2


class GraphBook:
    """What admission needs to know of graphs, as arrays: requests of equal graphs are admitted without a look at them.

    facts   int64 [_Fact + B, graphs]
    states  int64 [State + B, subgraphs]: the state in which a subgraph starts, but for what is its request's
    kinds   by worker and graph, the kind of request slot that it needs
    """

    def __init__(self, types: Sequence[CellType], subgraphs: Subgraphs, request_slots: Sequence[RequestSlots]) -> None:
        self._types = types
        self._subgraphs = subgraphs
        self._request_slots = request_slots
        self.index: dict[CellGraph, int] = {}
        self.facts: IndexArray = np.zeros((len(_Fact) + len(request_slots[0].values), 64), np.int64)
        self.states: IndexArray = np.zeros((subgraphs.num_fields, 64), np.int64)
        self.kinds: list[list[SlotKind]] = [[] for _ in request_slots]
        self._num_states = 0
        self._moves = 0

    def lookup(self, graphs: Sequence[CellGraph]) -> list[int]:
        """-> numbers of graphs; those of requests that run are kept in the tables of their cells."""
        try:
            return [*map(self.index.__getitem__, graphs)]
        except KeyError:
            pass
        if len(self.index) + len(graphs) > _MOST_GRAPHS:
            self._forget()
            for request_slots in self._request_slots:
                request_slots.forget()
        while True:
            for graph in graphs:
                if graph not in self.index:
                    self._write(graph)
            if (moves := sum(kind.table.num_moves for kind in self._types)) == self._moves:
                return [*map(self.index.__getitem__, graphs)]
            self._moves = moves  # rows have moved, so what was written is wrong; now there is room for all
            self._forget()

    def _forget(self) -> None:
        self.index.clear()
        for kinds in self.kinds:
            kinds.clear()
        self._num_states = 0

    def _write(self, graph: CellGraph) -> None:
        sub, g, s, count = self._subgraphs, len(self.index), self._num_states, len(graph.subgraphs)
        if g >= self.facts.shape[1]:
            self.facts = np.concatenate([self.facts, np.zeros_like(self.facts)], axis=1)
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
            state[State.READY] = 0 if waits else int(table[start, Column.READY])
            state[State.WAITS], state[State.LOOP] = waits, loop
            state[State.KIND] = kinds[p]
            state[State.STOP], state[State.STOP_OUTPUT] = stop, output
            state[State.DEST] = p  # replaced by the place of the part's results
            columns.append(state)
        self.states[:, s : s + count] = np.array(columns).T
        self.facts[:, g] = (s, count, graph.special, *graph.num_values)
        for own, request_slots in zip(self.kinds, self._request_slots, strict=True):
            own.append(request_slots.kind_of(graph))
        self._num_states += count
        self.index[graph] = g


class Admission:
    """Admits requests of one model, to a worker each. `pending` are those that it looks at: their graphs are in use.

    request_slots[w] are worker w's.
    """

    def __init__(
        self, subgraphs: Subgraphs, types: Sequence[CellType], request_slots: Sequence[RequestSlots], roster: Roster
    ) -> None:
        self.book = GraphBook(types, subgraphs, request_slots)
        self.pending: list[CellRequest] = []
        self._subgraphs = subgraphs
        self._types = types
        self._request_slots = request_slots
        self._roster = roster

    def admit(self, queue: Waiting, most: int, worker: int) -> tuple[list[int], list[CellRequest]]:
        """Start up to `most` requests from the front of a queue, as far as a worker has rows -> their slots, and them.

        The worker is their home until they end. Subgraphs that wait for nothing join their queues.
        """
        requests = self.pending = queue.front(most)
        graphs = self.book.lookup([request.graph for request in requests])
        self.pending = []
        kinds, make = self.book.kinds[worker], self._request_slots[worker].make
        numbers: list[int] = []
        for g in graphs:
            kind = kinds[g]
            number = kind.empty.pop() if kind.empty else make(kind)
            if number is None:
                break
            numbers.append(number)
        count = len(numbers)
        if count < len(requests):
            del requests[count:], graphs[count:]
        queue.pop(count)
        if numbers:
            self._start(requests, np.array(numbers), self.book.facts.take(graphs, axis=1), worker)
        return numbers, requests

    def _start(self, requests: Sequence[CellRequest], numbers: IndexArray, facts: IndexArray, worker: int) -> None:
        """numbers: the request slots; facts: of the graphs."""
        sub, book, request_slots, roster = self._subgraphs, self.book, self._request_slots[worker], self._roster
        first, count = facts[_Fact.FIRST], facts[_Fact.COUNT]
        total = int(count.sum())
        slots = sub.take(total)
        own = roster.owned.take(numbers, axis=1)
        roster.unfinished[numbers] = count
        for b, brought in enumerate(facts[len(_Fact) :]):
            if np.count_nonzero(brought):
                request_slots.write_values(b, own[len(Owned) + b], [request.values[b] for request in requests])
        begins = own[Owned.SIBLINGS]
        if total == len(requests):
            states = book.states.take(first, axis=1)
            request_slots.subgraphs.data[begins] = slots
            states[State.DEST] = own[Owned.DEST]
        else:
            mine = np.arange(len(requests)).repeat(count)
            among = np.arange(total)
            among -= (count.cumsum() - count).take(mine)
            states = book.states.take(first.take(mine) + among, axis=1)
            request_slots.subgraphs.data[begins.take(mine) + among] = slots
            own, numbers = own.take(mine, axis=1), numbers.take(mine)
            parts = zip(numbers.tolist(), states[State.DEST].tolist(), strict=True)
            states[State.DEST] = [roster.starts[number][p] for number, p in parts]
        states[State.OWNER], states[State.RUN], states[State.SIBLINGS] = numbers, own[Owned.RUN], own[Owned.SIBLINGS]
        if worker:  # the book has worker 0
            states[State.HOME] = worker
        states[len(State) :] = own[len(Owned) :]
        sub.state[:, slots] = states
        if np.count_nonzero(facts[_Fact.SPECIAL]):
            for request in requests:
                if request.graph.special:
                    request_slots.count(request, 1)
            if any(kind.num_growing for kind in self._types):
                self._grow(
                    requests, numbers if total == len(requests) else numbers[count.cumsum() - count], request_slots
                )
        self._queue(slots, states, worker)

    def _grow(self, requests: Sequence[CellRequest], numbers: IndexArray, request_slots: RequestSlots) -> None:
        """Growing chains get their lengths when they stop; until then, their limits."""
        for request, number in zip(requests, numbers.tolist(), strict=True):
            fields = request.graph.subgraphs
            grows = np.flatnonzero(fields[:, Field.LOOP])
            if len(grows):
                slots = request_slots.subgraphs_of(number, request.graph)[grows].tolist()
                self._roster.growing[number] = Growth(slots, fields[grows, Field.NODES].tolist())

    def _queue(self, slots: IndexArray, states: IndexArray, worker: int) -> None:
        """Subgraphs that wait for nothing join the worker's queues; of the others no node is ready."""
        ready, waits, kinds = states[State.READY], states[State.WAITS], states[State.KIND]
        if np.count_nonzero(waits):
            met = waits == 0
            slots, ready, kinds = slots[met], ready[met], kinds[met]
        for kind in self._types:
            mine = kinds == kind.kind
            count = np.count_nonzero(mine)
            if count == len(slots):  # most often all are of one kind
                kind.enqueue(slots, int(np.add.reduce(ready)), worker)
                return
            if count:
                kind.enqueue(slots[mine], int(np.add.reduce(ready[mine])), worker)
