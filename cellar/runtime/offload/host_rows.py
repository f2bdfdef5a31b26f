"""Rows of a matrix in host memory, multiplied by the CPU for a device: its memory is read where the link is not needed.

x --> pinned memory -> CPU: x W^T -> pinned memory --> device
      meanwhile the device multiplies the matrix's other rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cellar.ops.linear.weight import LinearWeight
from cellar.quant.weight import StackedWeight
from cellar.runtime.offload.channels import Channel
from cellar.runtime.offload.rooms import Room, Rooms, fetched

SPUN_TOKENS = 16
"""Up to so many tokens the CPU's thread spins until x has come: it is on its way for microseconds, and to be woken
takes tens of them, once a layer. Pinned memory for so many is kept.
"""


@dataclass(frozen=True, slots=True)
class Sent:
    """x on its way: it is in `here` once `event` has come."""

    here: Tensor
    event: Any


class Exchange:
    """What passes between `device` and the CPU that multiplies rows for it, `channel` its seconds. For one thread and
    one stream, one x at a time.
    """

    def __init__(self, device: torch.device, channel: Channel) -> None:
        self._device = device
        self._channel = channel
        self._rooms = Rooms(device)

    def send(self, x: Tensor) -> Sent:
        """Begin to bring x [tokens, columns] here, behind what the device has been told so far."""
        few = x.shape[0] <= SPUN_TOKENS
        here = self._few("in", x.shape, x.dtype).here if few else torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        here.copy_(x, non_blocking=True)
        event: Any = torch.cuda.Event(blocking=not few)  # type: ignore[no-untyped-call]
        event.record()
        return Sent(here, event)

    def product(self, weight: LinearWeight, sent: Sent, part: int = 0) -> Tensor:
        """x W^T on the device, on its way. `part` numbers the weights that share this x."""
        sent.event.synchronize()
        shape, dtype = torch.Size((sent.here.shape[0], weight.out_features)), sent.here.dtype
        if shape[0] > SPUN_TOKENS:
            out = torch.empty(shape, dtype=dtype, pin_memory=True)
            with self._channel.busy():
                out.copy_(weight.multiply(sent.here))
            return out.to(self._device, non_blocking=True)
        room = self._few(f"out {part}", shape, dtype)
        with self._channel.busy():
            room.here.copy_(weight.multiply(sent.here))
        return fetched(room.there)

    def _few(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Room:
        """What is there has been read before it is written again: x by the CPU, and a product by the stream, which
        comes to the next x behind it.
        """
        return self._rooms.room(name, shape, dtype, SPUN_TOKENS * shape[1])


class HostRows(LinearWeight):
    """A weight in host memory, in any format that the CPU multiplies, that takes and gives tensors of a device. Who
    multiplies waits for x.
    """

    __slots__ = ("exchange", "here")

    def __init__(self, here: LinearWeight, exchange: Exchange) -> None:
        super().__init__(here.out_features, here.in_features)
        self.here = here
        self.exchange = exchange

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.here.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By the CPU; the bias is added on the device."""
        out = self.exchange.product(self.here, self.exchange.send(x))
        return out if bias is None else out.add_(bias)

    def dense(self) -> Tensor:
        """The matrix, in host memory."""
        return self.here.dense()

    def remade(self, matrix: Tensor) -> HostRows:
        """Another one in the same format, in host memory."""
        return HostRows(self.here.remade(matrix), self.exchange)


class SharedWeight(StackedWeight):
    """Rows of one matrix under one another, some of them `HostRows`: x is sent once, and before the device multiplies
    its own rows, so that both work at once.
    """

    __slots__ = ()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The device's products are begun, then the CPU makes its own."""
        sizes = [part.out_features for part in self.parts]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        here = [part for part in self.parts if isinstance(part, HostRows)]
        exchange = here[0].exchange
        sent = exchange.send(x)
        found: dict[LinearWeight, Tensor] = {
            part: part.multiply(x, b)
            for part, b in zip(self.parts, biases, strict=True)
            if not isinstance(part, HostRows)
        }
        for number, part in enumerate(here):
            found[part] = exchange.product(part.here, sent, number)
        for one, b in zip(self.parts, biases, strict=True):
            if b is not None and isinstance(one, HostRows):
                found[one].add_(b)
        return torch.cat([found[one] for one in self.parts], 1)
