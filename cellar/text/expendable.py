"""Work that a request can make endless, or make fail in native code, done in a process that may be ended.

A chat template over hostile messages, or a grammar that overflows its compiler's stack, takes time, memory or the whole
process with it. Here that is a process of its own: it may use so much CPU time and memory for one call, and whoever
asked gets one sentence if it needs more. The next call starts another.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from cellar.core.errors import RequestError
from cellar.core.memory import give_back

_LENGTH = struct.Struct("<Q")
_PATIENCE = 8
"""Wall-clock seconds per second of CPU time, after which a process that sleeps, or never gets a core, is ended."""

_LARGE = 2**16
"""Bytes of a call from which on the process tidies up behind it, before the next."""

Worker = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Budget:
    """What one call may use: seconds of CPU time, and bytes of memory beyond what the process has when it starts."""

    seconds: float = 5.0
    memory_bytes: int = 512 * 2**20


class OverBudget(Exception):
    """The process was ended, or ended itself; the message says by what, for the end of a sentence.

    `by_time`: more seconds might have done.
    """

    def __init__(self, reason: str, by_time: bool = False) -> None:
        super().__init__(reason)
        self.by_time = by_time


class Expendable:
    """A process that makes one worker and answers its calls, one at a time; several threads may call.

    `maker` names a function, `package.module:function`; called with `arguments` in the process it gives the worker.
    Arguments and answers are plain JSON values. A RequestError of the worker is raised here again.
    """

    def __init__(self, maker: str, arguments: dict[str, Any], budget: Budget) -> None:
        self._setup = {"maker": maker, "arguments": arguments, "budget": asdict(budget)}
        self._budget = budget
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: socket.socket | None = None

    def call(self, **arguments: Any) -> Any:
        """The worker's answer. Raises RequestError as the worker did, or OverBudget if the process had to end."""
        message = json.dumps(arguments).encode()
        with self._lock:
            if self._process is None:
                self._start()
            answer = self._exchange(message)
        if "refused" in answer:
            raise RequestError(*answer["refused"])
        if "failed" in answer:
            raise OverBudget(answer["failed"])
        return answer["answer"]

    def close(self) -> None:
        """End the process, at whatever it is; a later call starts another."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._pipe = ours
        _send(ours, json.dumps(self._setup).encode())

    def _exchange(self, message: bytes) -> dict[str, Any]:
        process, pipe = self._process, self._pipe
        assert process is not None
        assert pipe is not None
        # The process counts its own CPU time; this is for one that cannot.
        timer = threading.Timer(self._budget.seconds * _PATIENCE, process.kill)
        timer.daemon = True
        timer.start()
        try:
            _send(pipe, message)
            data = _receive(pipe)
        except OSError:
            data = None
        finally:
            timer.cancel()
        if data is None:
            raise self._how_it_ended(self._end())
        answer: dict[str, Any] = json.loads(data)
        if "failed" in answer:  # its memory is in pieces
            self._end()
        return answer

    def _end(self) -> int | None:
        """Kill and reap; -> its exit code, the negative number of a signal that ended it before."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.5)  # it is about to end, and says by what
        process.kill()
        return process.wait()

    def _how_it_ended(self, code: int | None) -> OverBudget:
        if code in (-signal.SIGPROF, -signal.SIGKILL):
            return OverBudget(f"it takes more than {self._budget.seconds:g} s", by_time=True)
        return OverBudget(f"it takes more than {self._budget.memory_bytes >> 20} MiB of memory, or nests too deeply")


class Lanes:
    """Two such processes, so that quick calls never stand behind long ones: every call is first tried for a moment in
    one, and what takes longer goes to the other."""

    def __init__(self, maker: str, arguments: dict[str, Any], budget: Budget, quick_seconds: float = 0.5) -> None:
        quick = min(quick_seconds, budget.seconds)
        self._quick = Expendable(maker, arguments, Budget(quick, budget.memory_bytes))
        self._long = Expendable(maker, arguments, budget)

    def call(self, **arguments: Any) -> Any:
        """As `Expendable.call`."""
        try:
            return self._quick.call(**arguments)
        except OverBudget as error:
            if not error.by_time:
                raise
        return self._long.call(**arguments)

    def close(self) -> None:
        """End both; a later call starts them again."""
        self._quick.close()
        self._long.close()


def serve(descriptor: int) -> None:
    """The process: make the worker, then answer until the other side closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all processes
    with socket.socket(fileno=descriptor) as pipe:
        setup = _receive(pipe)
        if setup is None:
            return
        made = json.loads(setup)
        module, _, name = made["maker"].partition(":")
        worker: Worker = getattr(importlib.import_module(module), name)(**made["arguments"])
        budget = Budget(**made["budget"])
        size = _address_space()
        if size is not None:
            resource.setrlimit(resource.RLIMIT_AS, (size + budget.memory_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ConnectionError):  # whoever asked was killed
            while (message := _receive(pipe)) is not None:
                # Its default action ends the process, wherever that is, also in native code.
                signal.setitimer(signal.ITIMER_PROF, budget.seconds)
                answer = _answered(worker, message, budget)
                signal.setitimer(signal.ITIMER_PROF, 0)
                _send(pipe, answer)
                if len(message) + len(answer) >= _LARGE:
                    del message, answer
                    gc.collect()
                    give_back()


def _answered(worker: Worker, message: bytearray, budget: Budget) -> bytes:
    try:
        return json.dumps({"answer": worker(**json.loads(message))}).encode()
    except RequestError as error:
        return json.dumps({"refused": [str(error), error.parameter, error.code]}).encode()
    except MemoryError:
        return json.dumps({"failed": f"it takes more than {budget.memory_bytes >> 20} MiB of memory"}).encode()


def _address_space() -> int | None:
    """Bytes of address space that this process has now; None where the system does not say, nor keeps the limit."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _send(pipe: socket.socket, data: bytes) -> None:
    pipe.sendall(_LENGTH.pack(len(data)) + data)


def _receive(pipe: socket.socket) -> bytearray | None:
    """One message; None if the other side is gone."""
    head = _read(pipe, _LENGTH.size)
    return None if head is None else _read(pipe, _LENGTH.unpack(head)[0])


def _read(pipe: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = pipe.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return data
