"""Random requests over random graphs of cells, driven through scheduler and fake runtime; all promises are checked.

Expected values are computed while a graph is built, by the fake's formula, without any row, table or cursor.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cellar.core.cell_graphs import CellConfig, CellGraph, CellRequest
from cellar.core.tasks import BankSpec, CellCapacity, CellModelSpec, CellSpec, Port, TaskPlan, TaskResult
from cellar.runtime.cells.fake import FakeCellRuntime, fake_outputs
from cellar.schedule.cells.scheduler import CellScheduler
from tests.schedule.cells.graph import GraphMaker

PAIR, ONE = ((2,), "float32"), ((), "int64")
BANKS = (BankSpec("one", *ONE), BankSpec("pair", *PAIR, width=2))


def _cell(
    name: str, inputs: dict[str, Any], outputs: dict[str, Any], sizes: tuple[int, ...], priority: int
) -> CellSpec:
    def ports(kinds: dict[str, Any]) -> tuple[Port, ...]:
        banks = {ONE: 0, PAIR: 1}
        return tuple(Port(name, *kind, banks.get(kind)) for name, kind in kinds.items())

    return CellSpec(name, ports(inputs), ports(outputs), sizes, priority)


def random_spec(rng: random.Random, name: str = "model") -> CellModelSpec:
    """Cells a, b and c that can feed each other in every way; c's result can feed nothing."""
    sizes = [tuple(sorted(rng.sample(range(1, 7), rng.randint(1, 3)))) for _ in range(3)]
    return CellModelSpec(
        name,
        (
            _cell("a", {"x": ONE, "s": PAIR}, {"s": PAIR, "y": ONE, "d": PAIR}, sizes[0], rng.randint(0, 2)),
            _cell("b", {"l": PAIR, "r": PAIR}, {"s": PAIR, "t": PAIR}, sizes[1], rng.randint(0, 2)),
            _cell("c", {"s": PAIR}, {"out": ((3,), "float32")}, sizes[2], rng.randint(0, 2)),
        ),
        BANKS,
    )


@dataclass
class Made:
    """A request: its graph, and what it must answer."""

    graph: CellGraph
    layout: Any
    values: tuple[Any, ...]
    expected: dict[str, Any]
    grows: bool


class RequestMaker:
    """Writes random calls to a graph, and computes each node as it is made."""

    def __init__(self, rng: random.Random, spec: CellModelSpec, calls: int = 5) -> None:
        self.rng, self.spec = rng, spec
        self.graph = GraphMaker(spec)
        self.made: list[tuple[Any, dict[str, Any]]] = []  # node, its outputs
        self.returned: dict[str, Any] = {}
        self.expected: dict[str, Any] = {}
        self.grows = False
        for _ in range(rng.randint(1, calls)):
            rng.choice([self.call, self.call, self.map, self.chain, self.chain, self.tree, self.grow])()

    def finish(self) -> Made:
        """Return some outputs, compile."""
        for k, (node, outputs) in enumerate(self.made):
            if self.rng.random() < 0.3:
                name = self.rng.choice(list(outputs))
                self.returned[f"n{k}"], self.expected[f"n{k}"] = node[name], outputs[name]
        graph, layout, values = self.graph.compiled(self.returned)
        return Made(graph, layout, values, self.expected, self.grows)

    # -- calls --------------------------------------------------------------------------------------

    def run(self, cell: str, **inputs: Any) -> dict[str, Any]:
        spec = next(c for c in self.spec.cells if c.name == cell)
        values = [
            np.zeros((1, *p.shape)) if (v := inputs.get(p.name)) is None else np.asarray(v)[None] for p in spec.inputs
        ]
        return {p.name: v[0] for p, v in zip(spec.outputs, fake_outputs(spec, values), strict=True)}

    def source(self, kind: Any) -> tuple[Any, Any]:
        """Zeros, a value, or an output of an earlier node, and what it is worth."""
        choice = self.rng.random()
        found = [
            (node[name], outputs[name])
            for node, outputs in self.made[-12:]
            for name in outputs
            if (outputs[name].shape, outputs[name].dtype.name) == kind
        ]
        if choice < 0.2:
            return None, None
        if choice < 0.5 or not found:
            value = self.rng.randrange(50) if kind == ONE else [float(self.rng.randrange(9)), 1.0]
            return value, value
        return self.rng.choice(found)

    def call(self) -> None:
        cell = self.rng.choice(self.spec.cells)
        pairs = {p.name: self.source((p.shape, p.dtype)) for p in cell.inputs}
        node = self.graph.call(cell.name, **{k: v[0] for k, v in pairs.items()})
        self.made.append((node, self.run(cell.name, **{k: v[1] for k, v in pairs.items()})))

    def map(self) -> None:
        n = self.rng.randint(1, 5)
        pairs = [self.source(PAIR) for _ in range(n)]
        if any(not hasattr(s, "node") for s, _ in pairs):
            values = [[float(k), 2.0] for k in range(n)]
            nodes = self.graph.map("c", n, each={"s": values})
            results = [self.run("c", s=v) for v in values]
        else:
            nodes = self.graph.map("c", n, each={"s": [s for s, _ in pairs]})
            results = [self.run("c", s=v) for _, v in pairs]
        self.made += [(nodes.node(k), result) for k, result in enumerate(results)]

    def chain(self) -> None:
        n = self.rng.randint(1, 9)
        first, state = self.source(PAIR)
        if self.rng.random() < 0.5:
            xs = [self.rng.randrange(50) for _ in range(n)]
            nodes = self.graph.chain("a", n, each={"x": xs}, carry={"s": "s"}, first={"s": first})
            for k in range(n):
                outputs = self.run("a", x=xs[k], s=state)
                state = outputs["s"]
                self.made.append((nodes.node(k), outputs))
        else:
            fixed, other = self.source(PAIR)
            nodes = self.graph.chain("b", n, carry={"l": "t"}, first={"l": first}, fixed={"r": fixed})
            for k in range(n):
                outputs = self.run("b", l=state, r=other)
                state = outputs["t"]
                self.made.append((nodes.node(k), outputs))

    def tree(self) -> None:
        n = self.rng.randint(1, 6)
        roots = list(range(n))
        children = []
        while len(roots) > 1:
            pick = [roots.pop(self.rng.randrange(len(roots))) for _ in range(2)]
            if self.rng.random() < 0.2:
                roots.append(pick.pop())
                pick.append(-1)
            children.append(pick)
            roots.append(n + len(children) - 1)
        order = list(range(len(children)))
        self.rng.shuffle(order)  # any numbering is allowed
        number = {n + old: n + new for new, old in enumerate(order)}
        table = [[number.get(c, c) for c in children[old]] for old in order]
        leaf = self.rng.choice(["a", "b"])
        leaves = {"x": list(range(n))} if leaf == "a" else {"l": [[1.0, float(k)] for k in range(n)]}
        wires = ({"l": "s"}, {"r": "s"})
        nodes = self.graph.tree(
            leaf, "b", children=np.array(table, int).reshape(len(table), 2), wires=wires, leaves=leaves
        )
        done = {k: self.run(leaf, **{name: values[k] for name, values in leaves.items()}) for k in range(n)}

        def value(k: int) -> dict[str, Any]:
            if k not in done:
                left, right = (None if c < 0 else value(c)["s"] for c in table[k - n])
                done[k] = self.run("b", l=left, r=right)
            return done[k]

        self.made += [(nodes.node(k), value(k)) for k in range(n + len(table))]

    def grow(self) -> None:
        limit = self.rng.randint(1, 12)
        first, state = self.source(PAIR)
        start, token = self.source(ONE)
        steps: list[dict[str, Any]] = []
        for _ in range(limit):
            steps.append(self.run("a", x=token, s=state))
            token, state = steps[-1]["y"], steps[-1]["s"]
        stop = None
        if self.rng.random() < 0.7:
            symbol = int(self.rng.choice(steps)["y"])
            stop = ("y", symbol)
            end = next(k for k, step in enumerate(steps) if int(step["y"]) == symbol)
            steps = steps[:end]
        grown = self.graph.grow("a", limit, carry={"x": "y", "s": "s"}, first={"x": start, "s": first}, stop=stop)
        self.grows = True
        name = f"g{len(self.returned)}"
        for output in self.rng.sample(["y", "s"], self.rng.randint(0, 2)):
            self.returned[name + output] = grown[output]
            shape = () if output == "y" else (2,)
            self.expected[name + output] = np.array([step[output] for step in steps]).reshape(-1, *shape)


@dataclass
class Case:
    """What a drive is made of; all from one seed."""

    seed: int
    num_workers: int = 1
    num_models: int = 1
    num_requests: int = 12
    abort: float = 0.0
    bad: float = 0.0
    tight: bool = False
    run_ahead: int = 1
    max_tasks: int = 3
    graph_batch: int = 0
    graph_ahead: bool = False
    at_once: int = 1


@dataclass
class Seen:
    """What came out of a drive."""

    finished: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    steps: dict[str, list[Any]] = field(default_factory=dict)
    num_nodes: int = 0


def drive(case: Case) -> Seen:
    """Run a case to its end; raises AssertionError or IntegrityError when a promise is broken."""
    rng = random.Random(case.seed)
    specs = [random_spec(rng, f"m{m}") for m in range(case.num_models)]
    made = {
        f"r{k}": (k % case.num_models, RequestMaker(rng, specs[k % case.num_models]).finish())
        for k in range(case.num_requests)
    }
    most = [
        [max((one.graph.frames[b] for m, one in made.values() if m == k), default=0) for b in range(len(BANKS))]
        for k in range(case.num_models)
    ]
    factor = 1 if case.tight else 6
    rows = tuple(tuple((factor * n + 1) * bank.width for n, bank in zip(need, BANKS, strict=True)) for need in most)
    capacity = CellCapacity(rows, case.num_workers)
    config = CellConfig(
        max_tasks=case.max_tasks,
        run_ahead=case.run_ahead,
        graph_batch=case.graph_batch,
        graph_ahead=case.graph_ahead,
    )
    scheduler = CellScheduler(specs, capacity, config)
    for types in scheduler.types:
        for kind in types:  # so small that tables move all the time
            kind.table.rows = kind.table.rows[:, :8]
    scheduler.intake.admitted = rng.randint(1, 4)  # so few that calls must ask for more
    bad = {id for id in made if rng.random() < case.bad}

    def fail(plan: TaskPlan, n: int) -> str | None:
        flight = scheduler.flights[plan.plan]
        running = scheduler.running.get(int(scheduler.subgraphs.owner[flight.owners[n]]))
        return "it was bad" if running is not None and running.id in bad and rng.random() < 0.3 else None

    runtime = FakeCellRuntime(
        specs,
        capacity,
        order=lambda busy: rng.sample(busy, rng.randint(1, len(busy))),
        at_once=lambda: rng.randint(1, case.at_once),
        fail=fail if case.bad else None,
    )
    seen = Seen()
    todo = list(made)
    aborted: set[str] = set()
    streaming = {id for id in made if rng.random() < 0.5}

    def take(output: Any) -> None:
        for step in output.steps:
            assert step.id in streaming
            assert step.id not in seen.finished
            seen.steps.setdefault(step.id, []).append((step.part, step.output, step.ordinal, step.value))
        for id, results in output.finished:
            assert id not in seen.finished
            assert id not in seen.failed
            assert id not in aborted
            seen.finished[id] = made[id][1].layout.assemble(results)
        for id, reason in output.failed:
            assert id in bad
            assert id not in seen.finished
            assert reason == "it was bad"
            seen.failed[id] = reason

    idle, homes = 0, dict[str, int]()
    while todo or scheduler.has_work():
        for _ in range(rng.randint(0, 3)):
            if todo:
                id = todo.pop()
                m, one = made[id]
                scheduler.add(CellRequest(id, m, one.graph, one.values, id in streaming), 0.0)
        if rng.random() < case.abort:
            id = rng.choice(list(made))
            if id not in todo and id not in seen.finished and id not in seen.failed:
                aborted.add(id)
            if (output := scheduler.abort(id)) is not None:
                take(output)
        for worker in rng.sample(runtime.workers, len(runtime.workers)):
            while worker.in_flight < case.run_ahead and (plan := scheduler.plan(worker.id)) is not None:
                _check_homes(scheduler, homes)
                _check_rows(scheduler, capacity)
                worker.submit(plan)
        results: list[TaskResult] = runtime.poll(0.0)
        for result in results:
            take(scheduler.commit(result))
        scheduler.check_integrity()
        idle = 0 if results or todo else idle + 1
        assert idle < 3, "requests wait and nothing runs"
    assert seen.finished.keys() | seen.failed.keys() | aborted == made.keys()
    for id, response in seen.finished.items():
        one = made[id][1]
        assert response.keys() == one.expected.keys()
        for name, value in response.items():
            np.testing.assert_array_equal(value, one.expected[name], err_msg=f"{id} {name}")
        if id in streaming:
            _check_steps(one, seen.steps.get(id, []))
    seen.num_nodes = scheduler.stats().nodes
    if not case.abort and not case.bad and not any(one.grows for _, one in made.values()):
        assert seen.num_nodes == sum(one.graph.num_nodes for _, one in made.values()), "a node ran twice, or never"
    for m, free in enumerate(scheduler.stats().free_rows):
        every = tuple(case.num_workers * (n - bank.width) for n, bank in zip(rows[m], BANKS, strict=True))
        assert free == every, "rows leaked, or are counted twice"
    assert scheduler.subgraphs.num_used == 0
    return seen


def _check_homes(scheduler: CellScheduler, homes: dict[str, int]) -> None:
    """All tasks of a request are on one worker, from its first to its last."""
    for flight in scheduler.flights.values():
        for number in set(scheduler.subgraphs.owner[flight.flying()].tolist()):
            request = scheduler.running.get(number)
            if request is not None:
                assert homes.setdefault(request.id, flight.worker) == flight.worker, "a request runs on two workers"


def _check_rows(scheduler: CellScheduler, capacity: CellCapacity) -> None:
    """What the requests of each worker need is no more than it has; counted from their graphs, not from the books."""
    needs = [[[bank.width for bank in BANKS] for _ in range(capacity.num_workers)] for _ in capacity.rows]
    for number, request in [*scheduler.running.items(), *scheduler.draining.items()]:
        need = needs[request.model][scheduler.roster.homes[number]]
        for b, bank in enumerate(BANKS):
            need[b] += request.graph.frames[b] * bank.width
    for workers, most in zip(needs, capacity.rows, strict=True):
        for need in workers:
            assert all(n <= rows for n, rows in zip(need, most, strict=True)), "a worker has no such rows"


def _check_steps(one: Made, steps: list[Any]) -> None:
    """What was streamed is what the response holds."""
    for key, name in one.layout.grown.items():
        streamed = [value for part, output, ordinal, value in steps if (part, output, ordinal) == key]
        np.testing.assert_array_equal(np.array(streamed).reshape(one.expected[name].shape), one.expected[name])
