"""CellType: one cell of one model as Algorithm 1 sees it: queues of subgraphs, and how many nodes are ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from cellar.core.cell_graphs import NUM_COLUMNS, Column
from cellar.core.tasks import CellSpec
from cellar.schedule.cells.queue import CellQueue, IndexArray
from cellar.schedule.cells.results import Outbox
from cellar.schedule.cells.store import GraphTable
from cellar.schedule.cells.subgraphs import Subgraphs

More = Callable[[], bool]
"""Lets more requests in -> whether any came."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The nodes of all tasks of one call, task after task: nodes [cu[t], cu[t + 1]) are task t's.

    entries  columns of the table
    owners   subgraphs
    steps    where chains grow: how many steps each has made before; else None
    ending   subgraphs of which no node is left now
    plain    no task has two nodes of one subgraph
    """

    cu: list[int]
    entries: IndexArray
    owners: IndexArray
    steps: IndexArray | None
    ending: IndexArray
    plain: bool


class CellType:
    """Columns of the table: `Column`s, codes of the rows read, codes of the rows written, numbers of values.
    queues[w] are the subgraphs whose home is worker w; `num_running` counts the tasks in flight on all workers.

    `num_branching`, `num_growing`, `num_streaming` and `num_waited_for` count running requests with such nodes; without
    any, there is less to do.
    """

    def __init__(
        self,
        model: int,
        cell: int,
        kind: int,
        spec: CellSpec,
        subgraphs: Subgraphs,
        table: GraphTable,
        num_workers: int,
    ) -> None:
        self.model = model
        self.cell = cell
        self.kind = kind
        self.spec = spec
        self.num_inputs = len(spec.inputs)
        self.sources = slice(NUM_COLUMNS, NUM_COLUMNS + self.num_inputs)
        self.rows = slice(self.sources.stop, self.sources.stop + len(spec.kept))
        self.smallest, self.largest = spec.batch_sizes[0], spec.batch_sizes[-1]
        self.table = table
        self.outbox = Outbox(spec)
        self.queues = [CellQueue() for _ in range(num_workers)]
        self.num_running = 0
        self.num_branching = 0
        self.num_growing = 0
        self.num_streaming = 0
        self.num_waited_for = 0
        self.stale = False
        self.valued: set[int] = set()
        self._subgraphs = subgraphs
        self._ready = [0] * num_workers

    # -- Algorithm 1 ------------------------------------------------------------------------------

    def num_ready(self, worker: int) -> int:
        """NumReadyNodes: only nodes of requests whose home this worker is count."""
        return self._ready[worker]

    def batch(self, worker: int, most: int, more: More) -> Batch:
        """Batch, lines 12-23: up to `most` tasks. The first may have any size, later ones none under min(Bsizes).

        There is a node that this worker may run. The nodes are submitted, and so their children in the same subgraph
        become ready for the next task. `more` is asked for subgraphs while a task could be larger.
        """
        if not self.num_branching:
            return self._batch_chains(worker, most, more)
        while self.num_ready(worker) < most * self.largest and more():
            pass  # before the first task is formed, as rows of the table may move
        formed: list[Batch] = []
        num_formed = 0
        if not self.num_growing and self._ready[worker] <= self.largest:
            formed.append(self._form_small_tasks(worker, most))
            num_formed = len(formed[0].cu) - 1
        while num_formed < most and self.num_ready(worker) >= (self.smallest if formed else 1):
            formed.append(self._form_task(worker))
            num_formed += 1
        if len(formed) == 1:
            return formed[0]
        sizes = [stop - start for part in formed for start, stop in pairwise(part.cu)]
        entries = np.concatenate([part.entries for part in formed])
        owners = np.concatenate([part.owners for part in formed])
        ending = np.concatenate([part.ending for part in formed])
        steps = np.concatenate([part.steps for part in formed if part.steps is not None] or [entries[:0]])
        cu = list(accumulate(sizes, initial=0))
        return Batch(cu, entries, owners, steps if self.num_growing else None, ending, False)

    def _form_small_tasks(self, worker: int, most: int) -> Batch:
        """What `_form_task` forms, up to `most` times and while a task takes every node that is ready: then nothing is
        to be chosen. The first task is one of these. No chain grows.
        """
        sub, ready_at, queue = self._subgraphs, self.table.rows[Column.READY], self.queues[worker]
        slots = queue.front(self.largest).copy()
        at, left, ready = sub.at.take(slots), sub.left.take(slots), sub.ready.take(slots)
        total = self._ready[worker]
        sizes: list[int] = []
        begins: list[IndexArray] = []
        takes: list[IndexArray] = []
        while len(sizes) < most and (self.smallest if sizes else 1) <= total <= self.largest:
            sizes.append(total)
            begins.append(at)
            takes.append(ready)
            at = at + ready
            left = left - ready
            # Behind its last node a subgraph reads another's row, or none.
            ready = ready_at.take(at, mode="clip") * (left > 0)
            total = int(np.add.reduce(ready))
        sub.at[slots], sub.left[slots], sub.ready[slots] = at, left, ready
        self._ready[worker] = total
        going = left > 0
        ending = slots[~going]
        if len(ending):
            queue.keep(len(slots), going)
        cu = [0, *accumulate(sizes)]
        count, start = np.concatenate(takes), np.concatenate(begins)
        entries = (start - np.add.accumulate(count) + count).repeat(count)
        entries += np.arange(cu[-1])
        owners = np.concatenate([slots] * len(sizes)).repeat(count)
        return Batch(cu, entries, owners, None, ending, False)

    def _form_task(self, worker: int) -> Batch:
        """FormBatchedTask, lines 24-32: first in, first out, up to max(Bsizes) ready nodes."""
        sub, queue = self._subgraphs, self.queues[worker]
        slots = queue.front(self.largest)
        takes = sub.ready.take(slots)
        ends = np.add.accumulate(takes)
        used = min(int(ends.searchsorted(self.largest)) + 1, len(slots))  # every queued subgraph has a ready node
        slots, takes, ends = slots[:used].copy(), takes[:used], ends[:used]
        ready = count = int(ends[-1])
        if count > self.largest:
            takes[-1] -= count - self.largest
            ends[-1] = count = self.largest
        at = sub.at.take(slots)
        entries = (at - ends + takes).repeat(takes)
        entries += np.arange(count)
        owners = slots.repeat(takes)
        at += takes
        left = sub.left.take(slots)
        left -= takes
        steps = None
        if self.num_growing:
            loop = sub.loop.take(slots)
            steps = sub.grown.take(owners)
            sub.grown[slots] += loop > 0
            at -= np.where(at == sub.end.take(slots), loop, 0)
        going = left > 0
        # Behind its last node a subgraph reads another's row, or none.
        after = self.table.rows[Column.READY].take(at, mode="clip") * going
        sub.at[slots], sub.left[slots], sub.ready[slots] = at, left, after
        self._ready[worker] += int(np.add.reduce(after)) - ready
        ending = slots[~going]
        if len(ending):
            queue.keep(used, going)
        return Batch([0, count], entries, owners, steps, ending, False)

    def _batch_chains(self, worker: int, most: int, more: More) -> Batch:
        """As `batch`, where no subgraph ever has more than one ready node: all tasks at once.

        Subgraph i is in the tasks [start[i], stop[i]): from when a place is free until it has no nodes left.
        """
        sub, queue, limit = self._subgraphs, self.queues[worker], most
        while True:
            slots = queue.front(self.largest)
            left = sub.left.take(slots)
            short = int(np.count_nonzero(left < limit))
            if short and len(queue) > len(slots):  # others may join
                slots = queue.front(self.largest + short * limit)
                left = sub.left.take(slots)
            start, used, most, full = self._starts(left, limit)
            if full or not more():
                break
            if self.num_branching:  # what came is no chain
                return self.batch(worker, limit, more)
        slots, left, start = slots[:used].copy(), left[:used], start[:used]
        stop = np.minimum(start + left, most)
        count = stop - start
        at = sub.at.take(slots)
        task = np.arange(most)
        if not short:
            cu = [used * t for t in range(most + 1)]
            task, index = task.repeat(used), np.broadcast_to(np.arange(used), (most, used)).ravel()
        else:
            column = task.astype(np.int8)[:, None]
            member = (start.astype(np.int8) <= column) & (column < stop.astype(np.int8))
            index = member.ravel().nonzero()[0]
            bounds = index.searchsorted(np.arange(most + 1) * used)
            cu = bounds.tolist()
            task = task.repeat(bounds[1:] - bounds[:-1])
            index -= task * used
        entries = (at - start).take(index)
        entries += task
        owners = slots.take(index)
        steps = None
        fresh = at + count
        if self.num_growing:
            loop, end, grown = sub.loop[slots], sub.end[slots], sub.grown[slots]
            entries = _around(entries, end[index], loop[index])
            fresh = _around(fresh, end, loop)
            steps = np.where(loop[index] > 0, (grown - start)[index] + task, 0)
            sub.grown[slots] = grown + np.where(loop > 0, count, 0)
        left = left - count
        sub.left[slots] = left
        sub.at[slots] = fresh
        going = left > 0
        ending = slots[~going]
        if len(ending):
            sub.ready[ending] = 0
            queue.keep(used, going)
        self._ready[worker] = len(queue)
        return Batch(cu, entries, owners, steps, ending, True)

    def _starts(self, left: IndexArray, most: int) -> tuple[IndexArray, int, int, bool]:
        """-> in which task each chain begins, how many take part, how many tasks there are, and if all are full."""
        start = np.zeros(len(left), np.int64)
        used = min(len(left), self.largest)
        freed = np.bincount(np.minimum(left[:used], most), minlength=most + 1).tolist()
        size, joined = used, used
        full = size == self.largest
        for t in range(1, most):
            size -= freed[t]
            joining = left[joined : joined + self.largest - size].tolist()
            start[joined : joined + len(joining)] = t
            joined += len(joining)
            size += len(joining)
            for nodes in joining:
                if t + nodes < most:
                    freed[t + nodes] += 1
            full = full and size == self.largest
            if size < self.smallest:
                most = t
                joined = used + int(np.count_nonzero(start[used:joined] < t))
                break
        return start, joined, most, full

    # -- queue ------------------------------------------------------------------------------------

    def release(self, slots: IndexArray, worker: int) -> None:
        """Subgraphs whose external inputs are met now join the queue of their home."""
        sub = self._subgraphs
        ready = self.table.rows[Column.READY].take(sub.at[slots])
        sub.ready[slots] = ready
        self.enqueue(slots, int(ready.sum()), worker)

    def enqueue(self, slots: IndexArray, ready: int, worker: int) -> None:
        """Subgraphs with so many ready nodes, all in all, join the queue of their home."""
        self._ready[worker] += ready
        self.queues[worker].append(slots)

    def drop(self, slot: int) -> None:
        """A subgraph ends early; `purge` takes it out of the queue."""
        sub = self._subgraphs
        self._ready[int(sub.home[slot])] -= int(sub.ready[slot])
        sub.ready[slot] = 0
        if sub.left[slot]:
            sub.uncommitted[slot] -= sub.left[slot]
            sub.left[slot] = 0
            self.stale = True

    def purge(self) -> None:
        """Take dropped subgraphs out of the queues; before their slots are used again."""
        for queue in self.queues:
            count = len(queue)
            queue.keep(count, self._subgraphs.left[queue.front(count)] > 0)
        self.stale = False


def _around(at: IndexArray, end: IndexArray, loop: IndexArray) -> IndexArray:
    """Rows of growing chains beyond their last one are their last `loop` rows again."""
    over = at - end
    return np.where((loop > 0) & (over >= 0), end - loop + over % np.maximum(loop, 1), at)
