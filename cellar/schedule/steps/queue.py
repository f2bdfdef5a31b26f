"""WaitingQueue: requests that own no row, in the order in which their turns come.

Whoever sends a thousand sequences has one of them in line at a time: the others stand behind it, and the next one gets
a turn, the last of all, when it leaves. So within a priority owners take turns, and owners with one sequence are
served first come, first served:

    turns      3  b1     5  c1     6  a2
    behind                            a3, a4, a5 ...

Tenants take turns likewise, however many owners each has: a tenant's turns have numbers one after another, which begin
at the one that is being served (start-time fair queuing: Goyal, Vin, Cheng, SIGCOMM 1996, §2, requests as packets):

    tenant A   7     8     9     10    11 ...
    tenant B      7     8            comes while 7 is served, and is served in turn with A from then on
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Container, Set
from dataclasses import dataclass, field
from itertools import count

from cellar.schedule.steps.request import RequestState


@dataclass(slots=True)
class _Line:
    """An owner's requests: the one in line, and those behind it, first come first."""

    head: RequestState
    behind: dict[RequestState, None] = field(default_factory=dict)


class WaitingQueue:
    """push, pop and remove in O(log n), amortised.

    A request's key is (priority, turn); of equal ones the one that was pushed first comes first. Whoever comes back
    with a key that it has had goes to its place. Removed requests stay in the heap until they reach its top, or until
    they are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, RequestState]] = []
        self._pushed = count()
        self._members: set[RequestState] = set()
        self._lines: dict[tuple[int, str], _Line] = {}
        self._turns = 0
        self._tenants: Counter[str] = Counter()  # members by tenant
        self._last: dict[str, int] = {}  # turn of each of these

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, state: RequestState) -> bool:
        return state in self._members

    @property
    def tenants(self) -> Set[str]:
        """Those of whom somebody waits."""
        return self._tenants.keys()

    def turn(self, tenant: str = "") -> int:
        """The number of a new turn: after all that there are, or of a tenant after all of its own that are in line."""
        if tenant:
            return max(self._turns, self._last.get(tenant, -1) + 1)
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
            self._enter(state)

    def push(self, state: RequestState) -> None:
        """Put a request in line by its key."""
        heapq.heappush(self._heap, (state.key, next(self._pushed), state))
        if state.tenant:
            self._last[state.tenant] = max(state.key[1], self._last.get(state.tenant, -1))
        if state not in self._members:
            self._enter(state)

    def first(
        self, without: Container[str] = (), name: Callable[[RequestState], str] = lambda state: state.owner
    ) -> RequestState | None:
        """The request whose turn it is, or None; that of those whose `name` is none of `without`, in O(owners)."""
        if without:
            waiting = (entry for entry in self._heap if entry[2] in self._members and name(entry[2]) not in without)
            return min(waiting, default=(None, None, None))[2]
        while self._heap and self._heap[0][2] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def in_line(self, wanted: Callable[[RequestState], bool]) -> list[RequestState]:
        """Those in line who are wanted, each once, in the order of turns; O(owners)."""
        found = (entry for entry in self._heap if entry[2] in self._members and wanted(entry[2]))
        return list(dict.fromkeys(state for _, _, state in sorted(found)))  # who came back has an entry from before

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands."""
        self._leave(state)
        name = state.key[0], state.owner
        line = self._lines.get(name)
        if line is not None:
            if state in line.behind:
                del line.behind[state]
                return
            if line.head is state:
                self._advance(name, line)
        if self._heap and self._heap[0][2] is state:
            heapq.heappop(self._heap)
            self._turns = max(self._turns, state.key[1])  # whoever comes now is not behind what tenants still have
        elif len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapq.heapify(self._heap)

    def _enter(self, state: RequestState) -> None:
        self._members.add(state)
        if state.tenant:
            self._tenants[state.tenant] += 1

    def _leave(self, state: RequestState) -> None:
        self._members.remove(state)
        if state.tenant:
            self._tenants[state.tenant] -= 1
            if not self._tenants[state.tenant]:
                del self._tenants[state.tenant]
                self._last.pop(state.tenant, None)

    def _advance(self, name: tuple[int, str], line: _Line) -> None:
        """The head of a line leaves: the next one gets its turn, the last of all."""
        if not line.behind:
            del self._lines[name]
            return
        line.head = next(iter(line.behind))
        del line.behind[line.head]
        line.head.key = line.head.key[0], self.turn(line.head.tenant)
        self.push(line.head)
