"""Products one behind another in a CUDA graph: each begins before the kernel in front has ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cellar.ops.linear.weight import LinearWeight


def check_replays(weights: Sequence[LinearWeight], x: Tensor) -> None:
    """A chain through square `weights`, four times over, has the same bits after 20 replays as without a graph."""

    def chain() -> Tensor:
        y = x
        for weight in [*weights] * 4:
            y = weight.multiply(y)
        return y

    wanted = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, wanted)
