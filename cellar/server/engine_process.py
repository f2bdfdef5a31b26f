"""The engine in a process of its own, which serves any number of fronts through one socket.

    front's process                              engine's process
    AsyncLLM -> Front -> RemoteEngine -- add, finish, abort --> a reader thread each -- messages --> Engine
                              ^                                                            |
                              +------- its frame of a step, a snapshot <-- a sender thread each

One message a step and front holds the token ids of all its requests. Text is made at the fronts only, and the engine
never waits for one: frames that have not left yet go together. When a front goes, its requests are dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

from cellar.core.errors import CellarError, IntegrityError
from cellar.core.messages import EngineRates, FinishReason, Outlook, SchedulerStats, StepOutput
from cellar.core.sampling import SamplingParams
from cellar.engine.client import StepClient
from cellar.routing.digest import DigestShape
from cellar.routing.report import ReplicaReport
from cellar.server.endpoint import Address, Gate, listen
from cellar.server.engine_start import EngineStart, Opener
from cellar.server.heap import one_heap, reserve_steps
from cellar.server.reports import Reports
from cellar.server.wire import BY_SEQUENCE, Add, Call, Frame, Ready, Reported, Step, Terms, Told, Watch, engine_id

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0

OUT_OF_MEMORY = (
    ", as a system ends whoever takes the last of its memory: lower kv_offloading_size or, on the CPU, "
    "kv_cache_memory_bytes"
)
"""What may be behind a process that was killed."""

STATS_SECONDS = 0.2
"""How old a snapshot may be at a front to which no step brings anything."""

BUSY_SECONDS = 0.05
"""Until somebody is let in again after nobody could be."""

SWITCH_SECONDS = 0.001
"""How long a thread beside the loop may keep the interpreter to itself."""


class EngineProcess:
    """Starts an engine, unless its `start` is given; it listens at `address` from then on, which has its true port
    then. Raises CellarError if it cannot be opened.

    At its end it may take `persist_seconds` to bring KV to tiers that outlive it.
    """

    def __init__(
        self,
        opener: Opener,
        address: Address,
        log_level: str = "warning",
        persist_seconds: float = 0.0,
        start: EngineStart | None = None,
    ) -> None:
        self._patience = CLOSE_SECONDS + persist_seconds
        if start is None:
            start = EngineStart(opener, log_level)
        self._pipe, self.process = start.pipe, start.process
        self._lock = threading.Lock()
        # The process ends with its pipe; at exit multiprocessing waits for it.
        atexit.register(self._pipe.close)
        self.address = address
        try:
            with contextlib.suppress(OSError):  # it may have ended already: what it said of that can still be read
                self._pipe.send(address)
            first = self._pipe.recv()
            if isinstance(first, Ready):
                self.address = self._pipe.recv()
        except (EOFError, OSError):
            first = CellarError(f"{self.how_it_ended()}{OUT_OF_MEMORY if self.was_killed else ''}.")
        if not isinstance(first, Ready):
            self.close()
            raise first if isinstance(first, CellarError) else CellarError(f"the engine began with {first!r}")
        self.ready = first

    def how_it_ended(self) -> str:
        """A sentence about a process that has ended, or is about to."""
        with self._lock:  # the system tells the exit code once
            self.process.join(1.0)
            code = self.process.exitcode
        how = f" by signal {-code}" if code is not None and code < 0 else f" with exit code {code}"
        return f"the engine process has ended{'' if code is None else how}"

    @property
    def was_killed(self) -> bool:
        """True if it was ended as a system does that has no memory left."""
        return self.process.exitcode == -signal.SIGKILL

    def close(self) -> None:
        """End the process; a second call does nothing."""
        atexit.unregister(self._pipe.close)
        self._pipe.close()
        with self._lock:
            self.process.join(self._patience)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()


# -- in the engine's process -----------------------------------------------------------------------


def run_engine(pipe: Connection, opener: Opener, log_level: str) -> None:
    """Open an engine and run it, where the pipe's other end says, until that is closed."""
    one_heap()
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        opened = opener()
    except CellarError as error:
        pipe.send(CellarError(str(error)))
        return
    except Exception as error:
        logger.exception("the engine could not be opened")
        pipe.send(CellarError(f"the engine could not be opened ({type(error).__name__}: {error})."))
        return
    if opened.config.device.device == "cpu":
        schedule = opened.config.schedule
        reserve_steps(opened.spec, schedule.max_num_batched_tokens or 0, schedule.max_num_seqs)
    gc.collect()  # What is here now stays; a collection that walked over all of it would hold up a step.
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        address: Address = pipe.recv()
    except EOFError:  # nobody wants it any more
        opened.front.engine.close()
        return
    longest = opened.front.reader.max_model_len
    ready = Ready(opened.config, opened.spec, opened.checkpoint, longest, opened.generation, opened.basis)
    if isinstance(address, str):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)  # of an engine that was killed
    try:
        switchboard = Switchboard(opened.front.engine, ready, address, opened.outlook)
    except OSError as error:
        pipe.send(CellarError(f"the engine cannot listen for fronts ({error})."))
        return
    pipe.send(ready)
    pipe.send(switchboard.address)
    switchboard.run(pipe)


class Line:
    """The connection of one front, with the engine's ids of the sequences that it has running.

    `frame` is what the step at hand brought it so far, `told` the last snapshot that it got, `seen` the number of its
    last sequence that came.
    """

    def __init__(self, number: int, connection: Connection) -> None:
        self.number = number
        self.connection = connection
        self.ids: set[str] = set()
        self.terms: dict[int, tuple[SamplingParams, frozenset[int]]] = {}
        self.frame: Frame | None = None
        self.told: SchedulerStats | None = None
        self.seen = -1
        self.outbox: SimpleQueue[Any] = SimpleQueue()
        self.sender = threading.Thread(target=self._send_all, name="cellar-sender", daemon=True)
        self.sender.start()

    def part(self, touched: list[Line]) -> Frame:
        """The frame of the step at hand; who gets a first one is `touched`."""
        if self.frame is None:
            self.frame = Frame()
            touched.append(self)
        return self.frame

    def _send_all(self) -> None:
        """Send what is put into the outbox, steps that wait as one, until a None."""
        with contextlib.suppress(OSError):
            message = self.outbox.get()
            while message is not None:
                following = None
                if isinstance(message, Step):
                    try:
                        while isinstance(following := self.outbox.get_nowait(), Step):
                            message = Step(message.frames + following.frames, following.stats)
                        self.connection.send(message)
                        message = following
                        continue
                    except Empty:
                        pass
                self.connection.send(message)
                message = self.outbox.get()


class Switchboard:
    """Joins the fronts' connections with the engine; all but who listens and reads belongs to the engine's thread.

    `outlook` is what the engine says of itself, if it does.
    """

    def __init__(
        self, engine: StepClient, ready: Ready, address: Address, outlook: Callable[[], Outlook] | None = None
    ) -> None:
        self._engine = engine
        self._ready = ready
        self._reports = None if outlook is None or ready.basis is None else Reports(outlook, ready.basis)
        self._listener, self.address = listen(address)
        self._gate = Gate(self.address)
        self._lines: dict[int, Line] = {}
        self._owners: dict[str, tuple[Line, int]] = {}  # by the engine's id: whose, and its number there
        self._closing = threading.Event()
        self._failed: CellarError | None = None

    def run(self, pipe: Connection) -> None:
        """The loop, until the pipe's other end is closed or the engine fails."""
        for target, arguments in ((self._accept, ()), (self._watch, (pipe,))):
            threading.Thread(target=target, args=arguments, daemon=True).start()
        engine = self._engine
        told = 0.0
        try:
            while not self._closing.is_set():
                outputs = engine.turn(self._patience())
                stats, now = engine.stats(), time.monotonic()
                everyone = not engine.has_work() or now >= told + STATS_SECONDS
                self._deliver(outputs, stats, everyone)
                if everyone:
                    told = now
                if self._reports is not None:
                    self._reports.turned(bool(outputs) or engine.has_work(), now)
        except Exception as error:
            logger.exception("the engine's loop has ended")
            self._failed = CellarError(f"the engine's loop has ended ({type(error).__name__}: {error})")
        self._close()
        engine.close()

    def _patience(self) -> float | None:
        """How long the engine may wait for something to do."""
        return None if self._reports is None else self._reports.patience(time.monotonic())

    def _deliver(self, outputs: Iterable[StepOutput], stats: SchedulerStats, everyone: bool) -> None:
        """To each front its share; the snapshot alone to `everyone` else, if it is another."""
        shares: dict[Line, list[Frame]] = {}
        for output in outputs:
            for line, frame in self._shares(output):
                shares.setdefault(line, []).append(frame)
        for line in list(self._lines.values()):
            frames = shares.get(line)
            if frames is not None or (everyone and stats != line.told):
                line.told = stats
                line.outbox.put(Step(frames or [], stats))

    def _shares(self, output: StepOutput) -> list[tuple[Line, Frame]]:
        """The part of each front that has one. Sequences whose front has gone are nobody's."""
        owners, touched = self._owners, list[Line]()
        for id, token in zip(output.ids, output.tokens, strict=True):
            if (owner := owners.get(id)) is not None:
                frame = owner[0].frame or owner[0].part(touched)
                frame.numbers.append(owner[1])
                frame.tokens.append(token)
        for name in BY_SEQUENCE:
            for id, value in getattr(output, name).items():
                if (owner := owners.get(id)) is not None:
                    getattr(owner[0].part(touched), name)[owner[1]] = value
        for id in output.finished:
            self._forget(id)
        shares = []
        for line in touched:
            assert line.frame is not None
            shares.append((line, line.frame))
            line.frame = None
        return shares

    def _forget(self, id: str) -> None:
        if (owner := self._owners.pop(id, None)) is not None:
            owner[0].ids.discard(id)

    def _serve(self, line: Line, call: Call | Add | Terms | Watch) -> None:
        """Do what a front wants; if it cannot be done the sequences that it is about end."""
        match call:
            case Terms(number, None, None):
                line.terms.pop(number, None)
            case Terms(number, params, stop_ids):
                assert params is not None
                assert stop_ids is not None
                line.terms[number] = params, stop_ids
            case Add():
                self._add(line, call)
            case Watch(shape):
                self._watched(line, shape)
            case Call():
                self._call(line, call)

    def _watched(self, line: Line, shape: DigestShape) -> None:
        """A front wants reports."""

        def tell(report: ReplicaReport, rates: EngineRates) -> None:
            line.outbox.put(Reported(line.seen, report, rates))

        if self._reports is not None:
            self._reports.watch(line, shape, tell)

    def _add(self, line: Line, call: Add) -> None:
        line.seen = max(line.seen, *call.numbers)
        try:
            requests = call.requests(*line.terms[call.terms], line.number)
            for request, number in zip(requests, call.numbers, strict=True):
                line.ids.add(request.id)
                self._owners[request.id] = line, number
            self._engine.add(*requests)
        except IntegrityError:
            raise
        except Exception as error:
            self._failed_for(line, call.numbers, error)

    def _call(self, line: Line, call: Call) -> None:
        id = engine_id(line.number, call.number)
        if call.method == "memory":
            self._engine.memory(call.arguments[0], lambda answer: line.outbox.put(Told(call.number, answer)))
            return
        try:
            self._forget(id)
            if call.method == "finish":
                self._engine.finish(id, *call.arguments)
            else:
                self._engine.abort(id)
        except IntegrityError:
            raise
        except Exception as error:
            self._failed_for(line, (call.number,), error)

    def _failed_for(self, line: Line, numbers: Sequence[int], error: Exception) -> None:
        """In an `except`: sequences end, and their front is told."""
        logger.exception("what a front asks cannot be done")
        said = f"the request has failed ({type(error).__name__}: {error})."
        frame = Frame(finished=dict.fromkeys(numbers, (FinishReason.ERROR, said)))
        line.outbox.put(Step([frame], self._engine.stats()))

    def _drop(self, line: Line) -> None:
        """A front has gone."""
        self._lines.pop(line.number, None)
        if self._reports is not None:
            self._reports.leave(line)
        line.outbox.put(None)
        dropped = list(line.ids)
        for id in dropped:
            self._forget(id)
            self._engine.abort(id)
        if dropped and not self._closing.is_set():
            logger.warning("a front has gone; its %d sequences are dropped", len(dropped))

    # -- other threads ----------------------------------------------------------------------------

    def _watch(self, pipe: Connection) -> None:
        """The server holds the other end of the pipe as long as it wants an engine."""
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
        self._engine.post(self._closing.set)

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # it is closed, or there are no descriptors left
                if self._closing.wait(BUSY_SECONDS):
                    return
                continue
            threading.Thread(target=self._read, args=(number, connection), name="cellar-reader", daemon=True).start()
            number += 1

    def _read(self, number: int, connection: Connection) -> None:
        """What one front wants, until it goes or sends what nobody can read. A stranger gets and says nothing."""
        try:
            self._gate.admit(connection)
        except OSError as error:
            logger.warning("somebody who wanted to be a front was turned away: %s", error)
            connection.close()
            return
        line = Line(number, connection)
        line.outbox.put(self._ready)
        stats = line.told = self._engine.stats()
        line.outbox.put(Step([], stats))
        self._lines[line.number] = line
        try:
            while True:
                self._engine.post(partial(self._serve, line, line.connection.recv()))
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("a front sends what cannot be read")
        self._engine.post(partial(self._drop, line))
        line.sender.join()
        line.connection.close()

    def _close(self) -> None:
        self._closing.set()
        self._listener.close()
        for line in list(self._lines.values()):
            if self._failed is not None:
                line.outbox.put(self._failed)
            line.outbox.put(None)
            line.sender.join(CLOSE_SECONDS)
