"""Rows that the CPU multiplies beside a device: what is begun when."""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.ops.linear.dense import DenseWeight
from cellar.ops.linear.weight import LinearWeight
from cellar.runtime.offload.channels import Channel
from cellar.runtime.offload.host_rows import Exchange, HostRows, Sent, SharedWeight
from cellar.runtime.offload.rooms import Rooms, fetched


class Said(Exchange):
    """Sends nothing anywhere, and says what was asked of it."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(torch.device("cpu"), Channel())
        self._said = said

    def send(self, x: Tensor) -> Sent:
        self._said.append("send")
        return Sent(x, None)

    def product(self, weight: LinearWeight, sent: Sent, part: int = 0) -> Tensor:
        self._said.append(f"cpu {part}")
        return weight.multiply(sent.here)


class OnDevice(DenseWeight):
    """Says when it multiplies."""

    __slots__ = ("said",)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self.said.append("device")
        return super().multiply(x, bias)


def test_x_is_sent_once_and_the_device_multiplies_before_the_cpu_does() -> None:
    said: list[str] = []
    exchange, matrix, x, bias = Said(said), torch.randn(11, 6), torch.randn(3, 6), torch.randn(11)
    here, there = OnDevice(matrix[:4]), OnDevice(matrix[6:9])
    here.said = there.said = said
    cpu = [HostRows(DenseWeight(matrix[4:6]), exchange), HostRows(DenseWeight(matrix[9:]), exchange)]
    weight = SharedWeight([here, cpu[0], there, cpu[1]])
    torch.testing.assert_close(weight.multiply(x), x @ matrix.T)
    assert said == ["send", "device", "device", "cpu 0", "cpu 1"]
    torch.testing.assert_close(weight.multiply(x, bias), x @ matrix.T + bias)
    torch.testing.assert_close(cpu[0].multiply(x, bias[4:6]), x @ matrix[4:6].T + bias[4:6])


def test_rooms_are_kept_and_grow() -> None:
    """The bytes that this thread writes are those that the device reads; what it fetched is its own."""
    rooms = Rooms(torch.device("cpu"))
    first = rooms.room("out", (2, 3), torch.float32, 12)
    first.here.copy_(torch.arange(6.0).view(2, 3))
    mine = fetched(first.there)
    again = rooms.room("out", (4, 3), torch.float32)
    assert again.here.data_ptr() == first.here.data_ptr()
    again.here.fill_(7)
    assert first.there.eq(7).all()
    assert mine.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rooms.room("out", (13,), torch.float32).here.data_ptr() != first.here.data_ptr()
    assert rooms.room("out", (2, 3), torch.bfloat16).there.dtype == torch.bfloat16
    assert rooms.room("in", (2, 3), torch.float32).here.data_ptr() != first.here.data_ptr()
