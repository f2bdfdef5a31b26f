"""Stop strings, found across token borders (Aho and Corasick, 1975, over the characters of the text).

The result depends on the text alone, not on how it is cut into pieces: the match that ends first wins, and of
several that end there the longest.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_CHARACTERS = 21
"""Bits of a character's number."""


class Matched(NamedTuple):
    """`text` may be shown now; `stop` is the stop string that was completed, if any."""

    text: str
    stop: str | None


class _Automaton:
    """The stop strings' prefixes, numbered from 0, the empty one; 16 bytes each besides its last character.

    A prefix is numbered right before the longer one that was added with it; only branches have entries of their own.
    `fail` is the longest proper suffix that is a prefix, too; `stop` the longest stop string that ends there, -1 if
    none does; `held` how many characters may still become a stop string.
    """

    __slots__ = ("branches", "characters", "fail", "first", "held", "parent", "stop", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        children = [dict[str, int]()]
        depth, parent, stop, characters = [0], [-1], [-1], ["\0"]
        for k, text in enumerate(self.stops):
            node = 0
            for character in text:
                child = children[node].setdefault(character, len(children))
                if child == len(children):
                    children.append({})
                    depth.append(depth[node] + 1)
                    parent.append(node)
                    stop.append(-1)
                    characters.append(character)
                node = child
            stop[node] = k
        fail, held, queue = [0] * len(children), [0] * len(children), deque([0])
        while queue:
            node = queue.popleft()
            # A leaf is a whole stop string (passed over while not armed); it can grow no more, its suffix may.
            held[node] = depth[node] if children[node] else held[fail[node]]
            for character, child in children[node].items():
                queue.append(child)
                if node:
                    suffix = fail[node]
                    while suffix and character not in children[suffix]:
                        suffix = fail[suffix]
                    fail[child] = children[suffix].get(character, 0)
                    if stop[child] < 0:
                        stop[child] = stop[fail[child]]
        self.first = children[0]
        self.branches = {
            node << _CHARACTERS | ord(character): child
            for node, found in enumerate(children)
            for character, child in found.items()
            if node and child != node + 1
        }
        # One more, entered by nothing, so that every number has a next.
        self.characters = "".join(characters) + "\0"
        self.parent = array("i", [*parent, -1])
        self.fail, self.held, self.stop = array("i", fail), array("i", held), array("i", stop)

    def child(self, node: int, character: str) -> int:
        """The prefix that is one character longer, if there is one; else 0."""
        if not node:
            return self.first.get(character, 0)
        following = node + 1
        if self.parent[following] == node and self.characters[following] == character:
            return following
        return self.branches.get(node << _CHARACTERS | ord(character), 0)


class StopMatcher:
    """Looks for the first of some strings in one text that arrives in pieces.

    Holds back the longest suffix that a later piece could complete, and no more. O(1) per character, amortised.
    """

    __slots__ = ("_automaton", "_held", "_include", "_node")

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        self._automaton = _Automaton(stops)
        self._include = include_stop_str_in_output
        self._node = 0
        self._held = ""

    def fork(self) -> StopMatcher:
        """A matcher in the same state over the same strings: to look ahead with, or for another text."""
        other = object.__new__(StopMatcher)
        other._automaton, other._include = self._automaton, self._include
        other._node, other._held = self._node, self._held
        return other

    def push(self, text: str, armed: bool = True) -> Matched:
        """Take in more text. After a match the matcher is done. Not `armed`: what ends in `text` is no match."""
        node, automaton = self._node, self._automaton
        if not node and automaton.first.keys().isdisjoint(text):
            return Matched(text, None)
        find, fail = automaton.child, automaton.fail
        for i, character in enumerate(text):
            while not (child := find(node, character)) and node:
                node = fail[node]
            node = child
            if armed and (found := automaton.stop[node]) >= 0:
                stop, seen = automaton.stops[found], self._held + text[: i + 1]
                self._node, self._held = 0, ""
                return Matched(seen if self._include else seen[: len(seen) - len(stop)], stop)
        self._node = node
        seen = self._held + text
        border = len(seen) - automaton.held[node]
        self._held = seen[border:]
        return Matched(seen[:border], None)

    def flush(self) -> str:
        """The held text, once no more comes."""
        text, self._held, self._node = self._held, "", 0
        return text
