"""Star: collectives of small host arrays among ranks in threads or processes; rank 0 is the middle."""

from __future__ import annotations

import contextlib
import os
import socket
from multiprocessing.connection import Connection, Pipe
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import DeviceError

Ints = NDArray[np.int64]


class HostComm(Protocol):
    """Collectives. Every rank calls all of them in the same order; all get the same."""

    @property
    def rank(self) -> int:
        """From 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def sum(self, part: Ints) -> Ints:
        """The sum of all parts [n], in the order of ranks."""

    def share(self, values: Ints | None) -> Ints:
        """Rank 0's values; the others give None."""

    def close(self) -> None:
        """End it for all ranks: who waits, and who calls later, gets a DeviceError."""


class Star:
    """Implements `HostComm`. `ends` are rank 0's connections to the others, in order, or the other's one to rank 0."""

    def __init__(self, rank: int, size: int, ends: tuple[Connection, ...]) -> None:
        self.rank = rank
        self.size = size
        self._ends = ends

    def sum(self, part: Ints) -> Ints:
        """Raises DeviceError if a rank has gone."""
        with _gone():
            if self.rank:
                self._ends[0].send(part)
                return _received(self._ends[0])
            total = part.copy()
            for end in self._ends:
                total += _received(end)
            for end in self._ends:
                end.send(total)
            return total

    def share(self, values: Ints | None) -> Ints:
        """Raises DeviceError if a rank has gone."""
        with _gone():
            if values is None:
                return _received(self._ends[0])
            for end in self._ends:
                end.send(values)
            return values

    def close(self) -> None:
        """Wakes also who waits at another end."""
        for end in self._ends:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(end.fileno())) as other:
                other.shutdown(socket.SHUT_RDWR)


def stars(size: int) -> list[Star]:
    """The ends of all ranks, to be handed to their threads, or to their processes when these are started."""
    pipes = [Pipe() for _ in range(size - 1)]
    middle = Star(0, size, tuple(mine for mine, _ in pipes))
    return [middle, *(Star(rank, size, (theirs,)) for rank, (_, theirs) in enumerate(pipes, 1))]


def _received(end: Connection) -> Ints:
    values: Ints = end.recv()
    return values


@contextlib.contextmanager
def _gone():  # type: ignore[no-untyped-def]
    try:
        yield
    except (EOFError, OSError) as error:
        raise DeviceError("another rank has gone.") from error
