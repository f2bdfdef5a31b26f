"""AsyncLLM: the engine in a thread of its own, and an async generator for each request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from os import PathLike
from types import TracebackType
from typing import Any

from cellar.core.config import EngineConfig
from cellar.core.errors import CellarError, RequestError
from cellar.core.messages import RequestOutput, SchedulerStats
from cellar.core.sampling import SamplingParams
from cellar.core.specs import ModelSpec
from cellar.front import Front, Opened, Prepared, open_front
from cellar.outputs import Delta, Processed
from cellar.prompts import Prompt, PromptReader
from cellar.text.tokenizer import Tokenizer

News = Delta | RequestOutput | BaseException


@dataclass(slots=True, eq=False)
class _Stream:
    """Where a request's news go: a queue of the event loop that waits for them."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[News]
    deltas: bool


class AsyncLLM:
    """A model that many coroutines use at a time; options as those of `LLM`.

    The front and its engine belong to the loop's thread: what others want of them is a letter, read once per
    turn. An error of the loop itself reaches every stream, and every later call.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
        self._take(open_front(EngineConfig.of(model=model, **options)))

    @classmethod
    def over(cls, opened: Opened, begin: Callable[[], None] | None = None) -> AsyncLLM:
        """An AsyncLLM over a front that is open already, which is its own from now on.

        `begin` is done first by the loop's thread.
        """
        llm = cls.__new__(cls)
        llm._take(opened, begin)
        return llm

    def _take(self, opened: Opened, begin: Callable[[], None] | None = None) -> None:
        self._begin = begin
        self._opened = opened
        self._front: Front = opened.front
        self._letters: deque[Callable[[], None]] = deque()
        self._streams: dict[str, _Stream] = {}
        self._numbers = count()
        self._ended: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="cellar-engine", daemon=True)
        self._thread.start()

    # -- for coroutines ---------------------------------------------------------------------------

    def generate(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt; yields the output so far whenever there is more, the last one `finished`.

        Raises RequestError at once if the prompt or the parameters are not allowed, and from the iterator if the
        id is in use. Leaving the iterator (break with aclose, cancel) drops the request.
        """
        return self._outputs(self._prepare(prompt, sampling_params, request_id, priority))

    def deltas(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        conversation: str | None = None,
        salt: bytes = b"",
    ) -> AsyncIterator[Delta | RequestOutput]:
        """As `generate`, but yields what each step added, and at the end the whole request as a RequestOutput.

        `conversation` names what the request belongs to; KV is shared with requests of equal `salt` only.
        """
        prepared = self._prepare(prompt, sampling_params, request_id, priority, conversation, salt)
        return self._news(prepared, deltas=True)

    def read(self, prompt: object) -> Prompt:
        """A prompt, checked and as token ids; `generate` takes it. Raises RequestError."""
        return prompt if isinstance(prompt, Prompt) else self._front.reader.read(prompt)

    @property
    def reader(self) -> PromptReader:
        """What reads prompts, and refuses those that do not fit."""
        return self._front.reader

    async def abort(self, request_id: str) -> None:
        """Drop a request; its iterator ends with what there is, finish_reason "abort". Unknown ids are ignored."""
        self._post(lambda: self._abort(request_id))

    # -- what it is -------------------------------------------------------------------------------

    def get_default_sampling_params(self) -> SamplingParams:
        """How a request is sampled that brings no parameters: as the model's generation_config.json says."""
        return self._opened.generation.params()

    @property
    def config(self) -> EngineConfig:
        """All options, with everything decided that said `auto` or None."""
        return self._opened.config

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""
        return self._opened.spec

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus output."""
        return self._front.reader.max_model_len

    @property
    def running(self) -> bool:
        """False once the loop has ended, by `close` or by an error."""
        return self._ended is None

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError if it was skipped."""
        if self._front.tokenizer is None:
            raise RequestError("there is no tokenizer; open the AsyncLLM without skip_tokenizer_init.")
        return self._front.tokenizer

    def stats(self) -> SchedulerStats:
        """A snapshot of queues and cache; may be a step old."""
        return self._front.engine.stats()

    def close(self) -> None:
        """End the loop and free the model's memory; streams still open get a CellarError."""
        self._closing = True
        self._front.engine.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    # -- one stream -------------------------------------------------------------------------------

    def _prepare(
        self,
        prompt: object,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        conversation: str | None = None,
        salt: bytes = b"",
    ) -> Prepared:
        id = request_id if request_id is not None else f"cellar-{next(self._numbers)}"
        params = sampling_params or self.get_default_sampling_params()
        return self._front.prepare(id, self.read(prompt), params, priority, conversation, salt)

    async def _outputs(self, prepared: Prepared) -> AsyncIterator[RequestOutput]:
        async for news in self._news(prepared, deltas=False):
            assert isinstance(news, RequestOutput)
            yield news

    async def _news(self, prepared: Prepared, deltas: bool) -> AsyncIterator[Delta | RequestOutput]:
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue(), deltas)
        self._post(lambda: self._start(prepared, stream))
        finished = False
        try:
            while not finished:
                news = await stream.queue.get()
                if isinstance(news, BaseException):
                    finished = True
                    raise news
                finished = isinstance(news, RequestOutput) and news.finished
                yield news
        finally:
            if not finished:
                with contextlib.suppress(CellarError):  # an engine that has ended has dropped it already
                    self._post(lambda: self._leave(prepared.id, stream))

    def _post(self, letter: Callable[[], None]) -> None:
        """Have something done by the loop's thread. Raises what ended the loop, if it has ended."""
        if self._ended is None:
            self._letters.append(letter)
            self._front.engine.wake()
        if self._ended is not None:  # asked again: the loop may have read its last letter before this one came
            raise CellarError(str(self._ended)) from self._ended

    # -- the loop's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException = CellarError("the engine was closed; open a new one.")
        try:
            if self._begin is not None:
                self._begin()
            while not self._closing:
                while self._letters:
                    self._letters.popleft()()
                self._deliver(self._front.turn())
        except BaseException as failure:  # whatever it is, nobody may wait for ever
            error = failure
        self._ended = error
        while self._letters:
            self._letters.popleft()()
        for stream in self._streams.values():
            _hand_over({stream.loop: [(stream, error)]})
        self._streams.clear()
        self._front.close()

    def _start(self, prepared: Prepared, stream: _Stream) -> None:
        if self._ended is not None:
            _hand_over({stream.loop: [(stream, self._ended)]})
            return
        try:
            self._front.post(prepared, stream=True)
        except RequestError as error:
            _hand_over({stream.loop: [(stream, error)]})
        else:
            self._streams[prepared.id] = stream

    def _leave(self, request_id: str, stream: _Stream) -> None:
        """The iterator was left. Its id may belong to another stream by now, or never have been its own."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._front.abort(request_id)

    def _abort(self, request_id: str) -> None:
        output = self._front.abort(request_id)
        stream = self._streams.pop(request_id, None)
        if output is not None and stream is not None:
            _hand_over({stream.loop: [(stream, output)]})

    def _deliver(self, news: Processed) -> None:
        """One call into each event loop per turn, however many streams got something."""
        letters: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, News]]] = {}
        ended = {output.request_id for output in news.finished}
        told: set[str] = set()
        for delta in news.deltas:
            stream = self._streams[delta.request_id]
            if stream.deltas:
                letters.setdefault(stream.loop, []).append((stream, delta))
            elif delta.request_id not in ended and delta.request_id not in told:
                told.add(delta.request_id)
                letters.setdefault(stream.loop, []).append((stream, self._front.output(delta.request_id)))
        for output in news.finished:
            stream = self._streams.pop(output.request_id)
            letters.setdefault(stream.loop, []).append((stream, output))
        _hand_over(letters)


def _hand_over(letters: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, News]]]) -> None:
    for loop, pairs in letters.items():
        try:
            loop.call_soon_threadsafe(_put, pairs)
        except RuntimeError:  # that event loop is closed, and nobody waits in it
            continue


def _put(pairs: list[tuple[_Stream, News]]) -> None:
    for stream, news in pairs:
        stream.queue.put_nowait(news)
