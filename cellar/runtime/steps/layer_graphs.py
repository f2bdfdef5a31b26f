"""LayerGraphs: the layers of a step as one graph, or in pieces with a wait before each (decision 0083)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import torch

from cellar.runtime.steps.forward import Gate

Recording = Callable[[torch.cuda.CUDAGraph], AbstractContextManager[None]]
"""What is launched inside goes into the graph; see `runtime/captured.py`."""

T = TypeVar("T")


class LayerGraphs:
    """A step's layers, recorded one run of layers after another: those of one part of `parts` [layer], an ascending
    number for each layer; none: all of them, as one graph.

    They share a pool, and are always replayed in the order in which they were recorded, with no other graph of the
    pool in between. So what one leaves there, the hidden state above all, lies where the next one looks for it: that
    was alive while the next one was recorded, which therefore put nothing else there.
    """

    def __init__(self, parts: Sequence[int] = ()) -> None:
        starts = [layer for layer in range(1, len(parts)) if parts[layer] != parts[layer - 1]]
        self._starts = frozenset(starts)
        self._lasts = [layer - 1 for layer in [*starts, len(parts)]]
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self._lasts)

    def record(self, run: Callable[[Gate], T], recording: Recording) -> T:
        """Record what `run` launches; it calls the gate before each layer, in ascending order. -> what it returns,
        which is what the last piece leaves.
        """
        with ExitStack() as piece:

            def begin() -> None:
                graph = torch.cuda.CUDAGraph()
                piece.enter_context(recording(graph))
                self._graphs.append(graph)

            def gate(layer: int) -> None:
                if layer in self._starts:
                    piece.close()
                    begin()

            begin()
            return run(gate)

    def replay(self, gate: Gate | None = None) -> None:
        """Start all of it. `gate` is called before each piece with the number of the last layer in it: what comes in
        parts comes in the order of layers.
        """
        for last, graph in zip(self._lasts, self._graphs, strict=True):
            if gate is not None:
                gate(last)
            graph.replay()
