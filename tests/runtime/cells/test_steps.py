"""Several steps of a chain in one call: when they may be, and that the answers are those of single steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cellar.cells import Cell, CellModel, Graph
from cellar.cells.lstm import TokenLSTMCell
from cellar.cells.seq2seq import DecoderCell, language_model
from cellar.core.tasks import CellSpec, Port, TaskPlan
from cellar.engine.cells import CellEngine
from cellar.ops.recurrent.lstm import pack_lstm
from cellar.runtime.cells import executor as cell_executor
from cellar.runtime.cells.executor import Emitted, step_runs

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN = 24


def plan(sources: Any, rows: Any, sizes: list[int], emits: list[int] | None = None) -> TaskPlan:
    """One carried input and output; `sources` and `rows` by node."""
    return TaskPlan(
        plan=0,
        worker=0,
        model=0,
        cell=0,
        cu_batch=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        sources=np.array([sources], np.int32),
        rows=np.array([rows], np.int32),
        emits=(None if emits is None else np.array(emits, np.int32),),
    )


CELL = CellSpec("c", (Port("h", (2,), "float32", 0),), (Port("h", (2,), "float32", 0),), (1, 2, 4))


def runs(*arguments: Any) -> dict[int, int]:
    made = plan(*arguments)
    return step_runs(made, CELL, {0: 0}, np.diff(made.cu_batch).tolist(), Emitted(made))


def test_which_tasks_may_be_one_call() -> None:
    # two chains that write two frames by turns, from the first step on (row 0 is zero)
    assert runs([0, 0, 1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 1, 2, 3, 4], [2, 2, 2, 2]) == {0: 4}
    # two steps alone: only where the second writes over what the first has read
    assert runs([3, 1], [1, 3], [1, 1]) == {0: 2}
    assert runs([0, 1], [1, 3], [1, 1]) == {}
    # every node has its own frame: somebody reads what lies in between
    assert runs([0, 1, 2, 3], [1, 2, 3, 4], [1, 1, 1, 1]) == {}
    # one leaves after the second step
    assert runs([3, 4, 1, 2, 3, 1], [1, 2, 3, 4, 1, 3], [2, 2, 1, 1]) == {0: 2, 2: 2}
    # an output in between goes to the host
    assert runs([0, 1, 2, 1, 2], [1, 2, 1, 2, 1], [1] * 5, [1]) == {2: 3}
    assert runs([0, 1, 2, 1, 2], [1, 2, 1, 2, 1], [1] * 5, [4]) == {0: 5}
    # the second task has the same nodes in another order
    assert runs([0, 0, 2, 1, 4, 3], [1, 2, 4, 3, 2, 1], [2, 2, 2]) == {1: 2}
    assert runs([0], [1], [1]) == {}


def test_outputs_of_every_step_may_be_emitted_in_between() -> None:
    made = plan([0, 1, 2, 1, 2], [1, 2, 1, 2, 1], [1] * 5, [0, 1, 2, 3, 4])
    sizes, emitted = np.diff(made.cu_batch).tolist(), Emitted(made)
    assert step_runs(made, CELL, {0: 0}, sizes, emitted) == {}
    assert step_runs(made, CELL, {0: 0}, sizes, emitted, frozenset({0})) == {0: 5}


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 40])
def test_several_steps_are_single_steps(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layer = pack_lstm(random(4 * 32, 16) / 6, random(4 * 32, 32) / 6, random(4 * 32) / 6)
    for steps in (2, 3, 5, 8):
        x, h, c = random(steps, rows, 16), random(rows, 32), random(rows, 32)
        together = layer.steps(x, h, c)
        for t in range(steps):
            h, c, finite = layer.step(x[t], h, c)
            assert finite.all()
        assert torch.equal(together[0], h)
        assert torch.equal(together[1], c)


def model(words: int = 40) -> CellModel:
    torch.manual_seed(3)
    cell = Cell(
        "lstm",
        TokenLSTMCell(words, HIDDEN, HIDDEN),
        ("h", "c"),
        batch_sizes=(1, 2, 4, 8),
        shapes={"h": (HIDDEN,), "c": (HIDDEN,)},
    )

    def unfold(graph: Graph, tokens: list[int], every: bool = False) -> object:
        steps = graph.chain(cell, len(tokens), each={"token": tokens}, carry={"h": "h", "c": "c"})
        return steps["h"] if every else {"h": steps.node(-1)["h"], "c": steps.node(-1)["c"]}

    return CellModel("lstm", [cell], unfold, {"tokens": [1, 2]})


def counted_runs(monkeypatch: pytest.MonkeyPatch, *, together: bool) -> list[int]:
    """Have `step_runs` noted: -> of every call of several steps, how many there were. None are if not `together`."""
    runs: list[int] = []

    def noted(*arguments: Any) -> dict[int, int]:
        found = step_runs(*arguments) if together else {}
        runs.extend(found.values())
        return found

    monkeypatch.setattr(cell_executor, "step_runs", noted)
    return runs


def answers(monkeypatch: pytest.MonkeyPatch, fields: list[dict[str, Any]], *, together: bool) -> tuple[list[Any], int]:
    """Responses, and how many tasks ran as part of one call of several."""
    runs = counted_runs(monkeypatch, together=together)
    with CellEngine.open([model()], ("cpu",), num_threads=1, memory_bytes=1 << 22) as engine:
        return engine.run("lstm", fields, raise_errors=False), sum(runs)


@pytest.mark.parametrize("every", [False, True, None])
def test_answers_are_the_same_together_and_apart(monkeypatch: pytest.MonkeyPatch, every: bool | None) -> None:
    rng = np.random.default_rng(5)
    fields: list[dict[str, Any]] = [
        {"tokens": rng.integers(0, 40, int(length)).tolist(), "every": bool(k % 2) if every is None else every}
        for k, length in enumerate(rng.integers(1, 40, 6))
    ]
    apart, none = answers(monkeypatch, fields, together=False)
    joined, merged = answers(monkeypatch, fields, together=True)
    assert none == 0
    if every is False and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        assert merged > 20
    if every:
        assert merged == 0  # all that lies in between is asked for
    for one, other in zip(apart, joined, strict=True):
        for a, b in zip(_leaves(one), _leaves(other), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5)


def test_a_bad_token_among_several_steps_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: list[dict[str, Any]] = [{"tokens": [1] * 20}, {"tokens": [1] * 12 + [400] + [1] * 7}, {"tokens": [2] * 20}]
    found, _ = answers(monkeypatch, fields, together=True)
    expected, _ = answers(monkeypatch, [fields[0], fields[2]], together=False)
    assert isinstance(found[1], Exception)
    for one, other in zip((found[0], found[2]), expected, strict=True):
        np.testing.assert_allclose(one["h"], other["h"], atol=1e-6, rtol=1e-5)
        np.testing.assert_allclose(one["c"], other["c"], atol=1e-6, rtol=1e-5)


def writers(monkeypatch: pytest.MonkeyPatch, fields: list[dict[str, Any]], *, together: bool) -> tuple[list[Any], int]:
    """As `answers`, of a decoder that begins to write at once, and whose stop symbol comes now and then."""
    runs = counted_runs(monkeypatch, together=together)
    torch.manual_seed(7)
    decoder = DecoderCell(12, HIDDEN, HIDDEN)
    with torch.no_grad():
        decoder.embedding.weight.mul_(3)
        decoder.output.weight.mul_(8)
        decoder.embedding.weight[11] = float("nan")
        decoder.output.bias[11] = -1e9  # never written
    written = language_model(decoder, 0, name="writer", max_tokens=40, batch_sizes=(1, 2, 4, 8))
    with CellEngine.open([written], ("cpu",), num_threads=1, memory_bytes=1 << 22) as engine:
        found = engine.run("writer", fields, raise_errors=False)
    for given, answer in zip(fields, found, strict=True):
        if 11 not in given["tokens"]:
            assert answer["tokens"].tolist() == written.evaluate(given)["tokens"].tolist()
    return found, sum(runs)


def test_a_decoder_writes_the_same_words_together_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    fields: list[dict[str, Any]] = [
        {"tokens": rng.integers(1, 11, int(rng.integers(1, 4))).tolist(), "max_tokens": int(limit)}
        for limit in rng.integers(1, 40, 12)
    ]
    apart, none = writers(monkeypatch, fields, together=False)
    joined, merged = writers(monkeypatch, fields, together=True)
    assert none == 0
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        assert merged > 20
    assert [one["tokens"].tolist() for one in apart] == [one["tokens"].tolist() for one in joined]
    ends = [len(answer["tokens"]) < given["max_tokens"] for answer, given in zip(joined, fields, strict=True)]
    assert any(ends)  # by the symbol
    assert not all(ends)  # by the limit


def test_a_decoder_that_breaks_among_several_steps_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: list[dict[str, Any]] = [{"tokens": [k], "max_tokens": 30} for k in (3, 11, 5)]
    found, _ = writers(monkeypatch, fields, together=True)
    assert isinstance(found[1], Exception)
    assert "not finite" in str(found[1])


def _leaves(response: Any) -> list[Any]:
    return list(response.values()) if isinstance(response, dict) else [response]
