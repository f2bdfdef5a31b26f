"""LocalCellRuntime on the CPU with plans made by hand: rows, uploads, copies, emitted values, failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cellar.cells.lstm import LSTMCell
from cellar.core.errors import CapacityError, ConfigError, DeviceError
from cellar.core.tasks import (
    BankSpec,
    CellModelSpec,
    CellSpec,
    NodeFlag,
    Port,
    TaskPlan,
    TaskResult,
    Upload,
)
from cellar.runtime.cells.banks import bank_rows
from cellar.runtime.cells.local import LocalCellRuntime

HIDDEN, INPUT = 8, 4
X, STATE, NUMBER = 0, 1, 2


class Sum(nn.Module):
    """(a, b) -> a + b; what it does wrong depends on b."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if (b == 13).any():
            raise ValueError("thirteen")
        if (b == 14).any():
            return (a + b)[:, None]
        return a + b.masked_fill(b == 15, torch.nan)


def lstm_spec() -> CellSpec:
    state = ((HIDDEN,), "float32", STATE)
    return CellSpec(
        "lstm",
        (Port("x", (INPUT,), "float32", X), Port("h", *state), Port("c", *state)),
        (Port("h", *state), Port("c", *state)),
        (1, 2, 4, 8),
    )


def sum_spec(bank: int | None = NUMBER) -> CellSpec:
    ports = tuple(Port(name, (), "float32", NUMBER) for name in "ab")
    return CellSpec("sum", ports, (Port("s", (), "float32", bank),), (1, 4, 16))


BANKS = (
    BankSpec("x", (INPUT,), "float32"),
    BankSpec("state", (HIDDEN,), "float32", 2),
    BankSpec("number", (), "float32"),
)


@contextmanager
def opened(workers: int) -> Iterator[LocalCellRuntime]:
    torch.manual_seed(0)
    spec = CellModelSpec("m", (lstm_spec(), sum_spec(), sum_spec(None)), BANKS)
    modules = [LSTMCell(INPUT, HIDDEN), Sum(), Sum()]
    runtime = LocalCellRuntime([spec], [modules], ["cpu"] * workers, rows=[[40, 40, 40]], num_threads=1)
    runtime.test = SimpleNamespace(lstm=modules[0])  # type: ignore[attr-defined]
    try:
        yield runtime
    finally:
        runtime.close()


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def runtime(request: pytest.FixtureRequest) -> Iterator[LocalCellRuntime]:
    with opened(request.param) as found:
        yield found


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plan(cell: int, sizes: Sequence[int], sources: object, rows: object, emits: object, **more: object) -> TaskPlan:
    cu = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    return TaskPlan(
        plan=more.pop("number", 0),  # type: ignore[arg-type]
        worker=more.pop("worker", 0),  # type: ignore[arg-type]
        model=0,
        cell=cell,
        cu_batch=cu,
        sources=np.array(sources, np.int32),
        rows=np.array(rows, np.int32).reshape(-1, int(cu[-1])),
        emits=emits,  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


def run(runtime: LocalCellRuntime, *plans: TaskPlan) -> list[list[TaskResult]]:
    """Results per plan, with the ranges checked."""
    for p in plans:
        runtime.workers[p.worker].submit(p)
    found: dict[int, list[TaskResult]] = {p.plan: [] for p in plans}
    while any(worker.in_flight for worker in runtime.workers):
        for result in runtime.poll(10):
            assert result.first == (found[result.plan][-1].stop if found[result.plan] else 0)
            found[result.plan].append(result)
    for p in plans:
        assert found[p.plan][-1].stop == p.num_tasks
    return [found[p.plan] for p in plans]


def values(results: Sequence[TaskResult], output: int = 0) -> np.ndarray:
    parts = [r.values[output] for r in results]
    return np.concatenate([p for p in parts if p is not None])


def test_a_chain_and_its_neighbours(runtime: LocalCellRuntime) -> None:
    """Two sequences of lengths 3 and 2, in one plan of three tasks; states swap frames by turns."""
    lstm: LSTMCell = runtime.test.lstm  # type: ignore[attr-defined]
    x = torch.randn(5, INPUT)  # rows 1..3 are the first sequence's, 4..5 the second's
    task = plan(
        0,
        [2, 2, 1],
        [[1, 4, 2, 5, 3], [0, 0, 2, 6, 4], [0, 0, 3, 7, 5]],
        [[2, 6, 4, 8, 2], [3, 7, 5, 9, 3]],
        (ints(3, 4), ints(0, 4)),
        uploads=(Upload(X, ints(1, 2, 3, 4, 5), x.numpy()),),
    )
    (results,) = run(runtime, task)
    flags = np.concatenate([r.flags for r in results])
    assert flags.tolist() == [NodeFlag.OK] * 5
    wanted = []
    with torch.inference_mode():
        for rows in ([0, 1, 2], [3, 4]):
            h = c = torch.zeros(1, HIDDEN)
            for row in rows:
                h, c = lstm(x[row : row + 1], h, c)
                wanted.append((h, c))
    h_got, c_got = values(results, 0), values(results, 1)
    np.testing.assert_allclose(h_got[0], wanted[4][0][0], atol=1e-6)
    np.testing.assert_allclose(h_got[1], wanted[2][0][0], atol=1e-6)
    np.testing.assert_allclose(c_got[0], wanted[0][1][0], atol=1e-6)
    np.testing.assert_allclose(c_got[1], wanted[2][1][0], atol=1e-6)
    assert all(r.seconds >= 0 for r in results)


def numbers(count: int) -> Upload:
    return Upload(NUMBER, np.arange(1, count + 1, dtype=np.int32), np.arange(1, count + 1, dtype=np.float32))


@pytest.mark.parametrize("cell", [1, 2], ids=["kept", "only returned"])
def test_bad_nodes_fail_alone(runtime: LocalCellRuntime, cell: int) -> None:
    b = [12, 13, 14, 15, 16, 13, 2, 3]
    task = plan(
        cell,
        [6, 2],
        [[1] * 8, b],
        [range(30, 38)] if cell == 1 else [],
        (np.arange(8, dtype=np.int32),),
        uploads=(numbers(16),),
    )
    (results,) = run(runtime, task)
    ok, nan, failed = NodeFlag.OK, NodeFlag.NAN, NodeFlag.FAILED
    flags = np.concatenate([r.flags for r in results])
    assert flags.tolist() == [ok, failed, failed, nan, ok, failed, ok, ok]
    errors = {node: text for r in results for node, text in r.errors.items()}
    assert sorted(errors) == [1, 2, 5]
    assert "ValueError: thirteen" in errors[1]
    assert errors[5] == errors[1]
    assert "[1, 1]" in errors[2]
    assert "[1]" in errors[2]
    assert values(results)[[0, 4, 6, 7]].tolist() == [13, 17, 3, 4]


def test_a_task_of_one_node_that_fails(runtime: LocalCellRuntime) -> None:
    (results,) = run(runtime, plan(1, [1], [[1], [13]], [[20]], (ints(0),), uploads=(numbers(13),)))
    assert results[0].flags.tolist() == [NodeFlag.FAILED]
    assert "thirteen" in results[0].errors[0]


def test_workers_have_rows_of_their_own() -> None:
    """Rows of equal numbers on two workers are two rows: what one writes, the other does not see."""
    given = [Upload(NUMBER, ints(1), np.array([k + 1], np.float32)) for k in range(2)]
    plans = [plan(1, [1], [[1], [0]], [[20]], (ints(0),), uploads=(given[k],), number=k, worker=k) for k in range(2)]
    again = [plan(1, [1], [[20], [0]], [[21]], (ints(0),), number=2 + k, worker=k) for k in range(2)]
    with opened(2) as runtime:
        run(runtime, *plans)
        results = run(runtime, *again)
    assert [values(one).tolist() for one in results] == [[1], [2]]


def test_row_zero_stays_zero_and_plans_are_first_in_first_out(runtime: LocalCellRuntime) -> None:
    plans = [
        plan(1, [1, 1], [[k + 1, 20 + k], [0, 0]], [[20 + k, 21 + k]], (ints(1),), number=k, uploads=(numbers(3),))
        for k in range(3)
    ]
    plans = [replace(p, uploads=()) if p.plan else p for p in plans]
    results = run(runtime, *plans)
    assert [values(r).tolist() for r in results] == [[1], [2], [3]]


def test_a_device_that_fails_ends_the_plan_and_not_the_next(runtime: LocalCellRuntime) -> None:
    broken = plan(
        1,
        [1, 1],
        [[1, 99], [0, 0]],
        [[20, 21]],
        (ints(0, 1),),
        number=1,
        uploads=(Upload(NUMBER, ints(99), np.ones(1, np.float32)),),
    )
    good = plan(1, [1], [[1], [0]], [[20]], (ints(0),), number=2, uploads=(numbers(1),))
    first, second = run(runtime, broken, good)
    assert first[-1].error is not None
    assert "plan 1" in first[-1].error
    assert second[0].error is None
    assert values(second).tolist() == [1]


def test_a_closed_runtime_takes_no_plan(runtime: LocalCellRuntime) -> None:
    runtime.close()
    with pytest.raises(DeviceError, match="closed"):
        runtime.workers[0].submit(plan(1, [1], [[1], [0]], [[20]], (None,)))
    assert runtime.poll(None) == []


def test_wake_ends_a_poll(runtime: LocalCellRuntime) -> None:
    runtime.wake()
    assert runtime.poll(None) == []


def test_rows_are_divided() -> None:
    spec = CellModelSpec("m", (), BANKS)
    ((x, state, number),) = bank_rows([spec], 10_000)
    assert x * 16 + state * 32 + number * 4 <= 10_000
    assert state % 2 == 0
    assert min(x, state, number) > 50
    with pytest.raises(CapacityError, match="serve fewer models"):
        bank_rows([spec], 300)


def test_nothing_to_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one model"):
        LocalCellRuntime([], [], ["cpu"])
    with pytest.raises(ConfigError, match="answer_tasks is 0"):
        LocalCellRuntime([CellModelSpec("m", (), BANKS)], [[]], ["cpu"], answer_tasks=0)


def test_on_a_cpu_one_plan_is_on_its_way(runtime: LocalCellRuntime) -> None:
    assert runtime.capacity.run_ahead == 1
