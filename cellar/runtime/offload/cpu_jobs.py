"""Work of the CPU for a device, by a thread of its own, so that the one that launches does not wait for it.

    launching thread   x -> here, submit ---- hold ---- what uses the product ...   (of the next layers, too)
    device                x -> here .................. waits for the signal, goes on
    CPU's thread             waits for x, computes, sets the signal

Jobs run in the order in which they were submitted. What is launched behind `hold` finds the job's results; who writes
where a job reads, or reads where it writes, does so behind that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

import torch

from cellar.core.errors import DeviceError
from cellar.core.priority import wake_on_time
from cellar.ops.cpu.launch import use_threads
from cellar.runtime.offload.mover import Fence
from cellar.runtime.offload.signal import Signal, WaitingSignal

AHEAD = 8
"""So many parts of a pass, each a layer of a GPU batch, are launched while the CPU is at the first of them.

A device keeps about a thousand launches that it has not come to, of which these are at most a half. The next one would
wait in the driver, perhaps with the interpreter in its hands, which the CPU's thread needs to go on: all would stand
still.
"""


class StepJobs:
    """Jobs of one step: the first failure is kept, and what comes behind it is left out."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise what a job has raised. The device has come to the step's end."""
        if self.error is not None:
            raise self.error


class _Job(NamedTuple):
    number: int
    ready: Fence
    work: Callable[[], None]
    step: StepJobs


class CpuJobs:
    """A queue of jobs and the thread that does them with `num_threads` of the CPU. `close` ends it."""

    def __init__(self, signal: Signal, num_threads: int) -> None:
        self._signal = signal
        self._passed = WaitingSignal(torch.device("cpu"))  # the jobs that whoever launches need not wait for
        self._num_threads = num_threads
        self._submitted = 0
        self._parts: deque[int] = deque()
        self._step = StepJobs()
        self._closed = False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="cellar-cpu-jobs", daemon=True)
        self._thread.start()

    @property
    def runs_ahead(self) -> bool:
        """Whether who launches goes on while a job is done."""
        return self._signal.runs_ahead

    def begin(self) -> StepJobs:
        """A step begins, to which the jobs from now on belong."""
        self._step = StepJobs()
        return self._step

    def part(self) -> None:
        """A part of a pass is about to be launched. Waits until it is near enough to what the CPU does."""
        self._parts.append(self._submitted)
        if len(self._parts) > AHEAD:
            self._passed.hold(self._parts.popleft())

    def arrived(self, *, soon: bool) -> Fence:
        """See `Signal`."""
        return self._signal.arrived(soon=soon)

    def submit(self, ready: Fence, work: Callable[[], None]) -> int:
        """Have `work` done once `ready` has returned. -> what `hold` wants

        Raises DeviceError if it is closed.
        """
        if self._closed:
            raise DeviceError("the model is closed and the CPU takes no more work for it; open it again.")
        self._submitted += 1
        self._jobs.put(_Job(self._submitted, ready, work, self._step))
        return self._submitted

    def hold(self, number: int) -> None:
        """What is launched from now on waits for that job, done or failed."""
        self._signal.hold(number)

    def close(self) -> None:
        """Do what was submitted, then end the thread. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        use_threads(self._num_threads)
        wake_on_time()
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                try:
                    if job.step.error is None:
                        job.ready()
                    # Who launches goes on now, while this thread computes and leaves the interpreter alone. Between two
                    # jobs both would want it, and the device would wait for the one that gets it last.
                    self._passed.set(job.number - 1)
                    if job.step.error is None:
                        job.work()
                except BaseException as error:
                    job.step.error = error
                finally:
                    # Whatever has become of it: a device that waits would wait for ever.
                    self._signal.set(job.number)
                if self._jobs.empty():
                    self._passed.set(job.number)
                del job
        self._passed.set(self._submitted)


def threads_beside(asked: int | None) -> int:
    """Threads for work beside an accelerator, if nobody says how many: torch's, less one for whoever launches."""
    return max(1, torch.get_num_threads() - 1) if asked is None else asked
