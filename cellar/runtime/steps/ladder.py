"""The sizes of captured steps of one kind, and which of them have their graphs."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Ladder(Generic[T]):
    """`sizes` ascend. A size is launched kernel by kernel the first time it is met, which loads what its kernels need,
    recorded the second time, and replayed from then on. What was met before never changes which size a step takes, so
    neither do its sums.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._graphs: dict[int, T] = {}
        self._launched: set[int] = set()
        self._records = True

    @property
    def missing(self) -> tuple[int, ...]:
        """Sizes that are still to be recorded, ascending; none once that was given up."""
        return tuple(size for size in self.sizes if size not in self._graphs) if self._records else ()

    @property
    def recorded(self) -> dict[int, T]:
        """Graphs by size."""
        return dict(self._graphs)

    def size(self, count: int) -> int | None:
        """The size that a step of `count` tokens takes; None: it is larger than all of them."""
        at = bisect_left(self.sizes, count)
        return self.sizes[at] if at < len(self.sizes) else None

    def take(self, size: int, record: Callable[[int], T]) -> T | None:
        """What to replay for a step of this size, from `record` if that is due; None: launch its kernels now.

        A size that cannot be recorded ends all recording: steps are launched from then on.
        """
        if size not in self._graphs and size in self._launched and self._records:
            try:
                self.put(size, record(size))
            except Exception:
                self._records = False
                logger.warning("steps of %d tokens have no graph and are launched each time", size, exc_info=True)
        self._launched.add(size)
        return self._graphs.get(size)

    def put(self, size: int, graph: T) -> None:
        """A size has been recorded."""
        self._graphs[size] = graph
