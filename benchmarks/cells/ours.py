"""Cellular batching as it is served, without HTTP: scheduler and runtime, turned by the driving thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np

from benchmarks.cells.clock import Clock, WallClock, WorkClock
from benchmarks.cells.inline import InlineRuntime
from benchmarks.cells.models import cell_model, sentence_fields, tree_fields
from benchmarks.cells.setup import Setup
from benchmarks.cells.system import Answer
from benchmarks.cells.trees import vocabulary
from cellar.cells import CellModel
from cellar.core.cell_graphs import CellConfig, CellRequest
from cellar.core.errors import DeviceError
from cellar.core.tasks import TaskPlan, TaskResult
from cellar.runtime.cells.local import LocalCellRuntime
from cellar.runtime.cells.protocol import CellRuntime
from cellar.schedule.cells.scheduler import CellScheduler

MERGED = 16
"""How many nodes of one type a tree has at most at a time, about: leaves."""


class CellSystem:
    """A `System` over the scheduler and a runtime. Requests are unfolded when they arrive, unless `ahead`."""

    def __init__(
        self,
        name: str,
        model: CellModel,
        fields: Sequence[dict[str, object]],
        runtime: CellRuntime,
        config: CellConfig,
        clock: Clock | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        self.name = name
        self.scheduler = CellScheduler([model.spec], runtime.capacity, config)
        self._model = model
        self._fields = fields
        self._runtime = runtime
        self.clock: Clock = clock or WallClock()
        self._unfolded = [model.unfold(one) for one in fields] if ahead else None
        self._made: list[CellRequest] = []  # ahead: requests by number
        self._began: dict[str, tuple[int, float]] = {}  # the request slot, and when
        self._known = np.zeros(1 << 12, bool)  # by request slot

    def expect(self, count: int) -> None:
        """With `ahead`, make them."""
        if (ahead := self._unfolded) is not None:
            new = range(len(self._made), count)
            self._made += [ahead[request % len(ahead)].request(str(request), 0) for request in new]

    def arrive(self, requests: Sequence[int], now: float) -> None:
        """Unfold and queue them."""
        if self._unfolded is not None:
            made = [self._made[number] for number in requests]
        else:
            fields, unfold = self._fields, self._model.unfold
            made = [unfold(fields[number % len(fields)]).request(str(number), 0) for number in requests]
        for request in made:
            self.scheduler.add(request, now)

    def turn(self, timeout: float) -> Sequence[Answer]:
        """One turn of the engine's loop."""
        scheduler, runtime = self.scheduler, self._runtime
        for worker in runtime.workers:
            while worker.in_flight < scheduler.run_ahead and (plan := scheduler.plan(worker.id)) is not None:
                worker.submit(plan)
                self._note(plan)
        answers: list[Answer] = []
        for result in runtime.poll(timeout):
            answers += self._commit(result)
        return answers

    def drop(self) -> None:
        """Abort all, and wait for what is on the device."""
        for request in list(self.scheduler.running.values()):
            self.scheduler.abort(request.id)
        for queue in self.scheduler.waiting:
            while queue:
                for request in queue.front(len(queue)):
                    self.scheduler.abort(request.id)
        while any(worker.in_flight for worker in self._runtime.workers):
            for result in self._runtime.poll(1.0):
                self.scheduler.commit(result)
        self._began.clear()
        self._known[:] = False
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Stop the runtime."""
        self._runtime.close()

    def _note(self, plan: TaskPlan) -> None:
        """Remember when the first task of a request was handed over."""
        scheduler = self.scheduler
        if (slots := len(scheduler.roster.unfinished)) > len(self._known):
            self._known = np.concatenate([self._known, np.zeros(slots - len(self._known), bool)])
        numbers = scheduler.subgraphs.owner.take(scheduler.flights[plan.plan].owners)
        new = numbers[~self._known.take(numbers)]
        if len(new):
            self._known[new] = True
            now = self.clock()
            for number in dict.fromkeys(new.tolist()):
                self._began[scheduler.running[number].id] = number, now

    def _commit(self, result: TaskResult) -> list[Answer]:
        output = self.scheduler.commit(result)
        if output.failed:
            raise DeviceError(f"request {output.failed[0][0]} failed: {output.failed[0][1]}")
        if not output.finished:
            return []
        now = self.clock()
        ids = [id for id, _ in output.finished]
        numbers, begins = zip(*map(self._began.pop, ids), strict=True)
        self._known[[*numbers]] = False
        return [*zip(map(int, ids), begins, repeat(now))]


def open_ours(setup: Setup, cap: int | None = None) -> CellSystem:
    """Cellular batching. `cap`: most nodes of a task, in place of `max_batch`, or for trees of `tree_batch`: as merging
    has no limit on nodes, ours is higher there. (On a CPU with 256 instead of 64 the saturated system does a tenth
    more, docs/log/cells.md.)
    """
    most = cap or (setup.tree_batch if setup.model == "treelstm" else setup.max_batch)
    own = replace(setup, decoder_batch=cap) if cap is not None else setup
    return _open("cellar" if cap is None else f"cellar-{cap}", setup, replace(own, max_batch=most), _config(setup))


def open_merging(setup: Setup, cap: int | None = None, *, ahead: bool = False) -> CellSystem:
    """The baseline of merged graphs (DyNet, Fold): at most `cap` requests (default: `baseline_batch`) are collected,
    their graphs merged and run cell type by cell type as nodes become ready; nothing joins or leaves before all are
    done. `ahead`: the next graph is prepared while the last one runs (`CellConfig.graph_ahead`).

    Same kernels, same bookkeeping in arrays as ours: what a library with slow merging pays besides is not counted.
    The limit is one of requests, not of operations: the leaves of all trees of a batch are one task.
    """
    assert setup.max_batch is not None
    most = cap or setup.baseline_batch
    if setup.model == "treelstm":
        wide = replace(setup, max_batch=MERGED * most)
    else:
        wide = setup if cap is None else replace(setup, max_batch=cap, decoder_batch=cap)
    name = "merging" + ("" if cap is None else f"-{cap}") + "-ahead" * ahead
    return _open(name, setup, wide, replace(_config(setup), graph_batch=most, graph_ahead=ahead))


def _config(setup: Setup) -> CellConfig:
    assert setup.run_ahead is not None
    return CellConfig(max_tasks=setup.max_tasks, run_ahead=setup.run_ahead)


def _open(name: str, setup: Setup, cells: Setup, config: CellConfig) -> CellSystem:
    """`cells` says of what size the cells' batches are."""
    if setup.model == "treelstm":
        trees = setup.trees()
        fields, words = tree_fields(trees), len(vocabulary(trees))
    else:
        fields, words = sentence_fields(setup.sentences(), setup), setup.words
    model = cell_model(cells, words)
    clock = setup.new_clock()
    runtime: CellRuntime
    if isinstance(clock, WorkClock):
        runtime = InlineRuntime(model.spec, model.modules, clock)
    else:
        runtime = LocalCellRuntime(
            [model.spec],
            [model.modules],
            (setup.device,),
            num_threads=setup.threads,
            answer_tasks=setup.answer_tasks,
        )
    return CellSystem(name, model, fields, runtime, config, clock, ahead=setup.ahead)
