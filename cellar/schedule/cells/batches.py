"""GraphBatches: graph batching, the baseline. Requests that start together are answered together."""

from __future__ import annotations

from collections.abc import Sequence

from cellar.core.cell_graphs import CellResults

Ended = tuple[str, CellResults]


class GraphBatches:
    """The batches of one model: who runs in which, and the results that are held until all of a batch have ended."""

    def __init__(self) -> None:
        self._batch: dict[int, int] = {}  # by request slot
        self._running: dict[int, int] = {}
        self._held: dict[int, list[Ended]] = {}
        self._next = 0

    def start(self, numbers: Sequence[int]) -> None:
        """Requests, by their slots, are a batch."""
        self._batch.update(dict.fromkeys(numbers, self._next))
        self._running[self._next] = len(numbers)
        self._held[self._next] = []
        self._next += 1

    def end(self, numbers: Sequence[int], results: Sequence[Ended]) -> list[Ended]:
        """Requests have ended, with results or (`results` is empty) without -> what is answered now."""
        answered: list[Ended] = []
        for k, number in enumerate(numbers):
            batch = self._batch.pop(number)
            self._held[batch] += results[k : k + 1]
            self._running[batch] -= 1
            if not self._running[batch]:
                answered += self._held.pop(batch)
                del self._running[batch]
        return answered

    def forget(self, id: str) -> None:
        """The result of a request that has ended is not needed."""
        for batch, held in self._held.items():
            self._held[batch] = [one for one in held if one[0] != id]
