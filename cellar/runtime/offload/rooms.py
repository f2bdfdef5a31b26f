"""Pinned memory for what passes between the CPU's thread and a device in every layer: a few rows each way.

What comes to the device is read by a kernel. Its copy engine brings one thing after another, and so a copy of some
kilobytes would wait behind the weights of a layer, which are on their way for milliseconds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cellar.runtime.registered import mapped


class Room(NamedTuple):
    """The same bytes for this thread, and for kernels of the device."""

    here: Tensor
    there: Tensor


class Rooms:
    """Pinned memory by name, kept and used again. Whoever asks for a room has waited for what read it last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, Room] = {}

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, most: int = 0) -> Room:
        """Room for so many numbers; taken for `most` at once, if that is more."""
        count = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.here.numel() < count or held.here.dtype != dtype:
            here = torch.empty(max(count, most), dtype=dtype, pin_memory=self._device.type != "cpu")
            held = self._held[name] = Room(here, mapped(here, self._device))
        return Room(held.here[:count].view(shape), held.there[:count].view(shape))


def fetched(there: Tensor) -> Tensor:
    """A copy on the device, by a kernel: a plain copy would be the copy engine's."""
    return torch.add(there, 0)
