"""Timing a product as a model sees it: over matrices in turn, together larger than any cache, with no launch cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Generic, TypeVar

import torch
from torch import Tensor

from cellar.runtime.captured import recording
from cellar.runtime.probes.context import synchronize

LEAST_NBYTES = 256 * 2**20
# A replay reads about so much, so that its time is far above the clock's resolution: half a millisecond on an H200.
REPLAY_NBYTES = 2**31
ROUNDS = 7

V = TypeVar("V")
W = TypeVar("W")
"""What `change` makes of a matrix: the form in which it is multiplied."""


class Rotation(Generic[W]):
    """Matrices [n, k] of random numbers that are used in turn; together `nbytes` or more (one is enough if it is)."""

    def __init__(
        self,
        n: int,
        k: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        nbytes: int = LEAST_NBYTES,
        replay_nbytes: int = REPLAY_NBYTES,
        change: Callable[[Tensor], W],
    ) -> None:
        size = n * k * dtype.itemsize
        self._device = device
        self.nbytes = size
        scale = k**-0.5
        self.plain = [
            scale * torch.randn((n, k), device=device, dtype=dtype) for _ in range(max(1, -(-nbytes // size)))
        ]
        self.weights = [change(weight) for weight in self.plain]
        turns = 1 if device.type == "cpu" else max(1, replay_nbytes // (size * len(self.weights)))
        self.launches = turns * len(self.weights)

    def seconds(self, calls: Sequence[Callable[[W], object]], rounds: int = ROUNDS) -> list[float]:
        """Seconds of one call of each."""
        return self.by_turns([self.replay(call) for call in calls], rounds)

    def by_turns(self, replays: Sequence[Callable[[], None]], rounds: int = ROUNDS) -> list[float]:
        """Seconds of one launch of each: the median of `rounds`, taken by turns so that all see the same machine."""
        for replay in replays:
            replay()
        times: list[list[float]] = [[] for _ in replays]
        for _ in range(rounds):
            for replay, found in zip(replays, times, strict=True):
                found.append(self._elapsed(replay) / self.launches)
        return [median(found) for found in times]

    def replay(self, call: Callable[[W], object]) -> Callable[[], None]:
        """All launches of one replay, on an accelerator as one graph."""
        return self.replay_over(call, self.weights)

    def replay_plain(self, call: Callable[[Tensor], object]) -> Callable[[], None]:
        """The same over the plain matrices."""
        return self.replay_over(call, self.plain)

    def replay_over(self, call: Callable[[V], object], chosen: Sequence[V]) -> Callable[[], None]:
        """The same over other forms of them."""

        def all_of_them() -> None:
            for number in range(self.launches):
                call(chosen[number % len(chosen)])

        if self._device.type == "cpu":
            return all_of_them
        with torch.cuda.device(self._device):
            for weight in chosen[:2]:
                call(weight)
            synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with recording(graph):
                all_of_them()
        replay: Callable[[], None] = graph.replay
        return replay

    def _elapsed(self, replay: Callable[[], None]) -> float:
        if self._device.type == "cpu":
            start = time.perf_counter()
            replay()
            return time.perf_counter() - start
        with torch.cuda.device(self._device):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            replay()
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) / 1e3
