"""Tasks on an accelerator: one CUDA graph per cell and batch size, captured at start (thesis 001, section 2.6).

    plan's indices, padded -> [one copy] -> index buffer [task][input or output][node]
    per task: [graph: its slice of the buffer, the cell, flags] -> flags and emitted values -> host -> event

A graph takes the slice that a counter on the device points at, and moves the counter on: so the tasks of a plan are
replayed one behind the other, with no wait and nothing but a launch between them. A batch of n nodes takes the
graph of the next larger size; the nodes it lacks read row 0 and write the banks' spare rows.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cellar.core.errors import IntegrityError
from cellar.core.tasks import ZERO_ROW, CellModelSpec, CellSpec, TaskPlan
from cellar.ops.rows import Rows, RowsFunction, RowsModule, RowsOutput
from cellar.runtime.cell_banks import Banks, torch_dtype
from cellar.runtime.cell_executor import Answer, CellExecutor, bound
from cellar.runtime.cell_functions import guarded
from cellar.runtime.transfer import Upload

logger = logging.getLogger(__name__)

# Plans whose indices may be on their way at once; more than any run-ahead in use.
_STAGES = 4
# Tasks of a plan whose indices are on the device at once; longer plans go in several parts.
_MOST_TASKS = 8
# The counter lies in front of the indices, so that one copy sets it to zero; 16 words keep the alignment.
_HEADER = 16


@dataclass(frozen=True, slots=True)
class Launched:
    """A task on its way: `answer` is there once `end` has passed; the device could begin at `start`."""

    task: int
    answer: Answer
    start: Any
    end: Any


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: RowsOutput


class _Indices:
    """Sources and rows of a plan's tasks on the device: int64 [task, input or output, node], behind the counter."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._device_side = torch.zeros(_HEADER + words, dtype=torch.int64, device=device)
        self._stages = [torch.zeros(_HEADER + words, dtype=torch.int64, pin_memory=True) for _ in range(_STAGES)]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(_STAGES)]  # type: ignore[no-untyped-call]
        self._next = 0
        self.counter = self._device_side[:1]

    def of(self, columns: int, width: int) -> Tensor:
        """The buffer as a cell sees it: [tasks, columns, width]."""
        return self._device_side[_HEADER : _HEADER + _MOST_TASKS * columns * width].view(_MOST_TASKS, columns, width)

    def fill(
        self, plan: TaskPlan, first: int, stop: int, width: int, sizes: Sequence[int], spares: Sequence[int]
    ) -> None:
        """Tasks [first, stop) of a plan in stream order, each padded to its size; the counter at 0."""
        at = self._next
        self._next = (at + 1) % _STAGES
        self._copied[at].synchronize()
        num_inputs, num_rows = len(plan.sources), len(plan.rows)
        columns = num_inputs + num_rows
        used = _HEADER + (stop - first) * columns * width
        stage = self._stages[at]
        words = stage.numpy()[_HEADER:used].reshape(stop - first, columns, width)
        for t in range(first, stop):
            begin, end = int(plan.cu_batch[t]), int(plan.cu_batch[t + 1])
            block, count, size = words[t - first], end - begin, sizes[t - first]
            block[:num_inputs, :count] = plan.sources[:, begin:end]
            block[num_inputs:, :count] = plan.rows[:, begin:end]
            if count < size:
                block[:num_inputs, count:size] = ZERO_ROW
                for k, spare in enumerate(spares):
                    block[num_inputs + k, count:size] = spare
        self._device_side[:used].copy_(stage[:used], non_blocking=True)
        self._copied[at].record()


class _Harvest:
    """What the tasks of a plan leave on the host: one pinned block for flags and one per emitted output, filled task by
    task while the next one may already run.
    """

    def __init__(self, plan: TaskPlan, cell: CellSpec, tables: Sequence[Tensor], upload: Upload) -> None:
        self._cu: list[int] = plan.cu_batch.tolist()
        self._flags = _pinned((plan.num_nodes,), torch.bool)
        self._outputs: list[_Wanted | None] = [None for _ in plan.emits]
        row_of = {o: k for k, o in enumerate(cell.kept)}
        arrays, wanted = [], []
        for o, nodes in enumerate(plan.emits):
            if nodes is None:
                continue
            port = cell.outputs[o]
            host = _pinned((len(nodes), *port.shape), torch_dtype(port.dtype))
            table = None if port.bank is None else tables[port.bank]
            wanted.append(_Wanted(o, np.searchsorted(nodes, plan.cu_batch).tolist(), host, table))
            # Of a bank its rows; else places in the task's own output.
            places = (
                plan.rows[row_of[o]][nodes]
                if o in row_of
                else nodes - np.repeat(plan.cu_batch[:-1], np.diff(wanted[-1].cuts))
            )
            arrays.append(places.astype(np.int64))
        filled = [array for array in arrays if len(array)]
        there = iter(upload(filled) if filled else ())
        for one, array in zip(wanted, arrays, strict=True):
            one.index = next(there) if len(array) else None
            self._outputs[one.output] = one

    def take(self, task: int, output: RowsOutput, errors: dict[int, str]) -> Answer:
        """Send a task's flags and values on their way, before a later task overwrites them."""
        first, stop = self._cu[task], self._cu[task + 1]
        flags = self._flags[first:stop]
        flags.copy_(output.finite[: stop - first], non_blocking=True)
        values: list[Tensor | None] = []
        for wanted in self._outputs:
            if wanted is None:
                values.append(None)
                continue
            low, high = wanted.cuts[task], wanted.cuts[task + 1]
            target = wanted.host[low:high]
            if low < high and wanted.index is not None:
                table = output.values[wanted.output] if wanted.table is None else wanted.table
                assert table is not None
                target.copy_(table.index_select(0, wanted.index[low:high]), non_blocking=True)
            values.append(target)
        return Answer(flags, values, errors)


@dataclass(slots=True)
class _Wanted:
    """One output that goes to the host: where each task's nodes begin in `host` and in `index` (on the device)."""

    output: int
    cuts: list[int]
    host: Tensor
    table: Tensor | None
    index: Tensor | None = None


class GraphExecutor:
    """Launches tasks on an accelerator; belongs to one thread, whose current stream all work is on."""

    def __init__(
        self,
        models: Sequence[CellModelSpec],
        modules: Sequence[Sequence[torch.nn.Module]],
        functions: Sequence[Sequence[RowsFunction]],
        banks: Sequence[Banks],
        worker: int,
        device: torch.device,
        upload: Upload,
        *,
        capture: bool,
    ) -> None:
        self._models = models
        self._modules = modules
        self._functions = functions
        self._banks = banks[worker]
        self._device = device
        self._upload = upload
        self._plain = CellExecutor(models, functions, banks, worker)
        cells = [cell for model in models for cell in model.cells]
        self._indices = _Indices(_MOST_TASKS * max(_columns(cell) * cell.batch_sizes[-1] for cell in cells), device)
        self._pool: Any = torch.cuda.graph_pool_handle() if capture else None
        self._captured: dict[tuple[int, int, int], _Captured] = {}
        if capture:
            for m, model in enumerate(models):
                for c in range(len(model.cells)):
                    self._capture_cell(m, c)

    def launch(self, plan: TaskPlan) -> Iterator[Launched]:
        """Start a plan's tasks one by one; never waits for the device."""
        cell = self._models[plan.model].cells[plan.cell]
        start = _event()
        start.record()
        self._plain.prepare(plan)
        harvest = _Harvest(plan, cell, self._banks.tables[plan.model], self._upload)
        spares = [self._banks.spares[plan.model][bank] for bank in _kept_banks(cell)]
        counts = np.diff(plan.cu_batch).tolist()
        for begin in range(0, plan.num_tasks, _MOST_TASKS):
            end = min(begin + _MOST_TASKS, plan.num_tasks)
            sizes = [_size(cell, count) for count in counts[begin:end]]
            self._indices.fill(plan, begin, end, cell.batch_sizes[-1], sizes, spares)
            for t in range(begin, end):
                output, errors = self._run(plan.model, plan.cell, t - begin, sizes[t - begin], counts[t])
                answer = harvest.take(t, output, errors)
                done = _event()
                done.record()
                yield Launched(t, answer, start, done)
                start = done

    def _run(self, model: int, cell: int, slot: int, size: int, count: int) -> tuple[RowsOutput, dict[int, str]]:
        captured = self._captured.get((model, cell, size))
        if captured is None:
            spec = self._models[model].cells[cell]
            block = self._indices.of(_columns(spec), spec.batch_sizes[-1])[slot, :, :count]
            return guarded(self._functions[model][cell], spec, *self._bound(model, spec, block), count)
        captured.graph.replay()
        return captured.output, {}

    def _bound(self, model: int, spec: CellSpec, block: Tensor) -> tuple[list[Rows], list[Rows | None]]:
        """block: [inputs and kept outputs, nodes]."""
        indices, num_inputs = block.unbind(0), len(spec.inputs)
        return bound(spec, self._banks.tables[model], indices[:num_inputs], indices[num_inputs:])

    def _step(self, model: int, cell: int, block: Tensor) -> RowsOutput:
        return self._functions[model][cell](*self._bound(model, self._models[model].cells[cell], block))

    def _capture_cell(self, model: int, cell: int) -> None:
        spec = self._models[model].cells[cell]
        buffer = self._indices.of(_columns(spec), spec.batch_sizes[-1])
        buffer[:, : len(spec.inputs)] = ZERO_ROW
        for k, bank in enumerate(_kept_banks(spec)):
            buffer[:, len(spec.inputs) + k] = self._banks.spares[model][bank]
        # The largest first, so that the smaller ones find their memory in its pool.
        for size in reversed(spec.batch_sizes):
            try:
                self._captured[model, cell, size] = self._capture(model, cell, buffer[:, :, :size])
            except Exception as error:
                if isinstance(self._modules[model][cell], RowsModule) or isinstance(error, torch.OutOfMemoryError):
                    raise
                # A module of the user's may do on the host what no graph can hold, e.g. look at a value.
                logger.warning("cell %s is not captured, but launched kernel by kernel: %s", spec.name, error)
                torch.cuda.synchronize(self._device)
                # torch may take the pool for one that is still being recorded to.
                self._pool = torch.cuda.graph_pool_handle()
                for other in spec.batch_sizes:
                    self._captured.pop((model, cell, other), None)
                return

    def _capture(self, model: int, cell: int, buffer: Tensor) -> _Captured:
        """buffer: [tasks, inputs and kept outputs, size]. Warm up on spare rows, then record."""
        counter = self._indices.counter

        def step() -> RowsOutput:
            block = buffer.index_select(0, counter)[0]
            counter.add_(1)
            return self._step(model, cell, block)

        counter.zero_()
        step()
        torch.cuda.synchronize(self._device)
        counter.zero_()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with the device: another runtime's, or one that waits for an event.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step()
        return _Captured(graph, output)


def _columns(cell: CellSpec) -> int:
    return len(cell.inputs) + len(cell.kept)


def _kept_banks(cell: CellSpec) -> list[int]:
    return [port.bank for port in cell.outputs if port.bank is not None]


def _size(cell: CellSpec, count: int) -> int:
    at = bisect_left(cell.batch_sizes, count)
    if at == len(cell.batch_sizes):
        raise IntegrityError(f"a task of {count} nodes of cell {cell.name} is larger than {cell.batch_sizes[-1]}.")
    return cell.batch_sizes[at]


def _event() -> Any:
    """An event that knows its time, and whose waiter sleeps."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of the host that the device writes to by itself."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)
