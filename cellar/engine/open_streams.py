"""Open streams: requests of coroutines in an engine that has a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from cellar.core.errors import CellarError, IntegrityError
from cellar.core.messages import MemoryAnswer, MemoryQuestion, RequestOutput
from cellar.engine.driver import Driver
from cellar.engine.front import Front, Prepared
from cellar.engine.outputs import Delta, Processed
from cellar.engine.unread import News, Unread

START_SECONDS = 0.004
"""How long a turn starts requests; then what has come is handed over, and the next turn goes on."""


@dataclass(slots=True, eq=False)
class _Stream:
    """Where a request's news go: the event loop that waits for them."""

    loop: asyncio.AbstractEventLoop
    unread: Unread
    deltas: bool


class OpenStreams:
    """A front that a thread turns, and whom its news are for.

    What coroutines want of it is a message to the engine, read once per turn. Requests are started little by little,
    one of each owner in turn: a thousand prompts of one take a tenth of a second, in which others get their tokens and
    begin. An error of the engine itself reaches every stream, every question, and every later call.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._streams: dict[str, _Stream] = {}
        self._fresh: dict[str, tuple[Prepared, _Stream]] = {}  # not started yet
        self._owners: dict[str, deque[str]] = {}  # their ids, by owner; some may have been dropped
        self._until = 0.0  # this turn starts requests; 0: it has not begun to
        self._questions: set[asyncio.Future[MemoryAnswer]] = set()
        self._driver = Driver(front.engine, self._turn, self._end, "cellar-engine")

    def start(self, begin: Callable[[], None] | None) -> None:
        """Turn in a thread until `close`; `begin` is done first in it."""
        self._driver.start(begin)

    @property
    def running(self) -> bool:
        """False once the thread has ended, by `close` or by an error."""
        return self._driver.ended is None

    def close(self) -> None:
        """End the thread and the front; streams still open get a CellarError."""
        self._driver.close()

    # -- for coroutines ---------------------------------------------------------------------------

    async def news(self, prepared: Prepared, deltas: bool) -> AsyncIterator[Delta | RequestOutput]:
        """Start a request; what was added since the last look, or else all there is so far, and at last the whole.
        Leaving the iterator drops the request.
        """
        stream = _Stream(asyncio.get_running_loop(), Unread(), deltas)
        self._driver.post(lambda: self._come(prepared, stream))
        finished = False
        try:
            while not finished:
                news = await stream.unread.get()
                if isinstance(news, BaseException):
                    finished = True
                    raise news
                finished = isinstance(news, RequestOutput) and news.finished
                yield news
        finally:
            if not finished:
                with contextlib.suppress(CellarError):  # an engine that has ended has dropped it already
                    self._driver.post(lambda: self._leave(prepared.id, stream))

    def abort(self, request_id: str) -> None:
        """Drop a request; its stream ends with what there is. Unknown ids are ignored. Raises CellarError."""
        self._driver.post(lambda: self._abort(request_id))

    async def ask(self, question: MemoryQuestion) -> MemoryAnswer:
        """See `Front.memory`. Raises CellarError if the engine has ended."""
        told: asyncio.Future[MemoryAnswer] = asyncio.get_running_loop().create_future()
        self._driver.post(lambda: self._ask(question, told))
        return await told

    # -- the engine's thread ----------------------------------------------------------------------

    def _turn(self) -> None:
        self._until = 0.0
        self._start_some()
        self._deliver(self._front.turn(0.0 if self._fresh else None))

    def _end(self, error: BaseException) -> None:
        """Nobody may wait for ever."""
        for stream in (*self._streams.values(), *(stream for _, stream in self._fresh.values())):
            _hand_over({stream.loop: [(stream, error)]})
        self._streams.clear()
        self._fresh.clear()
        for told in tuple(self._questions):
            self._tell(told, error)
        self._front.close()

    def _come(self, prepared: Prepared, stream: _Stream) -> None:
        """A request is to be started when it is its turn."""
        if self._driver.ended is not None:
            _hand_over({stream.loop: [(stream, self._driver.ended)]})
            return
        self._start(prepared.id)  # of two with one id the second is refused
        self._fresh[prepared.id] = prepared, stream
        self._owners.setdefault(prepared.sequences[0].owner or prepared.id, deque()).append(prepared.id)
        self._start_some()
        if len(self._fresh) == 1:  # the first one that this turn leaves
            self._driver.post(self._start_some)  # so that it does not wait for news

    def _start_some(self) -> None:
        """Start requests, one of each owner in turn, while this turn may."""
        while self._fresh:
            now = time.monotonic()
            self._until = self._until or now + START_SECONDS
            if now >= self._until:
                return
            owner = next(iter(self._owners))
            ids = self._owners.pop(owner)
            self._start(ids.popleft())
            if ids and self._fresh:
                self._owners[owner] = ids

    def _start(self, request_id: str) -> None:
        """Start a request if it has not been."""
        if request_id not in self._fresh:
            return
        prepared, stream = self._take(request_id)
        try:
            self._front.add(prepared, stream=True)
        except IntegrityError:
            self._fresh[prepared.id] = prepared, stream  # told with all others, at the end
            raise
        except Exception as error:  # the request's own fault, whatever it is
            _hand_over({stream.loop: [(stream, error)]})
        else:
            self._streams[prepared.id] = stream

    def _take(self, request_id: str) -> tuple[Prepared, _Stream]:
        found = self._fresh.pop(request_id)
        if not self._fresh:
            self._owners.clear()
        return found

    def _ask(self, question: MemoryQuestion, told: asyncio.Future[MemoryAnswer]) -> None:
        self._questions.add(told)
        if self._driver.ended is not None:
            self._tell(told, self._driver.ended)
        else:
            self._front.memory(question, lambda answer: self._tell(told, answer))

    def _tell(self, told: asyncio.Future[MemoryAnswer], answer: MemoryAnswer | BaseException) -> None:
        self._questions.discard(told)
        with contextlib.suppress(RuntimeError):  # that event loop is closed, and nobody waits in it
            told.get_loop().call_soon_threadsafe(_settle, told, answer)

    def _leave(self, request_id: str, stream: _Stream) -> None:
        """The iterator was left. Its id may belong to another stream by now, or never have been its own."""
        if self._driver.ended is not None:
            return
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._front.abort(request_id)
        elif self._fresh.get(request_id, (None, None))[1] is stream:
            self._take(request_id)

    def _abort(self, request_id: str) -> None:
        if self._driver.ended is not None:
            return
        self._start(request_id)
        output = self._front.abort(request_id)
        stream = self._streams.pop(request_id, None)
        if output is not None and stream is not None:
            _hand_over({stream.loop: [(stream, output)]})

    def _deliver(self, news: Processed) -> None:
        """One call into each event loop per turn, however many streams got something."""
        news_of: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, News]]] = {}
        ended = {output.request_id for output in news.finished}
        told: set[str] = set()
        for delta in news.deltas:
            stream = self._streams[delta.request_id]
            if stream.deltas:
                news_of.setdefault(stream.loop, []).append((stream, delta))
            elif delta.request_id not in ended and delta.request_id not in told:
                told.add(delta.request_id)
                news_of.setdefault(stream.loop, []).append((stream, self._front.output(delta.request_id)))
        for output in news.finished:
            stream = self._streams.pop(output.request_id)
            news_of.setdefault(stream.loop, []).append((stream, output))
        _hand_over(news_of)


def _hand_over(news_of: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, News]]]) -> None:
    for loop, pairs in news_of.items():
        try:
            loop.call_soon_threadsafe(_put, pairs)
        except RuntimeError:  # that event loop is closed, and nobody waits in it
            continue


def _settle(told: asyncio.Future[MemoryAnswer], answer: MemoryAnswer | BaseException) -> None:
    if told.done():
        return  # nobody waits any more
    if isinstance(answer, BaseException):
        told.set_exception(answer)
    else:
        told.set_result(answer)


def _put(pairs: list[tuple[_Stream, News]]) -> None:
    for stream, news in pairs:
        stream.unread.put(news)
