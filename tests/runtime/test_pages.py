"""Memory of its own: zeros on huge pages, counted apart from its neighbours, and no other process's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cellar.runtime.pages import Shelf, take, taken_nbytes, zeros

HUGE = 2**21

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says which pages a process has")


@pytest.mark.parametrize("nbytes", [0, 1, 4096, HUGE, 3 * HUGE + 5])
def test_zeros_begin_at_a_huge_page(nbytes: int) -> None:
    memory = zeros(nbytes)
    assert memory.nbytes == nbytes
    assert not nbytes or memory.ctypes.data % HUGE == 0
    assert not memory.any()
    memory[:] = 255
    assert int(memory.sum()) == 255 * nbytes


@linux
def test_nothing_is_taken_before_it_is_touched_and_neighbours_are_not_counted() -> None:
    """Two mappings side by side would be one to the system, and each be counted as nothing or as both."""
    memories = [zeros(4 * HUGE) for _ in range(6)]
    assert [taken_nbytes(memory) for memory in memories] == [0] * 6
    for k, memory in enumerate(memories):
        assert take(memory[: (k % 3) * HUGE]) or not k % 3
    assert [taken_nbytes(memory) for memory in memories] == [0, HUGE, 2 * HUGE] * 2


@linux
def test_a_forked_process_has_none_of_it() -> None:
    """A page that both have is copied for whoever writes to it first, and a device goes on with the old one."""
    memory = zeros(HUGE)
    memory[:] = 7
    child = os.fork()
    if not child:
        begin = memory.ctypes.data
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        os._exit(any(int(first, 16) <= begin < int(end, 16) for first, end in ranges))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_more_than_there_can_be_is_refused() -> None:
    with pytest.raises((OSError, ValueError, OverflowError)):
        zeros(2**62)


def test_a_view_keeps_it() -> None:
    memory = zeros(HUGE)
    view = memory[5:9]
    del memory
    view[:] = 3
    assert np.array_equal(view, [3] * 4)


def test_what_is_put_on_a_shelf_stays_what_it_was() -> None:
    """Of any type and shape, beside others and where the first mapping is full."""
    shelf = Shelf(1000)
    sizes = [(3, 5), (0, 4), (1,), (2, 64), (700,), (3,)]
    given = [torch.arange(torch.Size(size).numel()).view(size) for size in sizes]
    given = [tensor.to(dtype) for tensor in given for dtype in (torch.uint8, torch.int8, torch.float16, torch.float32)]
    put = [shelf.put(tensor.t() if tensor.dim() == 2 else tensor) for tensor in given]
    for tensor, found in zip(given, put, strict=True):
        assert found.dtype == tensor.dtype
        assert found.is_contiguous()
        assert not found.numel() or found.data_ptr() % 64 == 0
        assert torch.equal(found.t() if found.dim() == 2 else found, tensor)
