"""What a request of a chain costs the host, by part: from the call that brings it to the answer, with no device.

    python -m benchmarks.cell_host [--batch 512] [--hidden 1024] [--seconds 2] [--per-task] [--alone]

A `CellEngine` serves an LSTM over lengths like those of WMT-15 (mean 24, p99 100) with a runtime that answers every
plan at once with zeros, as an accelerator's does: flags and values in one result (`--per-task`: one for each task).
Requests are unfolded beforehand and never run short. They come in groups (`--alone`: one by one, each with a future).
Parts:

    unfold   the user's function and its graph, which may happen in other threads; not in the sum
    submit   from the unfolded request to the mailbox
    add      from the mailbox to the queue
    admit    request slots, rows, values
    plan     choose, batch, gather
    commit   results to requests
    answer   the response, the future
    rest     the loop

Time is that of the processor in this thread, in microseconds a request, over windows of some plans; shown are windows
near the fifth percentile, which on a busy machine is nearest to what the code takes, and the median. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.cells.models import cell_model, sentence_fields
from benchmarks.cells.setup import Setup
from cellar.cells import CellModel
from cellar.core.errors import IntegrityError
from cellar.core.messages import TierOrder
from cellar.core.tasks import CellCapacity, CellModelSpec, TaskPlan, TaskResult, Values
from cellar.engine.cells import CellEngine

PARTS = ("submit", "add", "admit", "plan", "commit", "answer", "rest")
VOCABULARY = 1000
POOL = 4096
GROUP = 256
NODES = 30_000
"""Of a window, about."""
WAITING = 4096
"""Requests that wait at least."""


@dataclass(frozen=True)
class HostCost:
    """Seconds of a request; `parts` add up to `total`. `median` is the total's, `unfold` comes on top."""

    batch: int
    hidden: int
    per_task: bool
    alone: bool
    total: float
    median: float
    nodes: float
    unfold: float
    parts: dict[str, float]

    @property
    def requests_per_second(self) -> float:
        """What one interpreter could serve if nobody else needed it."""
        return 1 / self.total


class _Worker:
    def __init__(self, runtime: NullRuntime) -> None:
        self.id = 0
        self._runtime = runtime

    @property
    def in_flight(self) -> int:
        return len(self._runtime.plans)

    def submit(self, plan: TaskPlan) -> None:
        self._runtime.plans.append(plan)


class NullRuntime:
    """A `CellRuntime` that computes nothing: `poll` answers the oldest plan with zeros."""

    def __init__(self, spec: CellModelSpec, rows: int, *, per_task: bool = False) -> None:
        self.plans: deque[TaskPlan] = deque()
        self.workers = (_Worker(self),)
        self.capacity = CellCapacity((tuple(rows * bank.width for bank in spec.banks),), 1, 2)
        self.num_nodes = 0
        self._spec = spec
        self._per_task = per_task
        self._zeros: dict[tuple[int, ...], Values] = {}

    def copy(self, batch: TierOrder) -> None:
        """Raises IntegrityError: rows of cells stay where they are."""
        raise IntegrityError(f"copies {batch.number} are between tiers, and cells have one.")

    def poll(self, timeout: float | None) -> list[TaskResult]:
        """The results of the oldest plan."""
        if not self.plans:
            return []
        plan = self.plans.popleft()
        self.num_nodes += plan.num_nodes
        step = 1 if self._per_task else plan.num_tasks
        return [self._result(plan, first, first + step) for first in range(0, plan.num_tasks, step)]

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""

    def _result(self, plan: TaskPlan, first: int, stop: int) -> TaskResult:
        begin, end = plan.cu_batch[first], plan.cu_batch[stop]
        values: list[Values | None] = []
        for port, nodes in zip(self._spec.cells[plan.cell].outputs, plan.emits, strict=True):
            if nodes is None:
                values.append(None)
                continue
            count = int(np.diff(nodes.searchsorted((begin, end)))[0])
            zeros = self._zeros.get(port.shape)
            if zeros is None or len(zeros) < count:
                dtype = np.dtype("float32" if port.dtype == "bfloat16" else port.dtype)
                zeros = self._zeros[port.shape] = np.zeros((2 * count, *port.shape), dtype)
            values.append(zeros[:count])
        return TaskResult(plan.plan, 0, first, stop, np.zeros(end - begin, np.uint8), tuple(values))


class Parts:
    """Adds up the processor time of calls by part; of a call within a call only the inner one counts."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inner = 0.0

    def watch(self, owner: object, method: str, part: str) -> None:
        """From now on calls of this method count."""
        function: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            begin = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                spent = time.thread_time() - begin
                self.seconds[part] += spent - self._inner
                self._inner = outer + spent

        setattr(owner, method, timed)


def measure(
    model: CellModel,
    fields: Sequence[dict[str, Any]],
    batch: int,
    seconds: float,
    *,
    per_task: bool = False,
    alone: bool = False,
) -> HostCost:
    """Serve a model for some seconds."""
    unfolded = [model.unfold(one) for one in fields]
    engine = CellEngine([model], NullRuntime(model.spec, 1 << 20, per_task=per_task), check_seconds=float("inf"))
    runtime, scheduler, loop, front = engine.runtime, engine.scheduler, engine.engine, engine.front
    assert isinstance(runtime, NullRuntime)
    parts = Parts()
    for owner, method, part in (
        (engine, "submit_many", "submit"),
        (engine, "submit_unfolded", "submit"),
        (loop, "add", "add"),
        (scheduler.intake, "start", "admit"),
        (scheduler, "plan", "plan"),
        (scheduler, "commit", "commit"),
        (front, "deliver", "answer"),
        (loop, "turn", "rest"),
    ):
        parts.watch(owner, method, part)
    come, waits = 0, scheduler.waiting[0]
    windows: list[tuple[float, float, dict[str, float]]] = []
    futures: deque[Future[Any]] = deque()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(windows) < 20:
        parts.seconds = dict.fromkeys(PARTS, 0.0)
        done, nodes, begin = scheduler.stats().requests, runtime.num_nodes, time.thread_time()
        while runtime.num_nodes < nodes + NODES:
            while len(waits) < WAITING:
                group = [unfolded[(come + k) % len(unfolded)] for k in range(GROUP)]
                come += GROUP
                if alone:
                    futures += [engine.submit_unfolded(model.name, one) for one in group]
                else:
                    futures.append(engine.submit_many(model.name, group))
                front.deliver(loop.turn(0.0))
            front.deliver(loop.turn(0.0))
        spent = time.thread_time() - begin
        while futures and futures[0].done():
            futures.popleft()
        count = scheduler.stats().requests - done
        if count:
            parts.seconds["rest"] += spent - sum(parts.seconds.values())
            windows.append((spent / count, (runtime.num_nodes - nodes) / count, _each(parts.seconds, count)))
    windows = sorted(windows[len(windows) // 4 :], key=lambda window: window[0])
    least = windows[: max(1, len(windows) // 10)]
    engine.close()
    return HostCost(
        batch=batch,
        hidden=model.spec.banks[-1].shape[0],
        per_task=per_task,
        alone=alone,
        total=statistics.mean(total for total, _, _ in least),
        median=windows[len(windows) // 2][0],
        nodes=statistics.mean(count for _, count, _ in least),
        unfold=_unfold_seconds(model, fields),
        parts={part: statistics.mean(found[part] for _, _, found in least) for part in PARTS},
    )


def _each(seconds: dict[str, float], count: int) -> dict[str, float]:
    return {part: spent / count for part, spent in seconds.items()}


def _unfold_seconds(model: CellModel, fields: Sequence[dict[str, Any]]) -> float:
    """Of one request whose form is known."""
    found = []
    for k in range(0, len(fields), GROUP):
        begin = time.thread_time()
        for one in fields[k : k + GROUP]:
            model.unfold(one)
        found.append((time.thread_time() - begin) / len(fields[k : k + GROUP]))
    return min(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and a last line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cell_host", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--per-task", action="store_true")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args(argv)
    found = []
    print(
        "  ".join(["batch", *(f"{part:>6}" for part in PARTS), " total", "median", "requests/s", "M nodes/s", "unfold"])
    )
    for batch in options.batch:
        setup = Setup(
            model="lstm", hidden=options.hidden, vocab=VOCABULARY, device="cpu", max_batch=batch, pool=POOL
        ).resolved()
        model, fields = cell_model(setup), sentence_fields(setup.sentences(), setup)
        cost = measure(model, fields, batch, options.seconds, per_task=options.per_task, alone=options.alone)
        found.append(cost)
        times = [1e6 * seconds for seconds in (*(cost.parts[part] for part in PARTS), cost.total, cost.median)]
        print(
            "  ".join([f"{batch:5}", *(f"{value:6.2f}" for value in times)]),
            f" {cost.requests_per_second:10,.0f}  {cost.nodes / cost.total / 1e6:9.2f}  {1e6 * cost.unfold:6.1f}",
        )
    print(json.dumps({"benchmark": "cell_host", "unit": "s", "costs": [asdict(cost) for cost in found]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
