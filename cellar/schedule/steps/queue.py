"""WaitingQueue: requests that own no row, in order of (priority, arrival)."""

from __future__ import annotations

import heapq

from cellar.schedule.steps.request import RequestState


class WaitingQueue:
    """push, pop and remove in O(log n), amortised.

    First come first served is the same queue with one priority for all. Removed requests stay in the heap
    until they reach its top, or until they are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], RequestState]] = []
        self._members: set[RequestState] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, state: RequestState) -> bool:
        return state in self._members

    def push(self, state: RequestState) -> None:
        """Queue a request; keys are unique."""
        heapq.heappush(self._heap, (state.key, state))
        self._members.add(state)

    def first(self) -> RequestState | None:
        """The request whose turn it is, or None."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands."""
        self._members.remove(state)
        if self._heap[0][1] is state:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
