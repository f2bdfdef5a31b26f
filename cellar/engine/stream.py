"""AsyncLLM: the engine in a thread of its own, and an async generator for each request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from os import PathLike
from types import TracebackType
from typing import Any

from cellar.core.config import EngineConfig
from cellar.core.errors import CellarError, IntegrityError, RequestError
from cellar.core.messages import IntArray, MemoryAnswer, MemoryQuestion, RequestOutput, SchedulerStats, Tier
from cellar.core.sampling import SamplingParams
from cellar.core.specs import ModelSpec
from cellar.engine.driver import Driver
from cellar.engine.front import Front, Prepared
from cellar.engine.opened import Opened, open_front
from cellar.engine.outputs import Delta, Processed
from cellar.engine.prompts import Prompt, PromptReader
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

    The front and its engine belong to a thread: what coroutines want of them is a message to the engine, read once
    per turn. An error of the engine itself reaches every stream, and every later call.
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
        self._streams: dict[str, _Stream] = {}
        self._questions: set[asyncio.Future[MemoryAnswer]] = set()
        self._numbers = count()
        self._driver = Driver(self._front.engine, self._turn, self._end, "cellar-engine")
        self._driver.start(begin)

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
        owner: str = "",
        tenant: str = "",
    ) -> AsyncIterator[Delta | RequestOutput]:
        """As `generate`, but yields what each step added, and at the end the whole request as a RequestOutput.

        `conversation` names what the request belongs to; KV is shared with requests of equal `salt` only. Prompts of
        one `owner` share its turns; without a name the request has turns of its own. Tenants take turns, too.
        """
        prepared = self._prepare(prompt, sampling_params, request_id, priority, conversation, salt, owner, tenant)
        return self._news(prepared, deltas=True)

    def read(self, prompt: object, room: int = 1) -> Prompt:
        """A prompt, checked and as token ids; `generate` takes it. See `PromptReader.read`. Raises RequestError."""
        return prompt if isinstance(prompt, Prompt) else self._front.reader.read(prompt, room)

    @property
    def reader(self) -> PromptReader:
        """What reads prompts, and refuses those that do not fit."""
        return self._front.reader

    async def abort(self, request_id: str) -> None:
        """Drop a request; its iterator ends with what there is, finish_reason "abort". Unknown ids are ignored."""
        self._driver.post(lambda: self._abort(request_id))

    async def memory(
        self,
        *conversations: str,
        forget: bool = False,
        keep: Sequence[tuple[bytes, IntArray]] = (),
        pin_seconds: float | None = None,
        flush: Tier | None = None,
    ) -> MemoryAnswer:
        """Tokens of each conversation, by the fastest tier that has their K and V.

        With `forget`, none of it is found any more when this returns, in any tier or copy under way, unless another
        conversation shares it, or a context (salt, token ids) to `keep` has it. With `pin_seconds` it leaves tiers last
        for so long. With `flush` a tier drops whatever nobody uses, and the answer ends with how many chunks that were.
        Raises CellarError if the engine has ended.
        """
        told: asyncio.Future[MemoryAnswer] = asyncio.get_running_loop().create_future()
        question = MemoryQuestion(conversations, forget, pin_seconds, flush, tuple(keep))
        self._driver.post(lambda: self._ask(question, told))
        return await told

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
        return self._driver.ended is None

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
        self._driver.close()

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
        owner: str = "",
        tenant: str = "",
    ) -> Prepared:
        id = request_id if request_id is not None else f"cellar-{next(self._numbers)}"
        params = sampling_params or self.get_default_sampling_params()
        return self._front.prepare(id, self.read(prompt), params, priority, conversation, salt, owner, tenant)

    async def _outputs(self, prepared: Prepared) -> AsyncIterator[RequestOutput]:
        async for news in self._news(prepared, deltas=False):
            assert isinstance(news, RequestOutput)
            yield news

    async def _news(self, prepared: Prepared, deltas: bool) -> AsyncIterator[Delta | RequestOutput]:
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue(), deltas)
        self._driver.post(lambda: self._start(prepared, stream))
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
                    self._driver.post(lambda: self._leave(prepared.id, stream))

    # -- the engine's thread ----------------------------------------------------------------------

    def _turn(self) -> None:
        self._deliver(self._front.turn())

    def _end(self, error: BaseException) -> None:
        """Nobody may wait for ever."""
        for stream in self._streams.values():
            _hand_over({stream.loop: [(stream, error)]})
        self._streams.clear()
        for told in tuple(self._questions):
            self._tell(told, error)
        self._front.close()

    def _start(self, prepared: Prepared, stream: _Stream) -> None:
        if self._driver.ended is not None:
            _hand_over({stream.loop: [(stream, self._driver.ended)]})
            return
        try:
            self._front.add(prepared, stream=True)
        except IntegrityError:
            raise
        except Exception as error:  # the request's own fault, whatever it is
            _hand_over({stream.loop: [(stream, error)]})
        else:
            self._streams[prepared.id] = stream

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
        if self._driver.ended is None and self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._front.abort(request_id)

    def _abort(self, request_id: str) -> None:
        if self._driver.ended is not None:
            return
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
        stream.queue.put_nowait(news)
