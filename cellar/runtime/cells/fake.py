"""FakeCellRuntime: a runtime of cells without a model, whose outputs a person can compute by hand.

Output o of a node is, in every element e of its shape (counted from 0),

    (1 + o + e + 1 * sum(input 0) + 2 * sum(input 1) + ...) mod 1009

read from simulated banks: per worker and row a value, and whether it was ever written there. So a wrong row, a row
of another worker or one that somebody else overwrote changes the outputs, or rather is found: whatever a real
runtime could not do, or would do wrongly without notice, raises IntegrityError.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cellar.core.errors import IntegrityError
from cellar.core.messages import TierOrder
from cellar.core.tasks import ZERO_ROW, CellCapacity, CellModelSpec, CellSpec, NodeFlag, TaskPlan, TaskResult, Values
from cellar.runtime.cells.results import merged

MODULUS = 1009


def fake_outputs(spec: CellSpec, inputs: Sequence[Values]) -> list[Values]:
    """The formula above. inputs: [batch, *shape] each -> outputs, likewise."""
    batch = len(inputs[0]) if inputs else 1
    total = np.zeros(batch)
    for i, values in enumerate(inputs):
        total = total + (i + 1) * np.asarray(values, np.float64).reshape(batch, -1).sum(axis=1)
    outputs = []
    for o, port in enumerate(spec.outputs):
        element = np.arange(int(np.prod(port.shape)), dtype=np.float64)
        value = (1 + o + element + total[:, None]) % MODULUS
        outputs.append(value.reshape(batch, *port.shape).astype(_dtype(port.dtype)))
    return outputs


def _dtype(name: str) -> np.dtype[np.generic]:
    return np.dtype("float32" if name == "bfloat16" else name)


@dataclass
class _Pending:
    """A submitted plan; `done` of its tasks have run."""

    plan: TaskPlan
    done: int = 0
    ready: float = 0.0


class FakeCellWorker:
    """One first-in first-out queue of a FakeCellRuntime, with banks of its own."""

    def __init__(self, runtime: FakeCellRuntime, id: int) -> None:
        self.id = id
        self.pending: deque[_Pending] = deque()
        self._runtime = runtime
        rows = runtime.capacity.rows
        self.banks = [
            [np.zeros((rows[m][b], *bank.shape), _dtype(bank.dtype)) for b, bank in enumerate(model.banks)]
            for m, model in enumerate(runtime.models)
        ]
        self.written = [
            [np.zeros(rows[m][b], np.bool_) for b in range(len(model.banks))] for m, model in enumerate(runtime.models)
        ]
        for model in self.written:
            for bank in model:
                bank[ZERO_ROW] = True

    @property
    def in_flight(self) -> int:
        """Plans of which some task has not been answered."""
        return len(self.pending)

    def submit(self, plan: TaskPlan) -> None:
        """Hand over a plan; it runs while somebody polls."""
        self._runtime.submit(self, plan)


@dataclass
class FakeCellRuntime:
    """Implements `CellRuntime`.

    latency   seconds that each task lasts
    order     workers, given those with work, that run a task during a poll; default: all
    at_once   how many tasks of a plan a worker runs, and answers as one, during a poll; default: one
    compute   replaces the formula: (model, cell, inputs) -> outputs
    nan, fail whether node n of a plan is not finite, or fails (with this reason)
    break_    why the tasks of a plan fail as a whole, or None
    """

    models: Sequence[CellModelSpec]
    capacity: CellCapacity
    latency: float = 0.0
    order: Callable[[list[int]], list[int]] | None = None
    at_once: Callable[[], int] = lambda: 1
    compute: Callable[[int, int, Sequence[Values]], Sequence[Values]] | None = None
    nan: Callable[[TaskPlan, int], bool] | None = None
    fail: Callable[[TaskPlan, int], str | None] | None = None
    break_: Callable[[TaskPlan], str | None] = lambda plan: None
    num_tasks: int = 0
    batches: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._arrived = threading.Condition()
        self._woken = False
        self._closed = False
        self.workers = [FakeCellWorker(self, w) for w in range(self.capacity.num_workers)]

    def submit(self, worker: FakeCellWorker, plan: TaskPlan) -> None:
        """Check what can be checked before it runs, and queue it."""
        if plan.worker != worker.id:
            raise IntegrityError(f"plan {plan.plan} is for worker {plan.worker}, not {worker.id}")
        self._check(plan)
        with self._arrived:
            worker.pending.append(_Pending(plan))
            self._arrived.notify_all()

    def copy(self, batch: TierOrder) -> None:
        """Raises IntegrityError: rows of cells stay where they are."""
        raise IntegrityError(f"copies {batch.number} are between tiers, and cells have one.")

    def poll(self, timeout: float | None) -> list[TaskResult]:
        """Run a task on each worker that has one, and answer; waits for work up to `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._arrived:
            while not self._woken and not self._closed and not any(worker.pending for worker in self.workers):
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not self._arrived.wait(left):
                    break
            self._woken = False
        busy = [worker.id for worker in self.workers if worker.pending]
        if busy and self.latency:
            time.sleep(self.latency)
        results: list[TaskResult] = []
        for w in self.order(busy) if self.order and busy else busy:
            pending = self.workers[w].pending[0]
            count = min(self.at_once(), pending.plan.num_tasks - pending.done)
            results += [self._step(self.workers[w]) for _ in range(count)]
        return merged(results)

    def wake(self) -> None:
        """End a waiting `poll`."""
        with self._arrived:
            self._woken = True
            self._arrived.notify_all()

    def close(self) -> None:
        """Drop everything."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()

    # -- running ----------------------------------------------------------------------------------

    def _check(self, plan: TaskPlan) -> None:
        spec = self.models[plan.model].cells[plan.cell]
        sizes = np.diff(plan.cu_batch)
        if (
            not len(sizes)
            or sizes.min() < 1
            or sizes.max() > spec.batch_sizes[-1]
            or sizes[1:].min(initial=10**9) < spec.batch_sizes[0]
        ):
            raise IntegrityError(f"plan {plan.plan} has batches {sizes.tolist()}, and sizes are {spec.batch_sizes}")
        shapes = (len(spec.inputs), plan.num_nodes), (len(spec.kept), plan.num_nodes)
        if (plan.sources.shape, plan.rows.shape) != shapes:
            raise IntegrityError(f"plan {plan.plan} has arrays {plan.sources.shape} and {plan.rows.shape}")
        ports = [*zip(spec.inputs, plan.sources, strict=True)]
        ports += [(spec.outputs[o], rows) for o, rows in zip(spec.kept, plan.rows, strict=True)]
        for port, rows in ports:
            assert port.bank is not None
            if rows.min() < 0 or rows.max() >= self.capacity.rows[plan.model][port.bank]:
                raise IntegrityError(f"plan {plan.plan} names a row of {port.name} that its worker does not have")
        for array in (plan.sources, plan.rows, plan.cu_batch):
            if array.dtype != np.int32 or not array.flags.c_contiguous:
                raise IntegrityError(f"plan {plan.plan} has an array that is not contiguous int32")

    def _step(self, worker: FakeCellWorker) -> TaskResult:
        pending = worker.pending[0]
        plan, t = pending.plan, pending.done
        if t == 0:
            self._upload(worker, plan)
        pending.done += 1
        if pending.done == plan.num_tasks:
            worker.pending.popleft()
        error = self.break_(plan)
        outputs = () if error is not None else self._compute(worker, plan, t)
        self.num_tasks += 1
        if error is not None:
            return TaskResult(plan.plan, worker.id, t, t + 1, np.zeros(0, np.uint8), (), error=error)
        begin, end = int(plan.cu_batch[t]), int(plan.cu_batch[t + 1])
        values: list[Values | None] = []
        for output, emit in zip(outputs, plan.emits, strict=True):
            mine = None if emit is None else emit[(emit >= begin) & (emit < end)]
            values.append(None if mine is None else output[mine - begin])
        flags = np.zeros(end - begin, np.uint8)
        errors: dict[int, str] = {}
        for n in range(begin, end):
            if self.nan is not None and self.nan(plan, n):
                flags[n - begin] = NodeFlag.NAN
            elif self.fail is not None and (reason := self.fail(plan, n)) is not None:
                flags[n - begin], errors[n] = NodeFlag.FAILED, reason
        return TaskResult(plan.plan, worker.id, t, t + 1, flags, tuple(values), errors)

    def _upload(self, worker: FakeCellWorker, plan: TaskPlan) -> None:
        banks, written = worker.banks[plan.model], worker.written[plan.model]
        for upload in plan.uploads:
            banks[upload.bank][upload.rows] = upload.values
            if not upload.rows.all() or not np.array_equal(banks[upload.bank][upload.rows], upload.values):
                raise IntegrityError(f"plan {plan.plan} uploads two values to a row, or to the zero row")
            written[upload.bank][upload.rows] = True

    def _compute(self, worker: FakeCellWorker, plan: TaskPlan, t: int) -> Sequence[Values]:
        spec = self.models[plan.model].cells[plan.cell]
        banks, written = worker.banks[plan.model], worker.written[plan.model]
        nodes = slice(int(plan.cu_batch[t]), int(plan.cu_batch[t + 1]))
        self.batches.append(nodes.stop - nodes.start)
        inputs = []
        for i, port in enumerate(spec.inputs):
            assert port.bank is not None
            rows = plan.sources[i, nodes]
            if not written[port.bank][rows].all():
                raise IntegrityError(f"plan {plan.plan} reads a row of {port.name} that is not on worker {worker.id}")
            inputs.append(banks[port.bank][rows])
        outputs = fake_outputs(spec, inputs) if self.compute is None else self.compute(plan.model, plan.cell, inputs)
        for k, o in enumerate(spec.kept):
            bank = spec.outputs[o].bank
            assert bank is not None
            rows = plan.rows[k, nodes]
            read = [plan.sources[i, nodes] for i, port in enumerate(spec.inputs) if port.bank == bank]
            if (
                not rows.all()
                or len(np.unique(rows)) != len(rows)
                or np.isin(rows, np.concatenate([*read, rows[:0]])).any()
            ):
                raise IntegrityError(f"plan {plan.plan} writes a row twice, writes one that it reads, or the zero row")
            banks[bank][rows] = outputs[o]
            written[bank][rows] = True
        return outputs
