"""Cells: seconds of one task at every batch size, and the best largest batch (BatchMaker §2.2.2, §2.4.2).

A larger batch has a higher rate until the processor is full; from there on it only waits longer. So the best largest
batch is the smallest one whose rate is within a twentieth of the best rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from cellar.core.hardware import Profile, Table
from cellar.core.tasks import BankSpec, CellModelSpec, CellSpec, Port, TaskPlan, Upload
from cellar.ops.recurrent import join_rows, lstm_gates, product
from cellar.ops.recurrent.rows import Rows, RowsFunction, RowsOutput, placed
from cellar.runtime.cells.local import LocalCellRuntime
from cellar.runtime.probes.context import CPU, Probe, ProbeContext

COLUMNS = ("device", "model", "cell", "batch", "seconds")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
HIDDEN = {CPU: 256, "gpu": 1024}
WITHIN = 0.05
_TASKS = 5


def probe(context: ProbeContext, profile: Profile) -> Profile:
    """Adds a step of an LSTM in float32 to `tables["cells"]`, of 256 units on the CPU and 1024 on an accelerator."""
    for name, device in context.devices().items():
        hidden = HIDDEN[name]
        model = (_lstm_spec(hidden), (LSTMStep(hidden),))
        profile = _added(profile, name, [model], str(device), context.seconds)
    return profile


def cells_probe(models: Sequence[tuple[CellModelSpec, Sequence[nn.Module]]]) -> Probe:
    """A probe of models of the user's: every cell at its own batch sizes."""

    def run(context: ProbeContext, profile: Profile) -> Profile:
        for name, device in context.devices().items():
            profile = _added(profile, name, models, str(device), context.seconds)
        return profile

    return run


def best_batch(table: Table, device: str, model: str, cell: str) -> int | None:
    """The smallest batch whose rate is within a twentieth of the best; None if the cell was not measured."""
    rates = {int(b): int(b) / float(s) for d, m, c, b, s in table.rows if (d, m, c) == (device, model, cell)}
    if not rates:
        return None
    enough = (1 - WITHIN) * max(rates.values())
    return min(batch for batch, rate in rates.items() if rate >= enough)


def tuned(spec: CellModelSpec, table: Table, device: str) -> CellModelSpec:
    """A model whose cells have no batch above their best one; cells that were not measured stay as they are."""
    cells = []
    for cell in spec.cells:
        best = best_batch(table, device, spec.name, cell.name) or cell.batch_sizes[-1]
        cells.append(replace(cell, batch_sizes=tuple(size for size in cell.batch_sizes if size <= best)))
    return replace(spec, cells=tuple(cells))


def task_plan(spec: CellModelSpec, cell: int, batch: int) -> TaskPlan:
    """Some tasks of `batch` nodes for a runtime of this model alone; they read and write rows in no order."""
    one = spec.cells[cell]
    generator = np.random.default_rng(batch)
    taken = [1] * len(spec.banks)
    highs = {port.bank: port.high or 2 for port in one.inputs}

    def rows(bank: int) -> np.ndarray:
        first = taken[bank]
        taken[bank] += batch
        return generator.permutation(np.arange(first, first + batch, dtype=np.int32))

    sources = np.array([rows(port.bank) for port in one.inputs if port.bank is not None], np.int32)
    uploads = []
    for bank, count in enumerate(taken):
        if count > 1:
            shape = (count - 1, *spec.banks[bank].shape)
            dtype = spec.banks[bank].dtype
            whole = dtype.startswith(("int", "uint", "bool"))
            values = generator.integers(0, highs[bank], shape) if whole else generator.standard_normal(shape)
            given = np.dtype("float32" if dtype == "bfloat16" else dtype)
            uploads.append(Upload(bank, np.arange(1, count, dtype=np.int32), values.astype(given)))
    targets = [rows(port.bank) for port in one.outputs if port.bank is not None]
    return TaskPlan(
        plan=0,
        worker=0,
        model=0,
        cell=cell,
        cu_batch=np.arange(_TASKS + 1, dtype=np.int32) * np.int32(batch),
        sources=np.tile(sources, (1, _TASKS)),
        rows=np.tile(np.array(targets, np.int32).reshape(-1, batch), (1, _TASKS)),
        emits=tuple(None for _ in one.outputs),
        uploads=tuple(uploads),
    )


def task_seconds(runtime: LocalCellRuntime, plan: TaskPlan) -> list[float]:
    """Seconds of each task of a plan, or of those that are answered together; the uploads come before."""
    nodes = int(plan.cu_batch[1])
    first = replace(
        plan, cu_batch=plan.cu_batch[:2], sources=plan.sources[:, :nodes].copy(), rows=plan.rows[:, :nodes].copy()
    )
    found: list[float] = []
    for one in (first, replace(plan, uploads=())):
        runtime.workers[0].submit(one)
        found.clear()
        while runtime.workers[0].in_flight:
            found += [result.seconds / (result.stop - result.first) for result in runtime.poll(None)]
    return found


def rows_needed(spec: CellModelSpec) -> list[int]:
    """Rows of every bank that `task_plan` takes at the largest batch of any cell."""
    needed = [0] * len(spec.banks)
    for cell in spec.cells:
        for b in range(len(needed)):
            ports = sum(port.bank == b for port in (*cell.inputs, *cell.outputs))
            needed[b] = max(needed[b], 1 + ports * cell.batch_sizes[-1])
    return needed


def _added(
    profile: Profile,
    device: str,
    models: Sequence[tuple[CellModelSpec, Sequence[nn.Module]]],
    place: str,
    seconds: float,
) -> Profile:
    found: list[tuple[float | int | str, ...]] = []
    for spec, modules in models:
        runtime = LocalCellRuntime([spec], [modules], [place], rows=[rows_needed(spec)])
        try:
            for c, cell in enumerate(spec.cells):
                for batch in cell.batch_sizes:
                    took = _best(runtime, spec, c, batch, seconds / len(cell.batch_sizes))
                    found.append((device, spec.name, cell.name, batch, float(f"{took:.3g}")))
        finally:
            runtime.close()
    names = {(row[0], row[1]) for row in found}
    known = profile.tables.get("cells")
    kept = [row for row in known.rows if (row[0], row[1]) not in names] if known is not None else []
    return profile.merged(tables={"cells": Table(COLUMNS, (*kept, *found))})


def _best(runtime: LocalCellRuntime, spec: CellModelSpec, cell: int, batch: int, seconds: float) -> float:
    """The shortest time, because disturbances only ever add."""
    plan = task_plan(spec, cell, batch)
    best, spent = float("inf"), 0.0
    while spent < seconds or spent == 0.0:
        took = task_seconds(runtime, plan)
        best = min(best, *took)
        spent += sum(took)
    return best


def _lstm_spec(hidden: int) -> CellModelSpec:
    state = ((hidden,), "float32", 0)
    inputs = (Port("x", *state), Port("h", *state), Port("c", *state))
    cell = CellSpec("step", inputs, (Port("h", *state), Port("c", *state)), SIZES)
    return CellModelSpec(f"lstm-{hidden}", (cell,), (BankSpec("state", (hidden,), "float32", 2),))


class LSTMStep(nn.Module):
    """(x, h, c) -> (h, c) with random weights, as `cells/lstm.py` runs it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4 * hidden, 2 * hidden) / hidden**0.5)
        self.bias = nn.Parameter(torch.zeros(4 * hidden))

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The step over rows."""
        weight, bias = placed(self.weight, device), self.bias.detach().to(device)

        def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
            x, h, c = sources
            h_out, c_out = (rows for rows in targets if rows is not None)
            gates, rest = product(join_rows((x.table, h.table), (x.index, h.index)), weight, bias)
            finite = lstm_gates(gates, c.table, c.index, h_out.table, h_out.index, c_out.table, c_out.index, rest)
            return RowsOutput(finite, (None, None))

        return step
