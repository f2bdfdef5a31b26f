"""Waiting: the requests of one model that have not started, first come first served; any of them may leave."""

from __future__ import annotations

from collections import deque
from itertools import islice

from cellar.core.cell_graphs import CellRequest


class Waiting:
    """A queue in which leaving costs the same however many wait: who left is skipped, and swept out when half have."""

    def __init__(self) -> None:
        self._queue: deque[CellRequest] = deque()
        self._left: set[CellRequest] = set()

    def __len__(self) -> int:
        return len(self._queue) - len(self._left)

    def append(self, request: CellRequest) -> None:
        """One more at the end."""
        self._queue.append(request)

    def leave(self, request: CellRequest) -> None:
        """A request that waits here does no longer."""
        self._left.add(request)
        if 2 * len(self._left) > len(self._queue):
            self._queue = deque([one for one in self._queue if one not in self._left])
            self._left.clear()

    def front(self, most: int) -> list[CellRequest]:
        """Up to `most` requests from the front; none only if nobody waits. They stay."""
        queue, left = self._queue, self._left
        if not left:
            return list(islice(queue, most))
        while queue and queue[0] in left:
            left.remove(queue.popleft())
        return [one for one in islice(queue, most) if one not in left]

    def pop(self, count: int) -> None:
        """The first `count` that `front` gave have started."""
        queue, left = self._queue, self._left
        if not left:
            for _ in range(count):
                queue.popleft()
            return
        while count:
            one = queue.popleft()
            if one in left:
                left.remove(one)
            else:
                count -= 1
