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
    """Pinned memory by name, kept and used again. Whoever writes to a room does so behind what read it last.

    A room that is outgrown may still be read, by what was launched before, and so is kept. The next one is twice as
    large at least: all those before take less than it does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[tuple[str, torch.dtype], list[Room]] = {}

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, most: int = 0) -> Room:
        """Room for so many numbers; taken for `most` at once, if that is more."""
        count = math.prod(shape)
        held = self._held.setdefault((name, dtype), [])
        if not held or held[-1].here.numel() < count:
            size = max(count, most, 2 * held[-1].here.numel() if held else 0)
            here = torch.empty(size, dtype=dtype, pin_memory=self._device.type != "cpu")
            held.append(Room(here, mapped(here, self._device)))
        here, there = held[-1]
        return Room(here[:count].view(shape), there[:count].view(shape))


def fetched(there: Tensor) -> Tensor:
    """A copy on the device, by a kernel: a plain copy would be the copy engine's."""
    return torch.add(there, 0)
