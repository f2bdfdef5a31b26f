"""GraphExecutor's bookkeeping on the CPU: padding, counter, spare rows, parts of long plans, emitted values.

Events and graphs are stood in for: a graph that is replayed computes its work again into the tensors it was recorded
with, as a real one does. What only a GPU can show is in test_cells_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cellar.cells.lstm import LSTMCell, TokenLSTMCell
from cellar.core.errors import IntegrityError
from cellar.core.tasks import BankSpec, CellModelSpec, CellSpec, NodeFlag, Port, TaskPlan, Upload
from cellar.ops.recurrent.rows import StepsFunction
from cellar.runtime.cells import graphs as cell_graphs
from cellar.runtime.cells.banks import Banks
from cellar.runtime.cells.collector import NEVER, is_overwritten, node_flags, pack_indices
from cellar.runtime.cells.executor import CellExecutor
from cellar.runtime.cells.functions import rows_function
from cellar.runtime.cells.graphs import GraphExecutor
from cellar.runtime.cells.results import merged
from cellar.runtime.transfer import uploader

CPU = torch.device("cpu")
HIDDEN, INPUT, ROWS, WORDS = 6, 3, 80, 50


class Event:
    """Has always passed."""

    def __init__(self, **_: bool) -> None:
        pass

    def record(self, _: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Recorder:
    """In place of torch.cuda.graph and CUDAGraph: `step` is what the executor records."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, executor: GraphExecutor, model: int, cell: int, buffer: Tensor) -> Any:
        step = executor._step(model, cell, buffer)
        executor._indices.counter.zero_()
        output = step()
        recorder = self

        class Graph:
            def replay(self) -> None:
                recorder.replays += 1
                again = step()
                output.finite.copy_(again.finite)
                for static, value in zip(output.values, again.values, strict=True):
                    if static is not None and value is not None:
                        static.copy_(value)

        return cell_graphs._Captured(Graph(), output)  # type: ignore[arg-type]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    plain = torch.zeros

    def zeros(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return plain(*arguments, **options)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(cell_graphs, "_pinned", lambda shape, dtype: torch.full(shape, 7).to(dtype))
    monkeypatch.setattr(GraphExecutor, "_capture", _bound(found.capture))
    return found


def _bound(capture: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, model, cell, buffer: capture(self, model, cell, buffer)


def model(tokens: bool = False) -> tuple[CellModelSpec, list[nn.Module]]:
    """`tokens`: the first input is not features but a word."""
    state = ((HIDDEN,), "float32", 1)
    x = Port("x", (), "int64", 0) if tokens else Port("x", (INPUT,), "float32", 0)
    lstm = CellSpec(
        "lstm",
        (
            Port("x", () if tokens else (INPUT,), "int64" if tokens else "float32", 0),
            Port("h", *state),
            Port("c", *state),
        ),
        (Port("h", *state), Port("c", *state)),
        (1, 2, 4),
    )
    last = CellSpec("double", (Port("h", *state),), (Port("y", (HIDDEN,), "float32", None),), (2, 8))

    class Double(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            if (h == 13).any():
                raise ValueError("thirteen")
            return h + h

    torch.manual_seed(0)
    cell = TokenLSTMCell(WORDS, INPUT, HIDDEN) if tokens else LSTMCell(INPUT, HIDDEN)
    return CellModelSpec(
        "m", (lstm, last), (BankSpec("x", x.shape, x.dtype), BankSpec("state", (HIDDEN,), "float32", 2))
    ), [cell, Double()]


@contextmanager
def executors(
    capture: bool, answer_tasks: int = 8, tokens: bool = False
) -> Iterator[tuple[GraphExecutor, CellExecutor, Banks, Banks]]:
    spec, modules = model(tokens)
    both = []
    with torch.inference_mode():
        functions = [[rows_function(m, c, CPU) for m, c in zip(modules, spec.cells, strict=True)]]
        for _ in range(2):
            both.append(Banks([spec], [[ROWS, ROWS]], CPU, uploader(CPU)))
        graphs = GraphExecutor([spec], [modules], functions, both[0], CPU, capture=capture, answer_tasks=answer_tasks)
        # Step by step, as the graphs: several steps in one call leave no result between (test_cell_steps.py).
        single = [[f.step if isinstance(f, StepsFunction) else f for f in row] for row in functions]
        yield graphs, CellExecutor([spec], single, both[1]), both[0], both[1]


def plans(emitted: Sequence[int] = (), tokens: bool = False) -> list[TaskPlan]:
    """Two sequences in eleven tasks of one plan, more than go up at once, then the last cell of both.

    `emitted`: nodes that return h, besides the last of each sequence.
    """
    generator = np.random.default_rng(0)
    lengths = (11, 7)
    x, h_in, c_in, h_out, c_out, sizes = [], [], [], [], [], []
    for t in range(max(lengths)):
        running = [k for k, length in enumerate(lengths) if t < length]
        sizes.append(len(running))
        for k in running:
            x.append(1 + t + 20 * k)
            before, after = 2 + 4 * k + 2 * (t % 2), 2 + 4 * k + 2 * ((t + 1) % 2)
            h_in.append(before if t else 0)
            c_in.append(before + 1 if t else 0)
            h_out.append(after)
            c_out.append(after + 1)
    cu = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    ends = [sum(sizes[:7]) - 1, sum(sizes) - 1]
    rows = np.arange(1, 40, dtype=np.int32)
    given = generator.standard_normal((39, INPUT)).astype(np.float32)
    if tokens:
        given = generator.integers(WORDS, size=39)
    chain = TaskPlan(
        0, 0, 0, 0, cu,
        np.array([x, h_in, c_in], np.int32),
        np.array([h_out, c_out], np.int32),
        (np.array(sorted({*ends, *emitted}), np.int32), None),
        uploads=(Upload(0, rows, given),),
    )  # fmt: skip
    sources = np.array([[h_out[ends[1]], h_out[ends[0]], h_out[ends[1]]]], np.int32)
    none = np.empty((0, 3), np.int32)
    last = TaskPlan(1, 0, 0, 1, np.array([0, 1, 3], np.int32), sources, none, (np.array([0, 1, 2], np.int32),))
    return [chain, last]


@pytest.mark.parametrize("capture", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("answer_tasks", [1, 3, 8])
@pytest.mark.parametrize("emitted", [(), (0, 1, 2, 3, 9), range(18)], ids=["last", "some", "all"])
@pytest.mark.parametrize("tokens", [False, True], ids=["features", "tokens"])
def test_as_the_plain_executor(
    recorder: Recorder, capture: bool, answer_tasks: int, emitted: Sequence[int], tokens: bool
) -> None:
    with executors(capture, answer_tasks, tokens) as (graphs, plain, ours, theirs):
        for plan in plans(emitted, tokens):
            plain.prepare(plan)
            wanted = merged(answer.result(plan, t, 0.0) for t, answer in enumerate(plain.tasks(plan)))
            parts = [launched.answer.result(plan, 0.0) for launched in graphs.launch(plan)]
            begins = range(0, plan.num_tasks, answer_tasks)
            assert [(r.first, r.stop) for r in parts] == [(t, min(t + answer_tasks, plan.num_tasks)) for t in begins]
            got = merged(parts)
            assert [(r.first, r.stop) for r in got] == [(0, plan.num_tasks)]
            for one, other in zip(got, wanted, strict=True):
                assert one.flags.tolist() == other.flags.tolist()
                for a, b in zip(one.values, other.values, strict=True):
                    assert (a is None) == (b is None)
                    if a is not None and b is not None:
                        np.testing.assert_allclose(a, b, atol=1e-6)
        for a, b in zip(ours.tables[0], theirs.tables[0], strict=True):
            assert not a[0].any()
            torch.testing.assert_close(a[:ROWS], b[:ROWS])
    assert recorder.replays == (13 if capture else 0)


def test_tokens_go_up_with_the_indices_while_there_is_room(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[int] = []
    monkeypatch.setattr(Banks, "put", lambda _, model, bank, rows, values: put.append(len(rows)))
    with executors(True, tokens=True) as (graphs, _, ours, _):
        (chain, _), table = plans(tokens=True), ours.tables[0][0]
        list(graphs.launch(chain))
        upload = chain.uploads[0]
        assert table[upload.rows].tolist() == upload.values.tolist()
        assert not table[40:].any()
        many = np.arange(graphs._token_words // 2 + 1, dtype=np.int32) % 80
        more = (Upload(0, many, many.astype(np.int64)), Upload(0, many[:3], np.array([1, 2, 3])))
        list(graphs.launch(replace(chain, uploads=more)))
        assert table[:3].tolist() == [1, 2, 3]
    assert put == [len(many)]


def test_a_task_larger_than_any_size_is_a_defect(recorder: Recorder) -> None:
    with executors(True) as (graphs, _, _, _):
        sources = np.zeros((1, 9), np.int32)
        plan = TaskPlan(0, 0, 0, 1, np.array([0, 9], np.int32), sources, np.empty((0, 9), np.int32), (None,))
        with pytest.raises(IntegrityError, match="larger than 8"):
            list(graphs.launch(plan))


def test_what_no_graph_holds_is_run_again_node_by_node(recorder: Recorder) -> None:
    with executors(False) as (graphs, _, banks, _):
        banks.tables[0][1][5] = 13.0
        banks.tables[0][1][6] = torch.nan
        sources = np.array([[4, 5, 6, 0, 5]], np.int32)
        none = np.empty((0, 5), np.int32)
        everyone = np.arange(5, dtype=np.int32)
        plan = TaskPlan(0, 0, 0, 1, np.array([0, 4, 5], np.int32), sources, none, (everyone,))
        (result,) = (launched.answer.result(plan, 0.0) for launched in graphs.launch(plan))
    assert result.flags.tolist() == [NodeFlag.OK, NodeFlag.FAILED, NodeFlag.NAN, NodeFlag.OK, NodeFlag.FAILED]
    assert list(result.errors) == [1, 4]
    assert "thirteen" in result.errors[1]
    assert result.values[0] is not None
    assert result.values[0].shape == (5, HIDDEN)


# -- arithmetic ---------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rows_that_are_written_again_are_found(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    cu = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    rows = [np.concatenate([data.draw(st.permutations(range(1, 9)))[:n] for n in sizes]).astype(np.int32)]
    rows.append(rows[0] + 20)
    emitting = data.draw(st.lists(st.booleans(), min_size=int(cu[-1]), max_size=int(cu[-1])))
    nodes = np.flatnonzero(emitting).astype(np.int32)
    task = np.repeat(np.arange(len(sizes)), sizes)
    again = any(rows[0][other] == rows[0][n] for n in nodes for other in range(cu[-1]) if task[other] > task[n])
    writer = np.full(30, NEVER, np.int16)
    assert is_overwritten(rows[0][nodes], nodes.searchsorted(cu), rows, cu, writer) == again
    assert (writer == NEVER).all()


def test_flags_of_pads_do_not_count() -> None:
    finite = np.array([[True, False, False], [False, True, True]])
    assert node_flags(finite, [1, 3]).tolist() == [0, 1, 0, 0]
    assert node_flags(finite[:1], [2]).tolist() == [0, 1]


def test_indices_are_padded_and_places_follow() -> None:
    sources = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    plan = TaskPlan(0, 0, 0, 0, np.array([0, 2, 3], np.int32), sources, np.array([[7, 8, 9]], np.int32), (None,))
    words = np.full(40, -1, np.int64)
    places = [np.array([5], np.int32), np.array([6, 7], np.int32)]
    assert pack_indices(plan, 0, 2, 4, [2, 4], [99], places, words) == [24, 25, 27]
    first, second = words[:24].reshape(2, 3, 4)
    assert first[:, :2].tolist() == [[1, 2], [4, 5], [7, 8]]
    assert second.tolist() == [[3, 0, 0, 0], [6, 0, 0, 0], [9, 99, 99, 99]]
    assert words[24:28].tolist() == [5, 6, 7, -1]
    assert pack_indices(plan, 1, 2, 4, [1], [99], [], words) == [12]
    assert words[:12].reshape(3, 4)[:, 0].tolist() == [3, 6, 9]
