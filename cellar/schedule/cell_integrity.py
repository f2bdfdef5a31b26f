"""Invariants of the cell scheduler, checked by walking over everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cellar.core.cell_graphs import CellRequest
from cellar.core.errors import IntegrityError
from cellar.schedule.cell_flight import Flight
from cellar.schedule.cell_queue import IndexArray
from cellar.schedule.cell_requests import Roster
from cellar.schedule.cell_rows import BankRows
from cellar.schedule.cell_subgraphs import FREE, Subgraphs
from cellar.schedule.cell_types import CellType


def check(
    sub: Subgraphs,
    kinds: Sequence[CellType],
    banks: Sequence[Sequence[BankRows]],
    roster: Roster,
    running: Mapping[int, CellRequest],
    draining: Mapping[int, CellRequest],
    flights: Mapping[int, Flight],
    frames_of: Callable[[int, CellRequest], Sequence[IndexArray]],
) -> None:
    """Raise IntegrityError unless the books balance."""
    owned = {**running, **draining}
    for m, model in enumerate(banks):
        own = [frames_of(number, request) for number, request in owned.items() if request.model == m]
        for b, bank in enumerate(model):
            held = [frames[b] for frames in own]
            frames = np.concatenate([bank.free_frames(), *held])
            if len(frames) != bank.num_frames - 1 or len(np.unique(frames)) != len(frames) or not frames.all():
                raise IntegrityError(f"frames of {bank.spec.name} are lost, or have two owners")
    flying = np.zeros_like(sub.left)
    for flight in flights.values():
        np.add.at(flying, flight.flying(), 1)
    used = sub.owner != FREE
    if not np.array_equal(flying, np.where(used, sub.uncommitted - sub.left, 0)):
        raise IntegrityError("subgraphs count other nodes in flight than there are")
    if int(used.sum()) != sub.num_used:
        raise IntegrityError(f"{int(used.sum())} slots of subgraphs have an owner and {sub.num_used} are taken")
    if not set(sub.owner[used].tolist()) <= owned.keys():
        raise IntegrityError("a subgraph belongs to a request that has ended")
    for dead, counted in ((1, roster.num_dead), (0, roster.unfinished)):
        mine = np.bincount(sub.owner[used & (sub.dead == dead)], minlength=len(counted))
        if not np.array_equal(mine, counted) or (dead and mine.sum() != sub.num_dead):
            raise IntegrityError("requests count other subgraphs that go on, or that ended early, than there are")
    if roster.growing.keys() - running.keys():
        raise IntegrityError("a request that has ended still grows")
    for kind in kinds:
        mine = used & (sub.kind == kind.kind) & (sub.dead == 0)
        queued = np.sort(kind.queue.front(len(kind.queue)))
        if not kind.stale and not np.array_equal(queued, np.flatnonzero(mine & (sub.waits == 0) & (sub.left > 0))):
            raise IntegrityError(f"the queue of {kind.spec.name} does not hold the subgraphs that have nodes left")
        for worker in (FREE, *range(len(kind.ready_counts) - 1)):
            ready = int(sub.ready[mine & (sub.pinned == worker)].sum())
            if ready != kind.ready_counts[worker]:
                raise IntegrityError(f"{kind.spec.name} counts {kind.ready_counts[worker]} ready nodes, {ready} are")
        if kind.num_running != sum(f.num_tasks - f.committed for f in flights.values() if f.kind is kind):
            raise IntegrityError(f"{kind.spec.name} counts other running tasks than there are")
        if not owned and kind.outbox.places.num_used:
            raise IntegrityError(f"places for results of {kind.spec.name} are lost")
