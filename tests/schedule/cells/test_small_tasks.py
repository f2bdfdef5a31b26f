"""Tasks of trees that are formed at once are those that are formed one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from cellar.core.cell_graphs import CellConfig, CellRequest
from cellar.core.tasks import BankSpec, CellCapacity, CellModelSpec, CellSpec, Port, TaskPlan, TaskResult
from cellar.schedule.cells.scheduler import CellScheduler
from cellar.schedule.cells.types import Batch, CellType
from tests.schedule.cells.graph import GraphMaker

ONE = ((), "int64")
WIRES = ({"left": "y"}, {"right": "y"})


def spec_of(inner: tuple[int, ...], first: int) -> CellModelSpec:
    leaf = CellSpec("leaf", (Port("x", *ONE, 0),), (Port("y", *ONE, 0),), (1, 16), first)
    ports = (Port("left", *ONE, 0), Port("right", *ONE, 0))
    return CellModelSpec(
        "trees", (leaf, CellSpec("inner", ports, (Port("y", *ONE, 0),), inner, 0)), (BankSpec("one", *ONE),)
    )


def tree(spec: CellModelSpec, id: str, rng: random.Random) -> CellRequest:
    leaves = rng.randint(1, 9)
    roots, children = list(range(leaves)), []
    while len(roots) > 1:
        pair = [roots.pop(rng.randrange(len(roots))) for _ in range(2)]
        children.append(pair)
        roots.append(leaves + len(children) - 1)
    graph = GraphMaker(spec)
    made = graph.tree(
        "leaf", "inner", leaves={"x": list(range(leaves))}, children=np.array(children).reshape(-1, 2), wires=WIRES
    )
    return graph.request(id, {"y": made.node(-1)["y"], "first": made.node(0)["y"]})


def done(plan: TaskPlan) -> TaskResult:
    values = tuple(None if emit is None else np.zeros(len(emit), np.int64) for emit in plan.emits)
    return TaskResult(plan.plan, 0, 0, plan.num_tasks, np.zeros(plan.num_nodes, np.uint8), values)


def plans(inner: tuple[int, ...], first: int, seed: int) -> list[Any]:
    """Everything that is planned for some trees that come one after the other, of which a few are dropped."""
    rng = random.Random(seed)
    spec = spec_of(inner, first)
    made = CellScheduler((spec,), CellCapacity(((10_000,),)), CellConfig(max_tasks=4))
    waiting = [tree(spec, f"r{k}", rng) for k in range(30)]
    seen: list[Any] = []
    while waiting or made.has_work():
        for _ in range(rng.randint(0, 3)):
            if waiting:
                made.add(waiting.pop())
        plan = made.plan(0)
        if plan is None:
            continue
        flight = made.flights[plan.plan]
        # Not the rows: which of the slots that requests left together is taken next makes no difference.
        ids, ending = (
            [made.running[number].id for number in made.subgraphs.owner[slots].tolist()]
            for slots in (flight.owners, flight.ending)
        )
        seen.append((plan.cell, plan.cu_batch.tolist(), ids, sorted(ending)))
        if rng.random() < 0.1:
            made.abort(f"r{rng.randrange(30)}")
        made.commit(done(plan))
        made.check_integrity()
    return seen


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("inner", [(1, 64), (1, 3, 6), (2, 12), (5, 9)])
def test_at_once_is_one_by_one(inner: tuple[int, ...], first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = [plans(inner, first, seed) for seed in range(6)]
    several = [len(cu) for one in at_once for cell, cu, *_ in one if cell == 1]
    assert max(several) > 2, "no call of several tasks, so that this shows nothing"

    def one_task(self: CellType, worker: int, most: int) -> Batch:
        return self._form_task(worker)

    monkeypatch.setattr(CellType, "_form_small_tasks", one_task)
    assert at_once == [plans(inner, first, seed) for seed in range(6)]
