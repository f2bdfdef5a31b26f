"""Invariants of the scheduler, checked by walking over everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.schedule.steps.batch import InFlight
from cellar.schedule.steps.queue import WaitingQueue
from cellar.schedule.steps.request import Phase, RequestState
from cellar.schedule.steps.rows import Rows


def check_rows(rows: Rows, in_flight: Iterable[InFlight], num_slots: int) -> NDArray[np.int32]:
    """Raise IntegrityError unless the rows' arrays are true; -> how many rows use each slot [num_slots]."""
    named = np.zeros(rows.num_rows, np.int64)
    for record in in_flight:
        named[record.rows] += 1
    if not np.array_equal(named, rows.in_flight):
        raise IntegrityError("rows count other plans in flight than there are")
    owned = np.flatnonzero(rows.num_chunks)
    if rows.most_chunks != int(np.maximum(rows.num_chunks, -(-rows.last // rows.chunk_size))[owned].sum()):
        raise IntegrityError("rows count other chunks than they may need")
    references = np.zeros(num_slots, np.int32)
    for row, state in enumerate(rows.states):
        if state is None:
            continue
        np.add.at(references, rows.slots(row), 1)
        if state.row != row:
            raise IntegrityError(f"row {row} and {state.request.id} do not own each other")
        if not rows.computed[row] <= rows.planned[row] <= rows.capacity[row]:
            raise IntegrityError(f"row {row} is planned past its chunks")
        if rows.length[row] > state.limit:
            raise IntegrityError(f"row {row} is longer than its limit")
        if state.phase is not Phase.RUNNING and not named[row]:
            raise IntegrityError(f"row {row} is kept by no plan in flight")
    return references


def check_requests(
    rows: Rows,
    queue: WaitingQueue,
    loading: Sequence[RequestState],
    num_parked: int,
    requests: Mapping[str, RequestState],
) -> None:
    """Raise IntegrityError unless every request either waits in the queue, or loads, or is parked, or owns a row."""
    owners = [state for state in rows.states if state is not None]
    if len(owners) + rows.num_free != rows.num_rows:
        raise IntegrityError(f"{len(owners)} owned and {rows.num_free} free rows are not {rows.num_rows}")
    ended = sum(state.phase is Phase.ENDED for state in owners)
    if len(owners) - ended + len(queue) + len(loading) + num_parked != len(requests):
        raise IntegrityError(
            f"{len(requests)} requests, but {len(queue)} wait, {len(loading)} load, {num_parked} are parked and "
            f"{len(owners) - ended} own a row"
        )
    if any(state.phase is not Phase.LOADING or state.reservation is None for state in loading):
        raise IntegrityError("a request without memory loads")
    if any((state.phase is Phase.WAITING) != (state in queue) for state in requests.values()):
        raise IntegrityError("a request waits outside the queue, or runs inside it")
