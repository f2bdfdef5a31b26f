"""Sums of ranks through each other's boxes: here all ranks are streams of one GPU.

Captured ones are compared where ranks have GPUs of their own (tests/runtime/ranks/test_ranks_gpu.py): two graphs that
wait for each other on one device may share a queue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from cellar.ops.collectives import all_reduce
from cellar.ops.norm.definition import add_rms_norm_definition
from cellar.ops.peers import (
    MOST_BLOCKS,
    BoxSizes,
    PeerBoxes,
    first_of_peers,
    launch,
    launch_norm,
    peer_boxes,
    rows_of_peers,
    sum_at_once,
    sum_by_pieces,
    sum_in_blanks,
    sum_norm_of_peers,
    sum_of_peers,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device"),
]

NBYTES = 2**20


class Ranks:
    """So many ranks, each a stream with boxes of its own."""

    def __init__(self, size: int) -> None:
        device = torch.device("cuda", 0)
        self._memory = [
            torch.zeros(BoxSizes(size, NBYTES).total, dtype=torch.uint8, device=device) for _ in range(size)
        ]
        addresses = [memory.data_ptr() for memory in self._memory]
        self.boxes = [peer_boxes(addresses, rank, NBYTES, device) for rank in range(size)]
        self.streams = [torch.cuda.Stream(device) for _ in range(size)]

    def load(self, dtype: torch.dtype) -> None:
        """Run each kernel once with nothing to add, and flags that say that all have been here: one that is loaded
        while another waits for it would never run on this one device.
        """
        none = torch.empty(8, dtype=dtype, device="cuda")
        for memory, boxes in zip(self._memory, self.boxes, strict=True):
            flags = memory[: 8 * MOST_BLOCKS * len(self.boxes)]
            flags.view(torch.int32).fill_(2**30)
            for name, counts in (
                ("sum_at_once", [0]),
                ("sum_in_blanks", [0]),
                ("sum_by_pieces", [0]),
                ("gather_rows", [0, 1, 1]),
            ):
                launch(name, none, none, boxes, counts, 1)
                torch.cuda.synchronize()
            flags.zero_()
            boxes.calls.zero_()
        for memory in self._memory:
            memory.zero_()

    def load_norm(self, x: Tensor, residual: Tensor, weight: Tensor, boxes: PeerBoxes) -> None:
        """The same of a sum with its norm, of no rows."""
        calls = torch.zeros_like(boxes.calls)
        launch_norm(x, residual, weight, x.clone(), x.clone(), 1e-5, replace(boxes, calls=calls), 0)
        torch.cuda.synchronize()

    def all_do(self, way: Callable[[Tensor, PeerBoxes], Tensor], parts: list[Tensor]) -> list[Tensor]:
        torch.cuda.synchronize()
        found = []
        for part, boxes, stream in zip(parts, self.boxes, self.streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(way(part, boxes))
        torch.cuda.synchronize()
        return found


def parts_of(size: int, n: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(n, device="cuda", generator=generator).to(dtype) for _ in range(size)]


def expected(parts: list[Tensor]) -> Tensor:
    return all_reduce([part.float() for part in parts]).to(parts[0].dtype)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(2, torch.bfloat16), (3, torch.bfloat16), (4, torch.bfloat16), (2, torch.float16), (2, torch.float32)],
)
def test_every_rank_has_the_sum_in_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    """All kernels in turns, of those that take a sum."""
    ranks = Ranks(size)
    ranks.load(dtype)
    small, most = ranks.boxes[0].sizes.small // dtype.itemsize, NBYTES // dtype.itemsize
    lengths = [8, 4096, small, 70_008, 4096, most, 2 * most + 8, 8] * 3
    count = 0
    for seed, n in enumerate(lengths):
        parts = parts_of(size, n, dtype, seed)
        assert ranks.boxes[0].take(parts[0])
        if seed % 4 == 0:  # padding, and in one part alone
            for part in parts:
                part[: n // 3].zero_()
            parts[-1][n // 2 :].zero_()
        ways = [
            sum_of_peers,
            sum_by_pieces,
            *([sum_in_blanks] if n <= most else []),
            *([sum_at_once] if n <= small else []),
        ]
        for way in ways:
            count += -(-n // most) if way is sum_by_pieces or way is sum_of_peers else 1
            for found in ranks.all_do(way, parts):
                assert torch.equal(found, expected(parts)), (n, seed, way)
    assert ranks.boxes[0].calls.tolist() == [count] * MOST_BLOCKS


def test_rows_side_by_side_and_the_first_ranks() -> None:
    ranks = Ranks(4)
    ranks.load(torch.bfloat16)
    for n, width in ((1, 32_064), (3, 8), (1, 4), (5, 1004)) * 3:
        parts = [part.view(n, width) for part in parts_of(4, n * width, torch.bfloat16, n)]
        for found in ranks.all_do(rows_of_peers, parts):
            assert torch.equal(found, torch.cat(parts, 1))
        told = [torch.full((2, n), rank, device="cuda") for rank in range(4)]
        for found, own in zip(ranks.all_do(first_of_peers, told), told, strict=True):
            assert found is own
            assert not own.any()


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (4, torch.bfloat16), (4, torch.float16)])
def test_sums_with_their_norm_are_sums_and_norms(size: int, dtype: torch.dtype) -> None:
    """Also of numbers of rows that go in two launches elsewhere."""
    ranks = Ranks(size)
    ranks.load(dtype)
    width = 2048
    weight = torch.randn(width, device="cuda").to(dtype)
    for n in (1, 1, 3, 8, 16, 20, 31, 32, 1):
        parts = [part.view(n, width) for part in parts_of(size, n * width, dtype, n)]
        residual = parts_of(1, n * width, dtype, 7)[0].view(n, width)
        for boxes in ranks.boxes:  # loaded while nobody waits: see `load`
            ranks.load_norm(parts[0], residual, weight, boxes)
        totals: list[Tensor] = []
        with_norm = partial(norm_and_keep, residual=residual, weight=weight, totals=totals)
        wanted = add_rms_norm_definition(residual, expected(parts), weight, 1e-5)
        for normed, total in zip(ranks.all_do(with_norm, parts), totals, strict=True):
            assert torch.equal(total, wanted[1]), n
            # Two roundings, of which the second may make two units of one.
            unit = 2**-7 if dtype == torch.bfloat16 else 2**-10
            torch.testing.assert_close(normed, wanted[0], rtol=2 * unit, atol=unit)


def norm_and_keep(part: Tensor, boxes: PeerBoxes, *, residual: Tensor, weight: Tensor, totals: list[Tensor]) -> Tensor:
    """Launches nothing else: what is loaded while others wait never runs."""
    normed, total = sum_norm_of_peers(part, residual, weight, 1e-5, boxes)
    totals.append(total)
    return normed
