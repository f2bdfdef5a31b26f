"""Rows of a matrix in host memory, multiplied by the CPU for a device: its memory is read where the link is not needed.

x --> pinned memory -> CPU: x W^T -> pinned memory --> device
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cellar.ops.linear.weight import LinearWeight
from cellar.runtime.offload.channels import Channel


class HostRows(LinearWeight):
    """A weight in host memory, in any format that the CPU multiplies, that takes and gives tensors of `device`. Who
    multiplies waits for x.
    """

    __slots__ = ("_channel", "_device", "_here")

    def __init__(self, here: LinearWeight, device: torch.device, channel: Channel) -> None:
        super().__init__(here.out_features, here.in_features)
        self._here = here
        self._device = device
        self._channel = channel

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self._here.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By the CPU; the bias is added on the device."""
        here = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()
        product = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, pin_memory=True)
        with self._channel.busy():
            product.copy_(self._here.multiply(here))
        out = product.to(self._device, non_blocking=True)
        return out if bias is None else out.add_(bias)

    def dense(self) -> Tensor:
        """The matrix, in host memory."""
        return self._here.dense()

    def remade(self, matrix: Tensor) -> HostRows:
        """Another one in the same format, in host memory."""
        return HostRows(self._here.remade(matrix), self._device, self._channel)
