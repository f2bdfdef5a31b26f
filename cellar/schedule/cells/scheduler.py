"""CellScheduler: cellular batching. BatchMaker §2.4.3, Algorithm 1; docs/decisions/0012-cells.md.

    Schedule(worker)      `plan`, `_choose`     one cell type by rules (a), (b), (c), then priority
    Batch(ct, worker)     `_batch`              up to MaxTasksToSubmit tasks of it
    FormBatchedTask       `CellType.form_task`  ready nodes, first in first out

Index letters: task t, node n, output o, bank b, model m. `now` is not used: nothing here depends on time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from cellar.core.cell_graphs import (
    GROWING_TASKS,
    NUM_COLUMNS,
    CellConfig,
    CellOutput,
    CellRequest,
    CellStats,
    GraphPart,
)
from cellar.core.errors import CapacityError, IntegrityError, RequestError
from cellar.core.messages import CopyResult, Event, FinishReason, TierOrder
from cellar.core.tasks import CellCapacity, CellModelSpec, TaskPlan, TaskResult
from cellar.schedule.cells.admission import Admission
from cellar.schedule.cells.commit import Commit
from cellar.schedule.cells.fairness import FairShare
from cellar.schedule.cells.flight import Flight, assemble
from cellar.schedule.cells.intake import Intake
from cellar.schedule.cells.integrity import check
from cellar.schedule.cells.queue import IndexArray
from cellar.schedule.cells.requests import RequestSlots, Roster
from cellar.schedule.cells.rows import BankRows
from cellar.schedule.cells.running import Running
from cellar.schedule.cells.store import GraphTable
from cellar.schedule.cells.subgraphs import FREE, Subgraphs
from cellar.schedule.cells.types import CellType
from cellar.schedule.cells.waiting import Waiting


class CellScheduler:
    """Decides which nodes of which requests form the next tasks. No clock, no torch, one thread.

    `capacity` says how many rows each bank has on a worker. A request has a home: the worker that holds its rows and
    runs all its nodes. Requests wait, first come first served within their model, until all rows that they can need are
    free on one worker, and until a call can reach them: more ready nodes than the largest task takes, at every cell at
    which requests begin, would not change what is planned, and a call that finds too few asks for more.

    banks[m][w] are worker w's of model m.
    """

    def __init__(
        self, models: Sequence[CellModelSpec], capacity: CellCapacity, config: CellConfig | None = None
    ) -> None:
        self.config = config or CellConfig()
        self.max_tasks = self.config.tasks(capacity.max_tasks)
        self.run_ahead = self.config.calls_ahead(capacity.run_ahead, self.max_tasks)
        self.models = tuple(models)
        self.num_workers = capacity.num_workers
        self.subgraphs = Subgraphs(max(len(model.banks) for model in models))
        self.types: list[list[CellType]] = []
        self.banks: list[list[list[BankRows]]] = []
        self.roster = Roster(max(len(model.banks) for model in models))
        self.waiting = [Waiting() for _ in models]
        self.flights: dict[int, Flight] = {}
        self._kinds: list[CellType] = []
        self._request_slots: list[list[RequestSlots]] = []
        self._admissions: list[Admission] = []
        for m, model in enumerate(models):
            types = []
            for c, spec in enumerate(model.cells):
                columns = 2 * len(spec.inputs) + len(spec.kept) + NUM_COLUMNS
                table = GraphTable(columns, partial(self._parts_of, m, c), partial(self._slots_of, len(self._kinds)))
                types.append(CellType(m, c, len(self._kinds), spec, self.subgraphs, table, self.num_workers))
                self._kinds.append(types[-1])
            self.types.append(types)
            rows = capacity.rows[m]
            self.banks.append(
                [[BankRows(spec, rows[b]) for b, spec in enumerate(model.banks)] for _ in range(self.num_workers)]
            )
            self._request_slots.append(
                [RequestSlots(banks, types, self.roster, w) for w, banks in enumerate(self.banks[m])]
            )
            self._admissions.append(Admission(self.subgraphs, types, self._request_slots[m], self.roster))
        self._share = FairShare(tuple(len(model.cells) for model in models))
        self._next_plan = 0
        self._running = Running(
            self.subgraphs, self._kinds, self._request_slots, self.roster, graph_batches=self.config.graph_batch > 0
        )
        self.intake = Intake(
            self.config,
            self.types,
            self.waiting,
            self._admissions,
            self._running,
            self.subgraphs,
            self.num_workers,
        )
        self._entries = self.intake.entries
        self._commit = Commit(self.subgraphs, self._kinds, self.roster, self._running)
        self._num_tasks = self._num_nodes = 0

    @property
    def running(self) -> Mapping[int, CellRequest]:
        """The requests that run, by the number of their slot."""
        return self._running.requests

    @property
    def draining(self) -> Mapping[int, CellRequest]:
        """The requests that ended early and have nodes in flight, likewise."""
        return self._running.draining

    # -- the protocol -----------------------------------------------------------------------------

    def add(self, request: CellRequest, now: float = 0.0) -> None:
        """Queue a request. Raises RequestError or CapacityError if it could never run; nothing is kept then."""
        id, m = request.id, request.model
        if id in self._running.numbers:
            raise RequestError(f"request {id!r} is already running; give each its own id.", "id")
        if request.graph not in self._admissions[m].book.index:
            for bank, frames in zip(self.banks[m][0], request.graph.frames, strict=True):
                if frames >= bank.num_frames:
                    raise CapacityError(
                        f"the request needs {frames} rows of {bank.spec.name} and a worker has {bank.num_frames - 1}; "
                        "send a smaller one, or serve fewer models."
                    )
            self._entries[m] |= request.graph.entries
        self._running.numbers[id] = request
        self.waiting[m].append(request)

    def plan(self, worker: int, now: float = 0.0) -> TaskPlan | None:
        """Schedule(worker): the next call of a worker, or None if there is nothing that it could run."""
        for kind in self._kinds:
            if kind.stale:
                kind.purge()
        self.intake.admit()
        wanting = [m for m, types in enumerate(self.types) if any(ct.num_ready(worker) for ct in types)]
        if not wanting:
            return None
        m = wanting[0] if len(self.models) == 1 else self._share.order(wanting)[0]
        return self._batch(self._choose(self.types[m], worker), worker)

    def commit(self, result: TaskResult, now: float = 0.0) -> CellOutput:
        """Take in finished tasks; those of one worker come in the order of their plans."""
        output = CellOutput()
        flight = self.flights.get(result.plan)
        if flight is None or result.first != flight.committed or result.stop > flight.num_tasks:
            raise IntegrityError(f"tasks [{result.first}, {result.stop}) of plan {result.plan} were not next.")
        at_once = 1 if self._commit.is_eventful(flight, result) else max(1, result.stop - result.first)
        for t in range(result.first, result.stop, at_once):
            self._commit.tasks(flight, t, t + at_once, result, output)
        flight.committed = result.stop
        if result.stop == flight.num_tasks:
            del self.flights[result.plan]
        flight.kind.num_running -= result.stop - result.first
        self._share.measured(flight.kind.model, flight.kind.cell, result.seconds / max(1, result.stop - result.first))
        return output

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason = FinishReason.STOP) -> CellOutput | None:
        """End the growing chains of a request after at most `num_tokens` steps; later ones are void.

        Chains that have not come so far end where they are. The result comes at once, or from a later commit.
        """
        number = self._running.numbers.get(request_id)
        if not isinstance(number, int):
            return self.abort(request_id)
        growth = self.roster.growing.get(number)
        for slot in growth.slots if growth is not None else ():
            if self.subgraphs.owner[slot] == number and not self.subgraphs.dead[slot]:
                made = int(self.subgraphs.nodes[slot] - self.subgraphs.uncommitted[slot])
                self._running.end_chain(number, slot, min(made, num_tokens), stopped=reason is FinishReason.STOP)
        if self.roster.unfinished[number]:
            return None
        output = CellOutput()
        self._running.finish([number], output)
        return output

    def abort(self, request_id: str) -> CellOutput | None:
        """Drop a request at any moment; unknown and ended ids are ignored.

        -> with graph batching, the results of the others, if they waited for it alone.
        """
        found = self._running.numbers.get(request_id)
        if found is None:
            self._running.forget(request_id)
        elif isinstance(found, int):
            output = CellOutput()
            self._running.end(found, output)
            return output if output.finished else None
        else:
            del self._running.numbers[request_id]
            self.waiting[found.model].leave(found)
        return None

    def failed(self) -> Mapping[str, str]:
        """None: what is planned was counted when it was added, and nodes that fail are told by results."""
        return {}

    def copies(self, now: float) -> Sequence[TierOrder]:
        """None: rows stay where they are."""
        return ()

    def persist(self, now: float) -> Sequence[TierOrder]:
        """None: nothing outlives a request."""
        return ()

    def commit_copy(self, result: CopyResult, now: float) -> None:
        """Raises IntegrityError: nothing was copied."""
        raise IntegrityError(f"copies {result.number} were not asked for.")

    def next_event(self, now: float) -> Event | None:
        """None: only results of tasks are awaited."""
        return None

    def has_work(self) -> bool:
        """True while any request waits, runs, or has a task in flight."""
        return bool(self.running or self.flights or any(self.waiting))

    def stats(self) -> CellStats:
        """A snapshot; other threads may ask for one."""
        return CellStats(
            waiting=sum(len(queue) for queue in self.waiting),
            running=len(self.running),
            tasks=self._num_tasks,
            nodes=self._num_nodes,
            requests=self._running.num_ended,
            free_rows=self._free_rows(),
        )

    def _free_rows(self) -> tuple[tuple[int, ...], ...]:
        def of_worker(banks: Sequence[BankRows], request_slots: RequestSlots) -> list[int]:
            held = request_slots.empty_frames()
            return [(bank.num_free + count) << bank.shift for bank, count in zip(banks, held, strict=True)]

        return tuple(
            tuple(map(sum, zip(*map(of_worker, workers, request_slots), strict=True)))
            for workers, request_slots in zip(self.banks, self._request_slots, strict=True)
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the bookkeeping is sound: no row lost, no row given twice, all counts true."""
        self._free_empty()
        check(
            self.subgraphs,
            self._kinds,
            self.banks,
            self.roster,
            self.running,
            self.draining,
            self.flights,
            self._frames_of,
        )

    # -- Algorithm 1 ------------------------------------------------------------------------------

    def _choose(self, types: Sequence[CellType], worker: int) -> CellType:
        """Lines 5-10. One of the types has a node that the worker may run."""
        ready = [ct for ct in types if ct.num_ready(worker)]
        chosen = (
            [ct for ct in ready if ct.num_ready(worker) >= ct.largest]  # (a)
            or [ct for ct in ready if ct.num_running == 0]  # (b)
            or ready  # (c)
        )
        return max(chosen, key=lambda ct: ct.spec.priority)

    def _batch(self, ct: CellType, worker: int) -> TaskPlan:
        """Lines 11-23, for the scheduler's part; the type forms the tasks."""
        m = ct.model
        most = self.max_tasks
        if ct.num_growing and self.config.max_tasks is None:
            most = min(most, GROWING_TASKS)
        batch = ct.batch(worker, most, partial(self.intake.let_in, m, ct.cell, worker))
        tasks = len(batch.cu) - 1
        ct.num_running += tasks
        plan, flight = assemble(
            self._next_plan, worker, ct, batch, self.subgraphs, self._request_slots[m][worker], self._fan
        )
        self.flights[plan.plan] = flight
        self._next_plan += 1
        self._num_tasks += tasks
        self._num_nodes += len(batch.owners)
        self._share.charge(ct.model, ct.cell, tasks)
        return plan

    # -- what tables and checks ask -------------------------------------------------------------------

    def _slots_of(self, kind: int) -> IndexArray:
        return np.flatnonzero((self.subgraphs.owner != FREE) & (self.subgraphs.kind == kind))

    def _frames_of(self, number: int, request: CellRequest) -> list[IndexArray]:
        """The frames that a request owns in each bank."""
        return self._running.home_of(number, request).frames(number, request.graph)

    def _free_empty(self) -> None:
        for workers in self._request_slots:
            for request_slots in workers:
                request_slots.free_empty()

    def _parts_of(self, model: int, cell: int) -> set[GraphPart]:
        requests = [*self.running.values(), *self._admissions[model].pending]
        graphs = {request.graph for request in requests if request.model == model}
        return {part for graph in graphs for part in graph.parts if part.cell == cell}

    def _fan(self, slot: int, f: int) -> Sequence[int]:
        return self.running[int(self.subgraphs.owner[slot])].graph.fans[f]
