"""Front processes over one engine or several: each listens on the port itself, and the system deals out connections.

    this process  -- keeps --> the engines' processes <-- sockets -- front 0, front 1, ...  <-- clients
         +------- keeps and drains ------------------------------------^

A front that ends unasked is started again; the engines drop what it had running.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType

from cellar.core.errors import CellarError
from cellar.core.priority import yield_to_engine
from cellar.server.app import build_app
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.heap import one_heap, return_spare_memory
from cellar.server.host import ServedModel
from cellar.server.metrics import FRONT_RESTARTS
from cellar.server.pool.host import PoolHost
from cellar.server.serving import FrontServer, keep_what_is_here, listen_beside, server_config
from cellar.server.shared import Shared
from cellar.server.supervisor import Attach, Link
from cellar.server.tally import Tally

logger = logging.getLogger(__name__)

PAUSE_SECONDS = (0.1, 10.0)
STABLE_SECONDS = 30.0
GRACE_SECONDS = 5.0
"""Beyond the time for a drain, until a front is killed."""

DRAIN, STOP = "drain", "stop"

MOVE_SECONDS = 10.0
"""For a front to take its streams away from an engine; they go on elsewhere anyhow when that is lost."""

LOOK_SECONDS = 0.02
"""How often a front looks whether another engine is connected."""

_ENDS, _RENEWS = (signal.SIGINT, signal.SIGTERM), signal.SIGUSR1


@dataclass(frozen=True)
class FrontPlan:
    """All that a front's process needs to know; `attach` is None but in tests."""

    shared: Shared
    names: tuple[str, ...]
    port: int
    server: ServerConfig
    limits: LimitConfig
    attach: Attach | None = None


class FrontProcess:
    """One front's process. `ready` waits until it serves."""

    def __init__(self, plan: FrontPlan) -> None:
        self.started = time.monotonic()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._telling = threading.Lock()
        index = plan.shared.index
        self.process: BaseProcess = context.Process(
            target=run_front, args=(theirs, plan), name=f"cellar-front-{index}", daemon=True
        )
        self.process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it serves. Raises CellarError if it does not."""
        try:
            said = self._pipe.recv()
        except (EOFError, OSError):
            self.process.join(1.0)
            raise CellarError(f"a front has ended with exit code {self.process.exitcode}.") from None
        if isinstance(said, CellarError):
            raise said

    def tell(self, word: str | int) -> None:
        """Have it drain or stop, or leave an engine; one that is gone is past caring."""
        try:
            with self._telling:
                self._pipe.send(word)
        except OSError:
            logger.debug("%s has gone already", self.process.name)

    def has_left(self, engine: int, end: float) -> bool:
        """Whether it has said so by `end`, of an engine that it was told to leave; one that is gone has left all."""
        try:
            while self._pipe.poll(max(0.0, end - time.monotonic())):
                if self._pipe.recv() == engine:
                    return True
        except (EOFError, OSError):
            return True
        return False

    def close(self) -> None:
        """End it at once, if it still runs."""
        self._pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


class Fronts:
    """Keeps `plan.shared.count` fronts; `tally` is this process's. Raises CellarError if one does not start the first
    time."""

    def __init__(self, plan: FrontPlan, tally: Tally) -> None:
        self._plans = [
            FrontPlan(plan.shared.at(k), plan.names, plan.port, plan.server, plan.limits, plan.attach)
            for k in range(plan.shared.count)
        ]
        self._tally = tally
        self._grace = plan.limits.shutdown_timeout + GRACE_SECONDS
        self._pauses = [PAUSE_SECONDS[0]] * len(self._plans)
        self._signal_read, self._signal_write = os.pipe()
        os.set_blocking(self._signal_write, False)
        self.fronts: list[FrontProcess | None] = [FrontProcess(one) for one in self._plans]
        try:
            for front in self._live():
                front.ready()
        except BaseException:
            self._close()
            raise

    def run(self, renew: Callable[[], None] = lambda: None) -> None:
        """Keep them until SIGTERM or SIGINT, then drain them; a second signal ends them at once. SIGUSR1: `renew`."""
        # The system may hand a signal to any thread, as to a process that was stopped when it came: this one would
        # wait on, and its handlers with it. The pipe is written to at once, whichever thread it is.
        earlier = signal.set_wakeup_fd(self._signal_write, warn_on_full_buffer=False)
        before = {number: signal.signal(number, _taken) for number in (*_ENDS, _RENEWS)}
        try:
            due: dict[int, float] = {}
            while (number := self._signalled(self._next(due))) not in _ENDS:
                if number == _RENEWS:
                    renew()
                self._start_again(due)
            self._drain()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(earlier)
            self._close()

    def leave(self, engine: int) -> None:
        """Have all fronts take their streams away from an engine, and wait until they have. In any thread."""
        fronts = self._live()
        for front in fronts:
            front.tell(engine)
        end = time.monotonic() + MOVE_SECONDS
        for front in fronts:
            if not front.has_left(engine, end):
                logger.warning("%s has not left engine %d in time", front.process.name, engine)

    def _live(self) -> list[FrontProcess]:
        return [front for front in self.fronts if front is not None]

    def _signalled(self, timeout: float | None) -> int | None:
        """Wait for a signal, or the end of a front; -> the signal's number, None if it was none."""
        ends = [front.process.sentinel for front in self._live()]
        if self._signal_read in wait([self._signal_read, *ends], timeout):
            return os.read(self._signal_read, 1)[0]
        return None

    def _next(self, due: dict[int, float]) -> float | None:
        return max(0.0, min(due.values()) - time.monotonic()) if due else None

    def _start_again(self, due: dict[int, float]) -> None:
        """Note who has ended, and start who is due."""
        now = time.monotonic()
        for k, front in enumerate(self.fronts):
            if front is not None and not front.process.is_alive():
                code = front.process.exitcode
                stable = now - front.started > STABLE_SECONDS
                pause = PAUSE_SECONDS[0] if stable or code == 0 else self._pauses[k]
                self._pauses[k] = min(2 * pause, PAUSE_SECONDS[1])
                logger.error("front %d has ended (exit code %s); it is started again in %.1f s", k, code, pause)
                front.close()
                self._plans[k].shared.waiting().clear()
                self.fronts[k], due[k] = None, now + pause
        for k in [k for k, when in due.items() if when <= now]:
            del due[k]
            self.fronts[k] = FrontProcess(self._plans[k])
            self._tally.add(FRONT_RESTARTS)

    def _drain(self) -> None:
        logger.warning("no new requests; running ones have time to finish")
        for front in self._live():
            front.tell(DRAIN)
        end = time.monotonic() + self._grace
        while any(front.process.is_alive() for front in self._live()):
            self.fronts = [front for front in self._live() if front.process.is_alive()]
            left = end - time.monotonic()
            if left <= 0:
                return
            if self.fronts and self._signalled(left) in _ENDS:
                for front in self._live():
                    front.tell(STOP)

    def _close(self) -> None:
        for front in self._live():
            front.close()
        os.close(self._signal_read)
        os.close(self._signal_write)


def _taken(number: int, frame: FrameType | None) -> None:
    """A signal has a handler, so that it is said by the pipe and does nothing else."""


# -- in a front's process ---------------------------------------------------------------------------


def run_front(pipe: Connection, plan: FrontPlan) -> None:
    """Serve until told to drain, or until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the keeper of the fronts decides
    one_heap()
    yield_to_engine()
    index, server = plan.shared.index, plan.server
    logging.basicConfig(
        level=server.log_level.upper(), format=f"%(asctime)s %(levelname)s front {index} %(name)s: %(message)s"
    )
    serving: list[FrontServer] = []
    leaving: list[Callable[[int], None]] = []
    threading.Thread(target=_obey, args=(pipe, serving, leaving), name="cellar-orders", daemon=True).start()
    try:
        host = connected(plan)
        if isinstance(host, PoolHost):
            leaving.append(partial(_leave, pipe, host, plan.shared.addresses))
        app = build_app(host, ServedModel.of(host.opened, plan.names), server, plan.limits, plan.shared)
        listener = listen_beside(server.host, plan.port)
    except (CellarError, OSError) as error:
        pipe.send(CellarError(str(error)))
        return

    def ready() -> None:
        pipe.send("ready")

    keep_what_is_here()
    return_spare_memory()
    serving.append(FrontServer(server_config(app, server, plan.limits), ready))
    serving[0].run([listener])


def connected(plan: FrontPlan) -> Link | PoolHost:
    """What keeps a front connected with the engine, or with all of several. Waits until one is there."""
    addresses = plan.shared.addresses
    if len(addresses) == 1:
        return Link(addresses[0], plan.attach)
    host = PoolHost(plan.attach)
    for name, address in enumerate(addresses):
        host.keep(address, str(name))
    host.wait(None)
    return host


def _leave(pipe: Connection, host: PoolHost, addresses: Sequence[str], engine: int) -> None:
    """Take all streams away from an engine as soon as there is another one, which may just be back, and say so."""
    others = {address for k, address in enumerate(addresses) if k != engine}
    end = time.monotonic() + MOVE_SECONDS / 2
    while not others & host.addresses() and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
    host.drain(addresses[engine], lambda: pipe.send(engine))


def _obey(pipe: Connection, serving: list[FrontServer], leaving: list[Callable[[int], None]]) -> None:
    """The keeper's words: to drain, to stop, or to leave an engine; its end is an order to end at once."""
    word: str | int = DRAIN
    while word != STOP:
        try:
            word = pipe.recv()
        except (EOFError, OSError):
            word = STOP
        if isinstance(word, int):
            for leave in leaving:
                leave(word)
            continue
        if not serving:
            os._exit(1)
        serving[0].should_exit = True
    serving[0].force_exit = True
