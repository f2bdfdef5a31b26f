"""GraphExecutor's bookkeeping on the CPU: padding, counter, spare rows, parts of long plans, emitted values.

Events and graphs are stood in for: a graph that is replayed computes its work again into the tensors it was recorded
with, as a real one does. What only a GPU can show is in test_cells_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cellar.cells.lstm import LSTMCell
from cellar.core.errors import IntegrityError
from cellar.core.tasks import BankSpec, CellModelSpec, CellSpec, NodeFlag, Port, TaskPlan, Upload
from cellar.ops.rows import RowsOutput, StepsFunction
from cellar.runtime import cell_graphs
from cellar.runtime.cell_banks import Banks
from cellar.runtime.cell_executor import CellExecutor
from cellar.runtime.cell_functions import rows_function
from cellar.runtime.cell_graphs import GraphExecutor
from cellar.runtime.transfer import uploader

CPU = torch.device("cpu")
HIDDEN, INPUT, ROWS = 6, 3, 80


class Event:
    """Has always passed."""

    def __init__(self, **_: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Recorder:
    """In place of torch.cuda.graph and CUDAGraph: `step` is what the executor records."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, executor: GraphExecutor, model: int, cell: int, buffer: Tensor) -> Any:
        counter = executor._indices.counter

        def step() -> RowsOutput:
            block = buffer.index_select(0, counter)[0]
            counter.add_(1)
            return executor._step(model, cell, block)

        counter.zero_()
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


def model() -> tuple[CellModelSpec, list[nn.Module]]:
    state = ((HIDDEN,), "float32", 1)
    lstm = CellSpec(
        "lstm",
        (Port("x", (INPUT,), "float32", 0), Port("h", *state), Port("c", *state)),
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
    banks = (BankSpec("x", (INPUT,), "float32"), BankSpec("state", (HIDDEN,), "float32", 2))
    return CellModelSpec("m", (lstm, last), banks), [LSTMCell(INPUT, HIDDEN), Double()]


@contextmanager
def executors(capture: bool) -> Iterator[tuple[GraphExecutor, CellExecutor, Banks, Banks]]:
    spec, modules = model()
    both = []
    with torch.inference_mode():
        functions = [[rows_function(m, c, CPU) for m, c in zip(modules, spec.cells, strict=True)]]
        for _ in range(2):
            both.append(Banks([spec], [[ROWS, ROWS]], CPU, uploader(CPU)))
        graphs = GraphExecutor([spec], [modules], functions, both[:1], 0, CPU, uploader(CPU), capture=capture)
        # Step by step, as the graphs: several steps in one call leave no result between (test_cell_steps.py).
        single = [[f.step if isinstance(f, StepsFunction) else f for f in row] for row in functions]
        yield graphs, CellExecutor([spec], single, both[1:], 0), both[0], both[1]


def plans() -> list[TaskPlan]:
    """Two sequences in eleven tasks of one plan, more than go up at once, then the last cell of both."""
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
    chain = TaskPlan(
        0, 0, 0, 0, cu,
        np.array([x, h_in, c_in], np.int32),
        np.array([h_out, c_out], np.int32),
        (np.array(ends, np.int32), None),
        uploads=(Upload(0, rows, generator.standard_normal((39, INPUT)).astype(np.float32)),),
    )  # fmt: skip
    sources = np.array([[h_out[ends[1]], h_out[ends[0]], h_out[ends[1]]]], np.int32)
    none = np.empty((0, 3), np.int32)
    last = TaskPlan(1, 0, 0, 1, np.array([0, 1, 3], np.int32), sources, none, (np.array([0, 1, 2], np.int32),))
    return [chain, last]


@pytest.mark.parametrize("capture", [True, False], ids=["graphs", "eager"])
def test_as_the_plain_executor(recorder: Recorder, capture: bool) -> None:
    with executors(capture) as (graphs, plain, ours, theirs):
        for plan in plans():
            plain.prepare(plan)
            wanted = [answer.result(plan, t, 0.0) for t, answer in enumerate(plain.tasks(plan))]
            got = [launched.answer.result(plan, launched.task, 0.0) for launched in graphs.launch(plan)]
            assert [(r.first, r.stop) for r in got] == [(r.first, r.stop) for r in wanted]
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
        first, second = (launched.answer.result(plan, launched.task, 0.0) for launched in graphs.launch(plan))
    assert first.flags.tolist() == [NodeFlag.OK, NodeFlag.FAILED, NodeFlag.NAN, NodeFlag.OK]
    assert second.flags.tolist() == [NodeFlag.FAILED]
    assert list(first.errors) == [1]
    assert list(second.errors) == [4]
    assert "thirteen" in first.errors[1]
    assert first.values[0] is not None
    assert first.values[0].shape == (4, HIDDEN)
