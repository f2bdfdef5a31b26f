"""Algorithm 1, line by line, and BatchMaker's figure 2.5, with chains small enough to follow by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cellar.core.cell_graphs import CellConfig, CellRequest
from cellar.core.errors import CapacityError, IntegrityError, RequestError
from cellar.core.tasks import BankSpec, CellCapacity, CellModelSpec, CellSpec, NodeFlag, Port, TaskPlan, TaskResult
from cellar.schedule.cells.scheduler import CellScheduler
from tests.schedule.cells.graph import GraphMaker

ONE = ((), "int64")
BANK = BankSpec("one", *ONE)


def cell(name: str, *sizes: int, priority: int = 0, inputs: Sequence[str] = ("x",)) -> CellSpec:
    ports = tuple(Port(i, *ONE, 0) for i in inputs)
    return CellSpec(name, ports, (Port("y", *ONE, 0),), sizes, priority)


def model(*cells: CellSpec, name: str = "model") -> CellModelSpec:
    return CellModelSpec(name, cells, (BANK,))


def scheduler(*models: CellModelSpec, workers: int = 1, rows: int = 1000, **config: Any) -> CellScheduler:
    return CellScheduler(models, CellCapacity(tuple((rows,) for _ in models), workers), CellConfig(**config))


def chain(spec: CellModelSpec, id: str, *lengths: int, model: int = 0) -> CellRequest:
    """A chain of cell 0, then one of cell 1 that begins with its last node, and so on; the last output is returned."""
    graph = GraphMaker(spec)
    last: Any = 1
    for name, length in zip([c.name for c in spec.cells], lengths, strict=False):
        last = graph.chain(name, length, carry={"x": "y"}, first={"x": last}).node(-1)["y"]
    return graph.request(id, {"y": last}, model)


def result(plan: TaskPlan, first: int, stop: int, value: int = 7, **more: Any) -> TaskResult:
    nodes = int(plan.cu_batch[stop] - plan.cu_batch[first])
    begin, end = int(plan.cu_batch[first]), int(plan.cu_batch[stop])
    counts = [0 if emit is None else int(((emit >= begin) & (emit < end)).sum()) for emit in plan.emits]
    values = tuple(np.full(count, value) for count in counts)
    return TaskResult(plan.plan, plan.worker, first, stop, more.pop("flags", np.zeros(nodes, np.uint8)), values, **more)


def sizes(plan: TaskPlan | None) -> list[int]:
    assert plan is not None
    return [int(n) for n in np.diff(plan.cu_batch)]


def cell_of(plan: TaskPlan | None) -> int:
    assert plan is not None
    return plan.cell


def timeline(lengths: dict[str, tuple[int, int]], batch: int, **config: Any) -> dict[str, tuple[int, int]]:
    """One worker, every task takes one unit of time. lengths: id -> (arrival, length) -> id -> (start, end)."""
    spec = model(cell("rnn", batch))
    made = scheduler(spec, **config)
    waiting = dict(lengths)
    started: dict[str, int] = {}
    ended: dict[str, int] = {}
    plan: TaskPlan | None = None
    task = 0
    for now in range(40):
        if plan is not None:
            for id, _ in made.commit(result(plan, task, task + 1)).finished:
                ended[id] = now
            task += 1
            if task == plan.num_tasks:
                plan = None
        for id in [id for id, (arrival, _) in waiting.items() if arrival <= now]:
            made.add(chain(spec, id, waiting.pop(id)[1]), now)
        if plan is None:
            plan, task = made.plan(0, now), 0
        if plan is not None:
            flight = made.flights[plan.plan]
            slots = flight.owners[flight.cu_batch[task] : flight.cu_batch[task + 1]]
            for number in made.subgraphs.owner[slots].tolist():
                started.setdefault(made.running[number].id, now)
    made.check_integrity()
    return {id: (started[id], ended[id]) for id in lengths}


# The lengths of req5 to req8 are read off the figure's drawing as far as the text fixes them: the second batch lasts
# until 12, so its longest request has length 7.
FIGURE = {
    "req1": (0, 2),
    "req2": (0, 3),
    "req3": (0, 3),
    "req4": (0, 5),
    "req5": (1, 7),
    "req6": (3, 3),
    "req7": (3, 1),
    "req8": (4, 4),
}


def test_figure_2_5_cellular_batching() -> None:
    seen = timeline(FIGURE, batch=4)
    assert [seen[f"req{k}"][1] for k in (1, 2, 3, 4)] == [2, 3, 3, 5]
    assert seen["req5"][0] == 2
    assert seen["req6"][0] == seen["req7"][0] == 3


def test_figure_2_5_graph_batching() -> None:
    seen = timeline(FIGURE, batch=4, graph_batch=4)
    assert [seen[f"req{k}"][1] for k in (1, 2, 3, 4)] == [5] * 4
    assert [seen[f"req{k}"] for k in (5, 6, 7, 8)] == [(5, 12)] * 4


def test_figure_2_5_needs_one_batch_size() -> None:
    """With smaller sizes allowed the first call holds five tasks, and nobody joins before 5."""
    spec = model(cell("rnn", 1, 2, 4))
    made = scheduler(spec)
    for k, length in enumerate((2, 3, 3, 5)):
        made.add(chain(spec, f"r{k}", length))
    assert sizes(made.plan(0)) == [4, 4, 3, 1, 1]


def test_later_tasks_are_not_under_the_smallest_size_but_the_first_may_be() -> None:
    spec = model(cell("rnn", 2, 4))
    made = scheduler(spec)
    for k, length in enumerate((2, 2, 3)):
        made.add(chain(spec, f"r{k}", length))
    plan = made.plan(0)
    assert sizes(plan) == [3, 3]
    assert plan is not None
    made.commit(result(plan, 0, 2))
    assert sizes(made.plan(0)) == [1]


def test_max_tasks_to_submit() -> None:
    spec = model(cell("rnn", 1))
    for most in (1, 5):
        made = scheduler(spec, max_tasks=most)
        made.add(chain(spec, "r", 9))
        assert sizes(made.plan(0)) == [1] * most


def test_the_runtime_says_how_many_tasks_suit_it() -> None:
    """But of what grows no more are on their way than BatchMaker has: steps behind a stop symbol are void."""
    spec = model(cell("rnn", 1))
    cases = (CellConfig(), 16, 5), (CellConfig(max_tasks=7), 7, 7), (CellConfig(run_ahead=4), 8, 5)
    for config, found, growing in cases:
        for request, tasks in ((chain(spec, "r", 40), found), (grown(spec, "r", 40), growing)):
            made = CellScheduler([spec], CellCapacity(((100,),), 1, 2, 16), config)
            made.add(request)
            assert sizes(made.plan(0)) == [1] * tasks
    assert CellScheduler([spec], CellCapacity(((100,),)), CellConfig()).max_tasks == 5


def test_a_full_batch_goes_before_priority() -> None:
    """Rule (a)."""
    spec = model(cell("first", 1, 2), cell("later", 1, 4, priority=9))
    made = scheduler(spec, max_tasks=1)
    made.add(chain(spec, "r0", 1, 1))
    plan = made.plan(0)
    assert plan is not None
    assert plan.cell == 0
    made.commit(result(plan, 0, 1))  # now `later` has one node ready
    for k in (1, 2):
        made.add(chain(spec, f"r{k}", 1, 1))
    assert cell_of(made.plan(0)) == 0


def test_rule_a_counts_from_the_largest_size_on() -> None:
    """The prose says "more than", the algorithm says "at least"; the algorithm is built."""
    spec = model(cell("first", 1, 2), cell("later", 1, 2, priority=9))
    made = scheduler(spec, max_tasks=1)
    for k in range(3):
        made.add(chain(spec, f"r{k}", 1, 1))
    plan = made.plan(0)
    assert plan is not None
    assert sizes(plan) == [2]
    made.commit(result(plan, 0, 1))  # two `later`, exactly its largest, and one `first`
    assert cell_of(made.plan(0)) == 1


def test_a_type_with_nothing_running_goes_first() -> None:
    """Rule (b): with tasks of `later` in flight, on any worker, `first` goes though its priority is lower."""
    spec = model(cell("first", 1, 8), cell("later", 1, 8, priority=9))
    made = scheduler(spec, workers=2, max_tasks=1)
    for k in range(2):  # one for each worker
        made.add(chain(spec, f"r{k}", 1, 3))
    for plan in [made.plan(0), made.plan(1)]:
        assert plan is not None
        assert sizes(plan) == [1]
        made.commit(result(plan, 0, 1))
    for k in range(2):
        made.add(chain(spec, f"s{k}", 1, 1))
    assert cell_of(made.plan(0)) == 1
    assert made.types[0][1].num_ready(1) == 1
    assert cell_of(made.plan(1)) == 0


def test_priority_decides_within_a_rule() -> None:
    """Rule (b) holds for both."""
    spec = model(cell("first", 1, 8), cell("later", 1, 8, priority=1))
    made = scheduler(spec, max_tasks=1)
    made.add(chain(spec, "r0", 1, 1))
    plan = made.plan(0)
    assert plan is not None
    made.commit(result(plan, 0, 1))
    made.add(chain(spec, "r1", 1, 1))
    assert cell_of(made.plan(0)) == 1


def test_nodes_that_are_at_home_elsewhere_do_not_count() -> None:
    """As printed, the algorithm would submit an empty batch here; the next type is tried instead."""
    spec = model(cell("first", 1, 4, priority=5), cell("other", 1, 4))
    made = scheduler(spec, workers=2, max_tasks=1)
    made.add(chain(spec, "r", 3))
    assert sizes(made.plan(0)) == [1]
    assert made.plan(1) is None
    graph = GraphMaker(spec)
    made.add(graph.request("r9", {"y": graph.call("other", x=3)["y"]}))
    assert cell_of(made.plan(1)) == 1


def test_a_request_stays_with_its_home() -> None:
    """Between its calls, too, and where one subgraph begins with what another has left."""
    spec = model(cell("rnn", 1, 4), cell("last", 1, 4))
    made = scheduler(spec, workers=2, max_tasks=2)
    made.add(chain(spec, "r", 3, 1))
    ended = []
    for tasks in (2, 1, 1):
        assert made.plan(1) is None
        plan = made.plan(0)
        assert sizes(plan) == [1] * tasks
        assert plan is not None
        for t in range(tasks):
            ended += made.commit(result(plan, t, t + 1)).finished
            made.check_integrity()
    assert [id for id, _ in ended] == ["r"]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_requests_that_come_together_are_divided_among_the_workers(workers: int) -> None:
    spec = model(cell("rnn", 1, 4))
    made = scheduler(spec, workers=workers)
    for k in range(workers * 3):
        made.add(chain(spec, f"r{k}", 2))
    assert [sizes(made.plan(w)) for w in range(workers)] == [[3, 3]] * workers


def test_a_request_goes_to_the_worker_with_the_fewest_ready_nodes() -> None:
    spec = model(cell("rnn", 1, 4))
    made = scheduler(spec, workers=3, max_tasks=1)
    for k in range(6):
        made.add(chain(spec, f"r{k}", 9))
    plans = [made.plan(w) for w in range(3)]
    assert [sizes(plan) for plan in plans] == [[2]] * 3
    made.abort("r2")  # the second worker's
    made.add(chain(spec, "s", 9))
    assert plans[1] is not None
    made.commit(result(plans[1], 0, 1))
    assert sizes(made.plan(1)) == [2]
    assert [made.roster.homes[n] for n, one in made.running.items() if one.id == "s"] == [1]


def test_who_waits_goes_to_the_worker_that_is_short_first() -> None:
    """A home is chosen as late as can be: a worker with a task and a half of ready nodes takes no request."""
    spec = model(cell("rnn", 1, 2))
    made = scheduler(spec, workers=2, max_tasks=1)
    for k in range(6):
        made.add(chain(spec, f"r{k}", 9))
    assert sizes(made.plan(0)) == [2]
    made.add(chain(spec, "late", 9))
    assert sizes(made.plan(1)) == [2]
    assert made.stats().waiting == 1
    for id in ("r4", "r5"):  # the second worker's
        made.abort(id)
    made.plan(0)
    assert [made.roster.homes[n] for n, one in made.running.items() if one.id == "late"] == [1]


# -- rows of several workers ------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_capacity_of_workers_adds_up(workers: int) -> None:
    spec = model(cell("rnn", 1, 8))
    made = scheduler(spec, workers=workers, rows=1 + 2 * 3)  # two chains of three frames on each
    for k in range(2 * workers + 1):
        made.add(chain(spec, f"r{k}", 5))
    plans = [made.plan(w) for w in range(workers)]
    assert [sizes(plan)[0] for plan in plans] == [2] * workers
    assert made.stats().waiting == 1
    assert made.stats().free_rows == ((0,),)
    assert all(plan is not None and plan.rows.max() < 1 + 2 * 3 for plan in plans)
    last = plans[-1]
    assert last is not None
    made.commit(result(last, 0, last.num_tasks))
    assert sizes(made.plan(workers - 1))[0] == 1
    made.check_integrity()


@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_too_large_for_one_worker_is_refused(workers: int) -> None:
    spec = model(cell("rnn", 8))
    made = scheduler(spec, workers=workers, rows=3)
    with pytest.raises(CapacityError, match="needs 3 rows of one and a worker has 2; send a smaller one"):
        made.add(chain(spec, "r", 5))
    assert not made.has_work()


def test_a_worker_without_rows_is_passed_over() -> None:
    """Though it has less to do; and a request for which no worker has rows starts where they are free first."""
    spec = model(cell("rnn", 1, 8))
    made = scheduler(spec, workers=2, rows=1 + 2 * 3)
    for id, length in (("a", 2), ("b", 2), ("long", 9)):
        made.add(chain(spec, id, length))
    first, second = made.plan(0), made.plan(1)
    assert sizes(first) == [2, 2]  # so that none of its nodes is ready, and none of its rows is free
    assert sizes(second) == [1] * 5
    made.add(chain(spec, "c", 9))
    made.add(chain(spec, "d", 9))
    assert made.plan(0) is None
    assert sizes(made.plan(1)) == [2] * 4 + [1]
    assert made.stats().waiting == 1
    assert first is not None
    made.commit(result(first, 0, 2))
    assert sizes(made.plan(0)) == [1] * 5
    made.check_integrity()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_small_requests_do_not_starve_a_large_one(workers: int) -> None:
    """It needs all rows of a worker, and small ones come all the time."""
    spec = model(cell("rnn", 1, 8))
    wide = GraphMaker(spec)
    large = wide.request("large", {"y": wide.map("rnn", 5)["y"]})
    made = scheduler(spec, workers=workers, rows=1 + large.graph.frames[0])
    ended: list[str] = []
    for turn in range(12):
        for k in range(workers):
            made.add(chain(spec, f"r{turn}-{k}", 3))
        if turn == 3:
            made.add(large)
        plans = [made.plan(w) for w in range(workers)]
        for plan in plans:
            if plan is not None:
                ended += [id for id, _ in made.commit(result(plan, 0, plan.num_tasks)).finished]
        made.check_integrity()
    assert "large" in ended


def test_every_worker_runs_merged_graphs_of_its_own() -> None:
    spec = model(cell("rnn", 1, 8))
    made = scheduler(spec, workers=2, graph_batch=2)
    for k in range(5):
        made.add(chain(spec, f"r{k}", 3))
    plans = [made.plan(0), made.plan(1)]
    assert [sizes(plan) for plan in plans] == [[2, 2, 2]] * 2
    assert made.stats().waiting == 1
    assert plans[1] is not None
    assert [id for id, _ in made.commit(result(plans[1], 0, 3)).finished] == ["r2", "r3"]
    assert made.plan(0) is None
    assert sizes(made.plan(1)) == [1, 1, 1]


def test_between_subgraphs_parents_must_have_committed() -> None:
    spec = model(cell("first", 1), cell("later", 1))
    made = scheduler(spec)
    made.add(chain(spec, "r", 2, 1))
    plan = made.plan(0)
    assert sizes(plan) == [1, 1]
    assert made.plan(0) is None
    assert plan is not None
    made.commit(result(plan, 0, 2))
    assert cell_of(made.plan(0)) == 1


def test_a_path_that_leaves_a_type_and_returns_makes_two_subgraphs() -> None:
    """decoder -> projection -> decoder: as one subgraph it would wait for itself for ever."""
    spec = model(cell("decoder", 1, 8), cell("projection", 1, 8))
    graph = GraphMaker(spec)
    one = graph.call("decoder", x=1)
    projected = graph.call("projection", x=one["y"])
    two = graph.call("decoder", x=projected["y"])
    request = graph.request("r", {"y": two["y"]})
    assert len(request.graph.subgraphs) == 3
    made = scheduler(spec)
    made.add(request)
    for expected in (0, 1, 0):
        plan = made.plan(0)
        assert cell_of(plan) == expected
        assert plan is not None
        output = made.commit(result(plan, 0, 1))
    assert [id for id, _ in output.finished] == ["r"]


def test_first_in_first_out_across_requests() -> None:
    spec = model(cell("rnn", 2))
    made = scheduler(spec, max_tasks=1)
    for k in range(4):
        made.add(chain(spec, f"r{k}", 2))
    order = []
    while (plan := made.plan(0)) is not None:
        order += [id for id, _ in made.commit(result(plan, 0, 1)).finished]
    assert order == ["r0", "r1", "r2", "r3"]


def test_models_share_the_worker_and_priority_counts_inside_only() -> None:
    """A model with endless work and the highest priority does not starve another; calls are shared by time."""
    greedy, modest = model(cell("g", 1, priority=99), name="greedy"), model(cell("m", 1), name="modest")
    made = scheduler(greedy, modest, max_tasks=5)
    for k in range(6):
        made.add(chain(greedy, f"g{k}", 100))
        made.add(chain(modest, f"m{k}", 100, model=1))
    served = [0, 0]
    for _ in range(100):
        plan = made.plan(0)
        assert plan is not None
        served[plan.model] += plan.num_tasks
        seconds = plan.num_tasks * (4e-3 if plan.model == 0 else 1e-3)
        made.commit(result(plan, 0, plan.num_tasks, seconds=seconds))
    assert 3 < served[1] / served[0] < 5  # equal time: four short tasks for each long one


def test_a_model_that_was_idle_does_not_take_over() -> None:
    busy, idle = model(cell("b", 1), name="busy"), model(cell("i", 1), name="idle")
    made = scheduler(busy, idle, max_tasks=1)
    made.add(chain(busy, "b", 300))
    for _ in range(100):
        plan = made.plan(0)
        assert plan is not None
        made.commit(result(plan, 0, 1))
    made.add(chain(idle, "i", 100, model=1))
    calls = []
    for _ in range(20):
        plan = made.plan(0)
        assert plan is not None
        calls.append(plan.model)
        made.commit(result(plan, 0, 1))
    assert 8 <= sum(calls) <= 12


# -- requests and memory ----------------------------------------------------------------------------


def test_requests_wait_for_rows_and_get_them_back() -> None:
    spec = model(cell("rnn", 1, 8))
    made = scheduler(spec, rows=1 + 3 * 2)  # the first input is a value: three frames a chain
    for k in range(4):
        made.add(chain(spec, f"r{k}", 5))
    plan = made.plan(0)
    assert sizes(plan)[0] == 2
    assert made.stats().waiting == 2
    assert plan is not None
    made.commit(result(plan, 0, plan.num_tasks))
    assert made.stats().running == 0
    assert sizes(made.plan(0))[0] == 2


def test_what_can_never_run_is_refused() -> None:
    spec = model(cell("rnn", 8))
    made = scheduler(spec, rows=3)
    with pytest.raises(CapacityError, match="needs 3 rows"):
        made.add(chain(spec, "r", 5))
    made = scheduler(spec)
    made.add(chain(spec, "r", 5))
    with pytest.raises(RequestError, match="its own id"):
        made.add(chain(spec, "r", 5))
    assert made.stats().waiting == 1


@pytest.mark.parametrize("moment", ["waiting", "running", "in flight", "ended", "unknown"])
def test_abort_at_any_moment(moment: str) -> None:
    spec = model(cell("rnn", 1, 8))
    made = scheduler(spec)
    made.add(chain(spec, "other", 6))
    made.add(chain(spec, "r", 6))
    plan = None
    if moment != "waiting":
        plan = made.plan(0)
        assert plan is not None
    if moment in ("running", "ended"):
        assert plan is not None
        made.commit(result(plan, 0, plan.num_tasks))
    if moment == "ended":
        last = made.plan(0)
        assert last is not None
        assert len(made.commit(result(last, 0, 1)).finished) == 2
    made.abort("nobody" if moment == "unknown" else "r")
    made.check_integrity()
    done: list[str] = []
    if plan is not None and moment in ("in flight", "unknown"):
        done += [id for id, _ in made.commit(result(plan, 0, plan.num_tasks)).finished]
    while (plan := made.plan(0)) is not None:
        done += [id for id, _ in made.commit(result(plan, 0, plan.num_tasks)).finished]
    assert done == {"ended": [], "unknown": ["other", "r"]}.get(moment, ["other"])
    made.check_integrity()
    assert made.stats().free_rows == ((999,),)
    assert not made.has_work()


def test_a_node_that_is_not_finite_ends_its_request_alone() -> None:
    spec = model(cell("rnn", 1, 8))
    made = scheduler(spec)
    for k in range(3):
        made.add(chain(spec, f"r{k}", 2))
    plan = made.plan(0)
    assert plan is not None
    assert sizes(plan) == [3, 3]
    output = made.commit(result(plan, 0, 1, flags=np.array([0, NodeFlag.NAN, 0], np.uint8)))
    assert [id for id, _ in output.failed] == ["r1"]
    assert "not finite" in output.failed[0][1]
    output = made.commit(result(plan, 1, 2, flags=np.array([0, NodeFlag.NAN, 0], np.uint8)))
    assert [id for id, _ in output.finished] == ["r0", "r2"]
    assert not output.failed
    made.check_integrity()
    assert made.stats().free_rows == ((999,),)


def test_a_node_that_failed_says_why() -> None:
    spec = model(cell("rnn", 1, 8))
    made = scheduler(spec)
    for k in range(2):
        made.add(chain(spec, f"r{k}", 1))
    plan = made.plan(0)
    assert plan is not None
    output = made.commit(result(plan, 0, 1, flags=np.array([NodeFlag.FAILED, 0], np.uint8), errors={0: "boom"}))
    assert output.failed == [("r0", "boom")]
    assert [id for id, _ in output.finished] == ["r1"]


def test_tasks_that_fail_as_a_whole_end_the_requests_in_them() -> None:
    spec = model(cell("rnn", 1, 2))
    made = scheduler(spec, max_tasks=1)
    for k in range(3):
        made.add(chain(spec, f"r{k}", 1))
    plan = made.plan(0)
    assert plan is not None
    output = made.commit(TaskResult(plan.plan, 0, 0, 1, np.zeros(0, np.uint8), (), error="the device is lost"))
    assert output.failed == [("r0", "the device is lost"), ("r1", "the device is lost")]
    plan = made.plan(0)
    assert plan is not None
    assert [id for id, _ in made.commit(result(plan, 0, 1)).finished] == ["r2"]
    made.check_integrity()


def test_results_out_of_order_are_a_defect() -> None:
    spec = model(cell("rnn", 1, 2))
    made = scheduler(spec)
    made.add(chain(spec, "r", 3))
    plan = made.plan(0)
    assert plan is not None
    with pytest.raises(IntegrityError):
        made.commit(result(plan, 1, 2))
    made.commit(result(plan, 0, 3))
    with pytest.raises(IntegrityError):
        made.commit(result(plan, 0, 3))


# -- growing chains ---------------------------------------------------------------------------------


def grown(spec: CellModelSpec, id: str, limit: int, *, stream: bool = False) -> CellRequest:
    graph = GraphMaker(spec)
    decoder = graph.grow("rnn", limit, carry={"x": "y"}, first={"x": 1}, stop=("y", 0))
    return graph.request(id, {"y": decoder["y"]}, stream=stream)


def test_a_chain_grows_to_its_stop_symbol_and_later_steps_are_void() -> None:
    spec = model(cell("rnn", 1, 2))
    made = scheduler(spec)
    made.add(grown(spec, "r", 100, stream=True))
    plan = made.plan(0)
    assert plan is not None
    assert sizes(plan) == [1] * 5
    steps = [int(step.value) for t, v in enumerate((4, 5)) for step in made.commit(result(plan, t, t + 1, v)).steps]
    output = made.commit(result(plan, 2, 3, 0))
    assert steps == [4, 5]
    assert not output.steps
    ((_, results),) = output.finished
    assert results.lengths == (2,)
    assert results.stopped == (True,)
    emitted = results.emitted[0][0]
    assert emitted is not None
    assert emitted[:2].tolist() == [4, 5]
    assert made.stats().free_rows[0][0] < 999, "rows return when the void steps have committed"
    assert made.plan(0) is None
    output = made.commit(result(plan, 3, 5, 8))
    assert not output.steps
    assert not output.finished
    assert made.stats().free_rows == ((999,),)
    made.check_integrity()


def test_a_chain_grows_to_its_limit_in_two_frames() -> None:
    spec = model(cell("rnn", 1))
    made = scheduler(spec, rows=1 + 1 + 2)
    made.add(grown(spec, "r", 50))
    rows = set()
    while (plan := made.plan(0)) is not None:
        rows |= set(plan.rows.ravel().tolist())
        output = made.commit(result(plan, 0, plan.num_tasks, 3))
    assert len(rows) == 2
    assert output.finished[0][1].lengths == (50,)
    assert output.finished[0][1].stopped == (False,)


def test_finish_cuts_a_growing_chain() -> None:
    spec = model(cell("rnn", 1))
    made = scheduler(spec, max_tasks=2)
    made.add(grown(spec, "r", 50))
    for _ in range(2):
        plan = made.plan(0)
        assert plan is not None
        made.commit(result(plan, 0, 2, 3))
    plan = made.plan(0)
    output = made.finish("r", 3)
    assert output is not None
    ((id, results),) = output.finished
    assert id == "r"
    assert results.lengths == (3,)
    assert plan is not None
    made.commit(result(plan, 0, 2))
    made.check_integrity()
    assert not made.has_work()


# -- admission --------------------------------------------------------------------------------------


def _plans(spec: CellModelSpec, requests: Sequence[CellRequest], arrivals: Sequence[int], admitted: int | None) -> Any:
    """Cells, sizes and members of all tasks. `admitted`: so many requests at a time, as calls need them; None: all."""
    made = scheduler(spec, rows=100_000)
    if admitted is None:
        made.intake.is_short = lambda m, worker: True  # type: ignore[method-assign]
    else:
        made.intake.admitted = admitted
    seen, most, now, todo = [], 0, 0, list(zip(requests, arrivals, strict=True))
    while todo or made.has_work():
        while todo and todo[0][1] <= now:
            made.add(todo.pop(0)[0])
        now += 1
        plan = made.plan(0)
        if plan is None:
            continue
        most = max(most, len(made.running))
        flight = made.flights[plan.plan]
        ids = [made.running[number].id for number in made.subgraphs.owner[flight.owners].tolist()]
        seen.append((plan.cell, plan.cu_batch.tolist(), ids))
        made.commit(result(plan, 0, plan.num_tasks))
        if now % 8 == 0:
            made.check_integrity()
    made.check_integrity()
    return seen, most


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 6), marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["chains", "two cells", "branching"])
def test_requests_that_no_call_could_reach_wait_and_nothing_else_changes(kind: str, seeds: range) -> None:
    fewer = 0
    for seed in seeds:
        rng = random.Random(seed)
        first = cell("a", *sorted(rng.sample(range(1, 8), 2)))
        spec = model(first, cell("b", 1, 4, priority=rng.randint(0, 1)))
        requests = []
        for k in range(40):
            if kind == "branching":
                graph = GraphMaker(spec)
                leaves = graph.map("a", rng.randint(1, 6))
                requests.append(graph.request(f"r{k}", {"y": graph.call("b", x=leaves.node(0)["y"])["y"]}))
            else:
                lengths = [rng.randint(1, 9) for _ in range(1 if kind == "chains" else 2)]
                requests.append(chain(spec, f"r{k}", *lengths))
        arrivals = sorted(rng.choice([0, 0, rng.randint(0, 30)]) for _ in requests)
        all_at_once, most = _plans(spec, requests, arrivals, None)
        for admitted in (1, 5):
            few_at_a_time, held = _plans(spec, requests, arrivals, admitted)
            assert few_at_a_time == all_at_once
            fewer += held < most
    assert fewer, "requests were never held back, so that this shows nothing"


def test_a_request_of_a_known_graph_can_be_dropped_while_it_waits() -> None:
    spec = model(cell("rnn", 2))
    made = scheduler(spec, rows=40)
    first = chain(spec, "first", 3)
    made.add(first)
    assert made.plan(0) is not None  # its graph is in the book now
    made.add(replace(first, id="second"))
    with pytest.raises(RequestError, match="'second' is already running"):
        made.add(replace(first, id="second"))
    made.abort("second")
    assert made.stats().waiting == 0
    assert [request.id for request in made.running.values()] == ["first"]


def test_what_could_never_run_leaves_nothing_behind() -> None:
    spec = model(cell("rnn", 2))
    made = scheduler(spec, rows=40)
    good = [chain(spec, f"r{k}", 3) for k in range(3)]
    wide = GraphMaker(spec)
    nodes = wide.map("rnn", 60)
    large = wide.request("large", {"y": nodes["y"]})
    made.add(good[0])
    with pytest.raises(CapacityError, match="serve fewer models"):
        made.add(large)
    made.add(good[1])
    with pytest.raises(RequestError, match="its own id"):
        made.add(good[0])
    made.add(good[2])
    done = []
    while (plan := made.plan(0)) is not None:
        done += [id for id, _ in made.commit(result(plan, 0, plan.num_tasks)).finished]
    assert sorted(done) == ["r0", "r1", "r2"]


def test_a_snapshot_changes_nothing_and_counts_the_rows_of_empty_request_slots() -> None:
    spec = model(cell("rnn", 1))
    made = scheduler(spec)
    free = made.stats().free_rows
    made.add(chain(spec, "r", 3))
    plan = made.plan(0)
    assert plan is not None
    assert made.stats().free_rows < free
    made.commit(result(plan, 0, plan.num_tasks))
    held = made.banks[0][0][0].num_free
    assert made.stats().free_rows == free
    assert made.banks[0][0][0].num_free == held < free[0][0]


@pytest.mark.parametrize(
    ("run_ahead", "wanted", "max_tasks", "found"), [(None, 1, 5, 1), (None, 2, 5, 2), (3, 2, 5, 3), (None, 2, 32, 1)]
)
def test_the_runtime_says_how_many_calls_it_wants_ahead(
    run_ahead: int | None, wanted: int, max_tasks: int, found: int
) -> None:
    config = CellConfig(max_tasks=max_tasks, run_ahead=run_ahead)
    spec = model(cell("rnn", 2))
    assert CellScheduler([spec], CellCapacity(((100,),), 1, wanted), config).run_ahead == found


@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_merged_graph_follows_without_a_gap_or_waits_for_the_last(ahead: bool) -> None:
    spec = model(cell("rnn", 1, 8))
    config = CellConfig(max_tasks=3, run_ahead=2, graph_batch=2, graph_ahead=ahead)
    made = CellScheduler([spec], CellCapacity(((100,) * len(spec.banks),)), config)
    for k in range(4):
        made.add(chain(spec, f"r{k}", 3))
    first, second = made.plan(0), made.plan(0)
    assert first is not None
    assert sizes(first) == [2, 2, 2]
    assert (second is not None) == ahead  # all of the first graph has been submitted, and runs
    ended = [id for id, _ in made.commit(result(first, 0, 3)).finished]
    assert ended == ["r0", "r1"]
    second = second or made.plan(0)
    assert second is not None
    assert sizes(second) == [2, 2, 2]
    assert [id for id, _ in made.commit(result(second, 0, 3)).finished] == ["r2", "r3"]
    made.check_integrity()
