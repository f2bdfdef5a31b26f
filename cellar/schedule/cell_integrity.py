"""Invariants of the cell scheduler, checked by walking over everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cellar.core.errors import IntegrityError
from cellar.schedule.cell_flight import Flight
from cellar.schedule.cell_queue import IndexArray
from cellar.schedule.cell_requests import RunningRequest
from cellar.schedule.cell_rows import BankRows
from cellar.schedule.cell_subgraphs import FREE, Subgraphs
from cellar.schedule.cell_types import CellType


def check(
    sub: Subgraphs,
    kinds: Sequence[CellType],
    banks: Sequence[Sequence[BankRows]],
    running: Mapping[int, RunningRequest],
    draining: Mapping[int, RunningRequest],
    flights: Mapping[int, Flight],
    frames_of: Callable[[RunningRequest, int], IndexArray],
) -> None:
    """Raise IntegrityError unless the books balance."""
    owned = [*running.values(), *draining.values()]
    for m, model in enumerate(banks):
        for b, bank in enumerate(model):
            held = [frames_of(request, b) for request in owned if request.model == m]
            frames = np.concatenate([bank.free_frames(), *held])
            if len(frames) != bank.num_frames - 1 or len(np.unique(frames)) != len(frames) or not frames.all():
                raise IntegrityError(f"frames of {bank.spec.name} are lost, or have two owners")
    flying = np.zeros_like(sub.left)
    for flight in flights.values():
        for task in flight.tasks[flight.committed :]:
            flying[task.subgraphs] += 1 if task.takes is None else task.takes
    used = sub.owner != FREE
    if not np.array_equal(flying, np.where(used, sub.uncommitted - sub.left, 0)):
        raise IntegrityError("subgraphs count other nodes in flight than there are")
    if int(used.sum()) != sub.num_used:
        raise IntegrityError(f"{int(used.sum())} slots of subgraphs have an owner and {sub.num_used} are taken")
    if (
        int(((sub.dead == 1) & used).sum()) != sub.num_dead
        or sum(request.num_dead for request in owned) != sub.num_dead
    ):
        raise IntegrityError("ended subgraphs are counted wrongly")
    serials = {request.serial for request in owned}
    if not set(sub.owner[used].tolist()) <= serials:
        raise IntegrityError("a subgraph belongs to a request that has ended")
    for kind in kinds:
        mine = used & (sub.kind == kind.kind) & (sub.dead == 0)
        queued = np.sort(kind.queue.front(len(kind.queue)))
        if not kind.stale and not np.array_equal(queued, np.flatnonzero(mine & (sub.waits == 0) & (sub.left > 0))):
            raise IntegrityError(f"the queue of {kind.spec.name} does not hold the subgraphs that have nodes left")
        for worker in (FREE, *range(len(kind.ready_counts) - 1)):
            ready = int(sub.ready[mine & (sub.pinned == worker)].sum())
            if ready != kind.ready_counts[worker]:
                raise IntegrityError(f"{kind.spec.name} counts {kind.ready_counts[worker]} ready nodes, {ready} are")
        if kind.num_running != sum(len(f.tasks) - f.committed for f in flights.values() if f.kind is kind):
            raise IntegrityError(f"{kind.spec.name} counts other running tasks than there are")
        if not owned and kind.outbox.places.num_used:
            raise IntegrityError(f"places for results of {kind.spec.name} are lost")
