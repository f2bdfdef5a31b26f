"""Steps in pieces: where they are cut, what each waits for, and that together they are the whole. On the CPU graphs are
tapes; what only a GPU can show is in test_local_gpu.py and tests/e2e/test_early_loads.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from cellar.core.errors import DeviceError
from cellar.models.model import Hidden
from cellar.runtime.steps import fixed_inputs
from cellar.runtime.steps import graphs as step_graphs
from cellar.runtime.steps.forward import Forward, Gate
from cellar.runtime.steps.graphs import StepGraphs, prompt_sizes
from cellar.runtime.steps.inputs import StepInputs, step_inputs
from cellar.runtime.steps.layer_graphs import LayerGraphs
from cellar.runtime.steps.rows import DeviceRows
from cellar.runtime.tiers.arrivals import Arrival, ThreadMark
from cellar.runtime.transfer import uploader
from tests.runtime.steps.steps import CHUNK, Step, prompt_of
from tests.runtime.tape import tapes

CPU = torch.device("cpu")
PARTS = [0, 0, 1, 1, 1, 2]
LASTS = [1, 4, 5]
VOCAB = 101


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What graphs are asked for."""
    return tapes(monkeypatch)


def recording(graph: Any, *_: Any) -> Any:
    return graph.recording()


def layers(x: Tensor, num_layers: int = len(PARTS)) -> Callable[[Gate], Tensor]:
    """What is computed of x: each layer's result depends on those before it, and on the order."""

    def run(gate: Gate) -> Tensor:
        h = x * 2
        for layer in range(num_layers):
            gate(layer)
            h = (h + layer) * 1.5
        return h

    return run


@pytest.mark.parametrize(
    ("parts", "lasts"),
    [(PARTS, LASTS), ((), []), ([0] * 6, []), (range(6), list(range(6))), ([3, 3, 5, 5, 5, 5], [1, 5])],
)
def test_pieces_are_the_runs_of_layers_of_one_part(parts: Sequence[int], lasts: list[int], log: list[str]) -> None:
    x, pieces, asked = torch.arange(4.0), LayerGraphs(parts), list[int]()
    found = pieces.record(layers(x), recording)
    count = max(1, len(lasts))
    assert len(pieces) == count
    assert log == [f"{what} {n}" for n in range(count) for what in ("begin", "end")], "one after the other"
    for value in (x, x + 7):
        x.copy_(value.clone())
        pieces.replay(asked.append)
        assert torch.equal(found, layers(x)(lambda layer: None))
        if lasts:
            assert asked == lasts
        asked.clear()
    pieces.replay()
    assert log[2 * count :] == [f"replay {n}" for _ in range(3) for n in range(count)]
    assert not asked


def test_each_piece_waits_first(log: list[str]) -> None:
    pieces = LayerGraphs(PARTS)
    pieces.record(layers(torch.ones(2)), recording)
    log.clear()
    pieces.replay(lambda layer: log.append(f"wait {layer}"))
    assert log == [f"{what} {n}" for k, last in enumerate(LASTS) for what, n in (("wait", last), ("replay", k))]


def test_a_piece_that_breaks_is_ended(log: list[str]) -> None:
    def broken(gate: Gate) -> None:
        for layer in range(len(PARTS)):
            gate(layer)
            if layer == 3:
                raise ValueError("of a layer")

    with pytest.raises(ValueError, match="of a layer"):
        LayerGraphs(PARTS).record(broken, recording)
    assert log == ["begin 0", "end 0", "begin 1", "end 1"]


class Toy:
    """In place of a `Forward`: no attention, and a layer adds what its chunks hold. `said`: kind and size of steps."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        self.shapes: list[Any] = []
        self.arena = SimpleNamespace(num_slots=16, chunk_size=CHUNK)
        self.held = torch.zeros(len(PARTS), dtype=torch.float64)

    def run(
        self,
        works: Sequence[Any],
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        table: Tensor,
        pace: Any = None,
        gate: Gate | None = None,
        kind: str = "",
    ) -> Hidden:
        self.said.append((kind, len(tokens)))
        h = (tokens * 1000 + positions * 10 + slots).double()
        for layer in range(len(PARTS)):
            if gate is not None:
                gate(layer)
            h = h * 1.25 + self.held[layer]
        return Hidden(h.view(-1, 1), -h.view(-1, 1))

    def logits(self, h: Hidden) -> Tensor:
        return h.residual.float() + torch.arange(VOCAB)


class Event:
    """Has always passed."""

    def record(self, _: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class World:
    """Captured steps of a toy (`parts` None: none are), with rows and a table of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, parts: Sequence[int] | None) -> None:
        plain = torch.zeros

        def zeros(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            return plain(*arguments, **options)

        def pull(pinned: Tensor, there: Tensor, count: int) -> None:
            there[:count].copy_(pinned[:count])

        monkeypatch.setattr(torch, "zeros", zeros)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(fixed_inputs, "pull", pull)
        monkeypatch.setattr(step_graphs, "recording", recording)
        self.toy = Toy()
        self.rows = DeviceRows(4, 8, VOCAB, CPU, uploader(CPU))
        if parts is not None:
            self.graphs = StepGraphs(cast(Forward, self.toy), self.rows, 4, 64, CPU, parts=parts, whole=True)
        self.toy.held.copy_(torch.arange(len(PARTS)).double() * 3 + 1)

    def inputs(self, step: Step) -> StepInputs:
        plan = step.plan()
        self.rows.apply(plan)
        return step_inputs(plan, self.rows.table_host, CHUNK)

    def prompt(self, length: int) -> StepInputs:
        return self.inputs(Step(0).open(1).place(1, [3, 1, 9, 5, 2]).prompt(1, prompt_of(length, length)))

    def eager(self, inputs: StepInputs) -> Hidden:
        given = (torch.from_numpy(array) for array in (inputs.tokens, inputs.positions, inputs.slot_mapping))
        return self.toy.run([], *given, self.rows.table)


@pytest.mark.parametrize("length", [1, 16, 17, 40, 64])
@pytest.mark.parametrize("parts", [(), PARTS], ids=["whole", "pieces"])
def test_steps_with_prompts_are_those_of_launches(
    parts: Sequence[int], length: int, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, parts)
    count = len(LASTS) if parts else 1
    decodes = len(world.graphs._decodes.recorded)
    assert log.count("end 0") == 1
    assert len(log) == 2 * (count * len(prompt_sizes(64)) + 2 * decodes), "decodes have a graph, and one for sampling"
    log.clear()
    inputs = world.prompt(length)
    found = world.graphs.hidden(inputs)
    assert found is not None
    want = world.eager(inputs)
    assert torch.equal(found.residual, want.residual)
    assert found.delta is not None
    assert want.delta is not None
    assert torch.equal(found.delta, want.delta)
    assert len(log) == count


def test_layers_that_are_on_their_way_are_waited_for_piece_by_piece(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, PARTS)
    inputs = world.prompt(33)
    want = world.eager(inputs).residual
    there = world.toy.held.clone()
    world.toy.held.fill_(torch.nan)
    asked = []

    def gate(layer: int) -> None:
        asked.append(layer)
        world.toy.held[: layer + 1] = there[: layer + 1]

    assert world.graphs.waits_in_pieces(inputs)
    found = world.graphs.hidden(inputs, gate)
    assert found is not None
    assert torch.equal(found.residual, want)
    assert asked == LASTS


def test_what_does_not_come_fails_the_step_and_not_the_next(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, PARTS)
    inputs = world.prompt(20)
    marks = [ThreadMark() for _ in LASTS]
    arrival = Arrival(np.array([3], np.int32), marks, PARTS)
    marks[0].set()
    for mark in marks[1:]:
        mark.set(OSError("the device is lost"))
    log.clear()
    with pytest.raises(DeviceError, match="have not come: the device is lost"):
        world.graphs.hidden(inputs, arrival.before)
    assert len(log) == 1, "one piece was started"
    found = world.graphs.hidden(inputs)
    assert found is not None
    assert torch.equal(found.residual, world.eager(inputs).residual)


def test_who_has_no_pieces_leaves_its_graph_to_wait(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ())
    inputs = world.prompt(20)
    assert not world.graphs.waits_in_pieces(inputs)
    log.clear()
    assert world.graphs.hidden(inputs, lambda layer: None) is None
    assert not log, "nothing was started"


def test_decodes_alone_and_long_steps_have_no_pieces(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, PARTS)
    inputs = world.prompt(65)
    assert not world.graphs.waits_in_pieces(inputs)
    assert world.graphs.hidden(inputs, lambda layer: None) is None
    world.prompt(40)
    decode = world.inputs(Step(1).decode(1, 40))
    assert world.graphs.serves(decode)
    assert not world.graphs.waits_in_pieces(decode)
    log.clear()
    world.graphs.logits(decode)
    assert len(log) == 1


def test_sizes_without_a_graph_are_launched_then_recorded(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers each time, waiting or not; idle moments leave nothing missing."""
    world = World(monkeypatch, PARTS)
    graphs = StepGraphs(cast(Forward, world.toy), world.rows, 4, 64, CPU, parts=PARTS)
    assert graphs.missing().missing == len(prompt_sizes(64)) - 1
    log.clear()
    inputs = world.prompt(20)
    want, there = world.eager(inputs).residual, world.toy.held.clone()

    def gate(layer: int) -> None:
        world.toy.held[: layer + 1] = there[: layer + 1]

    seen = []
    for _ in range(3):
        world.toy.held.fill_(torch.nan)
        assert graphs.waits_in_pieces(inputs)
        found = graphs.hidden(inputs, gate)
        assert found is not None
        assert torch.equal(found.residual, want)
        seen.append((sum("begin" in line for line in log), sum("replay" in line for line in log)))
        log.clear()
    assert seen == [(0, 0), (len(LASTS), len(LASTS)), (0, len(LASTS))]
    while graphs.prepare():
        pass
    assert graphs.missing().missing == 0
    assert not graphs.prepare()
