"""Calls between tags of their own (DeepSeek V3, R1 and V3.1); in the tags bars are full-width and blanks low blocks.

<|tool calls begin|><|tool call begin|>function<|tool sep|>NAME ```json {...} ```<|tool call end|>...<|tool calls end|>
<|tool calls begin|><|tool call begin|>NAME<|tool sep|>{...}<|tool call end|>...<|tool calls end|>
"""

from __future__ import annotations

import re
from collections.abc import Callable

from cellar.text.tools.call import CallPiece, Parsed, Prose, ValueReader, overlap


def _tag(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


CALLS, CALLS_END = _tag("tool calls begin"), _tag("tool calls end")
CALL, CALL_END = _tag("tool call begin"), _tag("tool call end")
SEPARATOR = _tag("tool sep")

_HEAD = re.compile(rf"\s*(?:function{SEPARATOR})?\s*([\w./-]+)\s*(?:{SEPARATOR})?\s*(?:```(?:json)?)?\s*")
_LONGEST_HEAD = 256


class DeepSeekParser:
    """Calls in a section of the answer, each with its name before its arguments."""

    def __init__(self) -> None:
        self._state: Callable[[str, Parsed], str] = self._outside
        self._prose = Prose()
        self._held = ""
        self._raw = ""  # from the section's tag on, as long as no call of it was told
        self._head = ""
        self._count = 0
        self._name: str | None = None
        self._value = ValueReader()

    def push(self, text: str) -> Parsed:
        found, rest = Parsed(), self._held + text
        self._held = ""
        while rest:
            rest = self._state(rest, found)
        return found

    def flush(self) -> Parsed:
        held = "" if self._state == self._behind else self._held
        return Parsed(self._prose.say(held + self._raw + self._head))

    def _outside(self, rest: str, found: Parsed) -> str:
        before, there, after = rest.partition(CALLS)
        if there:
            found.content += self._prose.say(before)
            self._raw, self._head, self._state = CALLS, "", self._between
            return after
        self._held = rest[len(rest) - overlap(rest, CALLS) :]
        found.content += self._prose.say(rest[: len(rest) - len(self._held)])
        return ""

    def _between(self, rest: str, found: Parsed) -> str:
        """Before a call, or the section's end."""
        self._head += rest[0]
        tag = self._head.lstrip()
        if tag == CALL:
            self._raw += self._head if self._raw else ""
            self._head, self._state = "", self._named
        elif tag == CALLS_END and not self._raw:
            self._head, self._state = "", self._outside
        elif tag == CALLS_END or not (CALL.startswith(tag) or CALLS_END.startswith(tag)):
            return self._give_up(rest[1:], found)
        return rest[1:]

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
        found.calls.append(CallPiece(self._count - (self._name is None), self._name, rest[:used]))
        self._count += self._name is not None
        self._name, self._raw = None, ""
        self._prose.call()
        if self._value.ended:
            self._state = self._behind
        return rest[used:]

    def _behind(self, rest: str, found: Parsed) -> str:
        """The fence and the tag behind a call's arguments."""
        before, there, after = rest.partition(CALL_END)
        if there:
            self._head, self._state = "", self._between
            return after
        self._held = before[-len(CALL_END) :]
        return ""

    def _give_up(self, rest: str, found: Parsed) -> str:
        """What was held is text; what follows, too."""
        found.content += self._prose.say(self._raw + self._head)
        self._raw = self._head = ""
        self._state = self._outside
        return rest
