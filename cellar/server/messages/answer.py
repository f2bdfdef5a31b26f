"""An answer in Anthropic's form: blocks of thinking, text and tool use, as a whole or as events."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from cellar.core.messages import CompletionOutput, RequestOutput
from cellar.engine.prompts import Prompt
from cellar.server.desk import Session, check_complete
from cellar.server.errors import ApiError
from cellar.server.stream import named_event
from cellar.server.tools import Calls, ToolUse

UNPARSED = "INVALID_JSON"
"""Where the input of a call stands that is no JSON object: it was cut off, as a rule."""


class Answer:
    """The answer to one request of /v1/messages.

    `max_tokens` is what was asked for, not what the context had room for; `reasons`: the model may think.
    """

    def __init__(self, id: str, model: str, prompt: Prompt, tools: ToolUse, max_tokens: int, reasons: bool) -> None:
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._prompt = prompt
        self._tools = tools
        self._max_tokens = max_tokens
        self._reasons = reasons

    async def whole(self, session: Session) -> dict[str, Any]:
        """The body of the answer."""
        async with session:
            (output,) = await session.whole()
        (made,) = output.outputs
        calls = Calls(self._tools)
        text = calls.push(made.text)[0] + calls.flush()[0]
        content: list[dict[str, Any]] = []
        if made.reasoning:
            content.append({"type": "thinking", "thinking": made.reasoning, "signature": signature(made.reasoning)})
        if text and not (calls.calls and text.isspace()):
            content.append({"type": "text", "text": text, "citations": None})
        content += [_tool_use(call) for call in calls.calls]
        return {**self._head, "content": content, **self._end(made, calls), "usage": self._usage(output)}

    async def events(self, session: Session) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        blocks, calls, begun = Blocks(), Calls(self._tools), False
        async with session, aclosing(session.news()) as news:
            async for _, one in news:
                if not begun:
                    begun = True
                    yield self._start()
                    yield named_event({"type": "ping"})
                if isinstance(one, RequestOutput):
                    check_complete(one)
                    for data in blocks.close():
                        yield data
                    delta = self._end(one.outputs[0], calls)
                    yield named_event({"type": "message_delta", "delta": delta, "usage": self._usage(one)})
                    continue
                if one.finish_reason == "error":
                    raise ApiError(500, f"the engine could not complete this request ({one.stop_reason}).")
                text, entries = calls.push(one.text)
                if one.finish_reason is not None:
                    rest, more = calls.flush()
                    text, entries = text + rest, entries + more
                for data in blocks.add(one.reasoning, text, entries):
                    yield data
        yield named_event({"type": "message_stop"})

    def _start(self) -> bytes:
        usage = _account(len(self._prompt.token_ids), 0, 0)
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return named_event({"type": "message_start", "message": message})

    def _end(self, made: CompletionOutput, calls: Calls) -> dict[str, Any]:
        """Why it ended."""
        by_text = made.stop_reason if isinstance(made.stop_reason, str) else None
        reason = "end_turn"
        if made.finish_reason == "length":
            reason = "max_tokens" if len(made.token_ids) >= self._max_tokens else "model_context_window_exceeded"
        elif calls.calls:
            reason, by_text = "tool_use", None
        elif by_text is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": by_text}

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        (made,) = output.outputs
        account = _account(len(output.prompt_token_ids), len(made.token_ids), output.num_cached_tokens)
        if self._reasons:
            account["output_tokens_details"] = {"thinking_tokens": made.num_reasoning_tokens}
        return account


class Blocks:
    """The blocks of a stream: one is open at a time, and another kind of news closes it."""

    def __init__(self) -> None:
        self._count = 0
        self._kind: str | None = None  # of the block that is open
        self._call = -1  # the number of its call
        self._thought = hashlib.blake2b(digest_size=32)
        self._blanks = ""  # text that is nothing if only calls follow

    def add(self, reasoning: str, text: str, entries: list[dict[str, Any]]) -> Iterator[bytes]:
        """More came. What goes on with a call that is open is told before text that follows it."""
        if reasoning:
            if self._kind != "thinking":
                yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thought.update(reasoning.encode(errors="replace"))
            yield self._delta({"type": "thinking_delta", "thinking": reasoning})
        same = [entry for entry in entries if self._kind == "tool_use" and entry["index"] == self._call]
        for entry in same:
            yield from self._input(entry)
        if text:
            yield from self._text(text)
        for entry in entries[len(same) :]:
            if "id" in entry:
                self._blanks, self._call = "", entry["index"]
                name = entry["function"]["name"]
                yield from self._open("tool_use", {"type": "tool_use", "id": entry["id"], "name": name, "input": {}})
            yield from self._input(entry)

    def close(self) -> Iterator[bytes]:
        """Nothing more of the block that is open."""
        if self._kind is None and self._blanks:
            yield from self._say(self._blanks)
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _encoded(self._thought.digest())})
        if self._kind is not None:
            yield named_event({"type": "content_block_stop", "index": self._count - 1})
        self._kind = None

    def _text(self, text: str) -> Iterator[bytes]:
        if self._kind != "text":
            text, self._blanks = self._blanks + text, ""
            if text.isspace():
                self._blanks = text
                return
        yield from self._say(text)

    def _say(self, text: str) -> Iterator[bytes]:
        self._blanks = ""
        if self._kind != "text":
            yield from self._open("text", {"type": "text", "text": "", "citations": None})
        yield self._delta({"type": "text_delta", "text": text})

    def _input(self, entry: dict[str, Any]) -> Iterator[bytes]:
        if entry["function"]["arguments"]:
            yield self._delta({"type": "input_json_delta", "partial_json": entry["function"]["arguments"]})

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self.close()
        self._kind = kind
        self._count += 1
        yield named_event({"type": "content_block_start", "index": self._count - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._count - 1, "delta": delta})


def signature(thinking: str) -> str:
    """A digest of the text. Clients send it back with the text; it is not asked for, and proves nothing."""
    return _encoded(hashlib.blake2b(thinking.encode(errors="replace"), digest_size=32).digest())


def _encoded(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _account(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Tokens of the prompt are counted where they came from; together they are the prompt's."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        given = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        given = {UNPARSED: function["arguments"]}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
