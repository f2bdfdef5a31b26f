"""Tool calls: from what a model writes to the calls that it means.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, among other text
    llama3_json  the whole answer is {"name": ..., "parameters": {...}}, several with ; between

What does not parse is given back as the text it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `arguments` is JSON."""

    name: str
    arguments: str


@dataclass(slots=True)
class Parsed:
    """What a piece of text brought."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolParser(Protocol):
    """Reads one answer piece by piece."""

    def push(self, text: str) -> Parsed:
        """More text came; what might begin a call is held back."""

    def flush(self) -> Parsed:
        """No more comes."""


class HermesParser:
    """Calls in tags (Hermes 2 and 3, Qwen 2.5 and 3)."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._called = False

    def push(self, text: str) -> Parsed:
        found, rest = Parsed(), self._held + text
        while True:
            tag = CLOSE if self._inside else OPEN
            before, there, after = rest.partition(tag)
            if not there:
                break
            if self._inside:
                self._end(before, found)
            else:
                self._say(before, found)
            self._inside, rest = not self._inside, after
        if self._inside:
            self._held = rest
        else:
            self._held = rest[len(rest) - _overlap(rest, OPEN) :]
            self._say(rest[: len(rest) - len(self._held)], found)
        return found

    def flush(self) -> Parsed:
        found, rest, self._held = Parsed(), self._held, ""
        if self._inside:
            self._end(rest, found, closed=False)  # a model may end without the closing tag
        else:
            self._say(rest, found)
        return found

    def _say(self, text: str, found: Parsed) -> None:
        if self._called and not text.strip():
            return  # line breaks between calls
        found.content += text

    def _end(self, text: str, found: Parsed, closed: bool = True) -> None:
        call = _call(_json(text), "arguments")
        if call is None:
            found.content += OPEN + text + (CLOSE if closed else "")
        else:
            self._called = True
            found.calls.append(call)


class LlamaParser:
    """The whole answer is calls, or none of it is (Llama 3.1 to 3.3)."""

    def __init__(self) -> None:
        self._held = ""
        self._plain = False

    def push(self, text: str) -> Parsed:
        if self._plain:
            return Parsed(text)
        self._held += text
        begin = self._held.lstrip()
        if not begin or begin.startswith("{") or PYTHON_TAG.startswith(begin[: len(PYTHON_TAG)]):
            return Parsed()
        self._plain, held, self._held = True, self._held, ""
        return Parsed(held)

    def flush(self) -> Parsed:
        held, self._held = self._held, ""
        calls = _several(held.strip().removeprefix(PYTHON_TAG))
        return Parsed(held) if calls is None else Parsed(calls=calls)


PARSERS: Mapping[str, type[HermesParser] | type[LlamaParser]] = {"hermes": HermesParser, "llama3_json": LlamaParser}


def required_schema(tools: Sequence[Mapping[str, Any]], several: bool) -> dict[str, Any]:
    """The schema of an answer that is nothing but calls: a list of names with arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, parameters in functions(tools).items()
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    return schema if several else {**schema, "maxItems": 1}


def required_calls(text: str) -> list[ToolCall] | None:
    """The calls of an answer to `required_schema`; None if it was cut off."""
    value = _json(text)
    if not isinstance(value, list):
        return None
    calls = [_call(one, "arguments") for one in value]
    return [call for call in calls if call is not None]


def functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each tool's name and the schema of its arguments. Raises ValueError if a tool is no function."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping) or not isinstance(name, str):
            raise ValueError('each tool must be {"type": "function", "function": {"name": ...}}')
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ValueError(f"the parameters of function {name} must be a JSON schema")
        found[name] = dict(parameters) if parameters else {"type": "object"}
    return found


def _several(text: str) -> list[ToolCall] | None:
    """JSON objects with ; between; None if anything else is there."""
    decoder, calls, at = json.JSONDecoder(), list[ToolCall](), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        call = _call(value, "parameters") or _call(value, "arguments")
        if call is None:
            return None
        calls.append(call)
        while at < len(text) and text[at] in "; \n\t":
            at += 1
    return calls or None


def _call(value: Any, key: str) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or key not in value:
        return None
    arguments = value[key]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(value["name"], text)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` that may begin `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
