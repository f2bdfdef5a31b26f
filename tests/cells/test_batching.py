"""A cell is refused, or mended, where batching its nodes would change what they compute."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cellar.cells import Cell, CellModel, Graph
from cellar.cells.heads import ClassifierHead
from cellar.cells.lstm import TokenLSTMCell
from cellar.cells.sequence import classifier
from cellar.core.errors import ConfigError
from cellar.engine.cells import CellEngine
from cellar.runtime.cells.local import LocalCellRuntime


class Rowwise(nn.Module):
    """A function of x: [b, 3]."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def model(module: nn.Module, nodes: int = 1, **options: Any) -> CellModel:
    cell = Cell("one", module, ("y",), inputs=("x",), **options)

    def unfold(graph: Graph, rows: list[list[float]]) -> Any:
        return graph.map(cell, len(rows), each={"x": rows})["y"]

    return CellModel("m", [cell], unfold, {"rows": [[0.5, 1.0, -2.0 + k] for k in range(nodes)]})


def run(made: CellModel, rows: list[list[float]], **options: Any) -> Any:
    runtime = LocalCellRuntime([made.spec], [made.modules], ["cpu"], num_threads=1)
    with CellEngine([made], runtime) as engine:
        return engine.run("m", [{"rows": rows}], **options)[0]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(),
        lambda x: x - x.mean(0),
        lambda x: x.cumsum(0),
        lambda x: x.flip(0),
        lambda x: x.softmax(0),
        lambda x: torch.where(x.sum(1, keepdim=True) == x.sum(1).max(), x, -x),
        lambda x: x.argsort(0),
        lambda x: x + 1e-3 * x.mean(0),
    ],
    ids=["mean of all", "mean", "cumsum", "flip", "softmax", "best", "integers", "a thousandth of the mean"],
)
def test_rows_that_depend_on_each_other_are_refused(function: Callable[[Tensor], Tensor], nodes: int) -> None:
    with pytest.raises(ConfigError, match="'y' of cell 'one' depends on which other rows"):
        model(Rowwise(function), nodes)


def test_statistics_of_the_batch_are_refused_and_those_that_are_kept_are_not() -> None:
    model(nn.BatchNorm1d(3))
    with pytest.raises(ConfigError, match="more than 1 value per channel"):
        model(nn.BatchNorm1d(3, track_running_stats=False), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nodes", [1, 2])
def test_rows_that_differ_by_rounding_pass(dtype: torch.dtype, nodes: int) -> None:
    torch.manual_seed(0)
    model(nn.Sequential(nn.Linear(3, 2048), nn.Tanh(), nn.Linear(2048, 64)).to(dtype), nodes)


def test_masked_outputs_and_random_ones_pass() -> None:
    model(Rowwise(lambda x: torch.where(x > 0, x, -torch.inf)), infinite=("y",))
    model(Rowwise(lambda x: x + torch.randn_like(x)))
    model(Rowwise(lambda x: (x[:, :1] / 0 * 0).expand(-1, 3)))  # NaN alone, NaN in company


def test_a_cell_that_quits_while_it_is_registered_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="SystemExit"):
        model(Rowwise(lambda x: sys.exit()))
    with pytest.raises(ConfigError, match="batch of 2 zeros"):
        model(Rowwise(lambda x: sys.exit() if len(x) > 1 else x))


def test_a_module_in_training_mode_is_set_to_evaluation_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    with caplog.at_level(logging.WARNING):
        made = model(module)
    assert not any(one.training for one in module.modules())
    (record,) = caplog.records
    assert "'m'" in record.getMessage()
    assert "'one'" in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        model(module)
    assert not caplog.records
    with torch.no_grad():
        expected = module(torch.tensor([[1.0, 2.0, 3.0]])).numpy()
    np.testing.assert_allclose(run(made, [[1.0, 2.0, 3.0]]), expected, rtol=1e-6)


def test_nothing_is_said_of_cells_that_are_built_in(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = classifier(TokenLSTMCell(10, 4, 8), ClassifierHead(8, 3))
    assert not caplog.records
    assert not any(module.training for module in made.modules)


def test_infinite_outputs_pass_where_they_are_declared() -> None:
    masked = Rowwise(lambda x: torch.where(x > 0, x, -torch.inf))
    (answer,) = run(model(masked, infinite=("y",)), [[1.0, -1.0, 2.0]])
    assert answer.tolist() == [1.0, -math.inf, 2.0]
    assert "finite" in str(run(model(masked), [[1.0, -1.0, 2.0]], raise_errors=False))
    broken = Rowwise(lambda x: torch.where(x > 0, x, torch.nan))
    assert "finite" in str(run(model(broken, infinite=("y",)), [[1.0, -1.0, 2.0]], raise_errors=False))
    with pytest.raises(ConfigError, match="names 'z'"):
        model(masked, infinite=("z",))


def test_a_built_in_cell_may_be_infinite_too() -> None:
    head = ClassifierHead(3, 2)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([1.0, -math.inf]))
    cell = Cell("head", head, ("label", "logits"), infinite=("logits",))

    def unfold(graph: Graph, h: list[float]) -> Any:
        answer = graph.call(cell, h=np.array(h, np.float32))
        return {"label": answer["label"], "logits": answer["logits"]}

    made = CellModel("m", [cell], unfold, {"h": [0.0, 1.0, 2.0]})
    runtime = LocalCellRuntime([made.spec], [made.modules], ["cpu"], num_threads=1)
    with CellEngine([made], runtime) as engine:
        (answer,) = engine.run("m", [{"h": [1.0, 2.0, 3.0]}])
    assert answer["label"] == 0
    assert answer["logits"].tolist() == [1.0, -math.inf]
