"""The sizes of captured steps of one kind: which are captured, and how a step of one that is not yet is run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")


class How(Enum):
    """REPLAY what was captured; LAUNCH kernel by kernel, which loads what they need; RECORD first, then replay."""

    REPLAY = auto()
    LAUNCH = auto()
    RECORD = auto()


class Ladder(Generic[T]):
    """`sizes` ascend. A size is launched the first time it is met and recorded the second, so that nothing is recorded
    that has not run; what is met never changes which size a step takes, so neither do its sums.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._captured: dict[int, T] = {}
        self._met: set[int] = set()
        self._records = True

    @property
    def missing(self) -> tuple[int, ...]:
        """Sizes that are still to be captured, ascending; none once that was given up."""
        return tuple(size for size in self.sizes if size not in self._captured) if self._records else ()

    def size(self, count: int) -> int | None:
        """The size that a step of `count` tokens takes; None: it is larger than all of them."""
        at = bisect_left(self.sizes, count)
        return self.sizes[at] if at < len(self.sizes) else None

    def take(self, size: int) -> How:
        """How the next step of this size is run, which is being met now."""
        if size in self._captured:
            return How.REPLAY
        if size in self._met and self._records:
            return How.RECORD
        self._met.add(size)
        return How.LAUNCH

    def put(self, size: int, captured: T) -> None:
        """A size has been captured."""
        self._captured[size] = captured

    def captured(self, size: int) -> T | None:
        """What was put; None: nothing yet."""
        return self._captured.get(size)

    def give_up(self) -> None:
        """Record no more: what is missing is launched whenever it is met."""
        self._records = False
