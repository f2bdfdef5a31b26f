"""Running: the requests of all models that run, and every way in which one ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cellar.core.cell_graphs import CellOutput, CellRequest
from cellar.schedule.cells.batches import GraphBatches
from cellar.schedule.cells.queue import IndexArray
from cellar.schedule.cells.requests import Growth, RequestSlots, Roster
from cellar.schedule.cells.subgraphs import Subgraphs
from cellar.schedule.cells.types import CellType


class Running:
    """Requests are known by the number of their slot. request_slots[m][w]: of model m on worker w.

    requests   those that run
    draining   those that ended early and have nodes in flight
    numbers    by id; of one that waits, the request itself
    counts     [m][w]: how many run
    num_ended  since the start
    """

    def __init__(
        self,
        subgraphs: Subgraphs,
        kinds: Sequence[CellType],
        request_slots: Sequence[Sequence[RequestSlots]],
        roster: Roster,
        *,
        graph_batches: bool,
    ) -> None:
        self.requests: dict[int, CellRequest] = {}
        self.draining: dict[int, CellRequest] = {}
        self.numbers: dict[str, int | CellRequest] = {}
        self.counts = [[0] * len(workers) for workers in request_slots]
        self.num_ended = 0
        self._subgraphs = subgraphs
        self._kinds = kinds
        self._request_slots = request_slots
        self._roster = roster
        self._batches = [GraphBatches() for _ in request_slots] if graph_batches else []

    def start(self, numbers: Sequence[int], requests: Sequence[CellRequest], model: int, worker: int) -> None:
        """Requests of a model have been admitted to a worker; with graph batching they are a batch."""
        self.requests.update(zip(numbers, requests, strict=True))
        self.numbers.update(zip([request.id for request in requests], numbers, strict=True))
        self.counts[model][worker] += len(numbers)
        if numbers and self._batches:
            self._batches[model].start(numbers)

    def forget(self, id: str) -> None:
        """The result of a request that has ended, or never was, is not needed."""
        for batches in self._batches:
            batches.forget(id)

    def home_of(self, number: int, request: CellRequest) -> RequestSlots:
        """Where a request that runs, or has nodes in flight, has its slot."""
        return self._request_slots[request.model][self._roster.homes[number]]

    def finish(self, numbers: list[int], output: CellOutput) -> None:
        """All nodes have committed: results go out at once (graph batching: when all of the batch are done).

        The requests are of one model and have one home.
        """
        request = self.requests[numbers[0]]
        results = self.home_of(numbers[0], request).results(numbers)
        ended = [*zip(self._leave(numbers), results, strict=True)]
        if not self._batches:
            output.finished += ended
        else:
            output.finished += self._batches[request.model].end(numbers, ended)

    def fail(self, number: int, reason: str, output: CellOutput) -> None:
        """A request ends without a result, and is told why."""
        output.failed.append((self.requests[number].id, reason))
        self.end(number, output)

    def end(self, number: int, output: CellOutput) -> None:
        """A request ends before its time."""
        sub, request = self._subgraphs, self.requests[number]
        for slot in self.home_of(number, request).subgraphs_of(number, request.graph).tolist():
            if sub.owner[slot] == number and not sub.dead[slot]:
                self._drop(number, slot)
        self._roster.unfinished[number] = 0
        self._leave([number])
        if self._batches:
            output.finished += self._batches[request.model].end([number], [])

    def end_chain(self, number: int, slot: int, length: int, *, stopped: bool) -> None:
        """A growing chain ends before its limit."""
        growth: Growth = self._roster.growing[number]
        growth.lengths[growth.slots.index(slot)] = (length, stopped)
        self._roster.unfinished[number] -= 1
        self._drop(number, slot)

    def release_dead(self, slots: IndexArray) -> None:
        """Free the slots of ended subgraphs whose last task has come back."""
        sub, roster = self._subgraphs, self._roster
        if not len(slots):
            return
        owners = sub.owner[slots].tolist()
        sub.dead[slots] = 0
        sub.num_dead -= len(slots)
        sub.give(slots)
        for number in owners:
            roster.num_dead[number] -= 1
            if not roster.num_dead[number] and (request := self.draining.pop(number, None)) is not None:
                self.home_of(number, request).give([number])

    def _drop(self, number: int, slot: int) -> None:
        """Nothing more of it is submitted; its slot is free when its last task has come back."""
        sub = self._subgraphs
        self._kinds[int(sub.kind[slot])].drop(slot)
        if sub.uncommitted[slot]:
            sub.dead[slot] = 1
            sub.num_dead += 1
            self._roster.num_dead[number] += 1
        else:
            sub.give(np.array([slot]))

    def _leave(self, numbers: list[int]) -> list[str]:
        """They run no longer; their slots are free now, or when the last nodes that name their rows have committed.

        They are of one model and have one home. -> their ids.
        """
        growing = self._roster.growing
        requests = [*map(self.requests.pop, numbers)]
        model, request_slots = requests[0].model, self.home_of(numbers[0], requests[0])
        ids = [request.id for request in requests]
        for id in ids:
            del self.numbers[id]
        self.counts[model][request_slots.home] -= len(numbers)
        self.num_ended += len(numbers)
        if request_slots.num_special:
            for number, request in zip(numbers, requests, strict=True):
                growing.pop(number, None)
                if request.graph.special:
                    request_slots.count(request, -1)
        if self._subgraphs.num_dead:
            num_dead = self._roster.num_dead
            self.draining.update([(n, request) for n, request in zip(numbers, requests, strict=True) if num_dead[n]])
            numbers = [n for n in numbers if not num_dead[n]]
        request_slots.give(numbers)
        return ids
