"""`python -m benchmarks.cells_gpu`: one task of each cell at every batch size, beside the limit of the same device.

Per cell and batch, in microseconds: a task as the runtime runs it (gather, products, gates, scatter, flags); its matrix
products alone; a task while plans wait in the worker's queue, which is more where the host is the limit. Loads of
requests: `python -m benchmarks.cells`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from benchmarks.cells.models import cell_model
from benchmarks.cells.setup import MODELS, Setup
from cellar.core.errors import CellarError
from cellar.core.tasks import TaskPlan
from cellar.ops.linear.definition import linear
from cellar.ops.recurrent.rows import placed
from cellar.runtime.captured import captured
from cellar.runtime.cells.local import LocalCellRuntime
from cellar.runtime.probes.cells import rows_needed, task_plan, task_seconds
from cellar.runtime.probes.context import best_seconds, synchronize

_REPEATS = 60


@dataclass(frozen=True)
class StepFigure:
    """One cell at one batch size; seconds. `nodes_per_second` and `teraflops` are those of a whole task."""

    model: str
    cell: str
    batch: int
    task: float
    products: float
    queued: float
    nodes_per_second: float
    teraflops: float

    def line(self) -> str:
        """A row of the table, in microseconds."""
        times = [1e6 * seconds for seconds in (self.task, self.products, self.queued)]
        share = self.products / self.task
        return (
            f"{self.cell:8} {self.batch:5d} {times[0]:10.1f} {times[1]:10.1f} {share:6.2f} {times[2]:9.1f} "
            f"{self.nodes_per_second / 1e6:9.3f} {self.teraflops:8.3f}"
        )


HEADER = "cell     batch    task us products us  share queued us  M nodes/s   TFLOP/s"


def figures(setup: Setup, say: Callable[[str], None]) -> list[StepFigure]:
    """Every cell of a model at every batch size."""
    model = cell_model(setup)
    spec = model.spec
    runtime = LocalCellRuntime(
        [spec], [model.modules], [setup.device], rows=[rows_needed(spec)], num_threads=setup.threads
    )
    found = []
    say(HEADER)
    try:
        for c, cell in enumerate(spec.cells):
            shapes = products_of(model.modules[c])
            for batch in cell.batch_sizes:
                plan = task_plan(spec, c, batch)
                task = min(min(task_seconds(runtime, plan)) for _ in range(_REPEATS))
                flops = 2.0 * batch * sum(n * k for n, k in shapes)
                figure = StepFigure(
                    model=spec.name,
                    cell=cell.name,
                    batch=batch,
                    task=task,
                    products=products_seconds(shapes, batch, setup),
                    queued=queued_seconds(runtime, plan),
                    nodes_per_second=batch / task,
                    teraflops=flops / task / 1e12,
                )
                found.append(figure)
                say(figure.line())
    finally:
        runtime.close()
    return found


def products_of(module: nn.Module) -> list[tuple[int, int]]:
    """Matrices [out, in] that a node of a built-in cell is multiplied by; the two of an LSTM's layer are one."""
    found: list[tuple[int, int]] = []
    inputs = {name: weight for name, weight in module.named_parameters() if "weight_ih_l" in name}
    for name, weight in module.named_parameters():
        if weight.dim() != 2 or "embedding" in name or "weight_hh_l" in name:
            continue
        rows, columns = weight.shape
        found.append((rows, columns + rows // 4) if name in inputs else (rows, columns))
    return found


def products_seconds(shapes: Sequence[tuple[int, int]], batch: int, setup: Setup) -> float:
    """The products alone, recorded in one graph of several rounds."""
    device, dtype = setup.torch_device, setup.torch_dtype
    pairs = [
        (torch.randn((batch, k), device=device, dtype=dtype), placed(torch.randn((n, k), dtype=dtype) / k, device))
        for n, k in shapes
    ]
    rounds = 1 if device.type == "cpu" else 5

    def work() -> None:
        for _ in range(rounds):
            for x, weight in pairs:
                linear(x, weight)

    with torch.inference_mode():
        run = captured(work, device)
        return best_seconds(run, 0.1, device) / rounds


def queued_seconds(runtime: LocalCellRuntime, plan: TaskPlan) -> float:
    """Wall time per task when plans wait in the worker's queue: the larger of what host and device need."""
    worker, count = runtime.workers[0], 8
    plan = replace(plan, uploads=())
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            worker.submit(plan)
        while worker.in_flight:
            runtime.poll(None)
        best = min(best, (time.perf_counter() - start) / (count * plan.num_tasks))
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print; the last line is JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cells_gpu", description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-batch", type=int)
    given = parser.parse_args(arguments)
    found: list[StepFigure] = []
    try:
        for model in given.model or MODELS:
            setup = Setup(
                model=model,
                hidden=given.hidden,
                device=given.device,
                dtype=given.dtype,
                threads=given.threads,
                max_batch=given.max_batch,
            ).resolved()
            if setup.threads is not None:
                torch.set_num_threads(setup.threads)
            print(f"{model}, h = {setup.hidden}, {setup.dtype} on {setup.device}", flush=True)
            found += figures(setup, lambda line: print(line, flush=True))
            synchronize(setup.torch_device)
    except CellarError as error:
        print(f"cells_gpu: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"benchmark": "cells_gpu", "figures": [asdict(figure) for figure in found]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
