"""The whole answer is a list of {"name": ..., "arguments": {...}}, because a grammar wants it so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cellar.text.tools.call import CallReader, Parsed


class ListParser:
    """The whole answer is a list of calls, as `required_schema` has it."""

    def __init__(self) -> None:
        self._text = ""
        self._count = 0
        self._reader: CallReader | None = None

    def push(self, text: str) -> Parsed:
        found, rest = Parsed(), text
        self._text += text
        while rest:
            if self._reader is None:
                _, there, after = rest.partition("{")
                rest = there + after
                if not there:
                    break
                self._reader = CallReader(self._count, ("arguments",))
            reader = self._reader
            rest = rest[max(reader.push(rest), 1) :]
            if (piece := reader.piece()) is not None:
                self._count += piece.name is not None
                found.calls.append(piece)
            if reader.ended or reader.failed:
                self._reader = None
        return found

    def flush(self) -> Parsed:
        return Parsed() if self._count else Parsed(self._text)


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
            raise ValueError(f"the parameters of function {name[:64]} must be a JSON schema")
        found[name] = dict(parameters) if parameters else {"type": "object"}
    return found
