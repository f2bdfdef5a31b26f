"""Tool calls: from what a model writes to the calls that it means, told while they are written.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, among other text
    llama3_json  the whole answer is {"name": ..., "parameters": {...}}, several with ; between
    required     the whole answer is a list of {"name": ..., "arguments": {...}}, by a grammar

What turns out to be no call before its arguments began is given back as the text it is. From then on they are told as
they come, so an answer that is cut off, or broken inside its arguments, leaves a call with arguments that do not parse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

_BLANK = " \t\r\n"
_OUTSIDE_STRINGS = frozenset("{}[],:+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" + _BLANK)


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of the call number `index`. Its first piece alone has the name; `arguments`, put together, are JSON."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class Parsed:
    """What a piece of text brought: at most one piece of each call."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class ToolParser(Protocol):
    """Reads one answer piece by piece."""

    def push(self, text: str) -> Parsed:
        """More text came; what might begin a call is held back."""

    def flush(self) -> Parsed:
        """No more comes."""


class _Place(Enum):
    """Where in an object the next character stands."""

    BEFORE = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER = auto()


class CallReader:
    """Reads one object with a name and arguments, character by character.

    `arguments` may stand under any of `keys`. `text` is all that was read. A string of JSON in their place is told as
    what it holds, when it is complete.
    """

    def __init__(self, index: int, keys: Sequence[str]) -> None:
        self.text = ""
        self.told = False
        self.ended = False
        self.failed = False
        self._index = index
        self._keys = keys
        self._place = _Place.BEFORE
        self._key = ""
        self._token = ""  # the key or value at hand
        self._depth = 0
        self._string = False
        self._escaped = False
        self._name: str | None = None
        self._arguments: str | None = None
        self._untold = ""

    def push(self, text: str) -> int:
        """-> how many characters belong to the object; fewer than all if it ends, or fails, among them."""
        for count, character in enumerate(text):
            if not self._step(character):
                self.failed = True
                return count
            self.text += character
            if self.ended:
                self.failed = not self.told
                return count + 1
        return len(text)

    def piece(self) -> CallPiece | None:
        """What can be told since the last time."""
        if not self.told or (self._name is None and not self._untold):
            return None
        name, self._name = self._name, None
        untold, self._untold = self._untold, ""
        return CallPiece(self._index, name, untold)

    def _step(self, c: str) -> bool:
        """False if this is no object of calls."""
        place = self._place
        if place is _Place.IN_VALUE:
            return self._value(c)
        if place is _Place.IN_KEY:
            self._token += c
            if self._closes_string(c):
                self._key = _json(self._token)
                self._place = _Place.COLON
            return isinstance(self._key, str)
        if c in _BLANK:
            return True
        if place is _Place.VALUE:
            self._token, self._place, self._depth, self._string = "", _Place.IN_VALUE, 0, False
            return self._value(c)
        if c == "}" and place in (_Place.KEY, _Place.AFTER):
            self.ended = True
            return True
        follows = {
            _Place.BEFORE: ("{", _Place.KEY),
            _Place.KEY: ('"', _Place.IN_KEY),
            _Place.COLON: (":", _Place.VALUE),
            _Place.AFTER: (",", _Place.KEY),
        }
        expected, self._place = follows[place]
        self._token, self._escaped = c, False
        return c == expected

    def _closes_string(self, c: str) -> bool:
        if self._escaped:
            self._escaped = False
            return False
        self._escaped = c == "\\"
        return c == '"'

    def _value(self, c: str) -> bool:
        """One character inside, or just behind, a value."""
        if self._string:
            self._take(c)
            if self._closes_string(c):
                self._string = False
                return self._depth > 0 or self._end_value()
            return True
        if self._depth == 0 and self._token and (c in _BLANK or c in ",}"):  # behind a number or a word
            return self._end_value() and self._step(c)
        if c == '"':
            self._string, self._escaped = True, False
        elif c not in _OUTSIDE_STRINGS:
            return False
        if c in "{[":
            self._depth += 1
        elif c in "}]":
            if self._depth == 0:
                return False
            self._depth -= 1
        self._take(c)
        return not (c in "}]" and self._depth == 0) or self._end_value()

    def _take(self, c: str) -> None:
        self._token += c
        if self._key in self._keys and self._arguments is None and self._token[0] != '"' and self._name_known:
            self.told = True
            self._untold += c

    @property
    def _name_known(self) -> bool:
        return self.told or self._name is not None

    def _end_value(self) -> bool:
        self._place = _Place.AFTER
        if self._key == "name" and not self._name_known:
            name = _json(self._token)
            self._name = name if isinstance(name, str) else None
            if self._name is not None and self._arguments is not None:
                self.told, self._untold = True, self._arguments
            return isinstance(name, str)
        if self._key in self._keys and self._arguments is None:
            text = self._token
            if text[0] == '"':
                text = _json(text)
                if not isinstance(text, str):
                    return False
                if self._name_known:
                    self.told, self._untold = True, text
            self._arguments = text
        return True


class HermesParser:
    """Calls in tags (Hermes 2 and 3, Qwen 2.5 and 3)."""

    def __init__(self) -> None:
        self._held = ""
        self._blanks = ""
        self._count = 0
        self._reader: CallReader | None = None  # inside a tag
        self._done = False  # inside a tag, behind its object, or behind what is none

    def push(self, text: str) -> Parsed:
        found, rest = Parsed(), self._held + text
        self._held = ""
        while rest:
            if self._reader is None:
                rest = self._outside(rest, found)
            elif self._done:
                rest = self._behind(self._reader, rest, found)
            else:
                rest = self._inside(self._reader, rest, found)
        return found

    def flush(self) -> Parsed:
        found, reader = Parsed(), self._reader
        if reader is None:
            self._say(self._held, found)
        elif not reader.told:
            self._say(OPEN + reader.text + self._held, found)  # a model may end without the closing tag
        self._held, self._reader = "", None
        return found

    def _outside(self, rest: str, found: Parsed) -> str:
        before, there, after = rest.partition(OPEN)
        if there:
            self._say(before, found)
            self._reader, self._done = CallReader(self._count, ("arguments",)), False
            return after
        self._held = rest[len(rest) - _overlap(rest, OPEN) :]
        self._say(rest[: len(rest) - len(self._held)], found)
        return ""

    def _inside(self, reader: CallReader, rest: str, found: Parsed) -> str:
        used = reader.push(rest)
        if (piece := reader.piece()) is not None:
            self._count += piece.name is not None
            found.calls.append(piece)
            self._blanks = ""
        self._done = reader.ended or reader.failed
        return rest[used:]

    def _behind(self, reader: CallReader, rest: str, found: Parsed) -> str:
        """Up to the closing tag: what is no call is text, and behind a call there is nothing to say."""
        before, there, after = rest.partition(CLOSE)
        if not there:
            self._held = rest
            return ""
        if not reader.told:
            self._say(OPEN + reader.text + before + CLOSE, found)
        self._reader = None
        return after

    def _say(self, text: str, found: Parsed) -> None:
        """Behind a call, blanks are said only with the text that follows them: between calls they are nothing."""
        text = self._blanks + text
        said = text.rstrip() if self._count else text
        self._blanks = text[len(said) :]
        found.content += said


class LlamaParser:
    """The answer begins with calls, or has none (Llama 3.1 to 3.3)."""

    def __init__(self) -> None:
        self._held = ""
        self._count = 0
        self._plain = False
        self._reader: CallReader | None = None

    def push(self, text: str) -> Parsed:
        found, rest = Parsed(), text
        while rest:
            if self._plain:
                found.content += rest
                break
            rest = self._begin(rest, found) if self._reader is None else self._inside(self._reader, rest, found)
        return found

    def flush(self) -> Parsed:
        reader, held = self._reader, self._held
        if reader is not None:
            return Parsed() if reader.told else Parsed(held + reader.text)
        return Parsed() if self._count else Parsed(held)

    def _begin(self, rest: str, found: Parsed) -> str:
        """Before a call: blanks, the tag before the first one, semicolons before the others."""
        for k, character in enumerate(rest):
            begun = self._held + rest[:k]
            if character == "{" and (self._count or begun.strip() in ("", PYTHON_TAG)):
                self._held = begun
                self._reader = CallReader(self._count, ("parameters", "arguments"))
                return rest[k:]
            tag = (begun + character).strip()
            if not (character in _BLANK + ";" if self._count else PYTHON_TAG.startswith(tag)):
                return self._give_up(begun, rest[k:], found)
        self._held += rest
        return ""

    def _inside(self, reader: CallReader, rest: str, found: Parsed) -> str:
        used = reader.push(rest)
        if (piece := reader.piece()) is not None:
            self._count += piece.name is not None
            found.calls.append(piece)
        rest = rest[used:]
        if reader.failed and not reader.told:
            return self._give_up(self._held + reader.text, rest, found)
        if reader.ended:
            self._reader, self._held = None, ""
        elif reader.failed:
            return self._give_up("", rest, found)
        return rest

    def _give_up(self, before: str, rest: str, found: Parsed) -> str:
        """The rest is text."""
        self._plain, self._held, self._reader = True, "", None
        return before + rest


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


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` that may begin `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
