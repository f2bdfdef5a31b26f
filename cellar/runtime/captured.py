"""A fixed piece of work on a device, recorded once and repeated with no Python in between."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`work` itself on a CPU; on an accelerator a replay of it, which reads and writes the same tensors each time.

    It is run once before it is recorded, so that whatever it prepares when it first runs is there.
    """
    if device.type == "cpu":
        return work
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
