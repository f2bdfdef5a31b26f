"""Small arrays between host and device: one pinned copy in and asynchronous copies out per step; nothing on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}

Upload = Callable[[Sequence[NDArray[Any]]], list[Tensor]]


def uploader(device: torch.device) -> Upload:
    """A function that turns NumPy arrays into tensors on `device` without waiting; on the CPU they share memory."""
    if device.type == "cpu":
        return lambda arrays: [torch.from_numpy(array) for array in arrays]
    return packed_uploader(device, pin_memory=True)


def packed_uploader(device: torch.device, pin_memory: bool) -> Upload:
    """Tensors that are views of one buffer, filled by a single copy from pinned memory.

    The allocator of pinned memory keeps the block until the copy has run.
    """

    def upload(arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        pinned = torch.empty(max(end, 1), dtype=torch.uint8, pin_memory=pin_memory)
        target = pinned.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            target[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there = pinned.to(device, non_blocking=True)
        return [
            there[offset : offset + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    return upload


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory that is complete once the current stream has got here; a CPU tensor as it is."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
