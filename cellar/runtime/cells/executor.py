"""CellExecutor: runs the tasks of a plan on one device, each a gather, a cell and a scatter.

    plan -> uploads -> task 0, task 1, ... -> per task: flags and emitted values -> host

Nothing waits: on an accelerator a task's answer is a function that is called when its event has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.errors import CellarError
from cellar.core.tasks import CellModelSpec, CellSpec, IntArray, NodeFlag, TaskPlan, TaskResult, Upload, Values
from cellar.ops.recurrent.rows import Rows, RowsFunction, RowsOutput, StepsFunction
from cellar.runtime.cells.banks import Banks
from cellar.runtime.cells.functions import guarded, is_of_the_cell
from cellar.runtime.memory import is_out_of_memory

logger = logging.getLogger(__name__)

Longs = NDArray[np.int64]


@dataclass(slots=True)
class Answer:
    """What a task has left on the host, before or after it is there (pinned memory).

    `num_tasks`: how many tasks were one call. The flags are those of all of them, or of the last if the others have
    left nothing.
    """

    flags: Tensor
    values: list[Tensor | None]
    errors: dict[int, str] = field(default_factory=dict)
    num_tasks: int = 1

    def result(self, plan: TaskPlan, task: int, seconds: float) -> TaskResult:
        """The result of `num_tasks` tasks from `task` on; `errors` count nodes in the last, here in the plan."""
        flags = (~self.flags.numpy()).view(np.uint8)  # OK is 0, NAN is 1
        last = task + self.num_tasks - 1
        first = int(plan.cu_batch[last])
        for node in self.errors:
            flags[node] = NodeFlag.FAILED
        missing = int(plan.cu_batch[last + 1]) - int(plan.cu_batch[task]) - len(flags)
        if missing:
            flags = np.concatenate((np.zeros(missing, np.uint8), flags))
        return TaskResult(
            plan=plan.plan,
            worker=plan.worker,
            first=task,
            stop=last + 1,
            flags=flags,
            values=tuple(None if value is None else as_array(value) for value in self.values),
            errors={first + node: text for node, text in self.errors.items()},
            seconds=seconds,
        )


def as_array(values: Tensor) -> Values:
    """A tensor on the host as NumPy has it; bfloat16 as float32."""
    found: Values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return found


def failure(plan: TaskPlan, first: int, error: BaseException) -> TaskResult:
    """The answer for tasks [first, end) of a plan whose device failed, with a traceback in the log."""
    if is_out_of_memory(error):
        text = (
            f"plan {plan.plan} ran out of memory; lower the largest of the cells' batch_sizes, or serve fewer models "
            "(in Python also memory_bytes)."
        )
    elif isinstance(error, CellarError):
        text = str(error)
    else:
        text = f"plan {plan.plan} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    logger.error("plan %d failed", plan.plan, exc_info=error)
    none = tuple(None for _ in plan.emits)
    return TaskResult(plan.plan, plan.worker, first, plan.num_tasks, np.empty(0, np.uint8), none, error=text)


class CellExecutor:
    """Runs tasks on the CPU, or kernel by kernel on an accelerator.

    `functions[m][c]` is cell c of model m.
    """

    def __init__(
        self,
        models: Sequence[CellModelSpec],
        functions: Sequence[Sequence[RowsFunction]],
        banks: Banks,
    ) -> None:
        self._models = models
        self._functions = functions
        self._banks = banks

    def prepare(self, plan: TaskPlan, uploads: Sequence[Upload] | None = None) -> None:
        """Uploads, or those of them that are given."""
        for upload in plan.uploads if uploads is None else uploads:
            self._banks.put(plan.model, upload.bank, upload.rows, upload.values)

    def tasks(self, plan: TaskPlan) -> Iterator[Answer]:
        """Run a prepared plan on the host's tensors, task by task."""
        cell = self._models[plan.model].cells[plan.cell]
        sizes = np.diff(plan.cu_batch).tolist()
        tables = self._banks.tables[plan.model]
        function = self._functions[plan.model][plan.cell]
        # Column by column and cut by torch: slices made one by one in Python take as long as a small cell.
        sources = [_cut(index, sizes) for index in plan.sources]
        rows = [_cut(index, sizes) for index in plan.rows]
        emitted = Emitted(plan, cell.kept)
        runs = _runs(plan, cell, function, sizes, emitted) if isinstance(function, StepsFunction) else {}
        t = 0
        while t < len(sizes):
            first, batch, errors = t, sizes[t], dict[int, str]()
            output: RowsOutput | None = None
            if t in runs:
                assert isinstance(function, StepsFunction)
                last = t + runs[t] - 1
                output, targets = _several(function, cell, tables, sources, rows, t, last)
                if output is None:
                    del runs[t]  # one step at a time finds out whose fault it is
                    continue
                t = last
            else:
                inputs, targets = bound(cell, tables, [index[t] for index in sources], [index[t] for index in rows])
                output, errors = guarded(function, cell, inputs, targets, batch)
            every = function.every if t > first and isinstance(function, StepsFunction) else frozenset[int]()
            yield Answer(output.finite, _values(emitted, first, t, output, targets, every), errors, t + 1 - first)
            t += 1


def _runs(
    plan: TaskPlan, cell: CellSpec, function: StepsFunction, sizes: Sequence[int], emitted: Emitted
) -> dict[int, int]:
    """`step_runs`, where the batches are small enough for it."""
    most = function.most
    if most is not None and min(sizes) > most:
        return {}
    found = step_runs(plan, cell, function.carried, sizes, emitted, function.every)
    return found if most is None else {first: count for first, count in found.items() if sizes[first] <= most}


def step_runs(
    plan: TaskPlan,
    cell: CellSpec,
    carried: Mapping[int, int],
    sizes: Sequence[int],
    emitted: Emitted,
    every: Collection[int] = (),
) -> dict[int, int]:
    """First task -> number of tasks, for tasks that may be one call of several steps.

    They are steps of the same nodes in the same order, each of which reads what the one before wrote; nobody else
    reads what lies in between: the nodes write two frames by turns, and of the steps between no output is emitted but
    those in `every`.
    """
    row_of = {o: k for k, o in enumerate(cell.kept)}
    count = len(sizes)
    if count < 2 or any(o not in row_of for o in carried.values()):
        return {}
    cu = plan.cu_batch.tolist()

    def of_tasks(index: IntArray) -> list[bytes]:
        return [index[cu[t] : cu[t + 1]].tobytes() for t in range(count)]  # compared faster than arrays

    pairs = [(of_tasks(plan.sources[i]), of_tasks(plan.rows[row_of[o]])) for i, o in carried.items()]
    found: dict[int, int] = {}
    first = 0
    while first < count - 1:
        last = first
        while (
            last + 1 < count
            and emitted.silent(last, every)
            and all(read[last + 1] == written[last] for read, written in pairs)
            and (last == first or all(written[last + 1] == written[last - 1] for _, written in pairs))
        ):
            last += 1
        # Of two tasks alone, the second must write where the first has read: else their frames may not go by turns.
        if last == first + 1 and not all(written[last] == read[first] for read, written in pairs):
            last = first
        if last > first:
            found[first] = last - first + 1
        first = last + 1
    return found


def _several(
    function: StepsFunction,
    cell: CellSpec,
    tables: Sequence[Tensor],
    sources: Sequence[Sequence[Tensor]],
    rows: Sequence[Sequence[Tensor]],
    first: int,
    last: int,
) -> tuple[RowsOutput | None, list[Rows | None]]:
    """Tasks [first, last] in one call -> the output of the last and where it lies; None if a step raised."""
    read = [
        index[first] if i in function.carried else torch.cat(list(index[first : last + 1]))
        for i, index in enumerate(sources)
    ]
    inputs, targets = bound(cell, tables, read, [index[last] for index in rows])
    try:
        return function.run(inputs, last - first + 1, targets), targets
    except BaseException as error:
        if not is_of_the_cell(error):
            raise
        logger.debug("several steps of cell %s at once raised", cell.name, exc_info=True)
        return None, targets


def _values(
    emitted: Emitted,
    first: int,
    last: int,
    output: RowsOutput,
    targets: Sequence[Rows | None],
    every: Collection[int],
) -> list[Tensor | None]:
    """What tasks [first, last] emit: of the outputs `every` all of them, of others only the last."""
    if not emitted.any:
        return emitted.none
    values: list[Tensor | None] = []
    for o, (target, value) in enumerate(zip(targets, output.values, strict=True)):
        if target is not None and value is None:
            rows = emitted.rows_of(o, last)
            values.append(None if rows is None else target.table.index_select(0, rows))
            continue
        nodes = emitted.of(o, first if o in every else last, last)
        if nodes is None:
            values.append(None)
        else:
            assert value is not None
            whole = len(nodes) == len(value)
            values.append(value if whole else value.index_select(0, torch.from_numpy(nodes)))
    return values


def bound(
    cell: CellSpec, tables: Sequence[Tensor], sources: Sequence[Tensor], rows: Sequence[Tensor]
) -> tuple[list[Rows], list[Rows | None]]:
    """A task's indices, [b] each, with their tables: sources per input, rows per kept output."""
    inputs = []
    for port, index in zip(cell.inputs, sources, strict=True):
        assert port.bank is not None
        inputs.append(Rows(tables[port.bank], index))
    kept = iter(rows)
    targets = [None if port.bank is None else Rows(tables[port.bank], next(kept)) for port in cell.outputs]
    return inputs, targets


class Emitted:
    """The nodes of each task whose outputs go to the host, as numbers within the task, or as the rows they write."""

    def __init__(self, plan: TaskPlan, kept: Sequence[int] = ()) -> None:
        self._cu = plan.cu_batch
        self._written = dict(zip(kept, plan.rows, strict=False))
        self._rows: dict[int, Sequence[Tensor]] = {}
        self._emits = plan.emits
        self.any = any(nodes is not None for nodes in plan.emits)
        self.none: list[Tensor | None] = [None for _ in plan.emits]
        self._cuts = [None if nodes is None else np.searchsorted(nodes, plan.cu_batch) for nodes in plan.emits]

    def silent(self, task: int, but: Collection[int] = ()) -> bool:
        """True if no output of the task goes to the host, `but` aside."""
        return all(cuts is None or cuts[task] == cuts[task + 1] or o in but for o, cuts in enumerate(self._cuts))

    def of(self, output: int, first: int, last: int) -> Longs | None:
        """Of tasks [first, last], as numbers within them; None where the whole plan emits none."""
        nodes, cuts = self._emits[output], self._cuts[output]
        if nodes is None or cuts is None:
            return None
        return nodes[cuts[first] : cuts[last + 1]].astype(np.int64) - int(self._cu[first])

    def rows_of(self, output: int, task: int) -> Tensor | None:
        """The rows that a task's emitted nodes write; None where the whole plan emits none."""
        nodes, cuts = self._emits[output], self._cuts[output]
        if nodes is None or cuts is None:
            return None
        if output not in self._rows:
            self._rows[output] = _cut(self._written[output].take(nodes), np.diff(cuts).tolist())
        return self._rows[output][task]


def _cut(index: IntArray, sizes: list[int]) -> Sequence[Tensor]:
    """Rows of a plan's nodes, as tensors of the sizes of its tasks."""
    return torch.from_numpy(index.astype(np.int64)).split_with_sizes(sizes)
