"""Host memory that an accelerator's copy engines read and write: registered with its driver.

Registering touches every page, and so takes it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.runtime.memory import human

logger = logging.getLogger(__name__)

_PORTABLE = 1
"""For all accelerators of the process, not only for the one that asks."""


class Registered:
    """What is registered with the driver of `device` until `close`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._addresses: list[int] = []

    def __len__(self) -> int:
        """Parts that are registered now."""
        return len(self._addresses)

    def add(self, part: NDArray[np.uint8]) -> bool:
        """Register a part of memory that nobody gives back before `close`; False, and a line in the log, if the driver
        does not: then copies are slower and as right.

        Parts need no alignment; those that share a page register it twice, which the driver allows. A copy that
        crosses from one part to the next it refuses.
        """
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            error = int(driver.cudaHostRegister(part.ctypes.data, part.nbytes, _PORTABLE))
        if error:
            self._forget_error()
            logger.warning(
                "the driver did not register %s of host memory (error %d); copies of it are slower",
                human(part.nbytes),
                error,
            )
            return False
        self._addresses.append(part.ctypes.data)
        return True

    def _forget_error(self) -> None:
        """The driver keeps a thread's last error until it is asked for, and torch would take it for its next call's."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with suppress(RuntimeError):
                torch.ones(1, device=self._device)

    def close(self) -> None:
        """Undo it all."""
        driver: Any = torch.cuda.cudart() if self._addresses else None  # type: ignore[no-untyped-call]
        for address in self._addresses:
            driver.cudaHostUnregister(address)
        self._addresses.clear()


def mapped(memory: Tensor, device: torch.device) -> Tensor:
    """The same bytes, in registered memory, as a tensor that kernels of `device` read and write over the link."""
    if device.type == "cpu":
        return memory
    flat = memory.reshape(-1).view(torch.uint8)
    return torch.as_tensor(_Seen(flat), device=device).view(memory.dtype).view(memory.shape)


class _Seen:
    """An address for torch: registered memory has the same one on the device."""

    def __init__(self, memory: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 2,
            "strides": None,
        }
