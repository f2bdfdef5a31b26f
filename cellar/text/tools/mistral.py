"""Behind [TOOL_CALLS]: a list [{"name": ..., "arguments": {...}}, ...], or NAME[ARGS]{...} (both of Mistral's ways)."""

from __future__ import annotations

import re
from collections.abc import Callable

from cellar.text.tools.call import BLANK, CallPiece, CallReader, Parsed, Prose, ValueReader, overlap

TAG = "[TOOL_CALLS]"

_HEAD = re.compile(r"\s*([\w./-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
_LONGEST_HEAD = 256


class MistralParser:
    """Calls behind a tag, once before a list of them, or before each."""

    def __init__(self) -> None:
        self._state: Callable[[str, Parsed], str] = self._outside
        self._prose = Prose()
        self._held = ""
        self._raw = ""  # from the tag on, as long as no call of it was told
        self._listed = False
        self._count = 0
        self._head = ""
        self._name: str | None = None
        self._reader: CallReader | None = None
        self._value = ValueReader()

    def push(self, text: str) -> Parsed:
        found, rest = Parsed(), self._held + text
        self._held = ""
        while rest:
            rest = self._state(rest, found)
        return found

    def flush(self) -> Parsed:
        reader = self._reader
        if reader is not None and not reader.told:
            self._head = reader.text
        return Parsed(self._prose.say(self._held + self._raw + self._head))

    def _outside(self, rest: str, found: Parsed) -> str:
        before, there, after = rest.partition(TAG)
        if there:
            found.content += self._prose.say(before)
            self._raw, self._listed, self._state = TAG, False, self._begin
            return after
        self._held = rest[len(rest) - overlap(rest, TAG) :]
        found.content += self._prose.say(rest[: len(rest) - len(self._held)])
        return ""

    def _begin(self, rest: str, found: Parsed) -> str:
        """Behind the tag, or between the objects of a list."""
        c = rest[0]
        if c in BLANK or (self._listed and c == ","):
            self._raw += c if self._raw else ""
            return rest[1:]
        if c == "{":
            self._reader, self._state = CallReader(self._count, ("arguments",)), self._object
            return rest
        if self._listed:
            if c != "]" or self._raw:
                return self._give_up(rest, found)
            self._state = self._outside
            return rest[1:]
        if c == "[":
            self._raw, self._listed = self._raw + c, True
            return rest[1:]
        self._head, self._state = "", self._named
        return rest

    def _object(self, rest: str, found: Parsed) -> str:
        reader = self._reader
        assert reader is not None
        used = reader.push(rest)
        if (piece := reader.piece()) is not None:
            self._told(piece, found)
        if reader.ended or reader.failed:
            self._reader = None
            if not reader.told:
                self._head = reader.text
                return self._give_up(rest[used:], found)
            self._state = self._begin if self._listed and reader.ended else self._outside
        return rest[used:]

    def _named(self, rest: str, found: Parsed) -> str:
        before, there, _ = rest.partition("{")
        room = _LONGEST_HEAD - len(self._head)
        self._head += before[:room]
        if len(before) > room:
            return self._give_up(rest[room:], found)
        if not there:
            return ""
        match = _HEAD.fullmatch(self._head)
        if match is None:
            return self._give_up(rest[len(before) :], found)
        self._name, self._value, self._head = match[1], ValueReader(), ""
        self._state = self._arguments
        return rest[len(before) :]

    def _arguments(self, rest: str, found: Parsed) -> str:
        used = self._value.push(rest)
        self._told(CallPiece(self._count - (self._name is None), self._name, rest[:used]), found)
        self._name = None
        if self._value.ended:
            self._state = self._outside
        return rest[used:]

    def _told(self, piece: CallPiece, found: Parsed) -> None:
        self._count += piece.name is not None
        self._raw = ""
        self._prose.call()
        found.calls.append(piece)

    def _give_up(self, rest: str, found: Parsed) -> str:
        """What was held is text; what follows, too."""
        found.content += self._prose.say(self._raw + self._head)
        self._raw = self._head = ""
        self._state = self._outside
        return rest
