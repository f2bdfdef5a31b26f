"""WaitingQueue: requests that own no row, in the order in which their turns come.

Whoever sends a thousand sequences has one of them in line at a time: the others stand behind it, and the next one gets
a turn, the last of all, when it leaves. So within a priority owners take turns, and owners with one sequence are
served first come, first served:

    turns      3  b1     5  c1     6  a2
    behind                            a3, a4, a5 ...
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass, field

from cellar.schedule.steps.request import RequestState


@dataclass(slots=True)
class _Line:
    """An owner's requests: the one in line, and those behind it, first come first."""

    head: RequestState
    behind: dict[RequestState, None] = field(default_factory=dict)


class WaitingQueue:
    """push, pop and remove in O(log n), amortised.

    A request's key is (priority, turn); whoever comes back with a key that it has had goes to its place. Removed
    requests stay in the heap until they reach its top, or until they are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], RequestState]] = []
        self._members: set[RequestState] = set()
        self._lines: dict[tuple[int, str], _Line] = {}
        self._turns = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, state: RequestState) -> bool:
        return state in self._members

    def turn(self) -> int:
        """The number of a new turn, after all that there are."""
        self._turns += 1
        return self._turns - 1

    def add(self, state: RequestState) -> None:
        """Queue a new request, whose key has a new turn."""
        name = state.key[0], state.owner
        line = self._lines.get(name)
        if line is None:
            self._lines[name] = _Line(state)
            self.push(state)
        else:
            line.behind[state] = None
            self._members.add(state)

    def push(self, state: RequestState) -> None:
        """Put a request in line by its key; keys are unique."""
        heapq.heappush(self._heap, (state.key, state))
        self._members.add(state)

    def first(self, without: Container[str] = ()) -> RequestState | None:
        """The request whose turn it is, or None; that of the owners that are none of `without`, in O(owners)."""
        if without:
            waiting = (entry for entry in self._heap if entry[1] in self._members and entry[1].owner not in without)
            return min(waiting, default=(None, None))[1]
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands."""
        self._members.remove(state)
        name = state.key[0], state.owner
        line = self._lines.get(name)
        if line is not None:
            if state in line.behind:
                del line.behind[state]
                return
            if line.head is state:
                self._advance(name, line)
        if self._heap and self._heap[0][1] is state:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)

    def _advance(self, name: tuple[int, str], line: _Line) -> None:
        """The head of a line leaves: the next one gets its turn, the last of all."""
        if not line.behind:
            del self._lines[name]
            return
        line.head = next(iter(line.behind))
        del line.behind[line.head]
        line.head.key = line.head.key[0], self.turn()
        self.push(line.head)
