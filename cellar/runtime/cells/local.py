"""LocalCellRuntime: models of cells in this process, on any number of workers, each the CPU or one accelerator."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue

import torch
from torch import nn

from cellar.core.cores import num_cores
from cellar.core.errors import ConfigError, IntegrityError
from cellar.core.messages import TierOrder
from cellar.core.tasks import CellCapacity, CellModelSpec, TaskResult
from cellar.ops.recurrent.rows import RowsFunction
from cellar.runtime.cells.banks import Banks, bank_rows
from cellar.runtime.cells.device import DeviceWorker
from cellar.runtime.cells.executor import CellExecutor
from cellar.runtime.cells.functions import placed_modules, rows_function
from cellar.runtime.cells.graphs import MOST_TASKS, GraphExecutor
from cellar.runtime.cells.results import merged
from cellar.runtime.cells.worker import CellWorker, Results
from cellar.runtime.device import resolve_device
from cellar.runtime.memory import GIB, device_free
from cellar.runtime.transfer import uploader

# Of the memory that is free, for the banks of all models of one worker.
CPU_SHARE, CPU_LIMIT = 0.25, 2 * GIB
DEVICE_SHARE = 0.5
# Seconds between two looks at a device that computes, while nothing else is to be done.
_LOOK_SECONDS = 2e-5


class LocalCellRuntime:
    """Implements `CellRuntime`. `poll` belongs to the thread that submits, which launches what accelerators do; `wake`
    to any.

    models[m] and modules[m][c] are specs and torch modules (cell c of model m). `devices` has one entry per worker; on
    the CPU workers are threads of this process. `memory_bytes` bounds each worker's banks, `rows[m][b]` fixes them, for
    its own requests only: more workers have room for more requests;
    `num_threads` is the number of CPU threads of a worker's operations (None: chosen while it runs, at most torch's;
    several CPU workers divide the cores). `enforce_eager`: no graphs. `answer_tasks`: of how many tasks of a plan an
    accelerator gives the results at once; with 1 each is handed over as soon as it is done, which costs the host as
    much as its launch.
    Raises DeviceError, ConfigError, CapacityError.
    """

    def __init__(
        self,
        models: Sequence[CellModelSpec],
        modules: Sequence[Sequence[nn.Module]],
        devices: Sequence[str] = ("auto",),
        *,
        memory_bytes: int | None = None,
        rows: Sequence[Sequence[int]] | None = None,
        num_threads: int | None = None,
        enforce_eager: bool = False,
        answer_tasks: int = MOST_TASKS,
    ) -> None:
        if not models or not devices:
            raise ConfigError("a runtime of cells needs at least one model and one device.")
        if answer_tasks < 1:
            raise ConfigError(f"answer_tasks is {answer_tasks}; it must be at least 1.")
        places = [resolve_device(name) for name in devices]
        # In a thread of its own, which takes its OpenMP team with it when it ends (see `local.open_local`).
        with ThreadPoolExecutor(1, "cellar-open") as thread:
            functions = thread.submit(_functions, models, modules, places).result()
        if rows is None:
            nbytes = memory_bytes or min(_share(place, places.count(place)) for place in places)
            rows = bank_rows(models, nbytes)
        shape = tuple(tuple(counts) for counts in rows)
        if all(place.type == "cpu" for place in places):
            self._capacity = CellCapacity(shape, len(places))
        else:
            self._capacity = CellCapacity(shape, len(places), run_ahead=2, max_tasks=MOST_TASKS)
        banks = [Banks(models, rows, place, uploader(place)) for place in places]
        self._results: Results = SimpleQueue()
        self._closed = False
        self._workers: list[CellWorker | DeviceWorker] = []
        self._devices: list[DeviceWorker] = []
        for place in dict.fromkeys(places):
            if place.type != "cpu":
                # Weights and banks were filled by other threads; the workers' first tasks must find them.
                torch.cuda.synchronize(place)
        hosts = sum(place.type == "cpu" for place in places)
        if hosts > 1 and num_threads is None:
            # Teams of several workers on the same cores would wait for each other.
            num_threads = max(1, num_cores() // hosts)
        opened = partial(GraphExecutor, capture=not enforce_eager, answer_tasks=answer_tasks)
        try:
            for k, place in enumerate(places):
                own = functions[k]
                if place.type == "cpu":
                    opener = partial(CellExecutor, models, own, banks[k])
                    worker = CellWorker(k, opener, self._results, num_threads, alone=len(places) == 1)
                    self._workers.append(worker)
                    worker.ready()
                else:
                    graphs = partial(opened, models, modules, own, banks[k], place)
                    self._devices.append(DeviceWorker(k, graphs, place))
                    self._workers.append(self._devices[-1])
        except Exception:
            self.close()
            raise

    @property
    def workers(self) -> Sequence[CellWorker | DeviceWorker]:
        """Worker k has id k."""
        return self._workers

    @property
    def capacity(self) -> CellCapacity:
        """Rows of every bank, fixed at start."""
        return self._capacity

    def copy(self, batch: TierOrder) -> None:
        """Raises IntegrityError: rows of cells stay where they are."""
        raise IntegrityError(f"copies {batch.number} are between tiers, and cells have one.")

    def poll(self, timeout: float | None) -> list[TaskResult]:
        """Results so far, FIFO per worker; waits up to `timeout` seconds (None: for ever) for a first one or `wake`.

        Tasks of one plan that have finished meanwhile are one result.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        woken = self._closed
        while True:
            found = [result for worker in self._devices for result in worker.answered()]
            left = 0.0 if found or woken else end - time.monotonic()
            busy = any(worker.in_flight for worker in self._devices)
            woken |= self._received(found, min(left, _LOOK_SECONDS) if busy else left)
            if found or woken or left <= 0:
                return merged(found) if len(found) > 1 else found

    def _received(self, found: list[TaskResult], seconds: float) -> bool:
        """Add what the CPU's workers have, waiting for a first one. -> whether somebody called `wake`."""
        queue, woken = self._results, False
        try:
            item = queue.get(seconds > 0, None if seconds == math.inf else max(seconds, 0.0))
            while True:
                if item is None:
                    woken = True
                else:
                    worker, result, last = item
                    if last:
                        worker.collected()
                    found.append(result)
                item = queue.get_nowait()
        except Empty:
            return woken

    def wake(self) -> None:
        """End a waiting `poll` from another thread; if none waits, the next one returns at once."""
        self._results.put(None)

    def close(self) -> None:
        """Stop the workers after the tasks they are at, drop later plans. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.close()
        self.wake()


def _functions(
    models: Sequence[CellModelSpec], modules: Sequence[Sequence[nn.Module]], places: Sequence[torch.device]
) -> list[list[list[RowsFunction]]]:
    """Every cell's function, per worker. Workers of the CPU share them; on an accelerator products have counters on the
    device, which two streams must not use at a time, but workers of one device share its weights."""

    def made(own: Sequence[Sequence[nn.Module]], place: torch.device) -> list[list[RowsFunction]]:
        return [
            [rows_function(module, spec, place) for module, spec in zip(cells, model.cells, strict=True)]
            for cells, model in zip(own, models, strict=True)
        ]

    with torch.inference_mode():
        there = {place: placed_modules(modules, place) for place in dict.fromkeys(places)}
        hosts = [made(there[place], place) for place in there if place.type == "cpu"]
        return [hosts[0] if place.type == "cpu" else made(there[place], place) for place in places]


def _share(place: torch.device, sharers: int) -> int:
    free = device_free(place)
    nbytes = min(CPU_SHARE * free, CPU_LIMIT) if place.type == "cpu" else DEVICE_SHARE * free
    return int(nbytes / sharers)
