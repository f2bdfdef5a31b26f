"""Steps of few tokens whose weights are streamed: what goes to their layers, and which steps have too much for graphs.
Their layers are those of test_recorded_layers.py; real graphs are in tests/runtime/offload/test_offloaded_gpu.py.
"""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from cellar.models.model import Hidden, Model
from cellar.runtime.recorder import Recorder
from cellar.runtime.steps.forward import Forward
from cellar.runtime.steps.inputs import StepInputs
from cellar.runtime.steps.recorded_layers import RecordedLayers
from cellar.runtime.steps.streamed_graphs import StreamedGraphs
from tests.runtime.steps.steps import Step
from tests.runtime.steps.test_layer_graphs import Toy, World

CPU = torch.device("cpu")


def test_steps_are_those_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded to the sizes of layers' graphs; the next step gets its table, and the tokens that were chosen before."""
    world, toy = World(monkeypatch, None), Toy()
    toy.held.copy_(torch.arange(len(toy.held)).double() + 1)
    world.toy.held.copy_(toy.held)
    recorded = RecordedLayers(cast("Model", None), Recorder(CPU), 20, lambda: 0)
    graphs, asked = StreamedGraphs(cast("Forward", toy), recorded, world.rows, 4, CPU), list[int]()

    def found(inputs: StepInputs) -> Hidden | None:
        asked.clear()
        return graphs.hidden(inputs, asked.append)

    for length in (1, 16, 17, 20):
        inputs = world.prompt(length)
        here, want = found(inputs), world.eager(inputs)
        assert here is not None
        assert torch.equal(here.residual, want.residual)
        assert here.delta is not None
        assert want.delta is not None
        assert torch.equal(here.delta, want.delta)
        assert asked == list(range(len(toy.held)))
    assert toy.said == [("decodes", 1), ("prompts", 16), ("prompts", 20), ("prompts", 20)]
    world.rows.last[1] = 77
    decode = world.inputs(Step(1).decode(1, 20))
    here = found(decode)
    assert here is not None
    given = world.toy.run([], torch.tensor([77]), *_places(decode), world.rows.table)
    assert torch.equal(here.residual, given.residual)
    assert toy.said[-1] == ("decodes", 1)
    toy.said.clear()
    assert found(world.prompt(21)) is None
    assert not toy.said, "nothing was started"


def _places(inputs: StepInputs) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(inputs.positions), torch.from_numpy(inputs.slot_mapping)
