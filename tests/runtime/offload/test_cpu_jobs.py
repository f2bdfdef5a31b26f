"""The CPU's work for a device: in order, whatever the timing; launched ahead of; never waited for in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cellar.core.errors import DeviceError
from cellar.core.priority import wake_on_time
from cellar.runtime.offload import signal
from cellar.runtime.offload.cpu_jobs import AHEAD, CpuJobs, StepJobs, threads_beside
from cellar.runtime.offload.mover import Fence, opened
from cellar.runtime.offload.signal import WaitingSignal, signal_for
from tests.limits import SECONDS, join_all, until
from tests.runtime.offload.stream import Stream, StreamedSignal

LAYERS = 5
CPU = torch.device("cpu")


class Model:
    """Passes over layers whose product is the CPU's: x goes to a buffer, half by half, the product comes back from
    another, one of each for all layers. Numbers are whole, and a person can compute them.
    """

    def __init__(self, jobs: CpuJobs, stream: Stream, seed: int = 0) -> None:
        self.jobs = jobs
        self._stream = stream
        self._here, self._back = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self._random = np.random.default_rng(seed)
        self._pauses = iter(self._random.uniform(0, 3e-4, 100_000).tolist())
        self.fail: set[tuple[int, int]] = set()  # of which pass and layer the CPU's job fails
        self.multiplied: list[tuple[int, int]] = []

    def launch(self, number: int) -> tuple[StepJobs, list[int]]:
        """One pass; -> what says whether it went well, and what holds its last x once the stream has come there."""
        step, x, found = self.jobs.begin(), np.full(2, number), list[int]()
        for layer in range(LAYERS):
            self.jobs.part()
            self._layer(number, layer, x)
        self._stream.tell(lambda: found.extend(x.tolist()))
        return step, found

    def _layer(self, number: int, layer: int, x: np.ndarray) -> None:
        self._stream.tell(lambda: self._copy(x, self._here))
        arrived = self.jobs.arrived(soon=True)

        def multiply() -> None:
            if (number, layer) in self.fail:
                raise ValueError(f"the product of layer {layer} in pass {number}")
            self.multiplied.append((number, layer))
            self._copy((self._here * 3 + layer) % 9973, self._back)

        job = self.jobs.submit(arrived, multiply)
        self.jobs.hold(job)
        self._stream.tell(lambda: self._copy(self._back, x))

    def _copy(self, source: np.ndarray, target: np.ndarray) -> None:
        for half in range(2):
            target[half] = source[half]
            time.sleep(next(self._pauses))


def wanted(number: int) -> list[int]:
    x = number
    for layer in range(LAYERS):
        x = (3 * x + layer) % 9973
    return [x, x]


@contextmanager
def running(seed: int = 0) -> Iterator[Model]:
    stream = Stream()
    jobs = CpuJobs(StreamedSignal(stream), 1)
    try:
        yield Model(jobs, stream, seed)
    finally:
        jobs.close()
        stream.close()


def passes(runs: int) -> None:
    """Six a run. Raises AssertionError where a pass has not its numbers."""
    for seed in range(runs):
        with running(seed) as model:
            found = [model.launch(number) for number in range(1, 7)]
        for number, (step, x) in enumerate(found, 1):
            step.check()
            assert x == wanted(number)


def test_passes_have_their_numbers_while_others_are_launched() -> None:
    """Six are in flight at once, and share one buffer each way."""
    passes(5)


def _too_early(patch: pytest.MonkeyPatch) -> None:
    """The device does not wait for the product."""
    patch.setattr(StreamedSignal, "hold", lambda self, value: None)


def _without_x(patch: pytest.MonkeyPatch) -> None:
    """The CPU does not wait for x."""
    patch.setattr(StreamedSignal, "arrived", lambda self, soon: opened)


def _one_behind(patch: pytest.MonkeyPatch) -> None:
    """The product before is waited for."""
    plain = StreamedSignal.hold
    patch.setattr(StreamedSignal, "hold", lambda self, value: plain(self, value - 1))


def _said_before(patch: pytest.MonkeyPatch) -> None:
    """The flag is set when the job is taken, and not when it is done."""
    plain = CpuJobs.submit

    def submit(self: CpuJobs, ready: Fence, work: Callable[[], None]) -> int:
        number = self._submitted + 1

        def early() -> None:
            self._signal.set(number)
            work()

        return plain(self, ready, early)

    patch.setattr(CpuJobs, "submit", submit)


@pytest.mark.parametrize("bug", [_too_early, _without_x, _one_behind, _said_before])
def test_planted_bugs_change_numbers(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        passes(20)


def test_a_failure_is_the_steps_own_and_nothing_stands_still() -> None:
    """What comes behind it in its step is left out; steps before and behind it have their numbers."""
    with running() as model:
        model.fail = {(2, 1)}
        found = [model.launch(number) for number in (1, 2, 3)]
    for number in (1, 3):
        step, x = found[number - 1]
        step.check()
        assert x == wanted(number)
    step, x = found[1]
    assert len(x) == 2, "the stream has come to the end"
    with pytest.raises(ValueError, match="layer 1 in pass 2"):
        step.check()
    assert [layer for number, layer in model.multiplied if number == 2] == [0]
    assert len(model.multiplied) == 2 * LAYERS + 1


def test_an_x_that_cannot_be_waited_for_fails_the_step_too() -> None:
    def broken() -> None:
        raise DeviceError("the device has failed")

    with running() as model:
        step = model.jobs.begin()
        model.jobs.hold(model.jobs.submit(broken, lambda: None))
    with pytest.raises(DeviceError, match="has failed"):
        step.check()


def test_launches_run_ahead_so_far_and_no_farther() -> None:
    """While the CPU is at the first part, AHEAD of them are launched; the next one is when it has done that."""
    go_on, launched = threading.Event(), list[int]()
    with running() as model:

        def launch() -> None:
            model.jobs.hold(model.jobs.submit(opened, lambda: None if go_on.wait(SECONDS) else pytest.fail("late")))
            for part in range(3 * AHEAD):
                model.jobs.part()
                launched.append(part)
                model.jobs.hold(model.jobs.submit(opened, lambda: None))

        thread = threading.Thread(target=launch)
        thread.start()
        until(lambda: len(launched) == AHEAD)
        time.sleep(0.02)
        assert len(launched) == AHEAD
        go_on.set()
        thread.join(SECONDS)
        assert len(launched) == 3 * AHEAD


def test_parts_without_work_for_the_cpu_wait_for_what_it_is_at() -> None:
    """They are as many launches as the others."""
    go_on, launched = threading.Event(), list[int]()
    with running() as model:

        def launch() -> None:
            model.jobs.submit(opened, lambda: None if go_on.wait(SECONDS) else pytest.fail("late"))
            for part in range(3 * AHEAD):
                model.jobs.part()
                launched.append(part)

        thread = threading.Thread(target=launch)
        thread.start()
        until(lambda: len(launched) == AHEAD)
        time.sleep(0.02)
        assert len(launched) == AHEAD
        go_on.set()
        thread.join(SECONDS)
        assert len(launched) == 3 * AHEAD


@pytest.mark.parametrize("follows", [True, False])
def test_launches_go_on_when_the_next_job_computes(follows: bool) -> None:
    """And not while its x is on its way: then the CPU's thread wants the interpreter. If there is none, at once."""
    come, launched = threading.Event(), list[int]()
    with running() as model:
        model.jobs.submit(opened, lambda: None)

        def launch() -> None:
            for part in range(AHEAD + 1):
                model.jobs.part()
                launched.append(part)

        model.jobs.part()
        if follows:
            model.jobs.submit(lambda: None if come.wait(SECONDS) else pytest.fail("late"), lambda: None)
        thread = threading.Thread(target=launch)
        thread.start()
        if follows:
            until(lambda: len(launched) == AHEAD - 1)
            time.sleep(0.02)
            assert len(launched) == AHEAD - 1
            come.set()
        thread.join(SECONDS)
        assert len(launched) == AHEAD + 1


def test_closing_does_what_was_submitted_and_takes_no_more() -> None:
    stream = Stream()
    jobs, done = CpuJobs(StreamedSignal(stream), 1), list[int]()
    stream.tell(lambda: time.sleep(0.05))
    for number in range(20):
        jobs.submit(jobs.arrived(soon=False), lambda number=number: done.append(number))  # type: ignore[misc]
    jobs.close()
    assert done == list(range(20))
    jobs.close()
    with pytest.raises(DeviceError, match="closed"):
        jobs.submit(opened, lambda: None)
    stream.close()


def test_where_no_stream_waits_the_thread_that_launches_does() -> None:
    """So on a CPU: what `hold` returns from is done."""
    signal = signal_for(CPU)
    assert isinstance(signal, WaitingSignal)
    jobs, found = CpuJobs(signal, 1), list[int]()
    assert not jobs.runs_ahead

    def work() -> None:
        time.sleep(0.02)
        found.append(torch.get_num_threads())

    job = jobs.submit(jobs.arrived(soon=True), work)
    jobs.hold(job)
    assert found == [1], "on as many threads as it was told"
    jobs.close()


def test_a_thread_is_left_to_whoever_launches() -> None:
    assert threads_beside(5) == 5
    assert threads_beside(None) == max(1, torch.get_num_threads() - 1)


@pytest.mark.parametrize(
    ("value", "before", "after"), [(3, 2, 3), (3, 0, 7), (2**32 + 1, 2**32 - 1, 1), (2**32, 2**32 - 1, 5)]
)
def test_a_word_is_waited_for_and_may_begin_again(value: int, before: int, after: int) -> None:
    word = np.array([before], np.uint32)
    waiting = threading.Thread(target=signal.until, args=(word, value, 2e-6, list))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    word[0] = after
    join_all([waiting])
    signal.until(word, value, 2e-6, list)


def test_a_device_that_has_failed_is_asked() -> None:
    def ask() -> None:
        raise DeviceError("it fell off")

    with pytest.raises(DeviceError, match="fell off"):
        signal.until(np.zeros(1, np.uint32), 1, 2e-6, ask, patience=0.01)


def test_sleeps_end_on_time() -> None:
    """Of a thread that has asked for it, the shortest of many: others may have the core."""
    found: list[float] = []

    def sleeps() -> None:
        wake_on_time()
        for _ in range(300):
            begin = time.perf_counter()
            time.sleep(2e-6)
            found.append(time.perf_counter() - begin)

    thread = threading.Thread(target=sleeps)
    thread.start()
    join_all([thread])
    assert min(found) < 45e-6, "Linux adds 50 us of its own"
