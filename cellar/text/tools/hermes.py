"""Calls in tags: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, among other text."""

from __future__ import annotations

from cellar.text.tools.call import CallReader, Parsed, overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"


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
        self._held = rest[len(rest) - overlap(rest, OPEN) :]
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
