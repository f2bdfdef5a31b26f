"""Invariants of the cell scheduler, checked by walking over everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cellar.core.cell_graphs import CellRequest
from cellar.core.errors import IntegrityError
from cellar.schedule.cells.flight import Flight
from cellar.schedule.cells.queue import IndexArray
from cellar.schedule.cells.requests import Roster
from cellar.schedule.cells.rows import BankRows
from cellar.schedule.cells.subgraphs import FREE, Subgraphs
from cellar.schedule.cells.types import CellType


def check(
    sub: Subgraphs,
    kinds: Sequence[CellType],
    banks: Sequence[Sequence[Sequence[BankRows]]],
    roster: Roster,
    running: Mapping[int, CellRequest],
    draining: Mapping[int, CellRequest],
    flights: Mapping[int, Flight],
    frames_of: Callable[[int, CellRequest], Sequence[IndexArray]],
) -> None:
    """Raise IntegrityError unless the books balance. banks[m][w]: worker w's of model m."""
    owned = {**running, **draining}
    for m, model in enumerate(banks):
        own: list[list[Sequence[IndexArray]]] = [[] for _ in model]
        for number, request in owned.items():
            if request.model == m:
                own[roster.homes[number]].append(frames_of(number, request))
        for w, (rows, held) in enumerate(zip(model, own, strict=True)):
            _check_frames(w, rows, held)
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
    homes = np.array(roster.homes)
    if not np.array_equal(sub.home[used], homes[sub.owner[used]]):
        raise IntegrityError("a subgraph has another home than its request")
    for flight in flights.values():
        if np.count_nonzero(sub.home[flight.flying()] != flight.worker):
            raise IntegrityError(f"worker {flight.worker} runs a node whose rows are on another")
    for dead, counted in ((1, roster.num_dead), (0, roster.unfinished)):
        mine = np.bincount(sub.owner[used & (sub.dead == dead)], minlength=len(counted))
        if not np.array_equal(mine, counted) or (dead and mine.sum() != sub.num_dead):
            raise IntegrityError("requests count other subgraphs that go on, or that ended early, than there are")
    if roster.growing.keys() - running.keys():
        raise IntegrityError("a request that has ended still grows")
    for kind in kinds:
        mine = used & (sub.kind == kind.kind) & (sub.dead == 0)
        for w, queue in enumerate(kind.queues):
            here = mine & (sub.home == w)
            queued = np.sort(queue.front(len(queue)))
            if not kind.stale and not np.array_equal(queued, np.flatnonzero(here & (sub.waits == 0) & (sub.left > 0))):
                raise IntegrityError(f"a queue of {kind.spec.name} does not hold the subgraphs that have nodes left")
            ready = int(sub.ready[here].sum())
            if ready != kind.num_ready(w):
                raise IntegrityError(f"{kind.spec.name} counts {kind.num_ready(w)} ready nodes, {ready} are")
        if kind.num_running != sum(f.num_tasks - f.committed for f in flights.values() if f.kind is kind):
            raise IntegrityError(f"{kind.spec.name} counts other running tasks than there are")
        if not owned and kind.outbox.places.num_used:
            raise IntegrityError(f"places for results of {kind.spec.name} are lost")


def _check_frames(worker: int, banks: Sequence[BankRows], owned: Sequence[Sequence[IndexArray]]) -> None:
    """Each frame of a worker is free or has one owner, whose home it is. owned: per request, by bank."""
    for b, bank in enumerate(banks):
        frames = np.concatenate([bank.free_frames(), *[own[b] for own in owned]])
        if len(frames) != bank.num_frames - 1 or len(np.unique(frames)) != len(frames) or not frames.all():
            raise IntegrityError(f"frames of {bank.spec.name} on worker {worker} are lost, or have two owners")
