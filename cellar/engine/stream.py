"""AsyncLLM: the engine in a thread of its own, and an async generator for each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from os import PathLike
from types import TracebackType
from typing import Any

from cellar.core.config import EngineConfig
from cellar.core.errors import RequestError
from cellar.core.messages import IntArray, MemoryAnswer, MemoryQuestion, RequestOutput, SchedulerStats, Tier
from cellar.core.sampling import SamplingParams
from cellar.core.specs import ModelSpec
from cellar.engine.front import Front, Prepared
from cellar.engine.open_streams import OpenStreams
from cellar.engine.opened import Opened, open_front
from cellar.engine.outputs import Delta
from cellar.engine.prompts import Prompt, PromptReader
from cellar.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model that many coroutines use at a time; options as those of `LLM`.

    The front and its engine belong to a thread (`OpenStreams`). An error of the engine itself reaches every stream, and
    every later call.
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
        self._opened = opened
        self._front: Front = opened.front
        self._numbers = count()
        self._streams = OpenStreams(opened.front)
        self._streams.start(begin)

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
        """As `generate`, but yields what was added since the last look, at last the whole request as a RequestOutput.

        `conversation` names what the request belongs to; KV is shared with requests of equal `salt` only. Prompts of
        one `owner` share its turns; without a name the request has turns of its own. Tenants take turns, too.
        """
        prepared = self._prepare(prompt, sampling_params, request_id, priority, conversation, salt, owner, tenant)
        return self._streams.news(prepared, deltas=True)

    def read(self, prompt: object, room: int = 1) -> Prompt:
        """A prompt, checked and as token ids; `generate` takes it. See `PromptReader.read`. Raises RequestError."""
        return prompt if isinstance(prompt, Prompt) else self._front.reader.read(prompt, room)

    @property
    def reader(self) -> PromptReader:
        """What reads prompts, and refuses those that do not fit."""
        return self._front.reader

    async def abort(self, request_id: str) -> None:
        """Drop a request; its iterator ends with what there is, finish_reason "abort". Unknown ids are ignored."""
        self._streams.abort(request_id)

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
        question = MemoryQuestion(conversations, forget, pin_seconds, flush, tuple(keep))
        return await self._streams.ask(question)

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
        return self._streams.running

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
        self._streams.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    # -- how --------------------------------------------------------------------------------------

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
        async for news in self._streams.news(prepared, deltas=False):
            assert isinstance(news, RequestOutput)
            yield news
