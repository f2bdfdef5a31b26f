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
    GROWING_TASKS,
    NUM_COLUMNS,
    CellConfig,
    CellOutput,
    CellRequest,
    CellResults,
    CellStats,
    CellStep,
    GraphPart,
)
from cellar.core.errors import CapacityError, CellarError, IntegrityError, RequestError
from cellar.core.messages import FinishReason
from cellar.core.tasks import CellCapacity, CellModelSpec, NodeFlag, TaskPlan, TaskResult, Values
from cellar.schedule.cell_admission import Admission
from cellar.schedule.cell_fairness import FairShare
from cellar.schedule.cell_flight import Dependants, Flight, assemble
from cellar.schedule.cell_integrity import check
from cellar.schedule.cell_queue import IndexArray
from cellar.schedule.cell_requests import Growth, Roster, Seats
from cellar.schedule.cell_rows import BankRows
from cellar.schedule.cell_store import GraphTable
from cellar.schedule.cell_subgraphs import FREE, Subgraphs
from cellar.schedule.cell_types import CellType

_ADMITTED = 128
"""Requests admitted at a time: enough to share what a call costs, and few enough not to hold up a plan."""


class CellScheduler:
    """Decides which nodes of which requests form the next tasks. No clock, no torch, one thread.

    `capacity` says how many rows each bank has. Requests wait, first come first served within their model, until all
    rows that they can need are free, and until a call can reach them: more ready nodes than the largest task takes, at
    every cell at which requests begin, would not change what is planned, and a call that finds too few asks for more.

    running, draining  requests by the number of their seat: those that run, and those that ended early and have nodes
                       in flight
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
        self.banks: list[list[BankRows]] = []
        self.roster = Roster(max(len(model.banks) for model in models))
        self.running: dict[int, CellRequest] = {}
        self.draining: dict[int, CellRequest] = {}
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
            self._seats.append(Seats(self.banks[m], types, self.roster))
            self._admissions.append(Admission(self.subgraphs, types, self._seats[m], self.roster))
        self._share = FairShare(tuple(len(model.cells) for model in models))
        self._numbers: dict[str, int | None] = {}  # None: it waits
        self._entries: list[set[int]] = [set() for _ in models]
        self._next_plan = 0
        self._admitted = _ADMITTED
        self._num_running = [0] * len(models)
        self._held: list[list[tuple[str, CellResults]]] = [[] for _ in models]
        self._late = CellOutput()
        self._num_tasks = self._num_nodes = self._num_requests = 0

    # -- the protocol -----------------------------------------------------------------------------

    def add(self, request: CellRequest, now: float = 0.0) -> None:
        """Queue a request. Raises RequestError or CapacityError if it could never run; nothing is kept then."""
        if request.id in self._numbers:
            raise RequestError(f"request {request.id!r} runs already; give each its own id.", "id")
        if request.graph not in self._admissions[request.model].book.index:
            for bank, frames in zip(self.banks[request.model], request.graph.frames, strict=True):
                if frames >= bank.num_frames:
                    raise CapacityError(
                        f"the request needs {frames} rows of {bank.spec.name} and there are {bank.num_frames - 1}; "
                        "send a smaller one, or give cells more memory."
                    )
            self._entries[request.model] |= request.graph.entries
        self._numbers[request.id] = None
        self.waiting[request.model].append(request)

    def add_all(self, requests: Sequence[CellRequest], now: float = 0.0) -> list[tuple[str, str]]:
        """Queue many -> ids of those that could never run, and why."""
        refused: list[tuple[str, str]] = []
        numbers, waiting, books = self._numbers, self.waiting, [one.book.index for one in self._admissions]
        for request in requests:
            if request.id not in numbers and request.graph in books[request.model]:
                numbers[request.id] = None
                waiting[request.model].append(request)
                continue
            try:
                self.add(request, now)
            except CellarError as error:
                refused.append((request.id, str(error)))
        return refused

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
        if flight is None or result.first != flight.committed or result.stop > flight.num_tasks:
            raise IntegrityError(f"tasks [{result.first}, {result.stop}) of plan {result.plan} were not next.")
        at_once = 1 if self._is_eventful(flight, result) else max(1, result.stop - result.first)
        for t in range(result.first, result.stop, at_once):
            self._commit_tasks(flight, t, t + at_once, result, output)
        flight.committed = result.stop
        if result.stop == flight.num_tasks:
            del self.flights[result.plan]
        flight.kind.num_running -= result.stop - result.first
        self._share.measured(flight.kind.model, flight.kind.cell, result.seconds / max(1, result.stop - result.first))
        return output

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
        """End the growing chains of a request after at most `num_tokens` steps; later ones are void.

        Chains that have not come so far end where they are. The result comes from `late` or a later commit.
        """
        number = self._numbers.get(request_id)
        if number is None:
            self.abort(request_id)
            return
        growth = self.roster.growing.get(number)
        for slot in growth.slots if growth is not None else ():
            if self.subgraphs.owner[slot] == number and not self.subgraphs.dead[slot]:
                made = int(self.subgraphs.nodes[slot] - self.subgraphs.uncommitted[slot])
                self._end_chain(number, slot, min(made, num_tokens), stopped=reason is FinishReason.STOP)
        if self.roster.unfinished[number] == 0:
            self._finish([number], self._late)

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown and ended ids are ignored."""
        if request_id not in self._numbers:
            for m, held in enumerate(self._held):
                self._held[m] = [(id, results) for id, results in held if id != request_id]
            return
        number = self._numbers[request_id]
        if number is not None:
            self._end(number)
            return
        del self._numbers[request_id]
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
        """A snapshot; other threads may ask for one."""
        return CellStats(
            waiting=sum(len(queue) for queue in self.waiting),
            running=len(self.running),
            tasks=self._num_tasks,
            nodes=self._num_nodes,
            requests=self._num_requests,
            free_rows=self._free_rows(),
        )

    def _free_rows(self) -> tuple[tuple[int, ...], ...]:
        held = [seats.empty_frames() for seats in self._seats]
        return tuple(
            tuple((bank.num_free + count) << bank.shift for bank, count in zip(banks, counts, strict=True))
            for banks, counts in zip(self.banks, held, strict=True)
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the bookkeeping is sound: no row lost, no row given twice, all counts true."""
        self._dissolve()
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
        batch = ct.batch(worker, most, partial(self._let_in, m, ct.cell))
        tasks = len(batch.cu) - 1
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
        """Move requests from the queues to the workers' reach, as far as rows are free and calls reach."""
        for m, queue in enumerate(self.waiting):
            if self.config.graph_batch:
                if queue and not self._num_running[m]:
                    self._start(m, self.config.graph_batch)
                continue
            while queue and self._is_short(m) and self._start(m, self._admitted):
                pass

    def _let_in(self, m: int, cell: int) -> bool:
        """Admit requests that begin at a cell of which a call could take more -> whether there were any."""
        if not self.waiting[m] or self.config.graph_batch or cell not in self._entries[m]:
            return False
        return bool(self._start(m, self._admitted))

    def _start(self, m: int, most: int) -> int:
        """Admit up to `most` requests of a model -> how many."""
        numbers, requests = self._admissions[m].admit(self.waiting[m], most)
        self.running.update(zip(numbers, requests, strict=True))
        self._numbers.update(zip([request.id for request in requests], numbers, strict=True))
        self._num_running[m] += len(numbers)
        return len(numbers)

    def _is_short(self, m: int) -> bool:
        """Whether a cell at which requests of a model begin has few ready nodes: no more than a task and a half."""
        enough = 3 * self.num_workers / 2
        return any(self.types[m][c].num_unpinned < enough * self.types[m][c].largest for c in self._entries[m])

    # -- commit -------------------------------------------------------------------------------------

    def _is_eventful(self, flight: Flight, result: TaskResult) -> bool:
        """Whether tasks are committed one by one: a node failed, a chain met its stop symbol, steps are streamed."""
        kind = flight.kind
        if kind.num_streaming or np.count_nonzero(result.flags):
            return True
        if not kind.num_growing or result.error is not None:
            return False
        sub = self.subgraphs
        for o, (emit, values) in enumerate(zip(flight.emits, result.values, strict=True)):
            if emit is not None and values is not None and values.ndim == 1:
                owners = emit.owners[emit.bounds[result.first] : emit.bounds[result.stop]]
                if len(owners) != len(values):
                    return True
                hit = (sub.stop[owners] == values) & (sub.stop_output[owners] == o)
                if np.count_nonzero(hit):
                    return True
        return False

    def _commit_tasks(self, flight: Flight, first: int, stop: int, result: TaskResult, output: CellOutput) -> None:
        """Tasks [first, stop) of a flight; one, or several between which nothing happens."""
        sub, kind = self.subgraphs, flight.kind
        slots = flight.owners[flight.cu_batch[first] : flight.cu_batch[stop]]
        np.subtract.at(sub.uncommitted, slots, 1)
        at_once = stop - first > 1
        if at_once and stop - first == flight.num_tasks and not sub.num_dead:
            done = flight.ending[sub.uncommitted.take(flight.ending) == 0]
        else:
            done = slots[sub.uncommitted.take(slots) == 0]
            if at_once or not flight.plain:  # a subgraph may have had several nodes
                done = np.array([*dict.fromkeys(done.tolist())], np.int64)
        if self.num_workers > 1:
            landed = slots[sub.uncommitted[slots] == sub.left[slots]]
            if len(landed):
                kind.unpin(np.unique(landed), flight.worker)
        some_ended = True
        if result.error is not None:
            alive = slots[sub.dead[slots] == 0]
            for number in np.unique(sub.owner[alive]).tolist():
                self._fail(number, result.error, output)
        else:
            failed = self._fail_nodes(flight, first, stop, result, output)
            self._keep_values(flight, first, stop, result, output, some_ended=failed or sub.num_dead > 0)
            some_ended = failed or sub.num_dead > 0
        if flight.dependants is not None:
            self._release(flight.dependants, first, stop, some_ended=some_ended)
        if len(done):
            self._complete(done, output)

    def _fail_nodes(self, flight: Flight, first: int, stop: int, result: TaskResult, output: CellOutput) -> bool:
        """Requests whose node is not finite, or failed, end; their neighbours do not notice. -> if there are any."""
        base = flight.cu_batch[result.first]
        begin, end = flight.cu_batch[first], flight.cu_batch[stop]
        flags = result.flags[begin - base : end - base]
        if not np.count_nonzero(flags):
            return False
        for k in np.flatnonzero(flags).tolist():
            slot = int(flight.owners[begin + k])
            number = int(self.subgraphs.owner[slot])
            if number == FREE or self.subgraphs.dead[slot]:
                continue
            name = flight.kind.spec.name
            if flags[k] == NodeFlag.NAN:
                reason = (
                    f"cell {name!r} computed a value that is not finite; check the request's values and the weights."
                )
            else:
                reason = result.errors.get(begin + k, f"cell {name!r} failed on this request.")
            self._fail(number, reason, output)
        return True

    def _keep_values(
        self, flight: Flight, first: int, stop: int, result: TaskResult, output: CellOutput, *, some_ended: bool
    ) -> None:
        """Put emitted values where their requests find them, and end chains that met their stop symbol."""
        sub, kind = self.subgraphs, flight.kind
        stopped: list[int] = []
        found: list[tuple[int, IndexArray, IndexArray, Values]] = []
        for o, emit in enumerate(flight.emits):
            if emit is None or emit.bounds[first] == emit.bounds[stop]:
                continue
            begin, end = emit.bounds[first], emit.bounds[stop]
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
            number = int(sub.owner[slot])
            made = int(sub.nodes[slot] - sub.uncommitted[slot])
            self._end_chain(number, slot, made - 1, stopped=True)
            if not self.roster.unfinished[number]:
                self._finish([number], output)

    def _stream(self, kind: CellType, o: int, owners: IndexArray, values: Values, output: CellOutput) -> None:
        """Steps of growing chains whose requests want them as they come."""
        for k in np.flatnonzero(self.subgraphs.loop[owners]).tolist():
            slot = int(owners[k])
            number = int(self.subgraphs.owner[slot])
            request = self.running[number]
            if request.stream:
                ordinal = self.roster.growing[number].slots.index(slot)
                part = next(p for p, part in enumerate(request.graph.parts) if part.cell == kind.cell)
                output.steps.append(CellStep(request.id, ordinal, part, o, values[k]))

    def _release(self, dependants: Dependants, first: int, stop: int, *, some_ended: bool) -> None:
        """Nodes have committed that subgraphs wait for; those that wait for nothing more join their queues."""
        sub = self.subgraphs
        begin, end = dependants.bounds[first], dependants.bounds[stop]
        if begin == end:
            return
        targets = dependants.targets[begin:end]
        if some_ended:
            owners = dependants.owners[begin:end]
            targets = targets[(sub.owner[owners] != FREE) & (sub.dead[owners] == 0)]
        np.subtract.at(sub.waits, targets, 1)
        met = targets[sub.waits.take(targets) == 0]
        if not len(met):
            return
        met = np.array([*dict.fromkeys(met.tolist())])  # in the order in which what they waited for has run
        kinds = sub.kind.take(met)
        for k in sorted(set(kinds.tolist())):
            self._kinds[k].release(met[kinds == k])

    def _complete(self, done: IndexArray, output: CellOutput) -> None:
        """Subgraphs whose last node has committed; a request ends with its last subgraph."""
        sub, unfinished = self.subgraphs, self.roster.unfinished
        if sub.num_dead:
            dead = sub.dead[done] == 1
            self._bury(done[dead])
            done = done[~dead]
        owners = sub.owner.take(done)
        if np.count_nonzero(owners == FREE):  # they ended early in this very task
            done, owners = done[owners != FREE], owners[owners != FREE]
        if not len(done):
            return
        sub.give(done)
        np.subtract.at(unfinished, owners, 1)
        ended = owners[unfinished.take(owners) == 0].tolist()
        if ended:
            self._finish(ended if len(ended) == 1 else [*dict.fromkeys(ended)], output)

    def _end_chain(self, number: int, slot: int, length: int, *, stopped: bool) -> None:
        """A growing chain ends before its limit."""
        growth: Growth = self.roster.growing[number]
        growth.lengths[growth.slots.index(slot)] = (length, stopped)
        self.roster.unfinished[number] -= 1
        self._end_subgraph(number, slot)

    def _end_subgraph(self, number: int, slot: int) -> None:
        """Nothing more of it is submitted; its slot is free when its last task has come back."""
        sub = self.subgraphs
        self._kinds[int(sub.kind[slot])].drop(slot)
        if sub.uncommitted[slot]:
            sub.dead[slot] = 1
            sub.num_dead += 1
            self.roster.num_dead[number] += 1
        else:
            sub.give(np.array([slot]))

    def _bury(self, slots: IndexArray) -> None:
        """Ended subgraphs whose last task has come back."""
        sub, roster = self.subgraphs, self.roster
        if not len(slots):
            return
        owners = sub.owner[slots].tolist()
        sub.dead[slots] = 0
        sub.num_dead -= len(slots)
        sub.give(slots)
        for number in owners:
            roster.num_dead[number] -= 1
            if not roster.num_dead[number] and (request := self.draining.pop(number, None)) is not None:
                self._seats[request.model].give([number])

    def _finish(self, numbers: list[int], output: CellOutput) -> None:
        """All nodes have committed: results go out at once (graph batching: when all of the batch are done).

        The requests are of one model.
        """
        model = self.running[numbers[0]].model
        results = self._seats[model].results(numbers)
        ended = [*zip(self._leave(model, numbers), results, strict=True)]
        if not self.config.graph_batch:
            output.finished += ended
        else:
            self._held[model] += ended
            self._let_go(model, output)

    def _fail(self, number: int, reason: str, output: CellOutput) -> None:
        output.failed.append((self.running[number].id, reason))
        self._end(number, output)

    def _end(self, number: int, output: CellOutput | None = None) -> None:
        """A request ends before its time."""
        sub, request = self.subgraphs, self.running[number]
        for slot in self._seats[request.model].slots_of(number, request.graph).tolist():
            if sub.owner[slot] == number and not sub.dead[slot]:
                self._end_subgraph(number, slot)
        self.roster.unfinished[number] = 0
        self._leave(request.model, [number])
        if self.config.graph_batch:
            self._let_go(request.model, self._late if output is None else output)

    def _let_go(self, model: int, output: CellOutput) -> None:
        if not self._num_running[model]:
            output.finished += self._held[model]
            self._held[model] = []

    def _leave(self, model: int, numbers: list[int]) -> list[str]:
        """They run no longer; their seats are free now, or when the last nodes that name their rows have committed.

        -> their ids.
        """
        seats, growing = self._seats[model], self.roster.growing
        requests = [*map(self.running.pop, numbers)]
        ids = [request.id for request in requests]
        for id in ids:
            del self._numbers[id]
        self._num_running[model] -= len(numbers)
        self._num_requests += len(numbers)
        if seats.num_special:
            for number, request in zip(numbers, requests, strict=True):
                growing.pop(number, None)
                if request.graph.special:
                    seats.count(request, -1)
        if self.subgraphs.num_dead:
            num_dead = self.roster.num_dead
            self.draining.update([(n, request) for n, request in zip(numbers, requests, strict=True) if num_dead[n]])
            numbers = [n for n in numbers if not num_dead[n]]
        seats.give(numbers)
        return ids

    # -- what tables and checks ask -------------------------------------------------------------------

    def _slots_of(self, kind: int) -> IndexArray:
        return np.flatnonzero((self.subgraphs.owner != FREE) & (self.subgraphs.kind == kind))

    def _frames_of(self, number: int, request: CellRequest) -> list[IndexArray]:
        """The frames that a request owns in each bank."""
        return self._seats[request.model].frames(number, request.graph)

    def _dissolve(self) -> None:
        for seats in self._seats:
            seats.dissolve()

    def _parts_of(self, model: int, cell: int) -> set[GraphPart]:
        requests = [*self.running.values(), *self._admissions[model].pending]
        graphs = {request.graph for request in requests if request.model == model}
        return {part for graph in graphs for part in graph.parts if part.cell == cell}

    def _fan(self, slot: int, f: int) -> Sequence[int]:
        return self.running[int(self.subgraphs.owner[slot])].graph.fans[f]
