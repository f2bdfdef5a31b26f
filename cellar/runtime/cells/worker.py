"""CellWorker: a queue of plans, and the thread that runs them in order on the CPU.

    submit -> plans -> [worker's thread] -> results -> poll

Every wait is on a queue; nobody spins. Accelerators: cell_device.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch

from cellar.core.errors import DeviceError
from cellar.core.tasks import TaskPlan, TaskResult
from cellar.runtime.cells.executor import CellExecutor, failure
from cellar.runtime.pace import Pace, magnitude

# The worker, one of its results, and whether it is the last of its plan.
Results = SimpleQueue["tuple[CellWorker, TaskResult, bool] | None"]
Opener = Callable[[], CellExecutor]


class CellWorker:
    """Runs plans first in, first out; what fails makes a result that says so, and the next plan runs.

    `opener` makes the executor, in the worker's thread; `alone`: the runtime has no other worker.
    """

    def __init__(
        self,
        number: int,
        opener: Opener,
        results: Results,
        num_threads: int | None,
        *,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self._id = number
        self._opener = opener
        self._results = results
        self._num_threads = num_threads
        self._submitted = 0
        self._collected = 0
        self._closed = False
        self._opened: SimpleQueue[BaseException | None] = SimpleQueue()
        self._plans: SimpleQueue[TaskPlan | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"cellar-cells-{number}", daemon=True)
        self._thread.start()

    @property
    def id(self) -> int:
        """Number of the worker, from 0."""
        return self._id

    @property
    def in_flight(self) -> int:
        """Plans of which some task has not been answered by `poll`."""
        return self._submitted - self._collected

    def ready(self) -> None:
        """Wait until the worker takes plans. Raises what made that impossible."""
        error = self._opened.get()
        if error is not None:
            raise error

    def submit(self, plan: TaskPlan) -> None:
        """Hand over a plan; never blocks. Raises DeviceError if the runtime is closed."""
        if self._closed:
            raise DeviceError("the runtime is closed and takes no plans; open a new one.")
        self._submitted += 1
        self._plans.put(plan)

    def collected(self) -> None:
        """A poll has taken the last result of one of this worker's plans."""
        self._collected += 1

    def close(self) -> None:
        """Drop the plans that have not begun, and end the thread."""
        self._closed = True
        self._plans.put(None)
        self._thread.join()

    def _work(self) -> None:
        with torch.inference_mode():
            pace = Pace(self._num_threads)
            try:
                executor = self._opener()
            except BaseException as error:  # who waits for `ready` must hear of it
                self._opened.put(error)
                return
            self._opened.put(None)
            while (plan := self._plans.get()) is not None and not self._closed:
                # The nodes of a plan's tasks are as many as its time asks for, for tasks of about one size.
                pace.begin((plan.model, plan.cell, magnitude(plan.num_nodes // plan.num_tasks)), plan.num_nodes)
                self._run(executor, plan)
                pace.lap()

    def _run(self, executor: CellExecutor, plan: TaskPlan) -> None:
        """What a task leaves is there when its call returns.

        Results that nobody waits for (no values, nothing wrong, no other worker) are handed over with the next one
        that somebody does, or the last: each wakes a thread that takes the interpreter from the next task.
        """
        done, start = 0, time.perf_counter()
        held: list[TaskResult] = []
        try:
            executor.prepare(plan)
            for answer in executor.tasks(plan):
                end = time.perf_counter()
                result = answer.result(plan, done, end - start)
                held.append(result)
                done, start = result.stop, end
                if not self._alone or done == plan.num_tasks or is_awaited(result):
                    for one in held:
                        self._publish(plan, one)
                    held = []
                if self._closed:
                    return
        except BaseException as error:  # whatever it is, this thread goes on: others wait for the next plans
            for one in held:
                self._publish(plan, one)
            self._publish(plan, failure(plan, done, error))

    def _publish(self, plan: TaskPlan, result: TaskResult) -> None:
        self._results.put((self, result, result.stop == plan.num_tasks))


def is_awaited(result: TaskResult) -> bool:
    """Whether somebody may wait for it: it has values, or something is wrong."""
    return bool(result.flags.any()) or any(values is not None and len(values) > 0 for values in result.values)
