"""Tasks on an accelerator: one CUDA graph per cell and batch size, captured at start (BatchMaker §2.6).

    plan's indices, padded -> [one copy] -> index buffer [task][input or output][node], places of emitted values, tokens
    per task: [graph: its slice of the buffer, the cell, its line of flags]
    per plan: flags and emitted values -> host -> event (per `answer_tasks` tasks)

A graph takes the slice that a counter on the device points at, and moves the counter on: so the tasks of a plan are
replayed one behind the other, with no wait and nothing but a launch between them; its flags go to the line of that
number, so that one copy fetches those of all. A batch of n nodes takes the
graph of the next larger size; the nodes it lacks read row 0 and write the banks' spare rows.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cellar.core.errors import IntegrityError
from cellar.core.tasks import ZERO_ROW, CellModelSpec, CellSpec, IntArray, TaskPlan, Upload
from cellar.ops.recurrent.rows import Rows, RowsFunction, RowsModule, RowsOutput
from cellar.runtime.captured import recording
from cellar.runtime.cells.banks import Banks
from cellar.runtime.cells.collector import NEVER, OutputCollector, TaskOutputs, pack_indices
from cellar.runtime.cells.executor import CellExecutor, bound
from cellar.runtime.cells.functions import guarded

logger = logging.getLogger(__name__)

# Plans whose indices may be on their way at once; more than any run-ahead in use.
_STAGES = 4
# Tasks of a plan whose indices are on the device at once; longer plans go in several parts.
MOST_TASKS = 16
# The counter lies in front of the indices, so that one copy sets it to zero; 16 words keep the alignment.
_HEADER = 16


@dataclass(frozen=True, slots=True)
class Launched:
    """Tasks [first, stop) on their way: `answer` is there once `end` has passed; the device could begin at `start`."""

    first: int
    stop: int
    answer: TaskOutputs
    start: Any
    end: Any


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: RowsOutput


class _Indices:
    """Sources and rows of a plan's tasks on the device: int64 [task, input or output, node], behind the counter.

    Behind them lie other arrays of int64, of up to `others` words.
    """

    def __init__(self, words: int, others: int, device: torch.device) -> None:
        room = _HEADER + words + others
        self._device_side = torch.zeros(room, dtype=torch.int64, device=device)
        self._stages = [torch.zeros(room, dtype=torch.int64, pin_memory=True) for _ in range(_STAGES)]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(_STAGES)]  # type: ignore[no-untyped-call]
        self._next = 0
        self.counter = self._device_side[:1]

    def of(self, columns: int, width: int) -> Tensor:
        """The buffer as a cell sees it: [tasks, columns, width]."""
        return self._device_side[_HEADER : _HEADER + MOST_TASKS * columns * width].view(MOST_TASKS, columns, width)

    def fill(
        self,
        plan: TaskPlan,
        first: int,
        stop: int,
        width: int,
        sizes: Sequence[int],
        spares: Sequence[int],
        others: Sequence[IntArray],
        stream: Any,
    ) -> list[Tensor]:
        """Tasks [first, stop) of a plan in stream order, each padded to its size; the counter at 0.

        -> `others` on the device, good until the next call's copy.
        """
        at = self._next
        self._next = (at + 1) % _STAGES
        self._copied[at].synchronize()
        stage = self._stages[at]
        begins = pack_indices(plan, first, stop, width, sizes, spares, others, stage.numpy()[_HEADER:])
        used = _HEADER + begins[-1]
        self._device_side[:used].copy_(stage[:used], non_blocking=True)
        self._copied[at].record(stream)
        return [self._device_side[_HEADER + begin : _HEADER + end] for begin, end in pairwise(begins)]


class GraphExecutor:
    """Launches tasks on an accelerator; belongs to one thread, whose current stream all work is on.

    `answer_tasks` of a plan are answered at once: each answer costs the host as much as the launch of a task.
    """

    def __init__(
        self,
        models: Sequence[CellModelSpec],
        modules: Sequence[Sequence[torch.nn.Module]],
        functions: Sequence[Sequence[RowsFunction]],
        banks: Banks,
        device: torch.device,
        *,
        capture: bool,
        answer_tasks: int = MOST_TASKS,
    ) -> None:
        self._models = models
        self._modules = modules
        self._functions = functions
        self._banks = banks
        self._device = device
        self._answer_tasks = min(answer_tasks, MOST_TASKS)
        self._plain = CellExecutor(models, functions, banks)
        cells = [cell for model in models for cell in model.cells]
        words = max(_columns(cell) * cell.batch_sizes[-1] for cell in cells)
        places = max(len(cell.outputs) * cell.batch_sizes[-1] for cell in cells)
        self._token_words = 2 * MOST_TASKS * max(len(cell.inputs) * cell.batch_sizes[-1] for cell in cells)
        self._indices = _Indices(MOST_TASKS * words, MOST_TASKS * places + self._token_words, device)
        self._stream: Any = None if device.type == "cpu" else torch.cuda.current_stream(device)
        widest = max(cell.batch_sizes[-1] for cell in cells)
        most_rows = max((len(table) for tables in self._banks.tables for table in tables), default=1)
        self._writer = np.full(most_rows, NEVER, np.int16)
        self._finite = torch.zeros((MOST_TASKS, widest), dtype=torch.bool, device=device)
        self._pool: Any = torch.cuda.graph_pool_handle() if capture else None
        self._captured: dict[tuple[int, int, int], _Captured] = {}
        if capture:
            for m, model in enumerate(models):
                for c in range(len(model.cells)):
                    self._capture_cell(m, c)

    def launch(self, plan: TaskPlan) -> Iterator[Launched]:
        """Start a plan's tasks; never waits for the device."""
        cell = self._models[plan.model].cells[plan.cell]
        start = _event()
        start.record(self._stream)
        tables = self._banks.tables[plan.model]
        tokens, uploads = self._divided(plan, tables)
        self._plain.prepare(plan, uploads)
        spares = [self._banks.spares[plan.model][bank] for bank in _kept_banks(cell)]
        counts = (plan.cu_batch[1:] - plan.cu_batch[:-1]).tolist()
        for first in range(0, plan.num_tasks, self._answer_tasks):
            stop = min(first + self._answer_tasks, plan.num_tasks)
            sizes = [_size(cell, count) for count in counts[first:stop]]
            collector = OutputCollector(plan, first, stop, cell, tables, self._writer)
            places = collector.places
            others = places + [array for upload in tokens for array in (upload.rows, upload.values)]
            there = self._indices.fill(plan, first, stop, cell.batch_sizes[-1], sizes, spares, others, self._stream)
            for k, upload in enumerate(tokens):
                tables[upload.bank].index_copy_(0, *there[len(places) + 2 * k :][:2])
            tokens = []  # they are there for the later parts
            collector.begin(there[: len(places)], _pinned)
            for t in range(first, stop):
                output, errors = self._run(plan.model, plan.cell, t - first, sizes[t - first], counts[t])
                collector.task(t, output, errors)
            answer = collector.end(self._finite, _pinned)
            end = _event()
            end.record(self._stream)
            yield Launched(first, stop, answer, start, end)
            start = end

    def _divided(self, plan: TaskPlan, tables: Sequence[Tensor]) -> tuple[list[Upload], list[Upload]]:
        """-> the uploads that go up with the indices, because they are as small, and the others."""
        tokens: list[Upload] = []
        others: list[Upload] = []
        room = self._token_words
        for upload in plan.uploads:
            is_token = upload.values.dtype == np.int64 and upload.values.ndim == 1
            fits = is_token and tables[upload.bank].dtype == torch.int64 and 2 * len(upload.rows) <= room
            (tokens if fits else others).append(upload)
            room -= 2 * len(upload.rows) * fits
        return tokens, others

    def _run(self, model: int, cell: int, slot: int, size: int, count: int) -> tuple[RowsOutput, dict[int, str]]:
        captured = self._captured.get((model, cell, size))
        if captured is None:
            spec = self._models[model].cells[cell]
            block = self._indices.of(_columns(spec), spec.batch_sizes[-1])[slot, :, :count]
            output, errors = guarded(self._functions[model][cell], spec, *self._bound(model, spec, block), count)
            self._finite[slot, :count].copy_(output.finite)
            return output, errors
        captured.graph.replay()
        return captured.output, {}

    def _bound(self, model: int, spec: CellSpec, block: Tensor) -> tuple[list[Rows], list[Rows | None]]:
        """block: [inputs and kept outputs, nodes]."""
        indices, num_inputs = block.unbind(0), len(spec.inputs)
        return bound(spec, self._banks.tables[model], indices[:num_inputs], indices[num_inputs:])

    def _step(self, model: int, cell: int, buffer: Tensor) -> Callable[[], RowsOutput]:
        """What a graph does. buffer: [tasks, inputs and kept outputs, size]."""
        spec, counter = self._models[model].cells[cell], self._indices.counter
        finite = self._finite[:, : buffer.shape[2]]

        def step() -> RowsOutput:
            block = buffer.index_select(0, counter)[0]
            output = self._functions[model][cell](*self._bound(model, spec, block))
            finite.index_copy_(0, counter, output.finite[None])
            counter.add_(1)
            return output

        return step

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
        """Warm up on spare rows, then record."""
        counter, step = self._indices.counter, self._step(model, cell, buffer)
        counter.zero_()
        step()
        torch.cuda.synchronize(self._device)
        counter.zero_()
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self._pool, self._stream):
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
