"""Ranks as threads of one process: collectives by the definitions, between barriers, with an account of each.

A rank puts its part on the group's board, waits until all are there, computes what it is to get from all parts, and
waits until all have read. Sums are in the order of the group, so that runs repeat.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from cellar.core.errors import DeviceError
from cellar.core.layouts import Mesh
from cellar.core.sums import sent_by_all_reduce
from cellar.ops import collectives
from cellar.runtime.mesh.account import Account, Entry

T = TypeVar("T")

WAIT_SECONDS = 120.0
"""How long a rank waits for the others."""


class _GoneError(DeviceError):
    """Another rank knows why."""


class _Board:
    """Where a group's ranks meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.parts: list[tuple[Entry, Tensor] | None] = [None] * size


class ThreadMesh:
    """What the ranks of a mesh have in common. `rank(k)` is one of them; a rank that fails must `abort`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._boards: dict[tuple[int, ...], _Board] = {}
        self._lock = threading.Lock()
        self._aborted = False

    def rank(self, rank: int) -> ThreadCollectives:
        """The end of one rank."""
        return ThreadCollectives(self, rank)

    def abort(self) -> None:
        """Wake all who wait; they, and who calls later, get a DeviceError."""
        with self._lock:
            self._aborted = True
            for board in self._boards.values():
                board.barrier.abort()

    def board(self, group: tuple[int, ...]) -> _Board:
        """Of some ranks. Raises DeviceError after `abort`."""
        with self._lock:
            if self._aborted:
                raise _GoneError("another rank has failed.")
            return self._boards.setdefault(group, _Board(len(group)))

    def run(self, one: Callable[[ThreadCollectives], T]) -> list[T]:
        """What `one(collectives)` returns on each rank, each in a thread. Raises the error of a rank that says why."""

        def run(rank: int) -> T:
            try:
                return one(self.rank(rank))
            except BaseException:
                self.abort()
                raise

        with ThreadPoolExecutor(self.mesh.size) as threads:
            futures = [threads.submit(run, rank) for rank in range(self.mesh.size)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, _GoneError)):
            raise error
        return [future.result() for future in futures]


class ThreadCollectives:
    """Implements `Collectives` for one of a mesh's threads. Raises DeviceError if another rank fails or is at another
    collective.
    """

    def __init__(self, shared: ThreadMesh, rank: int) -> None:
        self._shared = shared
        self.mesh = shared.mesh
        self.rank = rank
        self.account = Account()

    def all_reduce(self, x: Tensor, axes: str, name: str) -> Tensor:
        """As `Collectives` says; nothing for a group of one."""
        entry = Entry("all-reduce", axes, name)
        sent = sent_by_all_reduce(_nbytes(x), self.mesh.count(axes))
        return self._meet(entry, x, lambda parts, _: collectives.all_reduce(parts), lambda _: sent)

    def reduce_scatter(self, x: Tensor, dim: int, axes: str, name: str, sizes: Sequence[int] | None = None) -> Tensor:
        """As `Collectives` says."""
        return self._meet(
            Entry("reduce-scatter", axes, name),
            x,
            lambda parts, at: collectives.reduce_scatter(parts, at, dim, sizes),
            lambda found: _nbytes(x) - _nbytes(found),
        )

    def all_gather(self, x: Tensor, dim: int, axes: str, name: str, sizes: Sequence[int] | None = None) -> Tensor:
        """As `Collectives` says."""
        return self._meet(
            Entry("all-gather", axes, name),
            x,
            lambda parts, _: collectives.all_gather(parts, dim),
            lambda found: _nbytes(found) - _nbytes(x),
        )

    def all_to_all(
        self,
        x: Tensor,
        split: int,
        join: int,
        axes: str,
        name: str,
        *,
        split_sizes: Sequence[int] | None = None,
        join_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """As `Collectives` says."""
        each = collectives.shares(x.shape[split], self.mesh.count(axes), split_sizes)
        kept = x.narrow(split, 0, each[self.mesh.index(self.rank, axes)])
        return self._meet(
            Entry("all-to-all", axes, name),
            x,
            lambda parts, at: collectives.all_to_all(parts, at, split, join, split_sizes),
            lambda _: _nbytes(x) - _nbytes(kept),
        )

    def _meet(
        self,
        entry: Entry,
        x: Tensor,
        compute: Callable[[Sequence[Tensor], int], Tensor],
        logical: Callable[[Tensor], int],
    ) -> Tensor:
        group = self.mesh.group(self.rank, entry.axes)
        if len(group) == 1:
            return x
        board, at = self._shared.board(group), group.index(self.rank)
        board.parts[at] = entry, x
        self._wait(board)
        there = [part for part in board.parts if part is not None]
        others = {other for other, _ in there}
        if others != {entry}:
            self._shared.abort()
            raise DeviceError(f"ranks are at different collectives: {sorted(others)}.")
        found = compute([part for _, part in there], at)
        self._wait(board)  # nobody goes on, and changes what it gave, before all have read
        self.account.add(entry, logical(found), sum(_nbytes(part) for k, (_, part) in enumerate(there) if k != at))
        return found

    def _wait(self, board: _Board) -> None:
        try:
            board.barrier.wait(WAIT_SECONDS)
        except threading.BrokenBarrierError as error:
            raise _GoneError("another rank has failed, or has not come.") from error


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
