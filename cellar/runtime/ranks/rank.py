"""A rank: a runtime with one worker, in a thread or a process of its own, that obeys orders and answers.

group -- orders --> [obey] -- submit, copy, supply --> runtime -- poll --> [answer] -- news --> group
                    its thread or process                       a second thread beside it
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import DeviceError
from cellar.core.messages import CopyBatch, CopyResult, EraseBatch, StepPlan, StepResult, TierOrder
from cellar.runtime.protocol import Capacity, Runtime

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long a rank may take to end by itself."""

Opener = Callable[[], Runtime[StepPlan]]


@dataclass(frozen=True, slots=True)
class Masks:
    """Token bit masks for the masked rows of a submitted step."""

    step: int
    masks: Mapping[int, NDArray[np.int32] | None]


Order = StepPlan | TierOrder | Masks


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank's runtime answered."""

    rank: int
    result: StepResult | CopyResult


@dataclass(frozen=True, slots=True)
class Died:
    """A rank runs no more, and why."""

    rank: int
    reason: str


News = Answer | Died | None


class Rank(Protocol):
    """One of a group."""

    @property
    def capacity(self) -> Capacity:
        """What its runtime has room for."""

    def send(self, order: Order) -> None:
        """Give an order; they are obeyed one after another. Fails silently once the rank has died: that is news."""

    def stop(self) -> None:
        """Tell it to end."""

    def join(self) -> None:
        """Wait for its end, which `stop` was told; a process that does not end is killed."""


class ThreadRank:
    """A rank in a thread of this process. Raises what `opener` raises."""

    def __init__(self, number: int, opener: Opener, news: SimpleQueue[News]) -> None:
        self._number = number
        self._news = news
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._runtime = opener()
        self.capacity = self._runtime.capacity
        self._thread = threading.Thread(target=self._run, name=f"cellar-rank-{number}", daemon=True)
        self._thread.start()

    def send(self, order: Order) -> None:
        self._orders.put(order)

    def stop(self) -> None:
        self._orders.put(None)
        self._runtime.close()  # ends what it waits for

    def join(self) -> None:
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        number, news = self._number, self._news
        obey(
            self._runtime,
            self._orders.get,
            lambda result: news.put(Answer(number, result)),
            lambda reason: news.put(Died(number, reason)),
        )


class ProcessRank:
    """A rank in a process of its own, which `opener` must be able to reach. Raises DeviceError if it does not start."""

    def __init__(self, number: int, opener: Opener, news: SimpleQueue[News]) -> None:
        context = multiprocessing.get_context("spawn")
        self._number = number
        self._news = news
        self._pipe, theirs = context.Pipe()
        self._stopping = False
        self.process: BaseProcess = context.Process(
            target=run_rank, args=(theirs, opener), name=f"cellar-rank-{number}", daemon=True
        )
        self.process.start()
        theirs.close()
        self._ready: Capacity | None = None
        self._reader = threading.Thread(target=self._read, name=f"cellar-rank-{number}", daemon=True)

    @property
    def capacity(self) -> Capacity:
        """Waits for the process the first time."""
        if self._ready is None:
            try:
                said = self._pipe.recv()
            except (EOFError, OSError):
                said = self._how_it_ended()
            if not isinstance(said, Capacity):
                self.stop()
                self.join()
                raise DeviceError(f"rank {self._number} could not be opened: {said}.")
            self._ready = said
            self._reader.start()
        return self._ready

    def send(self, order: Order) -> None:
        with contextlib.suppress(OSError):  # its end is on the way as news
            self._pipe.send(order)

    def stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(OSError):
            self._pipe.send(None)

    def join(self) -> None:
        self.process.join(CLOSE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        if self._reader.is_alive():
            self._reader.join()
        self._pipe.close()

    def _read(self) -> None:
        try:
            while True:
                said = self._pipe.recv()
                self._news.put(Died(self._number, said) if isinstance(said, str) else Answer(self._number, said))
        except (EOFError, OSError):
            if not self._stopping:
                self._news.put(Died(self._number, self._how_it_ended()))

    def _how_it_ended(self) -> str:
        self.process.join(1.0)
        code = self.process.exitcode
        return "its process has ended" + (
            "" if code is None else f" by signal {-code}" if code < 0 else f" with exit code {code}"
        )


def run_rank(pipe: Connection, opener: Opener) -> None:
    """In a rank's process: until it is told to end, or the other end of the pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all processes; the group decides
    try:
        runtime = opener()
    except Exception as error:
        logger.exception("a rank could not be opened")
        pipe.send(f"{type(error).__name__}: {error}")
        return
    lock = threading.Lock()

    def say(what: Any) -> None:
        with lock, contextlib.suppress(OSError):  # nobody listens: the end is near
            pipe.send(what)

    def order() -> Order | None:
        try:
            found: Order | None = pipe.recv()
        except (EOFError, OSError):
            return None
        return found

    say(runtime.capacity)
    obey(runtime, order, say, say)


def obey(
    runtime: Runtime[StepPlan],
    receive: Callable[[], Order | None],
    answer: Callable[[StepResult | CopyResult], None],
    died: Callable[[str], None],
) -> None:
    """Do as `receive` says until it says None, then close the runtime. `died` hears, once, why it cannot go on."""
    ended = threading.Event()
    lock = threading.Lock()

    def fail(error: BaseException) -> None:
        with lock:
            first = not ended.is_set()
            ended.set()
        if first:
            logger.error("a rank has failed", exc_info=error)
            died(f"{type(error).__name__}: {error}")

    def poll() -> None:
        try:
            while not ended.is_set():
                for result in runtime.poll(None):
                    answer(result)
        except BaseException as error:  # whatever it is, nobody may wait for ever
            fail(error)

    poller = threading.Thread(target=poll, name="cellar-rank-poll", daemon=True)
    poller.start()
    try:
        while (order := receive()) is not None and not ended.is_set():
            if isinstance(order, StepPlan):
                runtime.workers[0].submit(order)
            elif isinstance(order, CopyBatch | EraseBatch):
                runtime.copy(order)
            else:
                runtime.supply(order.step, order.masks)
    except BaseException as error:
        fail(error)
    ended.set()
    runtime.close()
    poller.join(CLOSE_SECONDS)
