"""Rows: who owns the frames of a worker's bank, and the runs of rows of requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cellar.core.tasks import BankSpec, Values
from cellar.schedule.cells.queue import IndexArray
from cellar.schedule.cells.store import RunStore


class BankRows:
    """Frames of one bank on one worker. Frame 0 is the zero frame and belongs to nobody."""

    def __init__(self, spec: BankSpec, num_rows: int) -> None:
        self.spec = spec
        self.shift = spec.width.bit_length() - 1
        self.num_frames = num_rows >> self.shift
        self._free: IndexArray = np.arange(self.num_frames - 1, 0, -1)
        self.num_free = len(self._free)

    def take(self, count: int) -> IndexArray:
        """`count` free frames; the caller has seen that there are so many."""
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count].copy()

    def give(self, frames: IndexArray) -> None:
        """Frames that no task in flight names are free again."""
        self._free[self.num_free : self.num_free + len(frames)] = frames
        self.num_free += len(frames)

    def free_frames(self) -> IndexArray:
        """A copy of the frames that nobody owns."""
        return self._free[: self.num_free].copy()


class RowRuns:
    """Runs of rows of one worker, each in the order of its request's codes (`core/cell_graphs.py`)."""

    def __init__(self, banks: Sequence[BankRows]) -> None:
        self._banks = banks
        self._store = RunStore(np.zeros(4096, np.int32))

    @property
    def data(self) -> Values:
        """int32: by code, counted from where the run begins, the row."""
        return self._store.data

    def take(self, frames: tuple[int, ...]) -> int | None:
        """-> where a run with so many frames of each bank begins; None if there are not so many."""
        if any(count > bank.num_free for bank, count in zip(self._banks, frames, strict=True)):
            return None
        parts = []
        for bank, count in zip(self._banks, frames, strict=True):
            whole = np.zeros(1 + count, np.int64)
            whole[1:] = bank.take(count)
            parts.append(((whole[:, None] << bank.shift) + np.arange(bank.spec.width)).ravel())
        run = np.concatenate(parts)
        start = self._store.take(len(run))
        self._store.data[start : start + len(run)] = run
        return start

    def give(self, start: int, frames: tuple[int, ...]) -> None:
        """No task in flight names these rows any more."""
        for bank, own in zip(self._banks, self.frames(start, frames), strict=True):
            bank.give(own)
        codes = sum((1 + count) * bank.spec.width for bank, count in zip(self._banks, frames, strict=True))
        self._store.places.give(start, codes)

    def frames(self, start: int, frames: tuple[int, ...]) -> list[IndexArray]:
        """Per bank, the frames of a run."""
        found = []
        for bank, count in zip(self._banks, frames, strict=True):
            width = bank.spec.width
            rows = self._store.data[start + width : start + (1 + count) * width : width]
            found.append(rows.astype(np.int64) >> bank.shift)
            start += (1 + count) * width
        return found
