"""What a thread launches, recorded as graphs with calls between them that are made anew in every replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from cellar.runtime.captured import recording

Call = Callable[[], None]

T = TypeVar("T")


class Between(Protocol):
    """How something is done that no graph can hold, as to have a thread of the CPU begin its work."""

    def __call__(self, call: Call) -> None:
        """Do it, between what is launched before and behind."""


def at_once(call: Call) -> None:
    """Where nothing is recorded."""
    call()


@dataclass(frozen=True, slots=True)
class Recorded:
    """Graphs, so many of them, and calls, in order."""

    parts: tuple[Call, ...]
    num_graphs: int

    def replay(self) -> None:
        """All of it again, on the current stream."""
        for part in self.parts:
            part()


class Recorder:
    """Records what one thread launches; graphs share `pool` and are recorded on `stream`, both of their own by default.

    While it records nothing is computed and no call is made: a replay does both.
    """

    def __init__(
        self, device: torch.device, make: Callable[[torch.cuda.CUDAGraph], AbstractContextManager[None]] | None = None
    ) -> None:
        self._device = device
        self._make = make
        self._parts: list[Call] | None = None
        self._num_graphs = 0
        self._piece = ExitStack()

    def record(self, work: Callable[[], T]) -> tuple[Recorded, T]:
        """`work` as it is to be repeated, and what it returns: tensors that each replay writes anew, or those that it
        has written to. Nothing in it may wait for the device.
        """
        assert self._parts is None, "one at a time"
        parts: list[Call] = []
        self._parts, self._num_graphs = parts, 0
        try:
            with ExitStack() as self._piece:
                self._begin()
                found = work()
        finally:
            self._parts = None
        return Recorded(tuple(parts), self._num_graphs), found

    def between(self, call: Call) -> None:
        """Make a call; while something is recorded it is kept instead, and a graph ends before it."""
        if self._parts is None:
            call()
            return
        self._piece.close()
        self._parts.append(call)
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        if self._make is None:
            # All graphs share them: what a graph needs while it runs is taken once.
            pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._make = lambda graph: recording(graph, pool, stream)
        self._piece.enter_context(self._make(graph))
        assert self._parts is not None
        self._parts.append(graph.replay)
        self._num_graphs += 1
