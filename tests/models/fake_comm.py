"""Ranks as threads of one process: collectives with the arithmetic of real ones and none of their transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from cellar.models.loop import Loop

T = TypeVar("T")


class ThreadComm:
    """A `Comm` of one of several threads. Strict: all ranks must call the same collective with the same shape."""

    loop: Loop | None = None

    def __init__(self, rank: int, board: list[tuple[str, Tensor] | None], barrier: threading.Barrier) -> None:
        self._rank = rank
        self._board = board
        self._barrier = barrier

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._exchanged("reduce", x)
        assert len({part.shape for part in parts}) == 1, "ranks sum tensors of different shapes"
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        parts = self._exchanged("gather", x)
        assert len({len(part) for part in parts}) == 1, "ranks gather different numbers of rows"
        return torch.cat(parts, 1)

    def _exchanged(self, what: str, x: Tensor) -> list[Tensor]:
        self._board[self._rank] = (what, x)
        self._barrier.wait(30)
        there = [entry for entry in self._board if entry is not None]
        assert {name for name, _ in there} == {what}, "ranks are at different collectives"
        found = [tensor for _, tensor in there]
        # Nobody goes on before all have read.
        self._barrier.wait(30)
        return found


def on_ranks(size: int, run: Callable[[int, ThreadComm], T]) -> list[T]:
    """What `run(rank, comm)` returns on each of so many ranks."""
    board: list[tuple[str, Tensor] | None] = [None] * size
    barrier = threading.Barrier(size)

    def one(rank: int) -> T:
        try:
            return run(rank, ThreadComm(rank, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(one, rank) for rank in range(size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    # What broke the barrier says more than that it is broken.
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
