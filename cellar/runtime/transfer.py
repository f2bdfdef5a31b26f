"""Small arrays between host and device: pulled in by a kernel, pushed out by another; nothing on the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.ops.triton_support import kernel
from cellar.ops.upload import Upload, by_copies

if TYPE_CHECKING:
    import triton.language as tl

# Elements that a program of a copying kernel moves, and the most that go that way.
_COPIED = 1024
_MOST_PUSHED = 16384

_ALIGNMENT = 16
_UNIT = 64
"""Bytes of which a copying kernel moves a multiple, so that one kernel does for all."""
_MOST_PULLED = 2**20
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def uploader(device: torch.device) -> Upload:
    """A function that turns NumPy arrays into tensors on `device` without waiting; on the CPU they share memory."""
    if device.type == "cpu":
        return by_copies(device)
    return packed_uploader(device, pin_memory=True)


def packed_uploader(device: torch.device, pin_memory: bool) -> Upload:
    """Tensors that are views of one buffer, filled from pinned memory at once.

    By a kernel, up to `_MOST_PULLED` bytes: the engine that copies to the device takes the copies of all queues in the
    order in which they were asked for, and a load from the host's tier may have asked for thousands. The allocator of
    pinned memory keeps a block until a copy has run; what kernels read is kept here.
    """
    pulled: deque[tuple[Any, Tensor]] = deque()

    def upload(arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        nbytes = -(-max(end, 1) // _UNIT) * _UNIT
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin_memory)
        target = pinned.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            target[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if device.type == "cuda" and nbytes <= _MOST_PULLED:
            there = torch.empty(nbytes, dtype=torch.uint8, device=device)
            pull(pinned.view(torch.int32), there.view(torch.int32), nbytes // 4)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            while pulled and pulled[0][0].query():
                pulled.popleft()
            pulled.append((event, pinned))
        else:
            there = pinned.to(device, non_blocking=True)
        return [
            there[offset : offset + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    return upload


def pull(pinned: Tensor, there: Tensor, count: int) -> None:
    """Copy the first `count` int32 words from pinned memory, by a kernel: a copy engine between two kernels makes them
    wait for each other twice (measured: 8 us each). `pinned` must stay as it is until the stream has got here.
    """
    _copy_kernel[(-(-count // _COPIED),)](there, pinned, count, BLOCK=_COPIED)


@kernel
def _copy_kernel(there, source, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(there + at, tl.load(source + at, mask=at < count), mask=at < count)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory that is complete once the current stream has got here; a CPU tensor as it is.

    Keep the copy until then: its memory is not held for the stream.
    """
    if tensor.device.type == "cpu":
        return tensor
    if tensor.is_meta:  # listed, not run
        here = torch.empty_like(tensor)
    else:
        here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    count = tensor.numel()
    if count > _MOST_PUSHED or not tensor.is_contiguous():
        return here.copy_(tensor, non_blocking=True)
    if count:
        # By a kernel, for the reason that `pull` gives.
        views = [t.view(torch.uint8) if t.dtype == torch.bool else t for t in (tensor, here)]
        _push_kernel[(-(-count // _COPIED),)](*views, count, BLOCK=_COPIED)
    return here


@kernel
def _push_kernel(source, here, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(here + at, tl.load(source + at, mask=at < count), mask=at < count)
