"""Rows of a matrix in host memory, multiplied by the CPU for a device: its memory is read where the link is not needed.

x --> pinned memory -> CPU: x W^T -> pinned memory --> device
      meanwhile the device multiplies the matrix's other rows

The thread that launches does neither: the CPU's products are jobs of another (`cpu_jobs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cellar.core.cpu_rows import MOST_IN_UNITS
from cellar.ops.cpu.launch import multiplies_in_units
from cellar.ops.linear.weight import LinearWeight
from cellar.quant.weight import StackedWeight
from cellar.runtime.offload.channels import Channel
from cellar.runtime.offload.cpu_jobs import CpuJobs
from cellar.runtime.offload.rooms import Room, Rooms, fetched
from cellar.runtime.recorder import Between, at_once

SPUN_TOKENS = MOST_IN_UNITS
"""Up to so many tokens the CPU's thread spins until x has come: it is on its way for microseconds, and to be woken
takes tens of them, once a layer. Pinned memory for so many is kept.
"""


def have_units(dtype: str) -> bool:
    """True if this processor's matrix units multiply plain rows of that type."""
    return dtype == "bfloat16" and multiplies_in_units()


@dataclass(slots=True)
class Begun:
    """Products that are being made by a job of `jobs`. `kept`: of few tokens, in rooms; else in memory of their own."""

    jobs: CpuJobs
    work: Callable[[], None]
    products: Sequence[Room]
    kept: bool
    number: int = 0

    def submit(self) -> None:
        """Have it done once what was launched so far has come, each time anew."""
        self.number = self.jobs.submit(self.jobs.arrived(soon=self.kept), self.work)

    def hold(self) -> None:
        """What is launched from now on waits for it."""
        self.jobs.hold(self.number)

    def submit_and_hold(self) -> None:
        """Both, where the device has nothing to do meanwhile."""
        self.submit()
        self.hold()


class Exchange:
    """What passes between `device` and the CPU that multiplies rows for it, `channel` its seconds. For one stream, one
    x at a time. `between`: how jobs are submitted and waited for, where launches are recorded (`runtime/recorder.py`).
    """

    def __init__(self, device: torch.device, channel: Channel, jobs: CpuJobs, between: Between = at_once) -> None:
        self._device = device
        self._channel = channel
        self._jobs = jobs
        self._between = between
        self._rooms = Rooms(device)

    def begin(self, x: Tensor, weights: Sequence[LinearWeight]) -> Begun:
        """Begin to bring x [tokens, columns] here, behind what the device has been told so far, and to multiply."""
        begun = self._sent(x, weights)
        self._between(begun.submit)
        return begun

    def products(self, begun: Begun) -> list[Tensor]:
        """x W^T of each weight on the device, on their way."""
        self._between(begun.hold)
        return self._fetched(begun)

    def multiply(self, x: Tensor, weights: Sequence[LinearWeight]) -> list[Tensor]:
        """Both, with nothing to compute meanwhile."""
        begun = self._sent(x, weights)
        self._between(begun.submit_and_hold)
        return self._fetched(begun)

    def _sent(self, x: Tensor, weights: Sequence[LinearWeight]) -> Begun:
        kept = len(x) <= SPUN_TOKENS
        here = self._room("in", x.shape, x.dtype, kept).here
        here.copy_(x, non_blocking=True)
        shapes = [torch.Size((len(x), weight.out_features)) for weight in weights]
        rooms = [self._room(f"out {n}", shape, x.dtype, kept) for n, shape in enumerate(shapes)]

        def multiply() -> None:
            with self._channel.busy():
                for weight, room in zip(weights, rooms, strict=True):
                    weight.multiply_into(room.here, here)

        return Begun(self._jobs, multiply, rooms, kept)

    def _fetched(self, begun: Begun) -> list[Tensor]:
        if begun.kept:
            return [fetched(room.there) for room in begun.products]
        return [room.here.to(self._device, non_blocking=True) for room in begun.products]

    def _room(self, name: str, shape: torch.Size, dtype: torch.dtype, kept: bool) -> Room:
        """One that is kept has been read before it is written again: x is sent behind the products of the x before,
        and a product is made when the next x has come, which the stream sends behind what fetched the last one.
        """
        if kept:
            return self._rooms.room(name, shape, dtype, SPUN_TOKENS * shape[1])
        here = torch.empty(shape, dtype=dtype, pin_memory=self._device.type != "cpu")
        return Room(here, here)


class HostRows(LinearWeight):
    """A weight in host memory, in any format that the CPU multiplies, that takes and gives tensors of a device."""

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
        (out,) = self.exchange.multiply(x, [self.here])
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
        """The CPU's products are begun, then the device makes its own."""
        sizes = [part.out_features for part in self.parts]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        here = [part for part in self.parts if isinstance(part, HostRows)]
        exchange, rows = here[0].exchange, [part.here for part in here]
        found: dict[LinearWeight, Tensor] = {}
        if len(here) == len(self.parts):
            products = exchange.multiply(x, rows)
        else:
            begun = exchange.begin(x, rows)
            for part, b in zip(self.parts, biases, strict=True):
                if not isinstance(part, HostRows):
                    found[part] = part.multiply(x, b)
            products = exchange.products(begun)
        found.update(zip(here, products, strict=True))
        for one, b in zip(self.parts, biases, strict=True):
            if b is not None and isinstance(one, HostRows):
                found[one].add_(b)
        return torch.cat([found[one] for one in self.parts], 1)
