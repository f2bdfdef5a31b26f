"""RemoteEngine: a front's side of the connection with the engine's process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, wait
from typing import Any

from cellar.core.errors import CellarError
from cellar.core.messages import FinishReason, Request, SchedulerStats, StepOutput
from cellar.server.wire import Call, Frame, Ready, Step


class RemoteEngine:
    """Stands for an `Engine` in another process; `turn` belongs to one thread, `wake` to any.

    Raises CellarError or OSError from the constructor if no engine listens at `address`, and CellarError from `turn`
    once it is gone, with `reason()`. `ended` is set by `close`.
    """

    def __init__(self, address: str, reason: Callable[[], str] = lambda: "the engine process has ended") -> None:
        self._pipe: Connection = Client(address, "AF_UNIX")
        self._reason = reason
        self._count = 0
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.ended = threading.Event()
        try:
            ready, first = self._receive(), self._receive()
        except CellarError:
            self.close()
            raise
        assert isinstance(ready, Ready)
        assert isinstance(first, Step)
        self.ready = ready
        self._stats = first.stats

    def add(self, request: Request) -> None:
        """Queue a request; one that could never run comes back as finished with an error."""
        number = self._count
        self._count += 1
        self._numbers[request.id] = number
        self._names[number] = request.id
        self._send(Call("add", number, (request,)))

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason) -> None:
        """End a request after `num_tokens` output tokens; later ones are void."""
        if (number := self._forget(request_id)) is not None:
            self._send(Call("finish", number, (num_tokens, reason)))

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown ids are ignored."""
        if (number := self._forget(request_id)) is not None:
            self._send(Call("abort", number))

    def wake(self) -> None:
        """End a waiting `turn`."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake anyhow; closed: nobody waits
            os.write(self._wake_write, b"\0")

    def turn(self, timeout: float | None = None) -> list[StepOutput]:
        """Frames that have come; waits up to `timeout` seconds (None: for ever) for one, or for a `wake`."""
        outputs: list[StepOutput] = []
        if self._wake_read in wait([self._pipe, self._wake_read], timeout):
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        while self._has_message():
            message = self._receive()
            if isinstance(message, CellarError):
                raise message
            outputs += [self._output(frame) for frame in message.frames]
            self._stats = message.stats
        return outputs

    def stats(self) -> SchedulerStats:
        """The last snapshot that came."""
        return self._stats

    def close(self) -> None:
        """Leave the engine, which drops what was running; a second call does nothing."""
        if self.ended.is_set():
            return
        self._pipe.close()
        self.ended.set()
        write, self._wake_write = self._wake_write, -1
        os.close(write)
        os.close(self._wake_read)

    def _output(self, frame: Frame) -> StepOutput:
        """A frame with our ids. What has ended here meanwhile is left out."""
        names = self._names
        output = StepOutput()
        for number, token in zip(frame.numbers, frame.tokens, strict=True):
            if (id := names.get(number)) is not None:
                output.ids.append(id)
                output.tokens.append(token)
        for name in ("logprobs", "prompt_logprobs", "num_cached_tokens", "queue_seconds", "finished"):
            for number, value in getattr(frame, name).items():
                if (id := names.get(number)) is not None:
                    getattr(output, name)[id] = value
        for id in output.finished:
            self._forget(id)
        return output

    def _forget(self, id: str) -> int | None:
        number = self._numbers.pop(id, None)
        if number is not None:
            del self._names[number]
        return number

    def _send(self, call: Call) -> None:
        try:
            self._pipe.send(call)
        except OSError as error:
            raise CellarError(self._reason()) from error

    def _has_message(self) -> bool:
        try:
            return self._pipe.poll()
        except OSError as error:
            raise CellarError(self._reason()) from error

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise CellarError(self._reason()) from error
