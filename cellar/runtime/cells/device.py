"""DeviceWorker: an accelerator's tasks, launched by the thread that submits and looked for by the thread that polls.

    submit -> launch -> tasks on their way -> poll: has the first one's event passed?

It has no thread of its own. A launch does not wait for the device, so nothing is gained by handing it on; and each
thread that a plan passes through wakes up late and takes the interpreter from the others (docs/log/cells.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from cellar.core.errors import DeviceError, is_interrupt
from cellar.core.tasks import TaskPlan, TaskResult
from cellar.runtime.cells.executor import failure
from cellar.runtime.cells.graphs import GraphExecutor, Launched


class DeviceWorker:
    """Runs plans first in, first out; what fails makes a result that says so, and the next plan runs.

    `opener` makes the executor. All methods belong to the thread that drives the runtime, whichever that is.
    """

    def __init__(self, number: int, opener: Callable[[], GraphExecutor], device: torch.device) -> None:
        self._id = number
        self._device = device
        self._stream: Any = None if device.type == "cpu" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in_flight = 0
        self._launched: deque[tuple[TaskPlan, Launched | TaskResult]] = deque()
        self._broken: TaskPlan | None = None
        with self._here():
            self._executor: GraphExecutor | None = opener()

    @property
    def id(self) -> int:
        """Number of the worker, from 0."""
        return self._id

    @property
    def in_flight(self) -> int:
        """Plans of which some task has not been answered by `poll`."""
        return self._in_flight

    def submit(self, plan: TaskPlan) -> None:
        """Launch a plan; never waits for the device. Raises DeviceError if the runtime is closed."""
        if self._executor is None:
            raise DeviceError("the runtime is closed and takes no plans; open a new one.")
        self._in_flight += 1
        done = 0
        try:
            with self._here():
                for launched in self._executor.launch(plan):
                    self._launched.append((plan, launched))
                    done = launched.stop
        except BaseException as error:
            if is_interrupt(error):
                raise
            self._launched.append((plan, failure(plan, done, error)))

    def answered(self) -> list[TaskResult]:
        """What has been computed since the last call, in order."""
        found: list[TaskResult] = []
        while self._launched:
            plan, what = self._launched[0]
            if isinstance(what, Launched):
                try:
                    if not what.end.query():
                        break
                    result = what.answer.result(plan, what.start.elapsed_time(what.end) / 1e3)
                except Exception as error:
                    result = failure(plan, what.first, error)
            else:
                result = what
            self._launched.popleft()
            if plan is self._broken:
                continue
            if result.error is not None:
                self._broken = plan
            if result.stop == plan.num_tasks:
                self._in_flight -= 1
            found.append(result)
        return found

    def close(self) -> None:
        """Wait for what was launched, which nobody will ask for, and free the memory."""
        if self._executor is not None:
            self._executor = None
            self._launched.clear()
            if self._stream is not None:
                self._stream.synchronize()

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Inference mode, and the worker's own stream."""
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), stream:
            yield
