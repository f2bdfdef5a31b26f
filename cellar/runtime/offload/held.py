"""Memory held to a size: one mapping, from which pieces are carved until it is full."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from cellar.core.errors import CapacityError
from cellar.runtime.memory import human
from cellar.runtime.offload.layout import aligned

PAGE = 4096


class HeldMemory:
    """`capacity` bytes of the place `name`. Pages are taken when they are first written.

    Raises CapacityError if the system does not give so much.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.used = 0
        try:
            self._bytes = torch.frombuffer(mmap.mmap(-1, max(capacity, PAGE)), dtype=torch.uint8)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(
                f"{human(capacity)} of {name} memory cannot be had ({error}); lower {name}_memory."
            ) from error

    def carve(self, nbytes: int, alignment: int = 64) -> Tensor:
        """The next `nbytes`, uint8, zero at first. Raises CapacityError if they do not fit."""
        start = aligned(self.used, alignment)
        if start + nbytes > self.capacity:
            left = max(0, self.capacity - start)
            raise CapacityError(
                f"the {self.name} memory of {human(self.capacity)} has {human(left)} left, but {human(nbytes)} "
                f"more are needed; raise {self.name}_memory, or plan again."
            )
        self.used = start + nbytes
        return self._bytes[start : self.used]
