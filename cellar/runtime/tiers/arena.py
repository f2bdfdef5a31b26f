"""Chunks of the device's arena as bytes: the layout of a chunk outside the device, read from and written to its slots.

On an accelerator a slot of a layer group is one contiguous piece, on the CPU it is gathered from all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cellar.core.messages import IntArray
from cellar.ops.cuda.copies import copies_at_once, copy_at_once
from cellar.runtime.steps.arena import Arena
from cellar.runtime.tiers.storage import Bytes

_MOST_PARTS = 12
"""Of a chunk, before its end is cut finer."""

_LAST = 4
"""The layers from the last quarter on are cut finer,"""

_MOST_LAST_PARTS = 8
"""into so many at most."""

_PART_NBYTES = 256 * 2**10
"""Many copies of so much at once are as fast as of twice as much: 55 GB/s (H200)."""

_FIRST = 64
"""Copies of a load's first call: asking for one takes a microsecond, and none begins before the call's end."""


def parted(num_layers: int, chunk_nbytes: int, part_nbytes: int) -> list[int]:
    """The part of each layer of a chunk: runs of layers of `part_nbytes` or more, and in the last quarter of half as
    much or more. A step computes a layer faster than its KV is loaded, but begins a part only when all of it is there:
    behind a load comes what it computes of the last part, if it has caught up with the load by then.
    """
    count = max(1, min(_MOST_PARTS, num_layers, chunk_nbytes // part_nbytes))
    parts = [j * count // num_layers for j in range(num_layers)]
    if count > 1:
        begin = min(parts.index(count - 1), num_layers - num_layers // _LAST)
        least = -(-part_nbytes * num_layers // (2 * chunk_nbytes))
        run = max(least, -(-(num_layers - begin) // _MOST_LAST_PARTS))
        parts[begin:] = [parts[begin - 1] + 1 + k // run for k in range(num_layers - begin)]
    return parts


class _Slice(NamedTuple):
    """A part of all slots [slots, ...], and where it lies in a chunk's bytes."""

    there: Tensor
    begin: int
    end: int


class ArenaChunks:
    """An arena's buffers, seen so that a slot is one piece: contiguous, or on the CPU gathered, group after group.

    `part_of_layer` [layer]: a chunk is written whole, or in parts (see `parted`). `shares` [part]: how much of a chunk
    has been written when a part has.
    """

    def __init__(self, arena: Arena, device: torch.device, part_nbytes: int = _PART_NBYTES) -> None:
        self.device = device
        self._at_once = device.type == "cuda" and copies_at_once()
        self._views: list[Tensor] = []
        self._sizes: list[int] = []
        for buffer in arena.buffers:
            raw = buffer.view(torch.uint8)  # the last dimension is in bytes
            # [slot, layer, K/V, head, token, bytes]
            view = raw.permute(2, 0, 1, 3, 4, 5) if device.type == "cpu" else raw
            self._views.append(view)
            self._sizes.append(view[0].numel())
        self.part_of_layer = parted(sum(map(len, arena.layers)), self.chunk_nbytes, part_nbytes)
        self._slices = [self._slices_of(part, arena.layers) for part in range(self.part_of_layer[-1] + 1)]
        sizes = [sum(each.end - each.begin for each in slices) for slices in self._slices]
        self.shares = [float(share) for share in np.cumsum(sizes) / self.chunk_nbytes]

    def _slices_of(self, part: int, groups: Sequence[Sequence[int]]) -> list[_Slice]:
        found, at = [], 0
        for view, size, layers in zip(self._views, self._sizes, groups, strict=True):
            places = [k for k, j in enumerate(layers) if self.part_of_layer[j] == part]
            if places:
                begin, end = min(places), max(places) + 1
                nbytes = size // len(layers)
                there = view[:, begin:end]
                if self.device.type != "cpu":
                    there = view.view(len(view), size)[:, begin * nbytes : end * nbytes]
                found.append(_Slice(there, at + begin * nbytes, at + end * nbytes))
            at += size
        return found

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk over all layer groups."""
        return sum(self._sizes)

    @property
    def num_parts(self) -> int:
        """Of a chunk."""
        return len(self._slices)

    def read(self, slot: int, chunk: Tensor) -> None:
        """Copy a slot's bytes to `chunk`, uint8 [chunk_nbytes] on the host; asynchronous on a stream."""
        for view, part in zip(self._views, self._parts(chunk), strict=True):
            self._copy(part.view(view.shape[1:]), view[slot])

    def write(self, slot: int, chunk: Tensor) -> None:
        """Copy `chunk` to a slot; asynchronous on a stream."""
        for view, part in zip(self._views, self._parts(chunk), strict=True):
            self._copy(view[slot], part.view(view.shape[1:]))

    def write_part(self, part: int, slots: IntArray, memory: Bytes, places: IntArray) -> None:
        """Copy one part of the chunks at `places` [n] of the host's `memory` [places, chunk_nbytes] to `slots` [n];
        asynchronous on a stream.
        """
        for there, begin, end in self._slices[part]:
            if self._at_once:
                # Addresses by arithmetic: of hundreds of chunks each object would take a microsecond or two.
                targets = there.data_ptr() + slots.astype(np.uint64) * np.uint64(there.stride(0))
                sources = memory.ctypes.data + begin + places.astype(np.uint64) * np.uint64(memory.strides[0])
                stream = torch.cuda.current_stream(self.device).cuda_stream
                count = len(targets)
                borders = (0, _FIRST, count) if part == 0 and count > _FIRST else (0, count)
                for a, b in pairwise(borders):
                    copy_at_once(targets[a:b], sources[a:b], end - begin, stream)
                continue
            chunks = [torch.from_numpy(memory[place, begin:end]) for place in places.tolist()]
            if self.device.type == "cpu":
                for slot, chunk in zip(slots.tolist(), chunks, strict=True):
                    self._copy(there[slot], chunk.view(there.shape[1:]))
            else:
                # All at once: this thread asks for the interpreter once, not for each of hundreds of copies.
                torch._foreach_copy_([there[s] for s in slots.tolist()], chunks, non_blocking=True)

    def copy(self, source: int, target: int) -> None:
        """Copy a slot to another one; asynchronous on a stream."""
        for view in self._views:
            self._copy(view[target], view[source])

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self.device.type == "cpu":
            # By NumPy, in this thread alone: torch would wake threads of its own, which the steps' cores do not have.
            target.numpy()[...] = source.numpy()
        else:
            target.copy_(source, non_blocking=True)

    def _parts(self, chunk: Tensor) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = torch.split(chunk, self._sizes)
        return parts
