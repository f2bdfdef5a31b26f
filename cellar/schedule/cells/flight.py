"""Flight: a plan on its way, and what its commit needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cellar.core.cell_graphs import Column
from cellar.core.tasks import IntArray, TaskPlan, Upload
from cellar.schedule.cells.queue import IndexArray
from cellar.schedule.cells.requests import RequestSlots
from cellar.schedule.cells.subgraphs import Subgraphs
from cellar.schedule.cells.types import Batch, CellType

Fan = Callable[[int, int], Sequence[int]]
"""(slot, f) -> numbers of the subgraphs in `CellGraph.fans[f]` of the slot's request."""


@dataclass(frozen=True, slots=True, eq=False)
class Emitted:
    """Nodes whose output comes back: where in the outbox, whose it is; task t owns [bounds[t], bounds[t + 1])."""

    places: IndexArray
    owners: IndexArray
    bounds: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Dependants:
    """Subgraphs that wait for a node: targets[k] for one of subgraph owners[k]; bounds as above."""

    targets: IndexArray
    owners: IndexArray
    bounds: list[int]


@dataclass(slots=True, eq=False)
class Flight:
    """`owners` are the subgraphs of all nodes, task t's at [cu_batch[t], cu_batch[t + 1]); `committed` tasks are back.

    `ending` are the subgraphs of which it has the last nodes; `plain`: no task has two nodes of one.
    """

    worker: int
    kind: CellType
    cu_batch: list[int]
    owners: IndexArray
    emits: tuple[Emitted | None, ...]
    dependants: Dependants | None
    ending: IndexArray
    plain: bool
    committed: int = 0

    @property
    def num_tasks(self) -> int:
        """Tasks of the plan."""
        return len(self.cu_batch) - 1

    def flying(self) -> IndexArray:
        """The subgraphs of the nodes that have not come back."""
        return self.owners[self.cu_batch[self.committed] :]


def assemble(
    number: int,
    worker: int,
    kind: CellType,
    batch: Batch,
    sub: Subgraphs,
    request_slots: RequestSlots,
    fan: Fan,
) -> tuple[TaskPlan, Flight]:
    """Gather the rows of all nodes of all tasks at once. request_slots: the worker's, of all requests in it."""
    cu, entries, owners = batch.cu, batch.entries, batch.owners
    table = kind.table.rows
    codes = table[kind.sources.start : kind.rows.stop].take(entries, axis=1)
    touched = request_slots.rows.data.take(codes + sub.run.take(owners))
    sources, rows = touched[: kind.num_inputs], touched[kind.num_inputs :]
    uploads = _uploads(kind, sources, entries, owners, sub, request_slots)
    emits: list[Emitted | None] = [None] * len(kind.spec.outputs)
    positions: list[IntArray | None] = [None] * len(emits)
    mask = table[Column.EMIT].take(entries)
    union = int(np.bitwise_or.reduce(mask))
    for o in range(len(emits)):
        if union >> o & 1:
            chosen = np.flatnonzero(mask & (1 << o))
            mine = owners[chosen]
            places = table[Column.DEST].take(entries[chosen]) + sub.dest[mine]
            if kind.num_growing:
                assert batch.steps is not None
                places += batch.steps[chosen]
            positions[o] = chosen.astype(np.int32)
            emits[o] = Emitted(places, mine, chosen.searchsorted(cu).tolist())
    dependants = None
    if kind.num_waited_for:
        dependants = _dependants(table[Column.DEP].take(entries), owners, cu, sub, request_slots, fan)
    plan = TaskPlan(
        number, worker, kind.model, kind.cell, np.array(cu, np.int32), sources, rows, tuple(positions), uploads
    )
    return plan, Flight(worker, kind, cu, owners, tuple(emits), dependants, batch.ending, batch.plain)


def _uploads(
    kind: CellType,
    sources: IntArray,
    entries: IndexArray,
    owners: IndexArray,
    sub: Subgraphs,
    request_slots: RequestSlots,
) -> tuple[Upload, ...]:
    """The values of requests that the nodes read."""
    uploads = []
    for i in kind.valued:
        bank = kind.spec.inputs[i].bank
        assert bank is not None
        numbers, rows = kind.table.rows[kind.rows.stop + i].take(entries), sources[i]
        mine = owners
        given = numbers >= 0
        count = np.count_nonzero(given)
        if not count:
            continue
        if count < len(owners):
            numbers, rows, mine = numbers[given], rows[given], owners[given]
        values = request_slots.values[bank].data.take(numbers + sub.values[bank].take(mine), axis=0)
        uploads.append(Upload(bank, rows, values))
    return tuple(uploads)


def _dependants(
    dep: IntArray, owners: IndexArray, cu: list[int], sub: Subgraphs, request_slots: RequestSlots, fan: Fan
) -> Dependants | None:
    chosen = np.flatnonzero(dep != -1)
    if not len(chosen):
        return None
    numbers, mine = dep[chosen], owners[chosen]
    if numbers.min() < 0:
        several = [fan(int(slot), -2 - n) if n < 0 else (n,) for slot, n in zip(mine, numbers.tolist(), strict=True)]
        counts = [len(one) for one in several]
        chosen, mine = np.repeat(chosen, counts), np.repeat(mine, counts)
        numbers = np.array([n for one in several for n in one])
    targets = request_slots.subgraphs.data[sub.siblings[mine] + numbers]
    return Dependants(targets, mine, chosen.searchsorted(cu).tolist())
