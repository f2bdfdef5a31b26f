"""A cache on the device of what one pass attends to, a layer at a time, whose chunks are kept in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.models.model import LayerContext
from cellar.ops.kv_format import as_bytes
from cellar.runtime.offload.mover import Fence, mover_for, opened
from cellar.runtime.steps.arena import Arena

_CHUNKS_AT_ONCE = 64

MOST_RUNS = 64
"""Of slots behind one another that are copied for a layer: each is two copies, begun in some ten microseconds. Of more
a kernel makes one launch, beside which nothing is computed.
"""

LongArray = NDArray[np.int64]


class Run(NamedTuple):
    """Chunks behind one another: their first slot in host memory, their first number on the device, how many."""

    slot: int
    number: int
    size: int


class Stores:
    """Copies of chunks from a device to host memory, on a stream of their own. `here`: the CPU's arena."""

    def __init__(self, here: Arena, device: torch.device) -> None:
        self._here = here
        self._mover = mover_for(device)

    def begin(self, j: int, runs: Sequence[Run], keys: Tensor, values: Tensor) -> Fence:
        """Begin to keep layer j's chunks, once the current stream has made them. -> behind these copies."""
        self._mover.computed()()
        for cache, here in ((as_bytes(keys), as_bytes(self._here.k[j])), (as_bytes(values), as_bytes(self._here.v[j]))):
            for slot, number, size in runs:
                self._mover.move(cache[number : number + size], here[slot : slot + size])
        return self._mover.moved()

    def wait(self) -> None:
        """What the current stream does next is behind all that was begun."""
        self._mover.moved()()


def runs_of(slots: LongArray) -> list[Run]:
    """Those that lie behind one another."""
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [Run(int(slots[a]), a, b - a) for a, b in pairwise(cuts)]


class StagedChunks:
    """A cache on the device of one pass, a layer at a time. Its chunk n is that of slot `slots[n]`: of prompts all are
    written there; of decodes all are brought from there, and those that are `grown` are written.

    Implements what `StepContext` asks of an arena: `k[j]` and `v[j]` are the same memory for all j.
    """

    def __init__(self, there: Arena, slots: Tensor, grown: Tensor | None = None) -> None:
        self._there = there
        self._slots = slots
        self._grown = grown
        self._written = slots if grown is None else slots.index_select(0, grown)
        self.chunk_size = there.chunk_size
        self._held: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self.k = [self._cache(j)[0] for j in range(len(there.k))]
        self.v = [self._cache(j)[1] for j in range(len(there.k))]

    def bring(self, j: int) -> None:
        """Bring layer j's chunks from host memory, if any are needed: by a kernel whose threads read side by side."""
        if self._grown is not None:
            for there, here in self._both(j):
                torch.index_select(there, 0, self._slots, out=here)

    def keep(self, j: int) -> None:
        """Bring layer j's chunks to host memory."""
        for there, here in self._both(j):
            there.index_copy_(0, self._written, here if self._grown is None else here.index_select(0, self._grown))

    def _both(self, j: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Layer j's keys, then its values, in host memory and here: as words, [chunks, words]."""
        for there, here in ((self._there.k[j], self.k[j]), (self._there.v[j], self.v[j])):
            yield _words(there), _words(here)

    def _cache(self, j: int) -> tuple[Tensor, Tensor]:
        count, like = len(self._slots), self._there.k[j]
        # There are a few more or less in every pass: memory in large pieces is found again.
        room = -(-count // _CHUNKS_AT_ONCE) * _CHUNKS_AT_ONCE
        shape = (room, *like.shape[1:])
        if shape not in self._held:
            made = torch.zeros((2, *shape), dtype=like.dtype, device=like.device)
            self._held[shape] = (made[0, :count], made[1, :count])
        return self._held[shape]


def _words(cache: Tensor) -> Tensor:
    """The bytes of each chunk in words of eight: of short floats the library copies no rows, and bytes slowly."""
    return as_bytes(cache).flatten(1).view(torch.int64)


class CopiedChunks(StagedChunks):
    """Of prompts, brought to host memory by copies, beside what is computed until the next layer attends; whoever
    computes the pass waits for those of the last layer. `soon`: the device reads them there in the same layer.
    """

    def __init__(self, there: Arena, slots: Tensor, stores: Stores, runs: Sequence[Run], *, soon: bool) -> None:
        super().__init__(there, slots)
        self._stores = stores
        self._runs = runs
        self._soon = soon
        self._kept: Fence = opened

    def bring(self, j: int) -> None:
        """Nothing is brought, but the layer before has left its memory."""
        self._kept()

    def keep(self, j: int) -> None:
        """Begin to bring layer j's chunks to host memory."""
        self._kept = self._stores.begin(j, self._runs, self.k[j], self.v[j])
        if self._soon:
            self._kept()


class StagedContext:
    """A `LayerContext` over staged chunks, brought before a layer attends to them, and kept afterwards."""

    def __init__(self, inner: LayerContext, chunks: StagedChunks) -> None:
        self._inner = inner
        self._chunks = chunks
        self.positions = inner.positions
        self.cos_sin = inner.cos_sin
        self.comm = inner.comm

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        """Attention on the device, then the chunks to host memory."""
        self._chunks.bring(j)
        out = self._inner.attend(j, q, k, v, rotate=rotate)
        self._chunks.keep(j)
        return out
