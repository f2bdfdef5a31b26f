"""Upload: small arrays on their way to a device, as whoever runs steps brings them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

Upload: TypeAlias = Callable[[Sequence[NDArray[Any]]], list[Tensor]]
"""NumPy arrays as tensors of a device, in stream order, without waiting; they may share memory with the arrays."""


def by_copies(device: torch.device) -> Upload:
    """A copy from pinned memory for each array; on the CPU they share memory."""

    def upload(arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        here = [torch.from_numpy(array) for array in arrays]
        pinned = [each.pin_memory() for each in here] if device.type == "cuda" else here
        return [each.to(device, non_blocking=True) for each in pinned]

    return upload
