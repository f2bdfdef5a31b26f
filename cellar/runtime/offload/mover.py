"""The seam for streams: moves into slots, and what each side waits for before it touches one.

The loader moves rows into a slot and makes a fence behind the moves; whoever computes waits for that fence. When the
slot is given back, a fence behind the computation is what the loader waits for. On the CPU both are over when the call
returns, so its fences are open. On an accelerator moves would run on a stream of their own, and a fence be an event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cellar.core.errors import DeviceError

Fence = Callable[[], None]
"""Returns when, or makes the caller's stream wait until, all that was begun before it is done."""


def opened() -> None:
    """The fence of what is done already."""


class Mover(Protocol):
    """Moves bytes towards one device."""

    def move(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy: uint8, equally long."""

    def moved(self) -> Fence:
        """Behind the moves so far, for whoever computes."""

    def computed(self) -> Fence:
        """Behind what was computed so far, for whoever moves."""


class HostMover:
    """Copies by the calling thread alone. NumPy lets other threads run meanwhile, and brings no team of its own."""

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy."""
        np.copyto(target.numpy(), source.numpy())

    def moved(self) -> Fence:
        """Nothing is left to wait for."""
        return opened

    def computed(self) -> Fence:
        """Nothing is left to wait for."""
        return opened


def mover_for(device: torch.device) -> Mover:
    """Raises DeviceError for an accelerator: streaming weights to one was never measured."""
    if device.type != "cpu":
        raise DeviceError(
            f"offloaded models run on the CPU alone yet, not on {device}; set device to cpu, or take a model or a "
            "quantization that fits the device."
        )
    return HostMover()
