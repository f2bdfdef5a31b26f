"""A lane that is a stream: work beside the caller's, in order, with memory that nobody else writes meanwhile."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from torch import Tensor

from cellar.models.loop import Loop
from cellar.models.points import FeedForward, feed_forward
from cellar.ops.linear.definition import linear
from cellar.runtime.ranks.lane import DeviceLane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device"),
]

LONG = 2_000_000
"""Cycles of a wait on the device, about a millisecond."""


class SlowComm:
    """A `Comm` of one rank whose sums take long, and give three times what they take."""

    normed_sums = None

    def __init__(self, loop: Loop | None) -> None:
        self.loop = loop

    def all_reduce(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(LONG // 10)
        between = x + x  # a block of the lane's own
        torch.cuda._sleep(LONG // 10)
        return between + x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float().cuda()


def test_loops_are_exact_on_integers_while_blocks_are_given_out_again() -> None:
    """Fifty layers, each with blocks that the one before has freed, on the caller's stream and on the lane's."""
    x, up, down = integers(64, 32, seed=1), integers(128, 32, seed=2), integers(32, 64, seed=3)
    layer = FeedForward(up, None, "relu", down, None)
    with torch.inference_mode():
        lane = DeviceLane(torch.device("cuda"))
        looped, plain = SlowComm(Loop(lane, 16)), SlowComm(None)
        found, wanted = x, x
        for _ in range(50):
            found = feed_forward(found, layer, looped, beside=found) % 5
            wanted = feed_forward(wanted, layer, plain, beside=wanted) % 5
            torch.full_like(found, float("nan"))  # what is freed is written over
        assert torch.equal(found, wanted)
        h = linear(x, up)
        direct = 3 * (linear(torch.relu(h[:, :64]) * h[:, 64:], down) + x)
        assert torch.equal(feed_forward(x, layer, looped, beside=x), direct)


def test_work_goes_on_beside_the_callers() -> None:
    lane = DeviceLane(torch.device("cuda"))

    def seconds(beside: bool) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            ahead = lane.run(partial(torch.cuda._sleep, 2 * LONG)) if beside else None
            torch.cuda._sleep(2 * LONG)
            if ahead is None:
                torch.cuda._sleep(2 * LONG)
            else:
                ahead.result()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(True)
    together, apart = seconds(True), seconds(False)
    assert together < 0.7 * apart, (together, apart)


def test_a_result_is_there_before_it_is_used() -> None:
    lane, x = DeviceLane(torch.device("cuda")), torch.zeros(1 << 20, device="cuda")

    def late() -> Tensor:
        torch.cuda._sleep(5 * LONG)
        return x + 1

    for _ in range(3):
        assert float((lane.run(late).result() + 1).min()) == 2


def test_a_step_that_is_recorded_is_not_cut() -> None:
    loop, x = Loop(DeviceLane(torch.device("cuda")), 4), torch.zeros(64, device="cuda")
    assert len(loop.sizes(64)) == 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sizes = loop.sizes(64)
        x.add_(1)
    assert sizes == [64]
