"""What crosses between the scheduler and the runtime of cells: specs, `TaskPlan` and `TaskResult`.

Words: a *cell* is a piece of a model that is computed for a batch at once; a *node* is one use of a cell by one
request; a *task* is one cell computed for the nodes of a batch. Every value that a node reads or writes lies in a
row of a *bank*: a bank holds the values of one shape and dtype of one model. Every worker has an array of its own for
each, [num_rows, *shape], whose rows are those of the requests that it runs. Whatever a node reads (another node's
output, a value of the request, zeros) is a row.

Index letters: task t, node n (position in a plan), input i, output o. All ranges are half-open.
bfloat16 crosses as float32, since NumPy has no such type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
Values = NDArray[Any]

ZERO_ROW = 0
"""Row 0 of every bank holds zeros on every worker, always: the runtime makes it so, nobody writes there."""


class NodeFlag(IntEnum):
    """State of one node's result. NAN: a floating output is not finite (`Port.infinite`: is NaN). FAILED: the cell
    raised, or returned a wrong shape, for this node even when it ran alone; `TaskResult.errors` says why."""

    OK = 0
    NAN = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class BankSpec:
    """The values of one shape and dtype of one model. `width` rows, a power of two, are given out together."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    width: int = 1


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a cell, without the batch dimension.

    `bank` indexes `CellModelSpec.banks`; None is an output that no input of the model could read: it is computed and
    perhaps returned, never kept. An integer input from outside is in [0, high) if `high` is set. `infinite`: an output
    may be infinite (a masked logit is -inf); NaN is a failure anyway.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bank: int | None
    high: int | None = None
    infinite: bool = False


@dataclass(frozen=True, slots=True)
class CellSpec:
    """A cell type: what it reads and writes, the batch sizes it is made for, its priority (higher runs first).

    `batch_sizes` ascend; tasks have at most the last of them. The runtime pads a task up to the next size.
    `kept` are the outputs that are written to banks, in order: the rows of `TaskPlan.rows`.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    batch_sizes: tuple[int, ...]
    priority: int = 0
    kept: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", tuple([o for o, port in enumerate(self.outputs) if port.bank is not None]))


@dataclass(frozen=True, slots=True)
class CellModelSpec:
    """A model as scheduler and runtime know it: cells and banks, by index."""

    name: str
    cells: tuple[CellSpec, ...]
    banks: tuple[BankSpec, ...]


@dataclass(frozen=True, slots=True)
class CellCapacity:
    """rows[m][b]: rows of bank b of model m on each worker, a multiple of the bank's width. Those of a request are
    all on one worker; all requests together have `num_workers` times as many.

    `run_ahead`: plans on their way that keep a worker busy, 2 where it computes while the host goes on. `max_tasks`:
    tasks of a plan that suit it, more where a task is short beside what a plan costs the host.
    """

    rows: tuple[tuple[int, ...], ...]
    num_workers: int = 1
    run_ahead: int = 1
    max_tasks: int = 5


@dataclass(frozen=True, slots=True)
class Upload:
    """bank[rows[k]] = values[k] before the tasks of the plan. A row may occur twice, with equal values.

    values: [k, *shape].
    """

    bank: int
    rows: IntArray
    values: Values


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """One call of a worker: 1..MaxTasksToSubmit tasks of one cell, to be run in order, with no wait between them.

    N nodes in T tasks; task t owns nodes [cu_batch[t], cu_batch[t + 1]).

    cu_batch  int32 [T + 1]
    sources   int32 [I, N], C-contiguous: sources[i, n] is the row, in the bank of input i, that node n reads
    rows      int32 [K, N], C-contiguous: rows[k, n] is the row, in the bank of output kept[k], that node n writes
    emits     one per output: the nodes whose output goes back to the host, ascending; None: nobody's

    Within a task rows are written once and no row is both read and written, so nodes may run in any order; a later
    task may read or overwrite what an earlier one wrote. Order: uploads, tasks. All rows are the worker's own.
    """

    plan: int
    worker: int
    model: int
    cell: int
    cu_batch: IntArray
    sources: IntArray
    rows: IntArray
    emits: tuple[IntArray | None, ...]
    uploads: tuple[Upload, ...] = ()

    @property
    def num_tasks(self) -> int:
        """T."""
        return len(self.cu_batch) - 1

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.sources.shape[1] if self.sources.size else int(self.cu_batch[-1])


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Tasks [first, stop) of a plan have finished; ranges of one plan ascend without gaps, plans are FIFO per worker.

    A runtime answers as soon as a task is done, and may answer for several at once.

    flags    uint8 [nodes of these tasks], NodeFlag
    values   one per output: [e, *shape] for the e nodes of these tasks in `emits[o]`, in their order; None: none
    errors   position in the plan -> why that node FAILED
    error    set, and all else empty, if the tasks failed as a whole (the device, not a cell)
    seconds  time that the tasks took on the worker, 0 if unknown
    """

    plan: int
    worker: int
    first: int
    stop: int
    flags: NDArray[np.uint8]
    values: tuple[Values | None, ...]
    errors: Mapping[int, str] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
