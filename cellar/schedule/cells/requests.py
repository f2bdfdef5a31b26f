"""Request slots: all that a running request owns, kept together for the next request that needs as much.

A running request is the number of its request slot; what is known of it stands in arrays (`Roster`), so that
many requests come and go without an object for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from cellar.core.cell_graphs import CellGraph, CellRequest, CellResults
from cellar.core.tasks import BankSpec, Values
from cellar.schedule.cells.queue import IndexArray
from cellar.schedule.cells.rows import BankRows, RowRuns
from cellar.schedule.cells.store import RunStore
from cellar.schedule.cells.types import CellType

Results = tuple[tuple[int, int, tuple[int, ...]], ...]
"""`CellGraph.results`."""

_FEW = 8
"""Values of so few requests are copied faster one by one than together."""


class SlotKind:
    """Requests of equal `CellGraph.needs` on one worker: what each needs, and the unused slots of that kind.

    `num_slots` counts those in use too.
    """

    __slots__ = ("empty", "frames", "num_slots", "num_subgraphs", "num_values", "results")

    def __init__(self, graph: CellGraph, results: Results) -> None:
        self.frames = graph.frames
        self.num_values = graph.num_values
        self.num_subgraphs = len(graph.subgraphs)
        self.results = results
        self.num_slots = 0
        self.empty: list[int] = []


class Growth:
    """Slots of a request's growing chains, and in `lengths` how far they came and whether they met their symbol."""

    __slots__ = ("lengths", "slots")

    def __init__(self, slots: list[int], limits: list[int]) -> None:
        self.slots = slots
        self.lengths = [(n, False) for n in limits]


class Owned(IntEnum):
    """Rows of `Roster.owned`; where the values in each bank begin follow.

    RUN       where its rows begin in the store of rows
    SIBLINGS  where the slots of its subgraphs begin in the store of slots
    DEST      `starts[0]`
    """

    RUN = 0
    SIBLINGS = 1
    DEST = 2


class Roster:
    """The request slots of all models, by number.

    owned       int64 [Owned + B, slots]: where the runs of each request begin
    unfinished  int64 [slots]: how many subgraphs of the request have not ended
    num_dead    int64 [slots]: how many ended early, and have a node in flight
    kinds       what kind each request slot is of
    starts      first place in the outbox of each part
    homes       the worker whose rows each owns
    growing     of the requests that have growing chains
    """

    def __init__(self, num_banks: int, room: int = 64) -> None:
        self.owned: IndexArray = np.zeros((len(Owned) + num_banks, room), np.int64)
        self.unfinished: IndexArray = np.zeros(room, np.int64)
        self.num_dead: IndexArray = np.zeros(room, np.int64)
        self.kinds: list[SlotKind | None] = [None] * room
        self.starts: list[tuple[int, ...]] = [()] * room
        self.homes: list[int] = [0] * room
        self.growing: dict[int, Growth] = {}
        self._unused: list[int] = list(range(room - 1, -1, -1))

    def take(self, kind: SlotKind, starts: tuple[int, ...], owned: Sequence[int], home: int) -> int:
        """-> the number of a new request slot that owns these runs."""
        if not self._unused:
            room = len(self.unfinished)
            self.owned = np.concatenate([self.owned, np.zeros_like(self.owned)], axis=1)
            self.unfinished = np.concatenate([self.unfinished, np.zeros_like(self.unfinished)])
            self.num_dead = np.concatenate([self.num_dead, np.zeros_like(self.num_dead)])
            self.kinds += [None] * room
            self.starts += [()] * room
            self.homes += [0] * room
            self._unused = list(range(2 * room - 1, room - 1, -1))
        number = self._unused.pop()
        self.kinds[number], self.starts[number], self.homes[number] = kind, starts, home
        self.owned[: len(owned), number] = owned
        return number

    def give(self, number: int) -> None:
        """Take back a request slot that owns nothing any more."""
        self.kinds[number] = None
        self._unused.append(number)


class RequestSlots:
    """The request slots of one model on one worker, and the stores in which they own runs.

    rows       by code, the row
    values[b]  [room, *shape]: by number, the value
    subgraphs  by number of a subgraph in its request, the slot of the subgraph

    An empty request slot is kept for the next request of its kind, so most requests start without an allocation.
    When rows run short, what the empty ones own is freed.
    """

    def __init__(self, banks: Sequence[BankRows], types: Sequence[CellType], roster: Roster, home: int) -> None:
        self.home = home
        self.rows = RowRuns(banks)
        self.values = [RunStore(np.zeros((256, *bank.spec.shape), _host(bank.spec))) for bank in banks]
        self.subgraphs = RunStore(np.zeros(1024, np.int64))
        self.num_special = 0
        self._roster = roster
        self._types = types
        self._kinds: dict[Any, SlotKind] = {}
        self._results: dict[Results, Results] = {}

    def kind_of(self, graph: CellGraph) -> SlotKind:
        """What a request of this graph needs."""
        kind = self._kinds.get(graph.needs)
        if kind is None:
            results = self._results.setdefault(graph.results, graph.results)
            kind = self._kinds[graph.needs] = SlotKind(graph, results)
        return kind

    def forget(self) -> None:
        """Drop the kinds that have no request slot in use."""
        self.free_empty()
        self._kinds = {needs: kind for needs, kind in self._kinds.items() if kind.num_slots}
        self._results = {kind.results: kind.results for kind in self._kinds.values()}

    def make(self, kind: SlotKind) -> int | None:
        """-> a new request slot; None if there are not so many rows."""
        run = self.rows.take(kind.frames)
        if run is None:
            self.free_empty()
            run = self.rows.take(kind.frames)
            if run is None:
                return None
        starts = tuple([self._types[c].outbox.places.take(n) if n else 0 for c, n, _ in kind.results])
        values = [store.take(n) if n else 0 for store, n in zip(self.values, kind.num_values, strict=True)]
        kind.num_slots += 1
        return self._roster.take(
            kind, starts, (run, self.subgraphs.take(kind.num_subgraphs), starts[0], *values), self.home
        )

    def give(self, numbers: Sequence[int]) -> None:
        """No task in flight names their rows any more."""
        kinds = self._roster.kinds
        for number in numbers:
            kind = kinds[number]
            assert kind is not None
            kind.empty.append(number)

    def free_empty(self) -> None:
        """Free what empty request slots own."""
        roster = self._roster
        for kind in self._kinds.values():
            for number in kind.empty:
                run, siblings = roster.owned[[Owned.RUN, Owned.SIBLINGS], number].tolist()
                self.rows.give(run, kind.frames)
                for (cell, count, _), start in zip(kind.results, roster.starts[number], strict=True):
                    if count:
                        self._types[cell].outbox.places.give(start, count)
                begins = roster.owned[len(Owned) :, number].tolist()
                for store, start, count in zip(self.values, begins, kind.num_values, strict=False):
                    if count:
                        store.places.give(start, count)
                self.subgraphs.places.give(siblings, kind.num_subgraphs)
                roster.give(number)
            kind.num_slots -= len(kind.empty)
            kind.empty.clear()

    def empty_frames(self) -> list[int]:
        """Frames of each bank that empty request slots hold."""
        counts = [0] * len(self.values)
        for kind in list(self._kinds.values()):
            for b, frames in enumerate(kind.frames):
                counts[b] += len(kind.empty) * frames
        return counts

    def write_values(self, bank: int, starts: IndexArray, given: Sequence[Values | None]) -> None:
        """Write the values that requests have for a bank, from starts[k] on."""
        store = self.values[bank].data
        arrays = [values for values in given if values is not None]
        if len(arrays) < _FEW or len(arrays) < len(given):
            for values, start in zip(given, starts.tolist(), strict=True):
                if values is not None:
                    store[start : start + len(values)] = values
            return
        counts = np.fromiter(map(len, arrays), np.int64, len(arrays))
        ends = counts.cumsum()
        where = (starts - ends + counts).repeat(counts)
        where += np.arange(len(where))
        store[where] = np.concatenate(arrays)

    def subgraphs_of(self, number: int, graph: CellGraph) -> IndexArray:
        """The slots of a request's subgraphs in the order of its graph; one is its own while its owner says so."""
        start = int(self._roster.owned[Owned.SIBLINGS, number])
        found: IndexArray = self.subgraphs.data[start : start + len(graph.subgraphs)]
        return found

    def results(self, numbers: list[int]) -> list[CellResults]:
        """Copies of what the nodes of some requests sent back; one copy for all that are alike."""
        kinds = self._roster.kinds
        results_of = [kind.results for number in numbers if (kind := kinds[number]) is not None]
        if results_of.count(results_of[0]) == len(results_of):
            return self._alike(results_of[0], numbers)
        groups: dict[Results, list[int]] = {}
        for number, results in zip(numbers, results_of, strict=True):
            groups.setdefault(results, []).append(number)
        found: dict[int, CellResults] = {}
        for results, alike in groups.items():
            found.update(zip(alike, self._alike(results, alike), strict=True))
        return [found[number] for number in numbers]

    def _alike(self, results: Results, numbers: list[int]) -> list[CellResults]:
        roster, parts = self._roster, []
        for p, (cell, count, emitted) in enumerate(results):
            outbox = self._types[cell].outbox
            if count:
                parts.append(outbox.get([roster.starts[number][p] for number in numbers], count, emitted))
            else:
                parts.append([outbox.nothing] * len(numbers))
        found = [CellResults(emitted) for emitted in zip(*parts, strict=True)]
        if roster.growing:
            for number, one in zip(numbers, found, strict=True):
                growth = roster.growing.get(number)
                if growth is not None:
                    one.lengths = tuple([n for n, _ in growth.lengths])
                    one.stopped = tuple([stopped for _, stopped in growth.lengths])
        return found

    def frames(self, number: int, graph: CellGraph) -> list[IndexArray]:
        """The frames that a request owns in each bank."""
        return self.rows.frames(int(self._roster.owned[Owned.RUN, number]), graph.frames)

    def count(self, request: CellRequest, by: int) -> None:
        """What matters for batching: a request whose graph is special has come or gone (rows may still be in use)."""
        self.num_special += by
        for part in request.graph.parts:
            if part.special:
                kind = self._types[part.cell]
                kind.num_branching += by * (not part.plain)
                kind.num_waited_for += by * part.waited_for
                kind.num_growing += by * part.growing
                kind.num_streaming += by * (part.growing and request.stream)


def _host(bank: BankSpec) -> np.dtype[Any]:
    return np.dtype("float32" if bank.dtype == "bfloat16" else bank.dtype)
