"""Chunks of the device's arena as bytes: the layout of a chunk outside the device, read from and written to its slots.

On an accelerator a slot of a layer group is one contiguous piece, on the CPU it is gathered from all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cellar.runtime.steps.arena import Arena


class ArenaChunks:
    """An arena's buffers, seen so that a slot is one piece: contiguous, or on the CPU gathered, group after group."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self.device = device
        self._views: list[Tensor] = []
        self._sizes: list[int] = []
        for buffer in arena.buffers:
            raw = buffer.view(torch.uint8)  # the last dimension is in bytes
            # [slot, layer, K/V, head, token, bytes]
            view = raw.permute(2, 0, 1, 3, 4, 5) if device.type == "cpu" else raw
            self._views.append(view)
            self._sizes.append(view[0].numel())

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk over all layer groups."""
        return sum(self._sizes)

    def read(self, slot: int, chunk: Tensor) -> None:
        """Copy a slot's bytes to `chunk`, uint8 [chunk_nbytes] on the host; asynchronous on a stream."""
        for view, part in zip(self._views, self._parts(chunk), strict=True):
            self._copy(part.view(view.shape[1:]), view[slot])

    def write(self, slot: int, chunk: Tensor) -> None:
        """Copy `chunk` to a slot; asynchronous on a stream."""
        for view, part in zip(self._views, self._parts(chunk), strict=True):
            self._copy(view[slot], part.view(view.shape[1:]))

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
