"""From the body of a request to what the engine takes: prompts, sampling parameters, and how tools are used.

Every endpoint that answers a conversation goes through `Preparer.chat`, whatever form its own body has.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

import numpy as np

from cellar.core.errors import RequestError
from cellar.core.sampling import SamplingParams, StructuredOutputsParams
from cellar.engine.prompts import Prompt
from cellar.server.config import LimitConfig
from cellar.server.desk import Desk
from cellar.server.errors import ApiError, as_api_error, refused, whole_characters
from cellar.server.host import ServedModel
from cellar.server.metrics import Metrics
from cellar.server.reasoning import Reasoning
from cellar.server.requests import ChatRequest, CompletionRequest, TokenizeRequest
from cellar.server.tools import ToolUse, tool_use
from cellar.server.work import check_sequences
from cellar.text.continuation import PromptText, new_ids
from cellar.text.expendable import Budget
from cellar.text.grammar import GrammarCheck
from cellar.text.incremental import IncrementalTokenizer
from cellar.text.prefill import begun_answer
from cellar.text.rendering import Rendering
from cellar.text.tokenizer import IntArray, Tokenizer
from cellar.text.tools.registry import parser_of
from cellar.text.truncation import Side, cut, cut_text

LONG_TEXT = 4096
"""Characters, or ids, from which on a request's text is worked on beside the event loop, not in it."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Known:
    """The ids of a conversation so far: int32 [n]. The last of them are `answer`, the others stand for `prompt`."""

    ids: IntArray
    answer: IntArray
    prompt: PromptText


@dataclass(frozen=True)
class PreparedChat:
    """A conversation that the engine can answer. `continued`: its prompt begins with the ids that were known."""

    prompt: Prompt
    params: SamplingParams
    tools: ToolUse
    continued: bool = False


class Preparer:
    """Reads prompts and conversations, and checks what the answer is to be. Close it: it has processes of its own."""

    def __init__(
        self,
        model: ServedModel,
        desk: Desk,
        limits: LimitConfig,
        metrics: Metrics,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self._model = model
        self._desk = desk
        self._limits = limits
        budget = Budget(limits.prepare_timeout)
        self.templates = None if model.templates is None else Rendering(model.templates, budget)
        self._grammars = GrammarCheck(budget)
        sources = {} if model.templates is None else model.templates.sources
        self._tool_call_parser = tool_call_parser or parser_of(sources)
        self._metrics = metrics
        self._incremental = None if model.tokenizer is None else IncrementalTokenizer(model.tokenizer)
        self.reasoning = Reasoning(reasoning_parser, model.templates, model.tokenizer)

    def close(self) -> None:
        """End the processes that render templates and try grammars."""
        if self.templates is not None:
            self.templates.close()
        self._grammars.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ApiError if there is none."""
        if self._model.tokenizer is None:
            raise refused("this server was started without a tokenizer and knows token ids only.")
        return self._model.tokenizer

    def check(self, model: str | None, priority: int | None) -> None:
        """Refuse another model, and priorities that nobody reads. Raises ApiError."""
        self.name(model)
        if priority and not self._model.has_priorities:
            raise refused(
                "priority has an effect only with --scheduling-policy priority; leave it out, or 0.", "priority"
            )

    def name(self, model: str | None) -> str:
        """The name to answer with. Raises ApiError (404) for another model."""
        if model is None:
            return self._model.names[0]
        if model not in self._model.names:
            raise ApiError(
                404,
                f"the model {model[:128]!r} does not exist; this server has {self._model.names[0]!r}.",
                "model",
                "model_not_found",
            )
        return model

    async def chat(self, body: ChatRequest, owner: str, known: Known | None = None) -> PreparedChat:
        """All of a chat of `owner` (`owner_of`). Where it goes on from what is known, the rest alone is tokenized.

        Raises RequestError with the engine's names of fields, ApiError.
        """
        tools = await self._tools(body)
        structured = await self.structured(body)
        if tools.structured is not None:
            if structured is not None:
                raise refused("a forced tool call leaves no room for response_format.", "response_format")
            structured = await self.grammar(tools.structured, False, "tools")
        params = body.params(structured, self._model.generation)
        if tools.needs_special_tokens:
            params = replace(params, skip_special_tokens=False)
        special = bool(body.add_special_tokens)
        continued, salt = False, self._desk.salt(owner, body.salt)

        keep = self._keep(body.truncate_prompt_tokens)

        def read(text: str) -> Prompt:
            nonlocal continued
            if keep is not None:
                ids = cut_text(self.tokenizer, whole_characters(text), special, keep, "left")
                return self._desk.read({"prompt": text, "prompt_token_ids": ids})
            prompt = None if known is None else self._continued(known, text)
            continued = prompt is not None
            return prompt or self.read_text(text, special, salt)

        prompt, seconds = await self.conversation(body, tools.tools, lambda text: _timed(read, text))
        if self._incremental is not None:
            done = self._incremental.take_stats()
            self._metrics.tokenized(done.characters, done.tokenized, seconds)
        return PreparedChat(
            prompt, self.reasoning.applied(params, prompt.text, body.thinking_token_budget), tools, continued
        )

    async def _tools(self, body: ChatRequest) -> ToolUse:
        """How they are used: found out in a thread, since a schema may be as large as a body. Raises ApiError."""
        if not body.tools:
            return tool_use(body, self._tool_call_parser)
        return await asyncio.to_thread(tool_use, body, self._tool_call_parser)

    async def count(self, body: ChatRequest) -> int:
        """Tokens of a chat's prompt. Raises RequestError, ApiError."""
        tools = await self._tools(body)
        special = bool(body.add_special_tokens)
        with _until_left() as gone:
            return await self.conversation(body, tools.tools, lambda text: len(self.encode(text, special, gone)))

    async def ids(self, body: TokenizeRequest) -> IntArray:
        """Ids of a text or a conversation, int32 [n]; any length. Raises RequestError, ApiError."""
        with _until_left() as gone:
            if (text := body.prompt) is not None:
                return await beside(len(text), lambda: self.encode(text, body.add_special_tokens, gone))
            special = bool(body.add_special_tokens)
            return await self.conversation(body, body.tools, lambda text: self.encode(text, special, gone))

    async def conversation(
        self,
        body: ChatRequest | TokenizeRequest,
        tools: list[dict[str, Any]] | None,
        then: Callable[[str], T],
    ) -> T:
        """`then` of a conversation as the model sees it. Raises RequestError, ApiError."""
        templates, messages = self.templates, body.messages or []
        effort = body.reasoning_effort if isinstance(body, ChatRequest) else None
        variables = self.reasoning.variables(body.chat_template_kwargs or {}, effort)
        if templates is None:
            raise refused("messages need a chat template, but this server has no tokenizer.", "messages")
        taken = {"self", "messages", "tools", "add_generation_prompt", "now"} & set(variables)
        if taken:
            raise refused(f"chat_template_kwargs cannot set {sorted(taken)[0]}.", "chat_template_kwargs")

        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise refused(
                "continue_final_message goes on with the last message, add_generation_prompt begins another; set one.",
                "continue_final_message",
            )

        def rendered() -> T:
            text = templates.render(
                messages,
                tools,
                add_generation_prompt=body.add_generation_prompt is not False and not continues,
                now=datetime.now(),
                **variables,
            )
            return then(begun_answer(text, messages) if continues else text)

        return await asyncio.to_thread(rendered)

    async def structured(self, body: ChatRequest | CompletionRequest) -> StructuredOutputsParams | None:
        """What the answer must be, if it can be had. Raises RequestError, ApiError with the field that asked for it."""
        if body.response_format is None and body.structured_outputs is None:
            return None
        wanted = await asyncio.to_thread(body.structured)
        return await self.grammar(wanted, body.response_format is not None)

    async def grammar(
        self, wanted: StructuredOutputsParams | None, by_format: bool, parameter: str | None = None
    ) -> StructuredOutputsParams | None:
        """What is wanted, if it can be had. Raises ApiError with the field that asked for it."""
        if wanted is None:
            return None
        parameter = parameter or ("response_format" if by_format else "structured_outputs")
        size = len((wanted.text + (wanted.whitespace_pattern or "")).encode(errors="replace"))
        if size > self._limits.max_grammar_bytes:
            raise refused(
                f"the schema or grammar has {size} bytes, but this server takes {self._limits.max_grammar_bytes}; "
                "make it smaller.",
                parameter,
            )
        whole_characters(wanted.text + (wanted.whitespace_pattern or ""))
        try:
            await asyncio.to_thread(self._grammars.check, wanted)
        except RequestError as error:
            raise as_api_error(error, {"structured_outputs": parameter}) from error
        return wanted

    async def prompts(self, body: CompletionRequest, owner: str) -> list[Prompt]:
        """Each prompt of a completion of `owner`. Raises RequestError, ApiError."""
        prompts = body.prompts()
        check_sequences(len(prompts), body.n or 1, self._limits)

        keep = self._keep(body.truncate_prompt_tokens)

        def read(prompt: str | list[int]) -> Prompt:
            if keep is not None:
                return self._cut(prompt, body.add_special_tokens is not False, keep, "left")
            if isinstance(prompt, str) and body.add_special_tokens is False:
                return self.read_text(prompt, False, self._desk.salt(owner, body.salt))
            return self._desk.read(prompt)

        return await beside(sum(map(len, prompts)), lambda: [read(prompt) for prompt in prompts])

    async def inputs(
        self, inputs: Sequence[str | list[int]], add_special_tokens: bool, truncate: int | None
    ) -> list[Prompt]:
        """Prompts that are to be pooled: they need no room for a token. `truncate` keeps their beginnings.

        Raises RequestError, ApiError.
        """
        keep = self._keep(truncate, room=0)

        def read(prompt: str | list[int]) -> Prompt:
            if keep is not None:
                return self._cut(prompt, add_special_tokens, keep, "right", room=0)
            if isinstance(prompt, str) and not add_special_tokens:
                self._desk.check_length(prompt, room=0)
                return self._desk.read({"prompt": prompt, "prompt_token_ids": self.encode(prompt, False)}, room=0)
            return self._desk.read(prompt, room=0)

        return await beside(sum(map(len, inputs)), lambda: [read(prompt) for prompt in inputs])

    def read_text(self, text: str, add_special_tokens: bool, salt: bytes) -> Prompt:
        """A prompt with or without special tokens around it; `salt` is its KV's. Raises RequestError, ApiError."""
        self._desk.check_length(text)
        if self._incremental is None or add_special_tokens:
            ids = self.encode(text, add_special_tokens)
        else:
            ids = self._incremental.encode(text, salt)
        return self._desk.read({"prompt": text, "prompt_token_ids": ids})

    def _keep(self, truncate: int | None, room: int = 1) -> int | None:
        """To how many tokens a prompt is cut, where it is; -1 means as many as fit. Raises ApiError."""
        if truncate == 0:
            raise refused("truncate_prompt_tokens is 0, but must be 1 or more, or -1.", "truncate_prompt_tokens")
        return self._model.max_model_len - room if truncate == -1 else truncate

    def _cut(self, prompt: str | list[int], add_special_tokens: bool, keep: int, side: Side, room: int = 1) -> Prompt:
        """A prompt that was cut; its text is what is left of it."""
        if isinstance(prompt, str):
            prompt = cut_text(self.tokenizer, whole_characters(prompt), add_special_tokens, keep, side)
        return self._desk.read(cut(prompt, keep, side), room)

    def _continued(self, known: Known, text: str) -> Prompt | None:
        """A prompt that goes on from known ids; None if its text does not."""
        more = new_ids(self.tokenizer, known.prompt, known.answer, whole_characters(text))
        if more is None:
            return None
        return self._desk.read({"prompt": text, "prompt_token_ids": np.concatenate((known.ids, more))})

    def encode(
        self, text: str | None, add_special_tokens: bool | None, gone: threading.Event | None = None
    ) -> IntArray:
        """Token ids of a text, int32 [n]. Raises ApiError if it is no text, RequestError if it cannot be tokenized, or
        is `gone` before its end."""
        return self.tokenizer.encode_array(whole_characters(text or ""), add_special_tokens is not False, gone)


def _timed(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """What comes of it, and how many seconds it took."""
    begun = perf_counter()
    return work(*args, **kwargs), perf_counter() - begun


@contextmanager
def _until_left() -> Iterator[threading.Event]:
    """Says when it is left, also because whoever asked has hung up: a thread cannot be cancelled, but may look."""
    gone = threading.Event()
    try:
        yield gone
    finally:
        gone.set()


async def beside(size: int, work: Callable[[], T]) -> T:
    """Do something in a thread if it is long, so that streams go on meanwhile."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()
