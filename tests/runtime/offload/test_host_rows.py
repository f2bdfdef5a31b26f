"""Rows that the CPU multiplies beside a device: what is begun when, and in which memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from cellar.ops.linear.dense import DenseWeight
from cellar.ops.linear.weight import LinearWeight
from cellar.runtime.offload.channels import Channel
from cellar.runtime.offload.cpu_jobs import CpuJobs
from cellar.runtime.offload.host_rows import SPUN_TOKENS, Begun, Exchange, HostRows, SharedWeight
from cellar.runtime.offload.rooms import Rooms, fetched
from cellar.runtime.offload.signal import WaitingSignal

CPU = torch.device("cpu")


class Said(Exchange):
    """Says what was asked of it."""

    def __init__(self, said: list[str], jobs: CpuJobs) -> None:
        super().__init__(CPU, Channel(), jobs)
        self._said = said

    def begin(self, x: Tensor, weights: Sequence[LinearWeight]) -> Begun:
        self._said.append(f"begin {len(weights)}")
        return super().begin(x, weights)

    def products(self, begun: Begun) -> list[Tensor]:
        self._said.append("products")
        return super().products(begun)


@pytest.fixture
def jobs() -> Iterator[CpuJobs]:
    found = CpuJobs(WaitingSignal(CPU), 1)
    yield found
    found.close()


class OnDevice(DenseWeight):
    """Says when it multiplies."""

    __slots__ = ("said",)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self.said.append("device")
        return super().multiply(x, bias)


def test_x_is_sent_once_and_the_device_multiplies_while_the_cpu_does(jobs: CpuJobs) -> None:
    said: list[str] = []
    exchange, matrix, x, bias = Said(said, jobs), torch.randn(11, 6), torch.randn(3, 6), torch.randn(11)
    here, there = OnDevice(matrix[:4]), OnDevice(matrix[6:9])
    here.said = there.said = said
    cpu = [HostRows(DenseWeight(matrix[4:6]), exchange), HostRows(DenseWeight(matrix[9:]), exchange)]
    weight = SharedWeight([here, cpu[0], there, cpu[1]])
    torch.testing.assert_close(weight.multiply(x), x @ matrix.T)
    assert said == ["begin 2", "device", "device", "products"]
    torch.testing.assert_close(weight.multiply(x, bias), x @ matrix.T + bias)
    torch.testing.assert_close(cpu[0].multiply(x, bias[4:6]), x @ matrix[4:6].T + bias[4:6])


@pytest.mark.parametrize("tokens", [1, SPUN_TOKENS, SPUN_TOKENS + 1])
def test_products_of_one_x_do_not_change_with_the_next(tokens: int, jobs: CpuJobs) -> None:
    exchange = Exchange(CPU, Channel(), jobs)
    matrices = [torch.randn(rows, 6) for rows in (5, 2)]
    weights = [DenseWeight(matrix) for matrix in matrices]
    found = []
    for _ in range(3):
        x = torch.randn(tokens, 6)
        found.append((x.clone(), exchange.products(exchange.begin(x, weights))))
        x.fill_(7)
    for x, products in found:
        for matrix, product in zip(matrices, products, strict=True):
            torch.testing.assert_close(product, x @ matrix.T)


def test_rooms_are_kept_and_grow() -> None:
    """The bytes that this thread writes are those that the device reads; what it fetched is its own. One that is
    outgrown stays, and the next is twice as large.
    """
    rooms = Rooms(torch.device("cpu"))
    first = rooms.room("out", (2, 3), torch.float32, 12)
    first.here.copy_(torch.arange(6.0).view(2, 3))
    mine = fetched(first.there)
    again = rooms.room("out", (4, 3), torch.float32)
    assert again.here.data_ptr() == first.here.data_ptr()
    again.here.fill_(7)
    assert first.there.eq(7).all()
    assert mine.tolist() == [[0, 1, 2], [3, 4, 5]]
    larger = rooms.room("out", (13,), torch.float32)
    assert larger.here.data_ptr() != first.here.data_ptr()
    assert rooms.room("out", (24,), torch.float32).here.data_ptr() == larger.here.data_ptr()
    another = rooms.room("out", (25,), torch.float32).here
    assert another.data_ptr() not in {first.here.data_ptr(), larger.here.data_ptr()}
    assert [room.here.numel() for room in rooms._held["out", torch.float32]] == [12, 24, 48]
    assert rooms.room("out", (2, 3), torch.bfloat16).there.dtype == torch.bfloat16
    assert rooms.room("in", (2, 3), torch.float32).here.data_ptr() != first.here.data_ptr()
