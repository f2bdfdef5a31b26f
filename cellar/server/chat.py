"""/v1/chat/completions: answer a conversation."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from cellar.core.messages import CompletionOutput, RequestOutput
from cellar.engine.outputs import Delta
from cellar.engine.prompts import Prompt
from cellar.server.choices import SpeltLogprobs, chat_logprobs, plain_tables, usage, usage_of
from cellar.server.desk import Session, check_complete
from cellar.server.errors import ApiError
from cellar.server.pieces import lazily
from cellar.server.requests import ChatRequest
from cellar.server.stream import event, unknown_usage
from cellar.server.tools import Calls, ToolUse
from cellar.text.tokenizer import Tokenizer


class Chat:
    """The answer to one ChatRequest."""

    def __init__(
        self,
        id: str,
        model: str,
        request: ChatRequest,
        prompt: Prompt,
        tokenizer: Tokenizer,
        tools: ToolUse,
        reasons: bool = False,
    ) -> None:
        """`reasons`: the model is one whose answers may hold reasoning; it is told apart, and counted."""
        self._head: dict[str, Any] = {"id": id, "created": int(time.time()), "model": model}
        self._request = request
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._tools = tools
        self._reasons = reasons

    async def whole(self, session: Session) -> dict[str, Any]:
        """The body of the answer."""
        async with session:
            (output,) = await session.whole()
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": lazily(map(self._choice, output.outputs), self._weight(output)),
            "usage": usage_of([output], reasons=self._reasons),
        }
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = plain_tables(output.prompt_logprobs or (), self._request.prompt_logprobs)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = self._prompt.token_ids.tolist()
        return body

    def _weight(self, output: RequestOutput) -> int:
        """About how many values the answer's choices have."""
        entries = 1 + 4 * (1 + (self._request.top_logprobs or 0)) if self._request.logprobs else 1
        return sum(10 + len(made.token_ids) * entries for made in output.outputs)

    async def events(self, session: Session) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events: the role, what is said bit by bit, why it ended, and the usage."""
        request, done, count = self._request, list[RequestOutput](), 0
        head = {**self._head, "object": "chat.completion.chunk"}
        begun: set[int] = set()
        calls = [Calls(self._tools) for _ in range(request.n or 1)]
        each = request.logprobs or request.return_token_ids or request.continuous_usage
        plain = not (self._tools.active or request.return_token_ids or request.continuous_usage)
        spelt = SpeltLogprobs(request.top_logprobs or 0, self._tokenizer) if request.logprobs else None
        fast, usage_there = json.dumps(head, separators=(",", ":"))[:-1], unknown_usage(request.include_usage)
        async with session, aclosing(session.news()) as news:
            async for _, one in news:
                if isinstance(one, RequestOutput):
                    check_complete(one)
                    done.append(one)
                    continue
                count += len(one.token_ids)
                if one.index not in begun:
                    begun.add(one.index)
                    yield event(self._with_usage(self._first(head, one.index), count))
                if plain and one.finish_reason is None and not one.reasoning:
                    if one.text or spelt is not None:
                        content = f'"content":{json.dumps(one.text)}' if one.text else ""
                        logprobs = "null" if spelt is None else spelt(one.token_ids, one.logprobs)
                        yield (
                            f'data: {fast},"choices":[{{"index":{one.index},"delta":{{{content}}},'
                            f'"logprobs":{logprobs},"finish_reason":null}}]{usage_there}}}\n\n'
                        ).encode()
                    continue
                part = self._part(one, calls[one.index])
                if part["delta"] or part["finish_reason"] or each:
                    yield event(self._with_usage({**head, "choices": [part]}, count))
        if request.include_usage:
            yield event({**head, "choices": [], "usage": usage_of(done, reasons=self._reasons)})

    def _with_usage(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        if self._request.continuous_usage:
            body["usage"] = usage(len(self._prompt.token_ids), count)
        elif self._request.include_usage:
            body["usage"] = None
        return body

    def _first(self, head: dict[str, Any], index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        body = {**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
        if self._request.return_token_ids:
            body["prompt_token_ids"] = self._prompt.token_ids.tolist()
        return body

    def _part(self, delta: Delta, calls: Calls) -> dict[str, Any]:
        if delta.finish_reason == "error":
            raise ApiError(500, f"the engine could not complete this request ({delta.stop_reason}).")
        request = self._request
        text, entries = calls.push(delta.text)
        if delta.finish_reason is not None:
            rest, more = calls.flush()
            text, entries = text + rest, entries + more
        said = _thought(delta.reasoning)
        if text:
            said["content"] = text
        if entries:
            said["tool_calls"] = entries
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": said,
            "logprobs": None,
            "finish_reason": _reason(delta.finish_reason, calls),
        }
        if request.logprobs:
            choice["logprobs"] = chat_logprobs(
                delta.token_ids, delta.logprobs or (), request.top_logprobs or 0, self._tokenizer
            )
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _choice(self, made: CompletionOutput) -> dict[str, Any]:
        request, calls = self._request, Calls(self._tools)
        text = calls.push(made.text)[0] + calls.flush()[0]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._reasons:
            message |= _thought(made.reasoning or None)
        if calls.calls:
            message |= {"content": text or None, "tool_calls": calls.calls}
        choice: dict[str, Any] = {
            "index": made.index,
            "message": message,
            "logprobs": None,
            "finish_reason": _reason(made.finish_reason, calls),
            "stop_reason": made.stop_reason,
        }
        if request.logprobs:
            choice["logprobs"] = chat_logprobs(
                made.token_ids, made.logprobs or (), request.top_logprobs or 0, self._tokenizer
            )
        if request.return_token_ids:
            choice["token_ids"] = made.token_ids
        return choice


def _thought(text: str | None) -> dict[str, Any]:
    """Reasoning under both of its names: DeepSeek's, and the one that vLLM has now. "" is none at all."""
    return {} if text == "" else {"reasoning_content": text, "reasoning": text}


def _reason(reason: str | None, calls: Calls) -> str | None:
    """OpenAI says of an answer that ends by itself and holds calls that it ended for them."""
    return "tool_calls" if reason == "stop" and calls.calls else reason
