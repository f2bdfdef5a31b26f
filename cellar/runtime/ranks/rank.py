"""A rank: a runtime with one worker, in a thread or a process of its own, that obeys orders and answers.

group -- orders --> [obey] -- submit, copy, supply --> runtime -- poll --> [answer] -- news --> group
                    its thread or process                       a second thread beside it

A process ends when it is told to, when its runtime fails, and when the process that started it is gone, however that
ended: nobody else holds the other end of its lifeline.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Full, Queue, SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import CapacityError, CellarError
from cellar.core.messages import CopyBatch, CopyResult, EraseBatch, StepPlan, StepResult, TierOrder
from cellar.runtime.memory import is_out_of_memory
from cellar.runtime.protocol import Capacity, Runtime
from cellar.runtime.ranks.comm import GONE
from cellar.runtime.ranks.lines import Answer, read, written
from cellar.runtime.ranks.pace import Pulse

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 4.0
"""How long ranks may take to end by themselves."""

PULSE_SECONDS = 1.0
"""How often a rank's process says that it lives."""

MOST_UNSENT = 1024
"""How many orders may wait to be taken. An engine runs a step or two ahead, so such a rank has long been lost."""

MOST_AT_ONCE = 2**15
"""Bytes of an order that is written by who gives it, if the pipe has room: its buffer is several times as large, and
room is at least most of it."""

SWITCH_SECONDS = 0.001
"""How long a thread of a rank's process may keep the interpreter to itself: copies are asked for beside its steps."""

STREAM_QUEUES = "32"
"""Queues of a GPU for a rank's streams: two streams in one queue, of which the first waits, would both wait."""

OUT_OF_MEMORY = "its memory ran out; take a smaller or quantized model, more ranks, or give KV less memory."

Opener = Callable[[], Runtime[StepPlan]]


@dataclass(frozen=True, slots=True)
class Masks:
    """Token bit masks for the masked rows of a submitted step."""

    step: int
    masks: Mapping[int, NDArray[np.int32] | None]


Order = StepPlan | TierOrder | Masks


@dataclass(frozen=True, slots=True)
class Opened:
    """A rank's runtime is there. `memory`: what it takes, `offload`: where its weights lie, if it says so."""

    rank: int
    capacity: Capacity
    memory: Any = None
    offload: Any = None


@dataclass(frozen=True, slots=True)
class Died:
    """A rank runs no more, and why. `error` is what a user can mend; `follows`: it went because another one did."""

    rank: int
    reason: str
    error: CellarError | None = None
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Alive:
    """A rank's process runs, whatever its runtime waits for. `pulse`: what it says of its pace; None: not open yet."""

    pulse: Pulse | None = None


News = Opened | Answer | Died | None


class Rank(Protocol):
    """One of a group. It begins to open at once, and all that it says is news: first `Opened`, or `Died`."""

    @property
    def heard(self) -> float | None:
        """When its process last said that it lives (`time.monotonic`); None: it has none of its own."""

    @property
    def pulse(self) -> Pulse | None:
        """What its process last said of its pace, if it has."""

    def send(self, order: Order, packed: Packed) -> None:
        """Give an order; they are obeyed one after another. Never blocks, and fails silently once the rank has died:
        that is news.
        """

    def stop(self) -> None:
        """Tell it to end, after what it was told before."""

    def join(self, seconds: float) -> None:
        """Wait so long for its end; a process that has not ended then is killed."""


class Packed:
    """An order as bytes, made once for all ranks that want them."""

    def __init__(self, order: Order | None) -> None:
        self._order = order
        self._bytes: bytes | None = None

    def bytes(self) -> bytes:
        """As `read` takes them."""
        if self._bytes is None:
            self._bytes = written(self._order)
        return self._bytes


STOP = Packed(None)
"""The order to end."""


class ThreadRank:
    """A rank in a thread of this process."""

    def __init__(self, number: int, opener: Opener, news: SimpleQueue[News]) -> None:
        self._number = number
        self._news = news
        self._opener = opener
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"cellar-rank-{number}", daemon=True)
        self._thread.start()

    @property
    def heard(self) -> None:
        return None

    @property
    def pulse(self) -> None:
        return None

    def send(self, order: Order, packed: Packed) -> None:
        self._orders.put(order)

    def stop(self) -> None:
        self._orders.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        number, news = self._number, self._news
        try:
            runtime = self._opener()
        except Exception as error:
            news.put(_death(number, error))
            return
        news.put(Opened(number, runtime.capacity))
        obey(
            runtime,
            self._orders.get,
            lambda result: news.put(Answer(number, result)),
            lambda error: news.put(_death(number, error)),
        )


class ProcessRank:
    """A rank in a process of its own, which `opener` must be able to reach.

    Small orders are written at once while there is room for them, all others by a thread: a process that is stopped
    takes none once its socket is full, and who gives them must be free to find that out.
    """

    def __init__(self, number: int, opener: Opener, news: SimpleQueue[News]) -> None:
        context = multiprocessing.get_context("spawn")
        self._number = number
        self._news = news
        self._pipe, theirs = context.Pipe()
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self._stopping = False
        self.heard = time.monotonic()
        self.pulse: Pulse | None = None
        self.process: BaseProcess = context.Process(
            target=run_rank,
            args=(number, theirs, lifeline, opener, logging.getLogger().getEffectiveLevel()),
            name=f"cellar-rank-{number}",
        )
        with _without_main():
            self.process.start()
        theirs.close()
        lifeline.close()
        atexit.register(self._lifeline.close)  # at exit multiprocessing waits for the process
        self._reader = threading.Thread(target=self._read, name=f"cellar-rank-{number}", daemon=True)
        self._reader.start()
        self._orders: Queue[Packed] = Queue(MOST_UNSENT)
        self._room = select.poll()
        self._room.register(self._pipe.fileno(), select.POLLOUT)
        self._sending = threading.Lock()
        self._unsent = 0  # orders left to the thread
        self._sender = threading.Thread(target=self._write, name=f"cellar-rank-{number}-orders", daemon=True)
        self._sender.start()

    def send(self, order: Order, packed: Packed) -> None:
        packed.bytes()
        self._give(packed)

    def stop(self) -> None:
        self._stopping = True
        self._give(STOP)

    def join(self, seconds: float) -> None:
        self.process.join(max(0.0, seconds))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        atexit.unregister(self._lifeline.close)
        self._lifeline.close()
        self._reader.join()
        self._give(STOP)  # if it waits for an order; one that writes finds nobody there
        self._sender.join()
        self._pipe.close()

    def _give(self, packed: Packed) -> None:
        if not self._sender.is_alive():
            return  # its end is on the way as news
        with self._sending, contextlib.suppress(OSError):
            if self._at_once(packed):
                self._pipe.send_bytes(packed.bytes())
                return
            try:
                self._orders.put_nowait(packed)
                self._unsent += 1
            except Full:
                if not self._stopping:
                    self._news.put(Died(self._number, f"it has left {MOST_UNSENT:,} orders untaken"))

    def _at_once(self, packed: Packed) -> bool:
        """Whether it can be written now without waiting: after all before it, into a pipe with room."""
        if self._unsent or packed is STOP or len(packed.bytes()) > MOST_AT_ONCE:
            return False
        return any(event == select.POLLOUT for _, event in self._room.poll(0))

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                packed = self._orders.get()
                self._pipe.send_bytes(packed.bytes())
                if packed is STOP:
                    return
                with self._sending:
                    self._unsent -= 1

    def _read(self) -> None:
        try:
            while True:
                news = read(self._pipe.recv_bytes())
                self.heard = time.monotonic()
                if isinstance(news, Alive):
                    self.pulse = news.pulse
                else:
                    self._news.put(news)
        except (EOFError, OSError):
            if not self._stopping:
                self._news.put(Died(self._number, self._how_it_ended()))

    def _how_it_ended(self) -> str:
        self.process.join(1.0)
        code = self.process.exitcode
        return "its process has ended" + (
            "" if code is None else f" by signal {-code}" if code < 0 else f" with exit code {code}"
        )


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """A process that starts meanwhile does not run the user's script: what a rank runs is not in it."""
    main = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    try:
        for name in kept:
            setattr(main, name, None)
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)


def run_rank(number: int, pipe: Connection, lifeline: Connection, opener: Opener, log_level: int) -> None:
    """In a rank's process: until it is told to end, or the other end of the pipe is gone."""
    logging.basicConfig(level=log_level, format=f"%(asctime)s %(levelname)s rank {number} %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_SECONDS)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", STREAM_QUEUES)
    # The group decides when to end; a terminal's Ctrl-C and a service's end reach all processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), name="cellar-lifeline", daemon=True).start()
    lock = threading.Lock()

    def say(what: News | Alive) -> None:
        with lock, contextlib.suppress(OSError):  # nobody listens: the end is near
            pipe.send_bytes(written(what))

    opened: list[Runtime[StepPlan]] = []

    def pulse() -> None:
        while True:
            time.sleep(PULSE_SECONDS)
            say(Alive(Pulse(time.monotonic(), getattr(opened[0], "waited", None)) if opened else None))

    threading.Thread(target=pulse, name="cellar-pulse", daemon=True).start()

    def order() -> Order | None:
        try:
            found: Order | None = read(pipe.recv_bytes())
        except (EOFError, OSError):
            return None
        return found

    try:
        runtime = opener()
    except Exception as error:
        if not isinstance(error, CellarError):
            logger.exception("rank %d could not be opened", number)
        say(_death(number, error))
    else:
        opened.append(runtime)
        gc.collect()  # as in an engine's process: no collection walks over all of the model in the middle of a step
        gc.freeze()
        say(Opened(number, runtime.capacity, *(getattr(runtime, name, None) for name in ("memory", "offload"))))
        obey(runtime, order, lambda result: say(Answer(number, result)), lambda error: say(_death(number, error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread may hang in a collective


def _end_with(lifeline: Connection) -> None:
    """End this process soon after the one that started it, whatever its threads wait for."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    time.sleep(CLOSE_SECONDS)
    os._exit(1)


def _death(number: int, error: BaseException) -> Died:
    if isinstance(error, CellarError):
        return Died(number, str(error), error, follows=str(error).startswith(GONE))
    if is_out_of_memory(error):
        return Died(number, "", CapacityError(OUT_OF_MEMORY))
    return Died(number, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def obey(
    runtime: Runtime[StepPlan],
    receive: Callable[[], Order | None],
    answer: Callable[[StepResult | CopyResult], None],
    died: Callable[[BaseException], None],
) -> None:
    """Do as `receive` says until it says None, then close the runtime, once the plans that it has are done: other
    ranks do them, too. `died` hears, once, why it cannot go on.
    """
    ended = threading.Event()
    changed = threading.Condition()
    worker = runtime.workers[0]

    def fail(error: BaseException) -> None:
        with changed:
            first = not ended.is_set()
            ended.set()
            changed.notify_all()
        if first:
            logger.error("a rank has failed", exc_info=error)
            died(error)

    def poll() -> None:
        try:
            while not ended.is_set():
                for result in runtime.poll(None):
                    answer(result)
                with changed:
                    changed.notify_all()
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
    with changed:
        changed.wait_for(lambda: ended.is_set() or not worker.in_flight, CLOSE_SECONDS / 2)
        ended.set()
    runtime.close()
    poller.join(CLOSE_SECONDS)
