"""Stop strings, found across token borders (Aho and Corasick, 1975, over the characters of the text).

The result depends on the text alone, not on how it is cut into pieces: the match that ends first wins, and of
several that end there the longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Matched(NamedTuple):
    """`text` may be shown now; `stop` is the stop string that was completed, if any."""

    text: str
    stop: str | None


class _Node:
    """A prefix of some stop string. `fail` is the longest proper suffix of it that is a prefix, too."""

    __slots__ = ("children", "depth", "fail", "held", "stop")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.children: dict[str, _Node] = {}
        self.fail: _Node = self
        self.stop: str | None = None  # longest stop string that ends here
        self.held = depth  # characters that may still become a stop string


class StopMatcher:
    """Looks for the first of some strings in one text that arrives in pieces.

    Holds back the longest suffix that a later piece could complete, and no more. O(1) per character, amortised.
    """

    __slots__ = ("_first", "_held", "_include", "_node", "_root")

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        self._root = _automaton(stops)
        self._first = frozenset(self._root.children)
        self._include = include_stop_str_in_output
        self._node = self._root
        self._held = ""

    def fork(self) -> StopMatcher:
        """A matcher in the same state, to look ahead with."""
        other = object.__new__(StopMatcher)
        other._root, other._first, other._include = self._root, self._first, self._include
        other._node, other._held = self._node, self._held
        return other

    def push(self, text: str, armed: bool = True) -> Matched:
        """Take in more text. After a match the matcher is done. Not `armed`: what ends in `text` is no match."""
        node, root = self._node, self._root
        if node is root and self._first.isdisjoint(text):
            return Matched(text, None)
        for i, character in enumerate(text):
            while (child := node.children.get(character)) is None and node is not root:
                node = node.fail
            node = child or root
            if armed and node.stop is not None:
                seen = self._held + text[: i + 1]
                self._node, self._held = root, ""
                return Matched(seen if self._include else seen[: len(seen) - len(node.stop)], node.stop)
        self._node = node
        seen = self._held + text
        border = len(seen) - node.held
        self._held = seen[border:]
        return Matched(seen[:border], None)

    def flush(self) -> str:
        """The held text, once no more comes."""
        text, self._held, self._node = self._held, "", self._root
        return text


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for character in stop:
            if character not in node.children:
                node.children[character] = _Node(node.depth + 1)
            node = node.children[character]
        node.stop = stop
    queue = deque([root])
    while queue:
        node = queue.popleft()
        # A leaf is a whole stop string (passed over while not armed); it can grow no more, its suffix may.
        node.held = node.depth if node.children else node.fail.held
        for character, child in node.children.items():
            queue.append(child)
            if node is root:
                child.fail = root
                continue
            fail = node.fail
            while character not in fail.children and fail is not root:
                fail = fail.fail
            child.fail = fail.children.get(character, root)
            child.stop = child.stop or child.fail.stop
    return root
