"""Memory held to a size: one piece of it, from which others are carved until it is full."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from cellar.core.errors import CapacityError
from cellar.runtime.memory import human, is_out_of_memory
from cellar.runtime.offload.layout import PAGE, aligned
from cellar.runtime.pages import zeros
from cellar.runtime.registered import Registered

NUM_THREADS = 8
AT_ONCE = 2**28
HOST = torch.device("cpu")


class HeldMemory:
    """`capacity` bytes of the place `name`, in host memory or on a device. Pages of host memory are taken when they are
    first written.

    Raises CapacityError if there is not so much.
    """

    def __init__(self, name: str, capacity: int, device: torch.device = HOST) -> None:
        self.name = name
        self.capacity = capacity
        self.used = 0
        self._registered: Registered | None = None
        try:
            if device.type == "cpu":
                self._bytes = torch.from_numpy(zeros(max(capacity, PAGE)))
            else:
                self._bytes = torch.zeros(capacity, dtype=torch.uint8, device=device)
        except (OSError, ValueError, OverflowError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"{human(capacity)} of {name} memory cannot be had ({error}); lower {name}_memory."
            ) from error

    def register(self, device: torch.device) -> bool:
        """Have copies between this host memory and an accelerator done by the accelerator, which takes all pages. False
        if its driver does not: then copies are slower, and its kernels do not reach this memory.
        """
        memory = self._bytes.numpy()
        with ThreadPoolExecutor(NUM_THREADS) as threads:  # a thread takes 2 GB of pages a second
            list(threads.map(lambda at: memory[at : at + AT_ONCE : PAGE].fill(0), range(0, len(memory), AT_ONCE)))
        self._registered = Registered(device)
        # At once: a copy may not cross the border of two registrations.
        return self._registered.add(memory)

    def share(self, device: torch.device, what: str) -> None:
        """`register` it for kernels of the device, which read `what` in it. Raises CapacityError if they cannot."""
        if not self.register(device):
            raise CapacityError(
                f"the driver of {device} does not register the {human(self.capacity)} of host memory for {what}, so "
                "the device cannot read them there; free host memory, raise what may be locked (ulimit -l), or plan "
                "with less host_memory."
            )

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

    def close(self) -> None:
        """Undo `register`. Nobody copies any more."""
        if self._registered is not None:
            self._registered.close()
            self._registered = None
