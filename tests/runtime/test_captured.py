"""Recording a graph: Python's cycle collector rests meanwhile, and other threads go on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cellar.runtime.captured import captured, recording


@contextmanager
def nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_rests_and_goes_on_as_before(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph", nothing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "a stream")
    graph: Any = object()
    try:
        gc.enable() if before else gc.disable()
        with recording(graph):
            assert not gc.isenabled()
        assert gc.isenabled() == before
        with pytest.raises(ValueError, match="of the work"), recording(graph):
            raise ValueError("of the work")
        assert gc.isenabled() == before
    finally:
        gc.enable()


def test_a_stream_of_its_own_records_without_emptying_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.graph` would wait for the device and give free memory back, once for each size."""

    class Graph:
        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            done.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self) -> None:
            done.append("end")

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        done.append(f"on {stream}")
        yield
        done.append("off")

    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.delattr(torch.cuda, "graph")
    graph: Any = Graph()
    with recording(graph, "pool", "stream"):
        done.append("work")
    assert done == ["on stream", "begin pool thread_local", "work", "end", "off"]
    done.clear()
    with pytest.raises(ValueError, match="of the work"), recording(graph, None, "stream"):
        raise ValueError("of the work")
    assert done == ["on stream", "begin None thread_local", "end"], "a graph is ended whatever happens"
    assert gc.isenabled()


def test_without_a_stream_it_is_one_of_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would take one that it makes once: graphs of a second device then were empty."""
    current = ["cuda:0"]
    found: list[Any] = []

    @contextmanager
    def graph(graph: Any, *, stream: Any, **_: Any) -> Iterator[None]:
        found.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: f"stream of {current[0]}")
    for current[0] in ("cuda:0", "cuda:1"):
        with recording(found):  # type: ignore[arg-type]
            pass
    assert found == ["stream of cuda:0", "stream of cuda:1"]


def test_on_a_cpu_the_work_itself_is_repeated() -> None:
    done: list[int] = []
    work = captured(lambda: done.append(1), torch.device("cpu"))
    assert done == []
    work()
    work()
    assert done == [1, 1]


class Cycle:
    def __init__(self, held: object) -> None:
        self.held, self.self = held, self


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device")
def test_a_lost_graph_does_not_break_the_next() -> None:
    """A graph in a cycle is destroyed by whatever collects; another thread allocates beside the recording."""
    device = torch.device("cuda", 0)
    x, y = torch.ones(64, device=device), torch.zeros(64, device=device)
    lost = [captured(lambda: torch.add(x, 1, out=y), device)]
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:

        def elsewhere() -> None:
            stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                torch.empty(2**28, device=device).fill_(1)
            stream.synchronize()

        def work() -> None:
            torch.add(x, 2, out=y)
            if torch.cuda.is_current_stream_capturing():
                # Not before: the collector would find it while nothing is recorded yet.
                Cycle(lost.pop())
                held = [[] for _ in range(1000)]  # type: ignore[var-annotated]
                del held
                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join()

        replay = captured(work, device)
    finally:
        gc.set_threshold(*threshold)
    y.zero_()
    replay()
    assert y.tolist() == [3.0] * 64
