"""Decodes over KV in host memory, divided between the CPU and the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cellar.ops.attention import AttentionWork
from cellar.runtime.offload.host_kv import Divided, divided

SIZE = 16
IntArray = NDArray[np.int32]


def parts(spans: list[tuple[int, int]], over_link: float, *, by_cpu: bool = True) -> Divided:
    """Of spans [start, stop), each in a row of its own."""

    def plan(row: IntArray, start: IntArray, stop: IntArray, device: torch.device) -> list[AttentionWork]:
        return []

    row = np.arange(len(spans), dtype=np.int32)
    start, stop = np.array(spans, np.int32).T
    table = np.arange(len(spans) * 8, dtype=np.int32).reshape(len(spans), 8)
    return divided(row, start, stop, table, SIZE, plan, torch.device("cpu"), by_cpu, over_link)


def test_the_device_attends_to_a_share_of_the_positions() -> None:
    decodes = [(29, 30), (9, 10), (39, 40), (19, 20)]
    for share, by_cpu in ((0.0, [0, 1, 2, 3]), (0.05, [0, 1, 2, 3]), (0.2, [0, 1, 2]), (0.5, [0, 1]), (0.9, [])):
        found = parts(decodes, share)
        assert found.tokens.tolist() == by_cpu
        assert found.rest.tolist() == [n for n in range(4) if n not in by_cpu]
        assert found.staged is None
    assert parts(decodes, 0.5, by_cpu=False).tokens.tolist() == []


def test_beside_fresh_prompts_the_cpu_attends_to_all_decodes() -> None:
    """The prompts are staged on the device, and what lies in host memory is not; one that goes on is not staged."""
    found = parts([(29, 30), (9, 10), (0, 20)], 0.5)
    assert found.tokens.tolist() == [0, 1]
    assert found.staged is not None
    assert found.staged.slots.tolist() == [16, 17]
    found = parts([(29, 30), (9, 10), (5, 20)], 0.5)
    assert found.tokens.tolist() == [0]
    assert found.rest.tolist() == list(range(1, 17))
    assert found.staged is None
