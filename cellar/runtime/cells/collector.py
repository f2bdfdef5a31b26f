"""What tasks on an accelerator leave on the host: one copy of flags and one per emitted output for several tasks.

A row that an emitted node wrote is fetched at the end, unless a later task writes it again; that, and what lies in no
bank, is fetched behind its task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.tasks import CellSpec, IntArray, NodeFlag, TaskPlan, TaskResult
from cellar.ops.recurrent.rows import RowsOutput
from cellar.runtime.cells.banks import torch_dtype
from cellar.runtime.cells.executor import as_array

Longs = NDArray[np.int64]
NEVER = np.iinfo(np.int16).max
Pinned = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(slots=True, eq=False)
class TaskOutputs:
    """Tasks of a plan from `first` on, with `counts` nodes; complete once the device has got behind them.

    finite  bool [tasks, width] on the host, of each task its first nodes count
    errors  position in the plan -> why that node failed
    """

    first: int
    counts: Sequence[int]
    finite: Tensor
    values: list[Tensor | None]
    errors: dict[int, str] = field(default_factory=dict)

    def result(self, plan: TaskPlan, seconds: float) -> TaskResult:
        """One result for all tasks."""
        flags = node_flags(self.finite.numpy(), self.counts)
        begin = int(plan.cu_batch[self.first])
        for node in self.errors:
            flags[node - begin] = NodeFlag.FAILED
        return TaskResult(
            plan=plan.plan,
            worker=plan.worker,
            first=self.first,
            stop=self.first + len(self.counts),
            flags=flags,
            values=tuple([None if value is None else as_array(value) for value in self.values]),
            errors=self.errors,
            seconds=seconds,
        )


@dataclass(slots=True, eq=False)
class EmittedOutput:
    """One output that goes to the host.

    nodes    how many
    cuts     where each task's nodes begin among them, and their end
    places   row of the bank, or of the task's own output, of each
    table    the bank; None: the task's own output
    at_once  whether all can be fetched behind the last task
    """

    output: int
    cuts: list[int]
    places: IntArray
    table: Tensor | None
    at_once: bool
    host: Tensor | None = None
    index: Tensor | None = None


class OutputCollector:
    """Collects what tasks [first, stop) of a plan leave. `writer`: as `is_overwritten` takes it."""

    def __init__(
        self,
        plan: TaskPlan,
        first: int,
        stop: int,
        cell: CellSpec,
        tables: Sequence[Tensor],
        writer: NDArray[np.int16],
    ) -> None:
        self._plan, self._first, self._stop, self._cell = plan, first, stop, cell
        self._errors: dict[int, str] = {}
        self._emitted = emitted_outputs(plan, first, stop, cell, tables, writer)

    @property
    def places(self) -> list[IntArray]:
        """What `begin` is to be given on the device."""
        return [one.places for one in self._emitted]

    def begin(self, indices: Sequence[Tensor], pinned: Pinned) -> None:
        """Before the tasks run. indices: `places` on the device; `pinned` makes memory for the values."""
        for one, index in zip(self._emitted, indices, strict=True):
            port = self._cell.outputs[one.output]
            one.host = pinned((len(one.places), *port.shape), torch_dtype(port.dtype))
            one.index = index

    def task(self, task: int, output: RowsOutput, errors: dict[int, str]) -> None:
        """Behind a task: fetch what later ones overwrite."""
        for node, text in errors.items():
            self._errors[int(self._plan.cu_batch[task]) + node] = text
        for one in self._emitted:
            if not one.at_once:
                source = output.values[one.output] if one.table is None else one.table
                assert source is not None
                _fetch(one, source, one.cuts[task - self._first], one.cuts[task - self._first + 1])

    def end(self, finite: Tensor, pinned: Pinned) -> TaskOutputs:
        """Behind the last task. finite: bool [tasks or more, width] on the device."""
        tasks = self._stop - self._first
        flags = pinned((tasks, finite.shape[1]), torch.bool)
        flags.copy_(finite[:tasks], non_blocking=True)
        values: list[Tensor | None] = [None] * len(self._plan.emits)
        for one in self._emitted:
            if one.at_once and one.table is not None:
                _fetch(one, one.table, 0, len(one.places))
            values[one.output] = one.host
        cu = self._plan.cu_batch[self._first : self._stop + 1]
        counts = (cu[1:] - cu[:-1]).tolist()
        return TaskOutputs(self._first, counts, flags, values, self._errors)


def _fetch(one: EmittedOutput, source: Tensor, low: int, high: int) -> None:
    assert one.host is not None
    assert one.index is not None
    if low < high:
        one.host[low:high].copy_(source.index_select(0, one.index[low:high]), non_blocking=True)


def emitted_outputs(
    plan: TaskPlan, first: int, stop: int, cell: CellSpec, tables: Sequence[Tensor], writer: NDArray[np.int16]
) -> list[EmittedOutput]:
    """The outputs of tasks [first, stop) that go to the host. `writer`: as `is_overwritten` takes it."""
    cu = plan.cu_batch[first : stop + 1]
    row_of = {o: k for k, o in enumerate(cell.kept)}
    found = []
    for o, nodes in enumerate(plan.emits):
        if nodes is None:
            continue
        bounds = nodes.searchsorted(cu)
        mine, cuts = nodes[bounds[0] : bounds[-1]], bounds - bounds[0]
        bank = cell.outputs[o].bank
        if bank is None:
            places = mine - cu[:-1].repeat(cuts[1:] - cuts[:-1])
            found.append(EmittedOutput(o, cuts.tolist(), places, None, False))
        else:
            places = plan.rows[row_of[o]][mine]
            written = [plan.rows[row_of[other]] for other in cell.kept if cell.outputs[other].bank == bank]
            at_once = not is_overwritten(places, cuts, [rows[cu[0] : cu[-1]] for rows in written], cu, writer)
            found.append(EmittedOutput(o, cuts.tolist(), places, tables[bank], at_once))
    return found


def is_overwritten(
    places: IntArray, cuts: Longs, written: Sequence[IntArray], cu: IntArray, writer: NDArray[np.int16]
) -> bool:
    """Whether a task writes a row again that an earlier one's emitted node wrote.

    Task t's emitted nodes wrote places[cuts[t]:cuts[t + 1]], all of its nodes rows[cu[t] - cu[0]:cu[t + 1] - cu[0]] of
    each `written`. `writer` has `NEVER` for every row, and is given back so.
    """
    tasks = len(cu) - 1
    if not len(places) or cuts[tasks - 1] == 0:  # only the last task's
        return False
    task = np.arange(tasks, dtype=np.int16)
    writer[places[::-1]] = task.repeat(cuts[1:] - cuts[:-1])[::-1]  # of several writes the earliest stays
    of_nodes = task.repeat(cu[1:] - cu[:-1])
    again = any(np.count_nonzero(writer.take(rows) < of_nodes) for rows in written)
    writer[places] = NEVER
    return again


def node_flags(finite: NDArray[np.bool_], counts: Sequence[int]) -> NDArray[np.uint8]:
    """bool [tasks, width], of each task its first counts[t] count -> uint8 [nodes]: OK is 0, NAN is 1."""
    whole = np.concatenate([row[:count] for row, count in zip(finite, counts, strict=True)])
    flags: NDArray[np.uint8] = (~whole).view(np.uint8)
    return flags


def pack_indices(
    plan: TaskPlan,
    first: int,
    stop: int,
    width: int,
    sizes: Sequence[int],
    spares: Sequence[int],
    places: Sequence[IntArray],
    words: Longs,
) -> list[int]:
    """Write what tasks [first, stop) need on the device: per task [columns, width], padded to its size; then `places`.

    -> where each of `places` begins, and the end of all. `spares`: per kept output, the row that pads write.
    """
    num_inputs = len(plan.sources)
    columns = num_inputs + len(plan.rows)
    at = (stop - first) * columns * width
    blocks = words[:at].reshape(stop - first, columns, width)
    cu = plan.cu_batch[first : stop + 1].tolist()
    for block, begin, end, size in zip(blocks, cu, cu[1:], sizes, strict=False):
        count = end - begin
        block[:num_inputs, :count] = plan.sources[:, begin:end]
        block[num_inputs:, :count] = plan.rows[:, begin:end]
        if count < size:
            block[:num_inputs, count:size] = 0  # ZERO_ROW
            for k, spare in enumerate(spares):
                block[num_inputs + k, count:size] = spare
    begins = [at]
    for array in places:
        words[at : at + len(array)] = array
        at += len(array)
        begins.append(at)
    return begins
