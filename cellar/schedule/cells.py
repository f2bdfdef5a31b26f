"""CellScheduler: cellular batching. Thesis 001, section 2.4.3, Algorithm 1; docs/decisions/0012-cells.md.

    Schedule(worker)      `plan`, `_choose`     one cell type by rules (a), (b), (c), then priority
    Batch(ct, worker)     `_batch`              up to MaxTasksToSubmit tasks of it
    FormBatchedTask       `CellType.form_task`  ready nodes, first in first out

Index letters: task t, node n, output o, bank b, model m. `now` is not used: nothing here depends on time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from cellar.core.cell_graphs import (
    NUM_COLUMNS,
    CellConfig,
    CellOutput,
    CellRequest,
    CellResults,
    CellStats,
    CellStep,
    GraphPart,
)
from cellar.core.errors import CapacityError, IntegrityError, RequestError
from cellar.core.messages import FinishReason
from cellar.core.tasks import CellCapacity, CellModelSpec, NodeFlag, TaskPlan, TaskResult, Values
from cellar.schedule.cell_admission import Admission
from cellar.schedule.cell_fairness import FairShare
from cellar.schedule.cell_flight import Dependants, Flight, assemble
from cellar.schedule.cell_integrity import check
from cellar.schedule.cell_queue import IndexArray
from cellar.schedule.cell_requests import RunningRequest, Seats
from cellar.schedule.cell_rows import BankRows
from cellar.schedule.cell_store import GraphTable
from cellar.schedule.cell_subgraphs import FREE, Subgraphs
from cellar.schedule.cell_types import CellType


class CellScheduler:
    """Decides which nodes of which requests form the next tasks. No clock, no torch, one thread.

    `capacity` says how many rows each bank has. Requests wait, first come first served within their model, until all
    rows that they can need are free.
    """

    def __init__(
        self, models: Sequence[CellModelSpec], capacity: CellCapacity, config: CellConfig | None = None
    ) -> None:
        self.config = config or CellConfig()
        self.models = tuple(models)
        self.num_workers = capacity.num_workers
        self.subgraphs = Subgraphs(max(len(model.banks) for model in models))
        self.types: list[list[CellType]] = []
        self.banks: list[list[BankRows]] = []
        self.running: dict[int, RunningRequest] = {}
        self.draining: dict[int, RunningRequest] = {}
        self.waiting: list[deque[CellRequest]] = [deque() for _ in models]
        self.flights: dict[int, Flight] = {}
        self._kinds: list[CellType] = []
        self._seats: list[Seats] = []
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
            self.banks.append([BankRows(b, spec, rows[b], self.num_workers) for b, spec in enumerate(model.banks)])
            self._seats.append(Seats(self.banks[m], types))
            self._admissions.append(Admission(self.subgraphs, types, self._seats[m]))
        self._share = FairShare(tuple(len(model.cells) for model in models))
        self._serials: dict[str, int | None] = {}  # None: it waits
        self._next_serial = 0
        self._next_plan = 0
        self._num_running = [0] * len(models)
        self._held: list[list[tuple[str, CellResults]]] = [[] for _ in models]
        self._late = CellOutput()
        self._num_tasks = self._num_nodes = self._num_requests = 0

    # -- the protocol -----------------------------------------------------------------------------

    def add(self, request: CellRequest, now: float = 0.0) -> None:
        """Queue a request. Raises RequestError or CapacityError if it could never run; nothing is kept then."""
        if request.id in self._serials:
            raise RequestError(f"request {request.id!r} runs already; give each its own id.", "id")
        known = request.graph in self._admissions[request.model].book.index
        for bank, frames in () if known else zip(self.banks[request.model], request.graph.frames, strict=True):
            if frames >= bank.num_frames:
                raise CapacityError(
                    f"the request needs {frames} rows of {bank.spec.name} and there are {bank.num_frames - 1}; "
                    "send a smaller one, or give cells more memory."
                )
        self._serials[request.id] = None
        self.waiting[request.model].append(request)

    def plan(self, worker: int, now: float = 0.0) -> TaskPlan | None:
        """Schedule(worker): the next call of a worker, or None if there is nothing that it could run."""
        for kind in self._kinds:
            if kind.stale:
                kind.purge()
        self._admit()
        wanting = [m for m, types in enumerate(self.types) if any(ct.num_ready(worker) for ct in types)]
        if not wanting:
            return None
        m = wanting[0] if len(self.models) == 1 else self._share.order(wanting)[0]
        return self._batch(self._choose(self.types[m], worker), worker)

    def commit(self, result: TaskResult, now: float = 0.0) -> CellOutput:
        """Take in finished tasks; those of one worker come in the order of their plans."""
        output = CellOutput()
        flight = self.flights.get(result.plan)
        if flight is None or result.first != flight.committed or result.stop > len(flight.tasks):
            raise IntegrityError(f"tasks [{result.first}, {result.stop}) of plan {result.plan} were not next.")
        for t in range(result.first, result.stop):
            self._commit_task(flight, t, result, output)
        flight.committed = result.stop
        if result.stop == len(flight.tasks):
            del self.flights[result.plan]
        flight.kind.num_running -= result.stop - result.first
        self._share.measured(flight.kind.model, flight.kind.cell, result.seconds / max(1, result.stop - result.first))
        return output

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
        """End the growing chains of a request after at most `num_tokens` steps; later ones are void.

        Chains that have not come so far end where they are. The result comes from `late` or a later commit.
        """
        serial = self._serials.get(request_id)
        if serial is None:
            self.abort(request_id)
            return
        request = self.running[serial]
        for slot in request.growing:
            if self.subgraphs.owner[slot] == serial and not self.subgraphs.dead[slot]:
                made = int(self.subgraphs.nodes[slot] - self.subgraphs.uncommitted[slot])
                self._end_chain(request, slot, min(made, num_tokens), stopped=reason is FinishReason.STOP)
        if request.unfinished == 0:
            self._finish(request, self._late)

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown and ended ids are ignored."""
        if request_id not in self._serials:
            for m, held in enumerate(self._held):
                self._held[m] = [(id, results) for id, results in held if id != request_id]
            return
        serial = self._serials[request_id]
        if serial is not None:
            self._end(self.running[serial])
            return
        del self._serials[request_id]
        for queue in self.waiting:
            for request in queue:
                if request.id == request_id:
                    queue.remove(request)
                    return

    def late(self) -> CellOutput:
        """What ended outside of a commit since the last call."""
        late, self._late = self._late, CellOutput()
        return late

    def has_work(self) -> bool:
        """True while any request waits, runs, or has a task in flight, or a result was not fetched from `late`."""
        return bool(self.running or self.flights or any(self.waiting) or self._late.finished)

    def stats(self) -> CellStats:
        """A snapshot."""
        return CellStats(
            waiting=sum(len(queue) for queue in self.waiting),
            running=len(self.running),
            tasks=self._num_tasks,
            nodes=self._num_nodes,
            requests=self._num_requests,
            free_rows=self._free_rows(),
        )

    def _free_rows(self) -> tuple[tuple[int, ...], ...]:
        self._dissolve()
        return tuple(tuple(bank.num_free << bank.shift for bank in banks) for banks in self.banks)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the bookkeeping is sound: no row lost, no row given twice, all counts true."""
        self._dissolve()
        check(self.subgraphs, self._kinds, self.banks, self.running, self.draining, self.flights, self._frames_of)

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
        batch = ct.batch(worker, self.config.max_tasks)
        m, tasks = ct.model, len(batch.tasks)
        ct.num_running += tasks
        plan, flight = assemble(
            self._next_plan, worker, ct, batch, self.subgraphs, self._seats[m], self.banks[m], self._fan
        )
        self.flights[plan.plan] = flight
        self._next_plan += 1
        self._num_tasks += tasks
        self._num_nodes += len(batch.owners)
        self._share.charge(ct.model, ct.cell, tasks)
        return plan

    # -- requests ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Move requests from the queues to the workers' reach, as far as rows are free; all of a model at once."""
        for m, queue in enumerate(self.waiting):
            if not queue:
                continue
            most = len(queue)
            if self.config.graph_batch:
                if self._num_running[m]:
                    continue
                most = min(most, self.config.graph_batch)
            admitted: list[RunningRequest] = []
            seats = self._seats[m]
            while len(admitted) < most:
                seat = seats.take(queue[0], self._next_serial)
                if seat is None:
                    break
                self._serials[queue.popleft().id] = self._next_serial
                self.running[self._next_serial] = seat
                self._next_serial += 1
                admitted.append(seat)
            if admitted:
                self._num_running[m] += len(admitted)
                self._admissions[m].admit(admitted)

    def _commit_task(self, flight: Flight, t: int, result: TaskResult, output: CellOutput) -> None:
        sub, kind, task = self.subgraphs, flight.kind, flight.tasks[t]
        slots = task.subgraphs
        uncommitted = sub.uncommitted.take(slots) - (1 if task.takes is None else task.takes)
        sub.uncommitted[slots] = uncommitted
        if self.num_workers > 1:
            landed = slots[uncommitted == sub.left[slots]]
            if len(landed):
                kind.unpin(landed, flight.worker)
        if result.error is not None:
            alive = slots[sub.dead[slots] == 0]
            for serial in np.unique(sub.owner[alive]).tolist():
                self._fail(self.running[serial], result.error, output)
        else:
            failed = self._fail_nodes(flight, t, result, output)
            self._keep_values(flight, t, result, output, some_ended=failed or sub.num_dead > 0)
        if flight.dependants is not None:
            self._release(flight.dependants, t)
        if np.count_nonzero(uncommitted) < len(slots):
            self._complete(slots[uncommitted == 0], output)

    def _fail_nodes(self, flight: Flight, t: int, result: TaskResult, output: CellOutput) -> bool:
        """Requests whose node is not finite, or failed, end; their neighbours do not notice. -> if there are any."""
        base = flight.cu_batch[result.first]
        begin, end = flight.cu_batch[t], flight.cu_batch[t + 1]
        flags = result.flags[begin - base : end - base]
        if not np.count_nonzero(flags):
            return False
        for k in np.flatnonzero(flags).tolist():
            slot = int(flight.owners[begin + k])
            serial = int(self.subgraphs.owner[slot])
            if serial == FREE or self.subgraphs.dead[slot]:
                continue
            name = flight.kind.spec.name
            if flags[k] == NodeFlag.NAN:
                reason = (
                    f"cell {name!r} computed a value that is not finite; check the request's values and the weights."
                )
            else:
                reason = result.errors.get(begin + k, f"cell {name!r} failed on this request.")
            self._fail(self.running[serial], reason, output)
        return True

    def _keep_values(self, flight: Flight, t: int, result: TaskResult, output: CellOutput, *, some_ended: bool) -> None:
        """Put emitted values where their requests find them, and end chains that met their stop symbol."""
        sub, kind = self.subgraphs, flight.kind
        stopped: list[int] = []
        found: list[tuple[int, IndexArray, IndexArray, Values]] = []
        for o, emit in enumerate(flight.emits):
            if emit is None or emit.bounds[t] == emit.bounds[t + 1]:
                continue
            begin, end = emit.bounds[t], emit.bounds[t + 1]
            values, offset = result.values[o], begin - emit.bounds[result.first]
            if values is None or len(values) < offset + end - begin:
                raise IntegrityError(f"plan {result.plan} came back with too few values of output {o}.")
            values, places, owners = (
                values[offset : offset + end - begin],
                emit.places[begin:end],
                emit.owners[begin:end],
            )
            if some_ended:
                alive = (sub.owner[owners] != FREE) & (sub.dead[owners] == 0)
                values, places, owners = values[alive], places[alive], owners[alive]
            if kind.num_growing and values.ndim == 1:
                hit = (sub.stop[owners] == values) & (sub.stop_output[owners] == o)
                stopped += owners[hit].tolist()
            found.append((o, places, owners, values))
        for o, places, owners, values in found:
            if stopped:
                others = ~np.isin(owners, stopped)
                values, places, owners = values[others], places[others], owners[others]
            kind.outbox.put(o, places, values)
            if kind.num_streaming:
                self._stream(kind, o, owners, values, output)
        for slot in stopped:
            request = self.running[int(sub.owner[slot])]
            made = int(sub.nodes[slot] - sub.uncommitted[slot])
            self._end_chain(request, slot, made - 1, stopped=True)
            if not request.unfinished:
                self._finish(request, output)

    def _stream(self, kind: CellType, o: int, owners: IndexArray, values: Values, output: CellOutput) -> None:
        """Steps of growing chains whose requests want them as they come."""
        for k in np.flatnonzero(self.subgraphs.loop[owners]).tolist():
            slot = int(owners[k])
            running = self.running[int(self.subgraphs.owner[slot])]
            if running.request.stream:
                ordinal, part = running.growing.index(slot), running.part_of(kind.cell)
                output.steps.append(CellStep(running.request.id, ordinal, part, o, values[k]))

    def _release(self, dependants: Dependants, t: int) -> None:
        """Nodes have committed that subgraphs wait for; those that wait for nothing more join their queues."""
        sub = self.subgraphs
        begin, end = dependants.bounds[t], dependants.bounds[t + 1]
        if begin == end:
            return
        targets, owners = dependants.targets[begin:end], dependants.owners[begin:end]
        targets = targets[(sub.owner[owners] != FREE) & (sub.dead[owners] == 0)]
        np.subtract.at(sub.waits, targets, 1)
        met = targets[sub.waits[targets] == 0]
        if not len(met):
            return
        met = np.unique(met) if len(met) > 1 else met
        if len(self._kinds) == 1:
            self._kinds[0].release(met)
            return
        kinds = sub.kind[met]
        for k in np.unique(kinds).tolist():
            self._kinds[k].release(met[kinds == k])

    def _complete(self, done: IndexArray, output: CellOutput) -> None:
        """Subgraphs whose last node has committed; a request ends with its last subgraph."""
        sub = self.subgraphs
        if sub.num_dead:
            dead = sub.dead[done] == 1
            self._bury(done[dead])
            done = done[~dead]
        owners = sub.owner[done].tolist()
        if FREE in owners:  # they ended early in this very task
            done = done[sub.owner[done] != FREE]
            owners = sub.owner[done].tolist()
        sub.give(done)
        running = self.running
        for serial in owners:
            request = running[serial]
            request.unfinished -= 1
            if not request.unfinished:
                self._finish(request, output)

    def _end_chain(self, request: RunningRequest, slot: int, length: int, *, stopped: bool) -> None:
        """A growing chain ends before its limit."""
        assert request.lengths is not None
        request.lengths[request.growing.index(slot)] = (length, stopped)
        request.unfinished -= 1
        self._end_subgraph(request, slot)

    def _end_subgraph(self, request: RunningRequest, slot: int) -> None:
        """Nothing more of it is submitted; its slot is free when its last task has come back."""
        sub = self.subgraphs
        self._kinds[int(sub.kind[slot])].drop(slot)
        if sub.uncommitted[slot]:
            sub.dead[slot] = 1
            sub.num_dead += 1
            request.num_dead += 1
        else:
            sub.give(np.array([slot]))

    def _bury(self, slots: IndexArray) -> None:
        """Ended subgraphs whose last task has come back."""
        sub = self.subgraphs
        if not len(slots):
            return
        owners = sub.owner[slots].tolist()
        sub.dead[slots] = 0
        sub.num_dead -= len(slots)
        sub.give(slots)
        for serial in owners:
            request = self.running.get(serial) or self.draining[serial]
            request.num_dead -= 1
            if serial in self.draining and not request.num_dead:
                del self.draining[serial]
                self._seats[request.model].give(request)

    def _finish(self, request: RunningRequest, output: CellOutput) -> None:
        """All nodes have committed: the result goes out at once (graph batching: when all of the batch are done)."""
        model = request.request.model
        results = request.results(self.types[model])
        self._leave(request)
        if not self.config.graph_batch:
            output.finished.append((request.request.id, results))
        else:
            self._held[model].append((request.request.id, results))
            self._let_go(model, output)

    def _fail(self, request: RunningRequest, reason: str, output: CellOutput) -> None:
        output.failed.append((request.request.id, reason))
        self._end(request, output)

    def _end(self, request: RunningRequest, output: CellOutput | None = None) -> None:
        """A request ends before its time."""
        sub = self.subgraphs
        for slot in request.slots().tolist():
            if sub.owner[slot] == request.serial and not sub.dead[slot]:
                self._end_subgraph(request, slot)
        self._leave(request)
        if self.config.graph_batch:
            self._let_go(request.model, self._late if output is None else output)

    def _let_go(self, model: int, output: CellOutput) -> None:
        if not self._num_running[model]:
            output.finished += self._held[model]
            self._held[model] = []

    def _leave(self, request: RunningRequest) -> None:
        """It is no longer running; its seat is free now, or when the last node that names its rows has committed."""
        model = request.request.model
        del self.running[request.serial]
        del self._serials[request.request.id]
        self._num_running[model] -= 1
        self._num_requests += 1
        seats = self._seats[model]
        if request.request.graph.special:
            seats.leave(request)
        if request.num_dead:
            self.draining[request.serial] = request
        else:
            seats.give(request)

    # -- what tables and checks ask -------------------------------------------------------------------

    def _slots_of(self, kind: int) -> IndexArray:
        return np.flatnonzero((self.subgraphs.owner != FREE) & (self.subgraphs.kind == kind))

    def _frames_of(self, request: RunningRequest, bank: int) -> IndexArray:
        """The frames that a request owns in a bank."""
        return self._seats[request.model].frames(request)[bank]

    def _dissolve(self) -> None:
        for seats in self._seats:
            seats.dissolve()

    def _parts_of(self, model: int, cell: int) -> set[GraphPart]:
        graphs = {running.request.graph for running in self.running.values() if running.model == model}
        return {part for graph in graphs for part in graph.parts if part.cell == cell}

    def _fan(self, slot: int, f: int) -> Sequence[int]:
        return self.running[int(self.subgraphs.owner[slot])].request.graph.fans[f]
