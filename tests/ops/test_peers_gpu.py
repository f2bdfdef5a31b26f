"""Sums of ranks through each other's boxes: here all ranks are streams of one GPU.

Captured ones are compared where ranks have GPUs of their own (tests/runtime/ranks/test_ranks_gpu.py): two graphs that
wait for each other on one device may share a queue.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cellar.ops.collectives import all_reduce
from cellar.ops.peers import MOST_PROGRAMS, box_nbytes, peer_boxes, sum_of_peers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device"),
]

NBYTES = 2**20


class Ranks:
    """So many ranks, each a stream with boxes of its own."""

    def __init__(self, size: int) -> None:
        device = torch.device("cuda", 0)
        self._memory = [torch.zeros(box_nbytes(size, NBYTES), dtype=torch.uint8, device=device) for _ in range(size)]
        addresses = [memory.data_ptr() for memory in self._memory]
        self.boxes = [peer_boxes(addresses, rank, NBYTES, device) for rank in range(size)]
        self.streams = [torch.cuda.Stream(device) for _ in range(size)]

    def load(self, parts: list[Tensor]) -> None:
        """Run each kernel once with flags that say that all have been here: one that is loaded while another waits for
        it would never run on this one device.
        """
        kept = [memory.clone() for memory in self._memory], [boxes.calls.clone() for boxes in self.boxes]
        for memory in self._memory:
            memory[: 4 * MOST_PROGRAMS * len(parts)].view(torch.int32).fill_(2**30)
        for part, boxes in zip(parts, self.boxes, strict=True):
            sum_of_peers(part, boxes)
            torch.cuda.synchronize()
        for there, was in zip(
            [*self._memory, *(boxes.calls for boxes in self.boxes)], [*kept[0], *kept[1]], strict=True
        ):
            there.copy_(was)

    def sums(self, parts: list[Tensor]) -> list[Tensor]:
        self.load(parts)
        torch.cuda.synchronize()
        found = []
        for part, boxes, stream in zip(parts, self.boxes, self.streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(sum_of_peers(part, boxes))
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
    ranks = Ranks(size)
    lengths = [1, 4096, NBYTES // dtype.itemsize, 70_001, 4096, 1] * 5
    assert not ranks.boxes[0].take(torch.empty(NBYTES // dtype.itemsize + 1, dtype=dtype, device="cuda"))
    for seed, n in enumerate(lengths):
        parts = parts_of(size, n, dtype, seed)
        assert ranks.boxes[0].take(parts[0])
        for found in ranks.sums(parts):
            assert torch.equal(found, expected(parts)), (n, seed)
    assert ranks.boxes[0].calls.tolist() == [len(lengths)] * MOST_PROGRAMS
