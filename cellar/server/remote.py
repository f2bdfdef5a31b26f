"""RemoteEngine: a front's side of the connection with the engine's process."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any

from cellar.core.errors import CellarError
from cellar.core.messages import FinishReason, MemoryAnswer, MemoryQuestion, Request, SchedulerStats, StepOutput
from cellar.core.sampling import SamplingParams
from cellar.engine.client import Message
from cellar.engine.engine import Mailbox
from cellar.routing.digest import DigestShape
from cellar.server.bell import Bell
from cellar.server.endpoint import Address, connect
from cellar.server.outlet import Outlet
from cellar.server.wire import BY_SEQUENCE, Add, Call, Frame, Ready, Reported, Step, Terms, Told, Watch


@dataclass(slots=True)
class _Users:
    """Terms that the engine has, and how many of our sequences go by them."""

    number: int
    params: SamplingParams  # kept, so that no other object gets its id
    stop_ids: frozenset[int]
    users: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return id(self.params), id(self.stop_ids)


class RemoteEngine:
    """Stands for an `Engine` in another process: implements `EngineClient` for transformers.

    Raises CellarError or OSError from the constructor if no engine listens at `address`, and CellarError from `turn`
    once it is gone, with `reason()`. `ended` is set by `close`.
    """

    def __init__(self, address: Address, reason: Callable[[], str] = lambda: "the engine process has ended") -> None:
        self._pipe: Connection = connect(address)
        self._outlet = Outlet(self._pipe)
        self._reason = reason
        self._count = 0
        self._numbers: dict[str, int] = {}
        self._terms: dict[tuple[int, int], _Users] = {}
        self._terms_of: dict[int, _Users] = {}
        self._num_terms = 0
        self._names: dict[int, str] = {}
        self._questions: dict[int, Callable[[MemoryAnswer | CellarError], None]] = {}
        self._frames: list[Frame] = []  # not told yet
        self.reported: list[Reported] = []  # found by `take`; for whoever wanted it, who empties it
        self._refused: dict[str, str] = {}  # by us, not told yet
        self._steady: tuple[list[int], list[str]] | None = None  # numbers of the last frame, and their ids
        self._mailbox = Mailbox(self.wake)
        self._bell = Bell()
        self._bell.listen(self._pipe)
        self._incoming = select.poll()
        self._incoming.register(self._pipe.fileno(), select.POLLIN)
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

    @property
    def connection(self) -> Connection:
        """What can be read when there is news; for whoever waits for several engines."""
        return self._pipe

    def post(self, message: Message) -> None:
        """Have something done by the owner's thread at its next turn; ends a waiting one."""
        self._mailbox.post(message)

    def read(self) -> None:
        """Do what was posted."""
        self._mailbox.read()

    def add(self, *requests: Request) -> None:
        """Queue requests; one that could never run comes back as finished with an error."""
        fresh = []
        for request in requests:
            if request.id in self._numbers:
                self._refused[request.id] = f"A request with the id {request.id!r} is running; use another id."
                continue
            self._numbers[request.id] = self._count
            self._names[self._count] = request.id
            self._count += 1
            fresh.append(request)
        for _, siblings in groupby(fresh, key=_shared):
            self._add(list(siblings))

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
        """End a request after `num_tokens` output tokens; later ones are void."""
        if (number := self._forget(request_id)) is not None:
            self._send(Call("finish", number, (num_tokens, reason)))

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown ids are ignored."""
        self._refused.pop(request_id, None)
        if (number := self._forget(request_id)) is not None:
            self._send(Call("abort", number))

    def memory(self, question: MemoryQuestion, then: Callable[[MemoryAnswer | CellarError], None]) -> None:
        """Ask; the answer comes with a later turn."""
        number = self._count
        self._count += 1
        self._questions[number] = then
        self._send(Call("memory", number, (question,)))

    @property
    def next_number(self) -> int:
        """Of the next sequence that is added."""
        return self._count

    def watch(self, shape: DigestShape) -> None:
        """Have the engine report, with digests of this shape; one that makes none sends none."""
        self._send(Watch(shape))

    def wake(self) -> None:
        """End a waiting `turn`."""
        self._bell.ring()

    def refused(self) -> Mapping[str, str]:
        """Requests that could never run and of which no turn has told yet, as far as the engine has answered."""
        self._receive_all()
        refused = dict(self._refused)
        for frame in self._frames:
            for number, (reason, said) in frame.finished.items():
                if reason is FinishReason.ERROR and (id := self._names.get(number)) is not None:
                    refused[id] = str(said)
        return refused

    def turn(self, timeout: float | None = None) -> list[StepOutput]:
        """What has come; waits up to `timeout` seconds (None: for ever) for something, or for a message."""
        self.read()
        if not (self._refused or self._frames):
            self._bell.wait(timeout)
        return self.take()

    def take(self) -> list[StepOutput]:
        """What has come; does not wait."""
        outputs = [StepOutput.refusal(self._refused)] if self._refused else []
        self._refused = {}
        self._receive_all()
        outputs += [self._output(frame) for frame in self._frames]
        self._frames = []
        return outputs

    def has_work(self) -> bool:
        """True while a request has not ended, or a message is unread."""
        return bool(len(self._mailbox) or self._numbers or self._refused)

    def stats(self) -> SchedulerStats:
        """The last snapshot that came."""
        return self._stats

    def close(self) -> None:
        """Leave the engine, which drops what was running; a second call does nothing."""
        if self.ended.is_set():
            return
        self._outlet.close()
        self.ended.set()
        self._bell.close()

    def _receive_all(self) -> None:
        while self._has_message():
            message = self._receive()
            if isinstance(message, CellarError):
                raise message
            if isinstance(message, Told):
                self._questions.pop(message.number)(message.answer)
                continue
            if isinstance(message, Reported):
                self.reported.append(message)
                continue
            self._frames += message.frames
            self._stats = message.stats

    def _add(self, siblings: list[Request]) -> None:
        """Requests that differ in their seeds only."""
        params, stop_ids = siblings[0].params, siblings[0].stop_ids
        told = self._terms.get((id(params), id(stop_ids)))
        if told is None:
            told = _Users(self._num_terms, params, stop_ids)
            self._num_terms += 1
            self._terms[told.key] = told
            self._send(Terms(told.number, params, stop_ids))
        numbers = tuple(self._numbers[request.id] for request in siblings)
        told.users += len(numbers)
        self._terms_of |= dict.fromkeys(numbers, told)
        self._send(Add.of(told.number, numbers, siblings))

    def _output(self, frame: Frame) -> StepOutput:
        """A frame with our ids. What has ended here meanwhile is left out."""
        names = self._names
        if self._steady is not None and self._steady[0] == frame.numbers:
            output = StepOutput(self._steady[1], frame.tokens)
        else:
            output = StepOutput()
            for number, token in zip(frame.numbers, frame.tokens, strict=True):
                if (id := names.get(number)) is not None:
                    output.ids.append(id)
                    output.tokens.append(token)
            if len(output.ids) == len(frame.numbers):
                self._steady = frame.numbers, output.ids
        for name in BY_SEQUENCE:
            for number, value in getattr(frame, name).items():
                if (id := names.get(number)) is not None:
                    getattr(output, name)[id] = value
        for id in output.finished:
            self._forget(id)
        return output

    def _forget(self, id: str) -> int | None:
        number = self._numbers.pop(id, None)
        if number is not None:
            self._steady = None
            del self._names[number]
            self._leave(self._terms_of.pop(number, None))
        return number

    def _leave(self, told: _Users | None) -> None:
        """A sequence needs its terms no longer; the last one of them takes them along."""
        if told is None:
            return
        told.users -= 1
        if not told.users:
            del self._terms[told.key]
            with contextlib.suppress(CellarError):  # whoever reads next is told that the engine has gone
                self._send(Terms(told.number))

    def _send(self, call: Call | Add | Terms | Watch) -> None:
        try:
            self._outlet.send(call)
        except OSError as error:
            raise CellarError(self._reason()) from error

    def _has_message(self) -> bool:
        if self._pipe.closed:
            raise CellarError(self._reason())
        return bool(self._incoming.poll(0))

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise CellarError(self._reason()) from error


def _shared(request: Request) -> tuple[object, ...]:
    """What siblings have in common; the large parts by identity."""
    large = (id(request.params), id(request.stop_ids), id(request.prompt), id(request.output))
    whose = (request.salt, request.conversation, request.owner, request.tenant)
    return *large, request.max_tokens, request.priority, *whose
