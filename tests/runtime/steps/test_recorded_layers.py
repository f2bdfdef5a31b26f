"""Layers as graphs, in halves or whole: they give what the model gives, whichever slot a layer lies in, whoever
multiplies its rows and however many tokens there are. On the CPU graphs are tapes; test_offloaded_gpu.py has real ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor

from cellar.core.errors import DeviceError
from cellar.models.model import Carried, Hidden, LayerContext, Model, Projected
from cellar.ops.linear.dense import DenseWeight
from cellar.ops.linear.weight import LinearWeight, Weight
from cellar.runtime.offload.channels import Channel
from cellar.runtime.offload.cpu_jobs import CpuJobs
from cellar.runtime.offload.host_rows import Exchange, HostRows, SharedWeight
from cellar.runtime.offload.signal import WaitingSignal
from cellar.runtime.recorder import Recorded, Recorder
from cellar.runtime.steps import recorded_layers
from cellar.runtime.steps.forward import pass_layer
from cellar.runtime.steps.recorded_layers import MOST_TOKENS, ROOM, LaunchedLayers, RecordedLayers, pass_sizes
from tests.runtime.tape import Tape

CPU = torch.device("cpu")
HEADS, DIM, LAYERS = 2, 4, 3
E = HEADS * DIM

T = TypeVar("T")


class Taped(Recorder):
    """A tape computes while it records, which a graph does not: what that has written to `rooms` is undone."""

    def __init__(self) -> None:
        super().__init__(CPU, lambda graph: graph.recording())  # type: ignore[attr-defined,no-any-return]
        self.rooms: Mapping[Any, Tensor] = {}

    def record(self, work: Callable[[], T]) -> tuple[Recorded, T]:
        before = {key: there.clone() for key, there in self.rooms.items()}
        found = super().record(work)
        for key, there in before.items():
            self.rooms[key].copy_(there)
        return found


class Blocks:
    """Half a transformer: what it carries is the sum, and in every second layer what was normed, too."""

    spec = SimpleNamespace(rope=None)

    def before_attention(self, j: int, weights: Any, h: Hidden, ctx: LayerContext) -> Projected:
        x = h.residual if h.delta is None else h.residual + h.delta
        normed = x / (1 + x.abs().amax(1, keepdim=True))
        q, k, v = weights["qkv"].multiply(normed).view(-1, 3 * HEADS, DIM).split(HEADS, 1)
        return Projected(q, k, v, Carried(x, normed if j % 2 else None))

    def after_attention(self, j: int, weights: Any, carried: Carried, attended: Tensor, ctx: LayerContext) -> Hidden:
        out = weights["out"].multiply(attended.flatten(1))
        return Hidden(carried.residual, out if carried.normed is None else out + carried.normed)


class Sums:
    """Attention of a kind: a token sees those before it."""

    comm = None

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        return (q + k.cumsum(0) * v) / (j + 1)


@pytest.fixture
def jobs() -> Iterator[CpuJobs]:
    made = CpuJobs(WaitingSignal(CPU), 1)
    yield made
    made.close()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Tape(said, 0))
    return said


class Streamed:
    """Layers in two slots in turns, a part of whose rows the CPU multiplies, or not."""

    def __init__(self, exchange: Exchange) -> None:
        self._matrices = [{"qkv": torch.randn(3 * E, E) / 3, "out": torch.randn(E, E) / 3} for _ in range(LAYERS)]
        self._slots = [{name: torch.empty_like(matrix) for name, matrix in self._matrices[0].items()} for _ in range(2)]
        self._weights: dict[tuple[int, int, bool], Mapping[str, Weight]] = {}
        for j, matrices in enumerate(self._matrices):
            for slot, there in enumerate(self._slots):
                for by_cpu in (False, True):
                    self._weights[j, slot, by_cpu] = {
                        name: _split(there[name], matrices[name], exchange) if by_cpu else DenseWeight(there[name])
                        for name in matrices
                    }

    def at(self, j: int, slot: int, by_cpu: bool) -> Mapping[str, Weight]:
        for name, there in self._slots[slot].items():
            there.copy_(self._matrices[j][name])
        return self._weights[j, slot, by_cpu]

    def plain(self, j: int) -> Mapping[str, Weight]:
        return {name: DenseWeight(matrix) for name, matrix in self._matrices[j].items()}


def _split(there: Tensor, here: Tensor, exchange: Exchange) -> LinearWeight:
    """Of the out matrix all rows are the CPU's."""
    cut = 0 if len(here) == E else len(here) // 3
    parts = [HostRows(DenseWeight(here[cut:]), exchange)]
    return SharedWeight([DenseWeight(there[:cut]), *parts]) if cut else parts[0]


def wanted(streamed: Streamed, h: Hidden) -> Tensor:
    found = [h]
    for j in range(LAYERS):
        pass_layer(
            [LaunchedLayers(cast("Model", Blocks()))],
            j,
            streamed.plain(j),
            found,
            [_context()],
            {},
            lambda: None,
            rotate=False,
        )
    return _sum(found[0])


def _context() -> LayerContext:
    return cast("LayerContext", Sums())


def _sum(h: Hidden) -> Tensor:
    return h.residual if h.delta is None else h.residual + h.delta


def run(
    recorded: RecordedLayers, streamed: Streamed, h: Hidden, first_slot: int, by_cpu: bool, kind: str = ""
) -> Tensor:
    one = recorded.of(h, kind)
    found = [one.hidden]
    for j in range(LAYERS):
        weights = streamed.at(j, (first_slot + j) % 2, by_cpu)
        pass_layer([one], j, weights, found, [_context()], {}, lambda: None, rotate=False)
    return _sum(one.left(found[0])).clone()


def hidden(tokens: int, *, delta: bool = False) -> Hidden:
    return Hidden(torch.randn(tokens, E), torch.randn(tokens, E) if delta else None)


def layers_of(recorder: Recorder, most: int = 40, left: Callable[[], int] = lambda: 2**40) -> RecordedLayers:
    found = RecordedLayers(cast("Model", Blocks()), recorder, most, left)
    if isinstance(recorder, Taped):
        recorder.rooms = found._rooms
    return found


def test_passes_give_what_the_model_gives(jobs: CpuJobs, log: list[str]) -> None:
    """Sizes, slots, the CPU's rows and an entry with and without a delta, mixed, launched and replayed."""
    torch.manual_seed(0)
    recorder = Taped()
    streamed, recorded = Streamed(Exchange(CPU, Channel(), jobs, recorder.between)), layers_of(recorder)
    cases = [(1, 0), (3, 0), (16, 1), (17, 0), (23, 1), (40, 0), (24, 1), (3, 1), (33, 0)]
    for turn in range(4):
        for number, (tokens, slot) in enumerate(cases):
            h = hidden(tokens, delta=number % 4 == 0)
            found = run(recorded, streamed, h, slot, by_cpu=tokens <= 16)
            torch.testing.assert_close(found, wanted(streamed, h), msg=f"turn {turn}, {tokens} tokens")
    assert log.count("replay 0") > log.count("begin 0") > 0


def test_whole_layers_are_one_graph_but_for_what_the_cpu_multiplies(jobs: CpuJobs, log: list[str]) -> None:
    """Steps of two kinds have graphs of their own, and of their layers' halves again others."""
    torch.manual_seed(1)
    recorder = Taped()
    streamed, recorded = Streamed(Exchange(CPU, Channel(), jobs, recorder.between)), layers_of(recorder)
    counts = []
    for turn in range(3):
        for number, (kind, tokens) in enumerate([("decodes", 3), ("prompts", 3), ("", 3), ("decodes", 24)]):
            log.clear()
            h = hidden(tokens, delta=number % 2 == 0)
            found = run(recorded, streamed, h, 0, by_cpu=tokens <= 16, kind=kind)
            torch.testing.assert_close(found, wanted(streamed, h), msg=f"turn {turn}, {kind}, {tokens} tokens")
            counts.append(log.count("replay 0"))
    # The CPU cuts a layer three times; halves are cut once more, by attention.
    assert counts == [0] * 4 + 2 * [4 * LAYERS, 4 * LAYERS, 5 * LAYERS, LAYERS]


def test_what_is_recorded_the_second_time_is_replayed_from_then_on(jobs: CpuJobs, log: list[str]) -> None:
    recorder = Taped()
    streamed, recorded = Streamed(Exchange(CPU, Channel(), jobs, recorder.between)), layers_of(recorder)
    run(recorded, streamed, hidden(5), 0, by_cpu=True)
    assert not log
    run(recorded, streamed, hidden(5), 0, by_cpu=True)
    # Two halves a layer: one is cut twice by the CPU's part of a matrix, the other once by a whole one.
    pieces = LAYERS * (3 + 2)
    assert [log.count(what) for what in ("begin 0", "end 0", "replay 0")] == [pieces] * 3
    log.clear()
    run(recorded, streamed, hidden(5), 0, by_cpu=True)
    assert log == ["replay 0"] * pieces
    log.clear()
    run(recorded, streamed, hidden(5), 1, by_cpu=True)
    run(recorded, streamed, hidden(5), 0, by_cpu=False)
    run(recorded, streamed, hidden(4), 0, by_cpu=True)
    assert not log, "another slot, other rows, another size: launched when they are first met"


def test_padding_holds_nothing_of_anybody(jobs: CpuJobs, log: list[str]) -> None:
    """What one pass has left in a room is not what the next one's padding computes with."""
    recorder = Taped()
    streamed, recorded = Streamed(Exchange(CPU, Channel(), jobs, recorder.between)), layers_of(recorder)
    run(recorded, streamed, Hidden(torch.full((24, E), torch.nan)), 0, by_cpu=False)
    one = recorded.of(hidden(18))
    assert one.hidden.residual.shape == (24, E)
    assert one.hidden.residual[18:].eq(0).all()
    rooms = [there[18:24] for (name, *_), there in recorded._rooms.items() if name in ("attended", "delta")]
    assert len(rooms) == 2
    assert all(room.eq(0).all() for room in rooms)


def test_one_that_cannot_be_recorded_is_launched(
    jobs: CpuJobs, log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def refused(graph: Any) -> Any:
        raise DeviceError("no memory for graphs")

    recorder = Recorder(CPU, refused)
    streamed, recorded = Streamed(Exchange(CPU, Channel(), jobs, recorder.between)), layers_of(recorder)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            h = hidden(7)
            torch.testing.assert_close(run(recorded, streamed, h, 0, by_cpu=True), wanted(streamed, h))
    assert [record.message for record in caplog.records] == [
        "passes of 7 tokens have no graphs and are launched each time"
    ]


@pytest.mark.parametrize("why", ["memory", "graphs"])
def test_graphs_take_no_more_than_they_may(
    why: str, jobs: CpuJobs, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded by then is replayed still."""
    left = [ROOM]
    if why == "graphs":
        monkeypatch.setattr(recorded_layers, "MOST_GRAPHS", 2 * LAYERS)
    recorder = Taped()
    streamed = Streamed(Exchange(CPU, Channel(), jobs, recorder.between))
    recorded = layers_of(recorder, left=lambda: left[0])
    for _ in range(2):
        run(recorded, streamed, hidden(3), 0, by_cpu=False)
    assert log.count("begin 0") == 2 * LAYERS
    left[0] -= why == "memory"
    log.clear()
    for tokens in (3, 4, 4, 4, 3):
        h = hidden(tokens)
        torch.testing.assert_close(run(recorded, streamed, h, 0, by_cpu=False), wanted(streamed, h))
    assert log == ["replay 0"] * 4 * LAYERS


def test_sizes_are_exact_where_the_cpu_multiplies_and_end_at_the_most() -> None:
    assert pass_sizes(1) == (1,)
    assert pass_sizes(9) == tuple(range(1, 10))
    assert pass_sizes(20) == (*range(1, 17), 20)
    assert pass_sizes(10_000)[-1] == MOST_TOKENS
    sizes = pass_sizes(MOST_TOKENS)
    assert sizes == tuple(sorted(set(sizes)))
    assert all(larger <= 1.5 * smaller for smaller, larger in pairwise(sizes) if smaller >= 16)
    recorded = layers_of(Recorder(CPU), 20)
    assert [recorded.takes(tokens) for tokens in (0, 1, 20, 21)] == [False, True, True, False]
