"""A fixed piece of work on a device, recorded once and repeated with no Python in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from cellar.core.collector import collector_rests


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """What this thread launches inside goes into `graph`, whose memory comes from `pool`.

    `stream`: where it is recorded, by default a stream of the current device; graphs that share a pool share it, too.
    With one, torch's allocator keeps what it has: otherwise it waits for the device and gives all that is free back
    first, which costs more than the recording.

    Other threads may go on with the device, but not wait for all of it. Python's cycle collector rests: if it found
    another graph to destroy, the driver would refuse that and break this one.
    """
    with collector_rests(), _on_stream(graph, pool, stream) if stream is not None else _on_any(graph, pool):
        yield


def _on_any(graph: torch.cuda.CUDAGraph, pool: Any) -> AbstractContextManager[None]:
    # torch's own choice is one stream for the whole process, on the device that was recorded on first.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


@contextmanager
def _on_stream(graph: torch.cuda.CUDAGraph, pool: Any, stream: Any) -> Iterator[None]:
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


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
    with torch.cuda.device(device), recording(graph):
        work()
    return graph.replay
