"""One worker: a queue of plans, the thread that runs them in order, and on an accelerator one that awaits results.

    submit -> plans -> [launch] -> launched -> [await] -> results -> poll
                       worker thread           second thread (accelerator only)

Every wait is on a queue or an event of the device; nobody spins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

import numpy as np
import torch

from cellar.core.errors import CellarError, DeviceError
from cellar.core.messages import CopyResult, IntArray, StepPlan, StepResult
from cellar.runtime.memory import is_out_of_memory
from cellar.runtime.pace import Pace
from cellar.runtime.steps.masks import Closed, MaskBox

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.01
"""Without a plan and without a step under way, until something is prepared."""

Finish = Callable[[], StepResult]
Results: TypeAlias = "SimpleQueue[tuple[StepWorker, StepResult] | CopyResult | Exception | None]"


class Executor(Protocol):
    """Runs one plan at a time."""

    def launch(self, plan: StepPlan, masks: MaskBox, pace: Pace | None = None) -> Finish:
        """Compute the plan, or start to; the function returned waits for the end and makes the result. `pace` sets the
        threads of a CPU.
        """

    def out_of_step(self, error: Exception) -> bool:
        """Whether nothing can run any more after a plan has failed so: other ranks wait for this one."""


class Watcher(Protocol):
    """Is told when there are steps."""

    def begins(self, slots: IntArray) -> None:
        """A plan is submitted, with these slots new in its table."""

    def ended(self) -> None:
        """Its result is there."""


class StepWorker:
    """Runs plans first in, first out; a plan that fails makes a result that says so, and the next one runs, unless the
    executor says that ranks are out of step: then the error is the last result.

    `num_collected` counts the results that `poll` has taken. `prepare` is called while nothing is under way and no plan
    has come for a moment, as long as it says that there was something to do; a plan that comes then waits for one call.
    `watcher` is told of each plan.
    """

    def __init__(
        self,
        number: int,
        executor: Executor,
        results: Results,
        masks: MaskBox,
        device: torch.device,
        num_threads: int | None = None,
        prepare: Callable[[], bool] | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._id = number
        self._executor = executor
        self._results = results
        self._masks = masks
        self._device = device
        self._num_threads = num_threads
        self._prepare = prepare
        self._watcher = watcher
        self._num_begun = self._num_ended = 0
        self._submitted = 0
        self.num_collected = 0
        self._closed = False
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._launched: SimpleQueue[tuple[StepPlan, Finish] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._launch_all, name=f"cellar-worker-{number}", daemon=True)]
        if device.type != "cpu":
            self._threads.append(threading.Thread(target=self._await_all, name=f"cellar-await-{number}", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def id(self) -> int:
        """Number of the worker, from 0."""
        return self._id

    @property
    def in_flight(self) -> int:
        """Plans submitted whose result no `poll` has returned yet."""
        return self._submitted - self.num_collected

    def submit(self, plan: StepPlan) -> None:
        """Hand over a plan; never blocks. Raises DeviceError if the runtime is closed."""
        if self._closed:
            raise DeviceError("the runtime is closed and takes no plans; open a new one.")
        self._submitted += 1
        if self._watcher is not None:
            self._watcher.begins(plan.table.slot)
        if plan.masked_rows:
            self._masks.expect(plan.step)
        self._plans.put(plan)

    def close(self) -> None:
        """Drop the plans that have not begun, and end the threads. The mask box must be closed before."""
        self._closed = True
        self._plans.put(None)
        for thread in self._threads:
            thread.join()
        del self._executor, self._prepare

    def _launch_all(self) -> None:
        with _thread_settings(self._device):
            pace = Pace(self._num_threads, company=self._masks.company) if self._device.type == "cpu" else None
            while (plan := self._next()) is not None and not self._closed:
                self._num_begun += 1
                try:
                    finish = self._executor.launch(plan, self._masks, pace)
                except Closed:
                    break
                except Exception as error:
                    if self._executor.out_of_step(error):
                        self._results.put(error)
                        break
                    finish = _failing(error)
                finally:
                    if plan.masked_rows:
                        self._masks.forget(plan.step)
                if self._device.type == "cpu":
                    self._publish(plan, finish)
                else:
                    self._launched.put((plan, finish))
                del plan, finish
        self._launched.put(None)

    def _next(self) -> StepPlan | None:
        """The next plan; what there is to prepare is prepared while none comes."""
        while self._prepare is not None:
            # Not just now: whoever gets a result has the next plan ready soon.
            idle = self._num_begun == self._num_ended
            with suppress(Empty):
                return self._plans.get(timeout=IDLE_SECONDS)
            if idle and not self._prepared(self._prepare):
                self._prepare = None
        return self._plans.get()

    def _prepared(self, prepare: Callable[[], bool]) -> bool:
        try:
            return prepare()
        except Exception:
            logger.warning("later steps are prepared no further, and run all the same", exc_info=True)
            return False

    def _await_all(self) -> None:
        with _thread_settings(self._device):
            while (launched := self._launched.get()) is not None:
                self._publish(*launched)

    def _publish(self, plan: StepPlan, finish: Finish) -> None:
        try:
            result = finish()
        except Exception as error:
            if self._executor.out_of_step(error):
                self._results.put(error)
                return
            result = _failure(plan.step, error, self._device)
        self._num_ended += 1
        if self._watcher is not None:
            self._watcher.ended()
        self._results.put((self, result))


@contextmanager
def _thread_settings(device: torch.device) -> Iterator[None]:
    """What torch keeps per thread: inference mode, the current device."""
    with torch.inference_mode():
        if device.type == "cpu":
            yield
        else:
            with torch.cuda.device(device):
                yield


def _failing(error: Exception) -> Finish:
    def finish() -> StepResult:
        raise error

    return finish


def _failure(step: int, error: Exception, device: torch.device) -> StepResult:
    """The result of a step that failed as a whole, with one sentence for the user and a traceback in the log."""
    if is_out_of_memory(error):
        cache = (
            "kv_cache_memory_bytes"
            if device.type == "cpu"
            else "the KV cache's memory (gpu_memory_utilization, or kv_cache_memory_bytes where that is set)"
        )
        text = f"step {step} ran out of memory on {device}; lower max_num_batched_tokens, max_num_seqs or {cache}."
    elif isinstance(error, CellarError):
        text = str(error)
    else:
        text = f"step {step} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    logger.error("step %d failed", step, exc_info=error)
    none = np.empty(0, np.int32)
    return StepResult(step, none.reshape(0, 1), none, none, error=text)
