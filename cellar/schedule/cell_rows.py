"""Rows: who owns the frames of a bank, on which workers each holds a valid value, and the runs of rows of requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellar.core.tasks import BankSpec, IntArray, StateCopy, Values
from cellar.schedule.cell_queue import IndexArray
from cellar.schedule.cell_store import RunStore

_NEVER = np.iinfo(np.int16).max


class BankRows:
    """Frames of one bank, the same on all workers. Frame 0 is the zero frame and belongs to nobody.

    With several workers `_valid[frame]` has bit w set if worker w has its value, or will have it before any task that
    it is given from now on; copies are made from `_writer[frame]`, where it is certain to be: what others read has
    committed.
    """

    def __init__(self, bank: int, spec: BankSpec, num_rows: int, num_workers: int) -> None:
        self.bank = bank
        self.spec = spec
        self.shift = spec.width.bit_length() - 1
        self.num_frames = num_rows >> self.shift
        self.num_workers = num_workers
        self._free: IndexArray = np.arange(self.num_frames - 1, 0, -1)
        self.num_free = len(self._free)
        if num_workers > 1:
            self._valid: NDArray[np.uint64] = np.zeros(self.num_frames, np.uint64)
            self._valid[0] = (1 << num_workers) - 1
            self._writer: NDArray[np.int16] = np.zeros(self.num_frames, np.int16)
            self._written: NDArray[np.int16] = np.full(self.num_frames, _NEVER, np.int16)

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

    def upload(self, worker: int, rows: IntArray) -> None:
        """Values from outside go to these rows before the tasks of a plan."""
        self._valid[rows >> self.shift] = np.uint64(1 << worker)

    def bring(
        self, worker: int, rows: IntArray, tasks: IndexArray, written: IntArray | None, written_by: IndexArray
    ) -> list[StateCopy]:
        """What must be copied before the tasks of a plan: task tasks[n] reads rows[n], written_by[k] writes written[k].

        `written_by` ascends. A frame that an earlier task of the plan writes need not come; one that is read first
        and written later must.
        """
        bit = np.uint64(1 << worker)
        frames = rows >> self.shift
        made = None if written is None else written >> self.shift
        copies = []
        lacking = np.flatnonzero((self._valid[frames] & bit) == 0)
        if len(lacking):
            needed = frames[lacking]
            if made is not None:
                self._written[made[::-1]] = written_by[::-1]  # of several writes the earliest stays
                needed = needed[self._written[needed] >= tasks[lacking]]
                self._written[made] = _NEVER
            needed = np.unique(needed)
            writer = self._writer[needed]
            for source in np.unique(writer).tolist():
                whole = (needed[writer == source, None] << self.shift) + np.arange(1 << self.shift)
                copies.append(StateCopy(self.bank, whole.ravel().astype(np.int32), source))
            self._valid[needed] |= bit
        if made is not None:
            self._valid[made] = bit
            self._writer[made] = worker
        return copies


class RowRuns:
    """Runs of rows, each in the order of its request's codes (`core/cell_graphs.py`)."""

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
