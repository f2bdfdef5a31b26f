"""Ranks as threads of one process: collectives with the arithmetic of real ones and none of their transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from cellar.models.loop import Loop
from cellar.models.model import NormedSums
from cellar.ops.norm import add_rms_norm

T = TypeVar("T")


class ThreadComm:
    """A `Comm` of one of several threads. Strict: all ranks must call the same collective with the same shape.

    `most_rows`: sums of up to so many rows go with the norm behind them.
    """

    loop: Loop | None = None
    most_rows = 0

    def __init__(self, rank: int, board: list[tuple[str, Tensor] | None], barrier: threading.Barrier) -> None:
        self._rank = rank
        self._board = board
        self._barrier = barrier

    @property
    def normed_sums(self) -> NormedSums | None:
        return self if self.most_rows else None

    def take(self, like: Tensor, apart: bool = True) -> bool:
        return len(like) <= self.most_rows

    def add_rms_norm(self, part: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert self.take(part)
        return add_rms_norm(residual, self._sum("sum and norm", part), norm, eps)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._sum("reduce", x)

    def _sum(self, what: str, x: Tensor) -> Tensor:
        parts = self._exchanged(what, x)
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
