"""The output of a response while it is written: items, and the events that tell of them.

An item is opened by its first character and closed by the beginning of the next or by the end of the answer. Each event
has the number that follows on that of the one before, from 0 on.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from cellar.core.messages import RequestOutput
from cellar.engine.outputs import Delta
from cellar.server.choices import chat_logprobs
from cellar.server.responses.items import Item, new_item_id
from cellar.server.tools import Calls, ToolUse
from cellar.text.tokenizer import Tokenizer

Event = dict[str, Any]

Seal = Callable[[str], str]


class _Open(Protocol):
    """An item that is being written."""

    item: Item

    def opened(self) -> Iterator[Event]:
        """That it is there."""

    def closed(self, status: str) -> Iterator[Event]:
        """That it is whole."""


class Answer:
    """One answer. `body` is the response's object, which ends with the output; `output` is the engine's, at the end.

    `num_top` asks for log-probabilities, with so many of the best of each place. `seal` encrypts reasoning for a client
    that keeps it. `namespaces` has namespace and name of functions by what the model calls them.
    """

    def __init__(
        self,
        body: dict[str, Any],
        tools: ToolUse,
        tokenizer: Tokenizer,
        num_top: int | None,
        seal: Seal | None,
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        self.body = body
        self.output: RequestOutput | None = None
        self._calls = Calls(tools)
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._seal = seal
        self._namespaces = namespaces
        self._output: list[Item] = []
        self._open: _Open | None = None
        self._scores: list[dict[str, Any]] = []  # of tokens whose text has not been told
        self._may_call = tools.active
        self._blanks = ""  # of a message that has not begun: before a call they are nothing
        self._count = 0

    def begin(self, queued: bool = False) -> list[Event]:
        """That there is a response: it waits, or is worked on."""
        kinds = ("response.created", "response.queued") if queued else ("response.created", "response.in_progress")
        return [self._of_response(kind) for kind in kinds]

    def started(self) -> list[Event]:
        """That a queued one is worked on."""
        self.body["status"] = "in_progress"
        return [self._of_response("response.in_progress")]

    def push(self, delta: Delta) -> list[Event]:
        """What more of the answer tells."""
        events: list[Event] = []
        if delta.logprobs is not None and self._num_top is not None:
            scores = chat_logprobs(delta.token_ids, delta.logprobs, self._num_top, self._tokenizer)
            self._scores += scores["content"]
        if delta.reasoning:
            self._scores.clear()
            events += self._say(_Reasoning, lambda item: item.more(delta.reasoning))
        text, entries = self._calls.push(delta.text)
        if delta.finish_reason is not None:
            rest, more = self._calls.flush()
            text, entries = text + rest, entries + more
        text, self._blanks = self._blanks + text, ""
        if self._may_call and not isinstance(self._open, _Message) and not text.strip() and not delta.finish_reason:
            self._blanks, text = text, ""
        if text:
            scored, self._scores = self._scores, []
            events += self._say(_Message, lambda item: item.more(text, scored))
        for entry in entries:
            self._scores.clear()
            self._blanks = ""
            events += self._call(entry)
        return events

    def finish(self, output: RequestOutput) -> list[Event]:
        """The events of the last item. From now on the body is whole; it is to be kept before `last` is told."""
        self.output = output
        made = output.outputs[0]
        whole = made.finish_reason == "stop"
        status = "completed" if whole else "incomplete"
        events: list[Event] = []
        if self._open is None and (whole or not self._output):
            events += self._say(_Message, lambda item: iter(()))
        events += self._close(status)
        self.body["status"] = status
        self.body["completed_at"] = int(time.time()) if whole else None
        self.body["incomplete_details"] = None if whole else {"reason": "max_output_tokens"}
        self.body["usage"] = usage_of(output)
        self._keep_output()
        return events

    def stop(self, status: str, error: dict[str, Any] | None = None) -> None:
        """It ends here, failed or cancelled; what there is of the last item stays incomplete."""
        self._close("incomplete")
        self.body["status"], self.body["error"] = status, error
        self._keep_output()

    def last(self) -> Event:
        """How it ended."""
        return self._of_response(f"response.{self.body['status']}")

    def _keep_output(self) -> None:
        self.body["output"] = copy.deepcopy(self._output)

    def _call(self, entry: dict[str, Any]) -> list[Event]:
        function = entry["function"]
        events: list[Event] = []
        if "id" in entry:
            events += self._close("completed")
            events += self._start(_Call(entry["id"], *self._namespaces.get(function["name"], (None, function["name"]))))
        assert isinstance(self._open, _Call)
        return events + self._numbered(self._open.more(function["arguments"]))

    def _say(self, kind: Callable[[], Any], more: Callable[[Any], Iterator[Event]]) -> list[Event]:
        """Go on with an item of this kind, or begin one."""
        events: list[Event] = []
        if not (isinstance(kind, type) and isinstance(self._open, kind)):
            events += self._close("completed")
            events += self._start(kind())
        return events + self._numbered(more(self._open))

    def _start(self, item: _Open) -> list[Event]:
        self._open = item
        self._output.append(item.item)
        return self._numbered(item.opened())

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        if isinstance(item, _Reasoning) and self._seal is not None:
            item.item["encrypted_content"] = self._seal(item.text)
        item.item["status"] = status
        return self._numbered(item.closed(status))

    def _numbered(self, events: Iterator[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            event["output_index"] = len(self._output) - 1
            event["sequence_number"] = self._count
            self._count += 1
            found.append(event)
        return found

    def _of_response(self, kind: str) -> Event:
        event = {"type": kind, "response": copy.deepcopy(self.body), "sequence_number": self._count}
        self._count += 1
        return event


class _Message:
    """What the assistant says."""

    def __init__(self) -> None:
        self._part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.item: Item = {"id": new_item_id("message"), "type": "message", "status": "in_progress"}
        self.item |= {"role": "assistant", "content": []}
        self._texts: list[str] = []

    def opened(self) -> Iterator[Event]:
        """That it is there."""
        yield {"type": "response.output_item.added", "item": copy.deepcopy(self.item)}
        yield self._event("response.content_part.added", part=copy.deepcopy(self._part))

    def more(self, text: str, scores: list[dict[str, Any]]) -> Iterator[Event]:
        """It goes on."""
        self._texts.append(text)
        self._part["logprobs"] += scores
        yield self._event("response.output_text.delta", delta=text, logprobs=scores)

    def closed(self, status: str) -> Iterator[Event]:
        """That it is whole."""
        text = self._part["text"] = "".join(self._texts)
        self.item["content"] = [self._part]
        yield self._event("response.output_text.done", text=text, logprobs=self._part["logprobs"])
        yield self._event("response.content_part.done", part=copy.deepcopy(self._part))
        yield {"type": "response.output_item.done", "item": copy.deepcopy(self.item)}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.item["id"], "content_index": 0, **fields}


class _Reasoning:
    """What the assistant thinks."""

    def __init__(self) -> None:
        self.item: Item = {"id": new_item_id("reasoning"), "type": "reasoning", "status": "in_progress"}
        self.item |= {"summary": [], "content": []}
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    def opened(self) -> Iterator[Event]:
        """That it is there."""
        yield {"type": "response.output_item.added", "item": copy.deepcopy(self.item)}
        yield self._event("response.content_part.added", part={"type": "reasoning_text", "text": ""})

    def more(self, text: str) -> Iterator[Event]:
        """It goes on."""
        self._texts.append(text)
        yield self._event("response.reasoning_text.delta", delta=text)

    def closed(self, status: str) -> Iterator[Event]:
        """That it is whole."""
        part = {"type": "reasoning_text", "text": self.text}
        self.item["content"] = [part]
        yield self._event("response.reasoning_text.done", text=part["text"])
        yield self._event("response.content_part.done", part=part.copy())
        yield {"type": "response.output_item.done", "item": copy.deepcopy(self.item)}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.item["id"], "content_index": 0, **fields}


class _Call:
    """A call of a function."""

    def __init__(self, call_id: str, namespace: str | None, name: str) -> None:
        self.item: Item = {"id": new_item_id("function_call"), "type": "function_call", "status": "in_progress"}
        self.item |= {"call_id": call_id, "name": name, "arguments": ""}
        if namespace is not None:
            self.item["namespace"] = namespace
        self._texts: list[str] = []

    def opened(self) -> Iterator[Event]:
        """That it is there."""
        yield {"type": "response.output_item.added", "item": self.item.copy()}

    def more(self, arguments: str) -> Iterator[Event]:
        """It goes on."""
        if arguments:
            self._texts.append(arguments)
            yield self._event("response.function_call_arguments.delta", delta=arguments)

    def closed(self, status: str) -> Iterator[Event]:
        """That it is whole."""
        arguments = self.item["arguments"] = "".join(self._texts)
        yield self._event("response.function_call_arguments.done", name=self.item["name"], arguments=arguments)
        yield {"type": "response.output_item.done", "item": self.item.copy()}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.item["id"], **fields}


def usage_of(output: RequestOutput) -> dict[str, Any]:
    """The account of a response. What was not found in the cache is written to it."""
    given, cached = len(output.prompt_token_ids), output.num_cached_tokens
    made = sum(len(one.token_ids) for one in output.outputs)
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": given - cached},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": sum(one.num_reasoning_tokens for one in output.outputs)},
        "total_tokens": given + made,
    }
