"""Reasoning at the beginning of an answer, told apart from the content while both are written."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

from cellar.core.sampling import Thinking
from cellar.text.tools.call import BLANK, overlap


class Split(NamedTuple):
    """What a piece of text brought."""

    reasoning: str
    content: str


class _Place(Enum):
    """Where in an answer the next character stands."""

    BEFORE = auto()
    INSIDE = auto()
    BETWEEN = auto()
    CONTENT = auto()


class ReasoningReader:
    """Reads one answer piece by piece. What it says does not depend on how the text is cut.

    Blanks around the reasoning are nobody's: those inside its marks, and those between it and the content. What could
    be a mark is held back. A mark that comes later is content like everything there.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._place = _Place.BEFORE
        self._held = ""
        self._said = False  # some reasoning was told: blanks belong to it if more follows
        self.began = False
        """True once the answer is known to hold reasoning, be it empty."""

    @property
    def over(self) -> bool:
        """True once all that follows is content."""
        return self._place in (_Place.BETWEEN, _Place.CONTENT)

    def push(self, text: str) -> Split:
        """More text came."""
        if self._place is _Place.CONTENT:
            return Split("", text)
        text, self._held = self._held + text, ""
        if self._place is _Place.BEFORE:
            text = self._before(text)
        reasoning = ""
        if self._place is _Place.INSIDE:
            self.began = True
            reasoning, text = self._inside(text)
        if self._place is _Place.BETWEEN:
            text = text.lstrip(BLANK)
            if text:
                self._place = _Place.CONTENT
        return Split(reasoning, text if self._place is _Place.CONTENT else "")

    def flush(self) -> Split:
        """No more comes: what was held back is no mark."""
        held, self._held = self._held, ""
        if self._place is _Place.BEFORE and not self._thinking.begun:
            self._place = _Place.CONTENT
            return Split("", held)
        return Split(held.rstrip(BLANK) if self._said else held.strip(BLANK), "")

    def _before(self, text: str) -> str:
        """Nothing is decided yet -> what stands behind the place that this decides."""
        begun = text.lstrip(BLANK)
        for mark in self._thinking.opens:
            if begun.startswith(mark):
                self._place = _Place.INSIDE
                return begun[len(mark) :]
        if any(mark.startswith(begun) for mark in self._thinking.opens):
            self._held = text
            return ""
        self._place = _Place.INSIDE if self._thinking.begun else _Place.CONTENT
        return text

    def _inside(self, text: str) -> tuple[str, str]:
        """-> reasoning that can be told, and what stands behind it."""
        end, mark = _first(text, self._thinking.closes)
        if mark is None:
            open_end = len(text) - max(overlap(text, close) for close in self._thinking.closes)
            told = text[:open_end].rstrip(BLANK)
            self._held, rest = text[len(told) :], ""
        else:
            told, rest = text[:end].rstrip(BLANK), text[end + len(mark) :]
            self._place = _Place.BETWEEN
        if not self._said:
            told = told.lstrip(BLANK)
            if not told:
                self._held = self._held.lstrip(BLANK)
        self._said = self._said or bool(told)
        return told, rest


def _first(text: str, marks: Iterable[str]) -> tuple[int, str | None]:
    """Where the first of some marks stands, the longest of those that begin there."""
    found = [(text.find(mark), -len(mark), mark) for mark in marks]
    at, _, mark = min((one for one in found if one[0] >= 0), default=(len(text), 0, None))
    return at, mark
