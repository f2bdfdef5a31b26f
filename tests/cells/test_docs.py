"""The example of docs/cells-models.md runs, and cells run in the order that the page says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cellar.cells.heads import ClassifierHead
from cellar.cells.lstm import TokenLSTMCell
from cellar.cells.model import CellModel
from cellar.cells.seq2seq import DecoderCell, language_model, translator
from cellar.cells.tree_lstm import ChildSumNode, TreeInner, TreeLeaf, child_sum_classifier, tree_classifier
from cellar.core.cell_graphs import CellConfig
from cellar.core.tasks import CellCapacity
from cellar.schedule.cells.scheduler import CellScheduler
from tests.schedule.cells.test_scheduler import cell_of, result, sizes

PAGE = Path(__file__).parents[2] / "docs" / "cells-models.md"


def test_the_page_of_built_in_models(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.count("'label'") == 2


def translating() -> CellModel:
    return translator(TokenLSTMCell(10, 4, 8), DecoderCell(10, 4, 8), 1, 2)


def continuing() -> CellModel:
    return language_model(DecoderCell(10, 4, 8), 2)


def of_trees() -> CellModel:
    return tree_classifier(TreeLeaf(10, 4, 8), TreeInner(8), ClassifierHead(8, 3))


def of_dependencies() -> CellModel:
    return child_sum_classifier(ChildSumNode(10, 4, 8, 2), ClassifierHead(8, 3))


@pytest.mark.parametrize(
    ("make", "fields", "order"),
    [
        (translating, {"tokens": [5], "max_tokens": 3}, ("encoder", "decoder")),
        (continuing, {"tokens": [5, 6], "max_tokens": 3}, ("read", "write")),
        (of_trees, {"tokens": [5, 6], "children": [[0, 1]]}, ("leaf", "inner")),
        (of_dependencies, {"tokens": [5, 6], "parents": [1, -1]}, ("leaf", "node")),
    ],
    ids=["translator", "language model", "trees", "dependencies"],
)
def test_what_costs_little_runs_first(
    make: Callable[[], CellModel], fields: dict[str, Any], order: tuple[str, str]
) -> None:
    """A second request is read, or has its leaves computed, before the first goes on: then both go on in one batch."""
    said = "An encoder's steps run before a decoder's, and leaves before inner nodes"
    assert said in " ".join(PAGE.read_text(encoding="utf-8").split())
    model = make()
    capacity = CellCapacity(((1000,) * len(model.spec.banks),))
    scheduler = CellScheduler([model.spec], capacity, CellConfig(max_tasks=1))
    ran = []
    for k in range(3):
        if k < 2:
            scheduler.add(model.unfold(fields).request(f"r{k}", 0))
        plan = scheduler.plan(0)
        ran.append(model.spec.cells[cell_of(plan)].name)
        assert plan is not None
        if k < 2:
            scheduler.commit(result(plan, 0, 1))
    assert ran == [order[0], order[0], order[1]]
    assert sizes(plan) == [2]
