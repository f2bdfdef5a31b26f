"""What the baselines compute is what the models compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.cells.baselines import executor, ideal, library, padding
from benchmarks.cells.drive import all_at_once
from benchmarks.cells.models import cell_model, modules, sentence_fields, tree_fields
from benchmarks.cells.padding import Padded
from benchmarks.cells.setup import Setup
from cellar.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


def small(model: Any, data: str | None = None) -> Setup:
    return Setup(model=model, hidden=16, vocab=50, data=data, device="cpu", pool=12, max_batch=8).resolved()


def test_padded_sentences_have_the_states_of_unpadded_ones() -> None:
    setup = small("lstm", "wmt-50")
    data = setup.sentences()
    batch = Padded(tuple(range(7)), 50)
    expected = torch.stack([torch.from_numpy(_evaluate(setup, sentence_fields(data, setup)[k])) for k in range(7)])
    system = library(setup, 10)
    for run in (executor(setup, data), system._executor):
        run.start(batch)
        assert run.done(0.0)
        torch.testing.assert_close(run.last, expected, atol=1e-5, rtol=1e-5)  # type: ignore[attr-defined]


def test_padded_translations_are_those_of_single_sentences() -> None:
    setup = small("seq2seq", "wmt-50")
    data = setup.sentences()
    fields = sentence_fields(data, setup)
    batch = Padded(tuple(range(6)), 50)
    for run in (executor(setup, data), library(setup, 10)._executor):
        run.start(batch)
        for k in range(6):
            expected = _evaluate(setup, fields[k])
            assert len(expected) == data.target(k)
            assert run.tokens[: data.target(k), k].tolist() == list(expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("model", "data"), [("lstm", "fixed-5"), ("lstm", "fixed-6"), ("treelstm", "fixed-4")])
def test_the_ideal_graph_computes_the_model(model: Any, data: str) -> None:
    setup = small(model, data)
    fields = tree_fields(setup.trees()) if model == "treelstm" else sentence_fields(setup.sentences(), setup)
    system = ideal(setup)
    run: Any = system._executor
    for _ in range(2):  # nothing is left over from the batch before
        run.start(Padded((0, 1, 2), int(data[-1])))
        for k in range(3):
            expected = torch.from_numpy(_evaluate(setup, fields[k % len(fields)]))
            torch.testing.assert_close(run.last[k], expected, atol=1e-5, rtol=1e-5)


def test_whole_systems_answer_everything() -> None:
    setup = small("lstm", "wmt-50")
    for system in (padding(setup, 1), library(setup, 40)):
        trace = all_at_once(system, 30)
        assert (trace.ended >= trace.began).all()
        assert trace.throughput > 0


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="padded"):
        padding(small("treelstm"), 10)
    with pytest.raises(ConfigError, match="alike"):
        ideal(small("lstm"))
    with pytest.raises(ConfigError, match="model"):
        Setup(model="mlp", device="cpu").resolved()  # type: ignore[arg-type]


def _evaluate(setup: Setup, fields: dict[str, Any]) -> Any:
    assert set(modules(setup)) == {cell.name for cell in cell_model(setup).cells}
    return cell_model(setup).evaluate(fields)
