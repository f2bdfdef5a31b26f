"""One call: the pieces in which it is told, and reading it while it is written.

What turns out to be no call before its arguments began is given back as the text it is. From then on they are told as
they come, so an answer that is cut off, or broken inside its arguments, leaves a call with arguments that do not parse.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

BLANK = " \t\r\n"
_OUTSIDE_STRINGS = frozenset("{}[],:+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" + BLANK)


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
        if c in BLANK:
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
        if self._depth == 0 and self._token and (c in BLANK or c in ",}"):  # behind a number or a word
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


class ValueReader:
    """Reads one JSON object or list by its brackets and strings alone; what is inside is told as it is."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._string = False
        self._escaped = False

    def push(self, text: str) -> int:
        """-> how many characters belong to it. The first one must be its opening bracket."""
        for count, c in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == '"':
                    self._string = False
            elif c == '"':
                self._string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.ended = True
                    return count + 1
        return len(text)


class Prose:
    """Text around calls: behind one, blanks are said only with the text that follows them."""

    def __init__(self) -> None:
        self.behind_a_call = False
        self._blanks = ""

    def say(self, text: str) -> str:
        """-> what of this text, and of blanks before it, is said now."""
        text = self._blanks + text
        said = text.rstrip() if self.behind_a_call else text
        self._blanks = text[len(said) :]
        return said

    def call(self) -> None:
        """A call was told: blanks before it are nothing."""
        self.behind_a_call, self._blanks = True, ""


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` that may begin `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
