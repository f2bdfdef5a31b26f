"""Time of the cell scheduler alone: plan and commit of batched chains, and add + finish of requests, with no runtime.

    python -m benchmarks.cell_schedule [--batch 64 512] [--length 24] [--present 3 16] [--per-task] [--seconds 2]

An LSTM of one cell (inputs token, h, c) serves chains of `--length` nodes; `--present` batches of requests are always
there, so that every batch is full and requests join and leave all the time: with few, those that a plan has room for
are admitted with every plan; with many, admission shares its costs among more. From the time of that and of chains ten
times as long follow the costs of a node (plan and commit) and of a request (add, admission, finish). A plan's results
are committed at once, as an accelerator's come, or task by task with `--per-task`.

Time is that of the processor, over windows of a few calls: their fifth percentile, which on a busy machine is nearest
to what the code takes, and their median. `all` is nodes over the time of everything. The project's limits: 5 million
nodes/s at batch 512, 1 million at 64, 5 us a request. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from cellar.core.cell_graphs import (
    NO_STOP,
    NUM_COLUMNS,
    VALUE_SLOTS,
    CellConfig,
    CellGraph,
    CellRequest,
    Column,
    Field,
    GraphPart,
)
from cellar.core.tasks import BankSpec, CellCapacity, CellModelSpec, CellSpec, Port, TaskResult
from cellar.schedule.cells.scheduler import CellScheduler

LIMIT_NODES = {64: 1e6, 512: 5e6}
LIMIT_REQUEST_SECONDS = 5e-6
HIDDEN = 1024
LONG = 10
CALLS = 4


@dataclass(frozen=True)
class Timing:
    """Figures of one batch size; the limit is None where the project sets none."""

    batch: int
    length: int
    present: int
    per_task: bool
    nodes_per_second: float
    median_nodes_per_second: float
    seconds_per_request: float
    median_seconds_per_request: float
    all_nodes_per_second: float
    limit_nodes: float | None
    limit_request_seconds: float = LIMIT_REQUEST_SECONDS


def lstm_spec(batch: int) -> CellModelSpec:
    """One LSTM cell whose hidden state of the last step is returned."""
    state = (HIDDEN,)
    cell = CellSpec(
        "lstm",
        (Port("token", (), "int64", 0), Port("h", state, "float32", 1), Port("c", state, "float32", 1)),
        (Port("h", state, "float32", 1), Port("c", state, "float32", 1), Port("label", (), "int64", None)),
        tuple(1 << k for k in range(batch.bit_length())),
    )
    return CellModelSpec("lstm", (cell,), (BankSpec("tokens", (), "int64"), BankSpec("states", state, "float32", 2)))


def chain_graph(length: int) -> CellGraph:
    """A chain whose last node returns a label; as `cells/compiler.py` makes it."""
    k = np.arange(length)
    table = np.zeros((length, NUM_COLUMNS + 3 + 2 + 3), np.int32)
    token, h, c, new_h, new_c, number, *others = range(NUM_COLUMNS, table.shape[1])
    slots = min(1 << (length - 1).bit_length(), VALUE_SLOTS)
    states = 1 + slots  # where the codes of states begin
    mine, before = states + 2 * (1 + (k & 1)), states + 2 * (2 - (k & 1))
    table[:, token], table[:, number], table[:, others] = 1 + k % VALUE_SLOTS, k, -1
    table[:, h], table[:, c] = before, before + 1
    table[0, [h, c]] = states
    table[:, new_h], table[:, new_c] = mine, mine + 1
    table[:, Column.READY], table[:, Column.DEP] = 1, -1
    table[-1, Column.EMIT] = 1 << 2
    fields = np.zeros((1, len(Field)), np.int32)
    fields[0, [Field.ROWS, Field.NODES]] = length
    part = GraphPart(0, table, (0,), 1, (2,), True, False, False)
    return CellGraph((part,), fields, np.array([NO_STOP]), (0,), (slots, 2), states + 6, (length, 0), (), length)


def measure(batch: int, length: int, seconds: float, present: int = 3, *, per_task: bool = False) -> Timing:
    """Times chains of `length` and of ten times that length, and takes both costs from the two."""
    short = _seconds_per_node(batch, length, seconds, present, per_task)
    long = _seconds_per_node(batch, length * LONG, seconds, present, per_task)
    (best_node, best), (median_node, median) = (
        _costs(share(short), share(long), length) for share in (_least, statistics.median)
    )
    return Timing(
        batch,
        length,
        present,
        per_task,
        1 / best_node,
        1 / median_node,
        best,
        median,
        1 / _least(short),
        LIMIT_NODES.get(batch),
    )


def _costs(short: float, long: float, length: int) -> tuple[float, float]:
    """Seconds of a node and of a request, given the time by node with chains of `length` and of ten times that."""
    request = (short - long) * length * LONG / (LONG - 1)
    return long - request / (length * LONG), request


def _least(windows: list[float]) -> float:
    """The fifth percentile: what is left if nobody else uses the core, or its twin."""
    return statistics.quantiles(windows, n=20)[0]


def _seconds_per_node(batch: int, length: int, seconds: float, present: int, per_task: bool) -> list[float]:
    """Processor time of this thread by node, over windows of a few calls, while present * batch chains are there."""
    rng = np.random.default_rng(0)
    graphs = {n: chain_graph(n) for n in range(length - length // 2, length + length // 2 + 1)}
    lengths = rng.integers(min(graphs), max(graphs) + 1, 4096).tolist()
    tokens = [rng.integers(0, 1000, n) for n in lengths]
    frames = 4 * (present + 1) * batch * VALUE_SLOTS
    scheduler = CellScheduler([lstm_spec(batch)], CellCapacity(((frames, 2 * frames),)), CellConfig())
    most = batch * scheduler.max_tasks
    labels, flags = np.zeros(most, np.int64), np.zeros(most, np.uint8)
    added = running = 0
    waiting: deque[CellRequest] = deque()
    windows: list[float] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(windows) < 40:
        while len(waiting) < (present + 1) * batch * CALLS:
            k = added % len(tokens)
            waiting.append(CellRequest(str(added), 0, graphs[lengths[k]], (tokens[k], None)))
            added += 1
        nodes, begin = 0, time.thread_time()
        for _ in range(CALLS):
            if running < present * batch:
                for _ in range(present * batch - running):
                    scheduler.add(waiting.popleft())
                running = present * batch
            plan = scheduler.plan(0)
            assert plan is not None
            cu = plan.cu_batch.tolist()
            step = 1 if per_task else plan.num_tasks
            for t in range(0, plan.num_tasks, step):
                size = cu[t + step] - cu[t]
                result = TaskResult(plan.plan, 0, t, t + step, flags[:size], (None, None, labels[:size]))
                running -= len(scheduler.commit(result).finished)
            nodes += cu[-1]
        windows.append((time.thread_time() - begin) / nodes)
    return windows[len(windows) // 4 :]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and a last line of JSON; 1 if a figure is on the wrong side of its limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cell_schedule", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=sorted(LIMIT_NODES))
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--present", type=int, nargs="+", default=[3, 16])
    parser.add_argument("--per-task", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args(argv)
    timings = [
        measure(batch, options.length, options.seconds, present, per_task=options.per_task)
        for batch in options.batch
        for present in options.present
    ]
    print(f"{'':15}  {'plan + commit, M nodes/s':^24}  {'add + finish, us/request':^24}  {'all':>6}")
    columns = f"{'least':>8}{'median':>8}{'limit':>8}"
    print(f"{'batch':>6}  {'present':>7}  {columns}  {columns}  {'M/s':>6}")
    for t in timings:
        limit = "-" if t.limit_nodes is None else f"{t.limit_nodes / 1e6:.0f}"
        print(
            f"{t.batch:6}  {t.present:7}  "
            f"{t.nodes_per_second / 1e6:8.2f}{t.median_nodes_per_second / 1e6:8.2f}{limit:>8}  "
            f"{t.seconds_per_request * 1e6:8.2f}{t.median_seconds_per_request * 1e6:8.2f}"
            f"{t.limit_request_seconds * 1e6:8.0f}  {t.all_nodes_per_second / 1e6:6.2f}"
        )
    print(json.dumps({"benchmark": "cell_schedule", "unit": "s", "timings": [asdict(t) for t in timings]}))
    slow = [t for t in timings if t.limit_nodes and t.nodes_per_second < t.limit_nodes]
    return int(bool(slow) or any(t.seconds_per_request > t.limit_request_seconds for t in timings))


if __name__ == "__main__":
    sys.exit(main())
