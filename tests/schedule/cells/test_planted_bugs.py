"""Each planted bug must be found by `cell_driver.drive`: a check that cannot fail checks nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cellar.core.errors import CellarError
from cellar.schedule.cells import flight as cell_flight
from cellar.schedule.cells.admission import Admission
from cellar.schedule.cells.commit import Commit
from cellar.schedule.cells.queue import CellQueue
from cellar.schedule.cells.requests import RequestSlots, Roster
from cellar.schedule.cells.rows import BankRows
from cellar.schedule.cells.running import Running
from cellar.schedule.cells.scheduler import CellScheduler
from cellar.schedule.cells.store import GraphTable
from cellar.schedule.cells.subgraphs import State
from cellar.schedule.cells.types import CellType
from cellar.schedule.cells.waiting import Waiting
from tests.schedule.cells.driver import Case, drive

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, tuple[Plant, dict[str, Any]]] = {}


def bug(**where: Any) -> Callable[[Plant], Plant]:
    """`where` says in what settings the bug shows, so that the hunt is short."""

    def register(plant: Plant) -> Plant:
        BUGS[plant.__name__] = plant, where
        return plant

    return register


# -- order ------------------------------------------------------------------------------------------


@bug()
def subgraphs_do_not_wait_for_others(patch: pytest.MonkeyPatch) -> None:
    queue = Admission._queue

    def hasty(self: Admission, slots: np.ndarray, states: np.ndarray, worker: int) -> None:
        states[State.WAITS] = 0
        queue(self, slots, states, worker)

    patch.setattr(Admission, "_queue", hasty)


@bug()
def all_that_wait_for_one_node_but_the_first_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    fan = CellScheduler._fan
    patch.setattr(CellScheduler, "_fan", lambda self, slot, f: fan(self, slot, f)[:1])


@bug()
def a_node_of_a_chain_is_submitted_twice(patch: pytest.MonkeyPatch) -> None:
    chains = CellType._batch_chains

    def slow(self: CellType, *args: Any) -> Any:
        batch = chains(self, *args)
        first = batch.owners[: batch.cu[1]]
        slots = first[self._subgraphs.loop[first] == 0][:1]
        self._subgraphs.at[slots] -= self._subgraphs.left[slots] > 0
        return batch

    patch.setattr(CellType, "_batch_chains", slow)


@bug()
def a_node_of_a_tree_is_submitted_twice(patch: pytest.MonkeyPatch) -> None:
    form = CellType._form_task

    def slow(self: CellType, worker: int) -> Any:
        made = form(self, worker)
        slots = made.owners[:1]
        self._subgraphs.at[slots] -= (self._subgraphs.left[slots] > 0) & (self._subgraphs.loop[slots] == 0)
        return made

    patch.setattr(CellType, "_form_task", slow)


@bug()
def more_nodes_are_ready_than_are(patch: pytest.MonkeyPatch) -> None:
    form = CellType._form_task

    def greedy(self: CellType, worker: int) -> Any:
        self._subgraphs.ready[:] = np.minimum(self._subgraphs.left, self._subgraphs.ready * 2)
        return form(self, worker)

    patch.setattr(CellType, "_form_task", greedy)


@bug(abort=0.5, tight=True, num_requests=20)
def who_left_the_queue_is_started_all_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Waiting, "leave", lambda self, request: None)


@bug(abort=0.5, tight=True, num_requests=20)
def who_stands_in_front_of_one_that_left_is_started_twice(patch: pytest.MonkeyPatch) -> None:
    def short(self: Waiting, count: int) -> None:
        for _ in range(count):
            self._left.discard(self._queue.popleft())

    patch.setattr(Waiting, "pop", short)


@bug()
def chains_join_a_task_before_there_is_room(patch: pytest.MonkeyPatch) -> None:
    starts = CellType._starts

    def early(self: CellType, left: np.ndarray, most: int) -> Any:
        start, used, most, full = starts(self, left, most)
        start[:used] = np.where(start[:used] > 0, start[:used] - 1, 0)
        return start, used, most, full

    patch.setattr(CellType, "_starts", early)


@bug()
def batches_may_be_one_too_large(patch: pytest.MonkeyPatch) -> None:
    init = CellType.__init__

    def large(self: CellType, *args: Any) -> None:
        init(self, *args)
        self.largest += 1

    patch.setattr(CellType, "__init__", large)


@bug()
def later_tasks_may_be_small(patch: pytest.MonkeyPatch) -> None:
    init = CellType.__init__

    def small(self: CellType, *args: Any) -> None:
        init(self, *args)
        self.smallest = 1

    patch.setattr(CellType, "__init__", small)


@bug()
def a_partly_taken_subgraph_leaves_the_queue(patch: pytest.MonkeyPatch) -> None:
    keep = CellQueue.keep

    def forgetful(self: CellQueue, count: int, mask: np.ndarray) -> None:
        mask = mask.copy()
        mask[-1:] = False
        keep(self, count, mask)

    patch.setattr(CellQueue, "keep", forgetful)


# -- rows -------------------------------------------------------------------------------------------


@bug()
def rows_return_while_void_steps_are_in_flight(patch: pytest.MonkeyPatch) -> None:
    leave = Running._leave

    def early(self: Running, numbers: list[int]) -> list[str]:
        held = self._roster.num_dead[numbers]
        self._roster.num_dead[numbers] = 0
        ids = leave(self, numbers)
        self._roster.num_dead[numbers] = held
        return ids

    patch.setattr(Running, "_leave", early)


@bug()
def request_slots_leak(patch: pytest.MonkeyPatch) -> None:
    give = RequestSlots.give
    patch.setattr(RequestSlots, "give", lambda self, numbers: give(self, [n for n in numbers if n % 5 != 4]))


@bug()
def an_empty_request_slot_is_taken_by_two(patch: pytest.MonkeyPatch) -> None:
    give = RequestSlots.give

    def twice(self: RequestSlots, numbers: list[int]) -> None:
        give(self, numbers)
        give(self, [number for number in numbers if number % 3 == 0])

    patch.setattr(RequestSlots, "give", twice)


@bug(tight=True)
def a_freed_request_slot_leaves_its_places(patch: pytest.MonkeyPatch) -> None:
    free_empty = RequestSlots.free_empty

    def partly(self: RequestSlots) -> None:
        for kind in self._kinds.values():
            for cell, count, _ in kind.results:
                if count and kind.empty:
                    self._types[cell].outbox.places.num_used += 1
        free_empty(self)

    patch.setattr(RequestSlots, "free_empty", partly)


@bug()
def two_requests_share_a_frame(patch: pytest.MonkeyPatch) -> None:
    take = BankRows.take

    def shared(self: BankRows, count: int) -> np.ndarray:
        frames = take(self, count)
        if count > 1 and count % 3 == 0:
            frames[0] = frames[1]
        return frames

    patch.setattr(BankRows, "take", shared)


@bug()
def a_request_reads_the_values_of_the_one_before(patch: pytest.MonkeyPatch) -> None:
    bring, calls = RequestSlots.write_values, []

    def stale(self: RequestSlots, *args: Any) -> None:
        calls.append(args)
        if len(calls) < 7:
            bring(self, *args)

    patch.setattr(RequestSlots, "write_values", stale)


@bug(num_workers=2)
def rows_come_from_the_bank_of_another_worker(patch: pytest.MonkeyPatch) -> None:
    init = CellScheduler.__init__

    def crossed(self: CellScheduler, *args: Any) -> None:
        init(self, *args)
        for banks, request_slots in zip(self.banks, self._request_slots, strict=True):
            request_slots[0].rows._banks = banks[1]

    patch.setattr(CellScheduler, "__init__", crossed)


@bug(num_workers=2)
def rows_are_named_that_the_request_has_on_another_worker(patch: pytest.MonkeyPatch) -> None:
    batch = CellScheduler._batch

    def crossed(self: CellScheduler, ct: CellType, worker: int) -> Any:
        request_slots = self._request_slots[ct.model]
        request_slots.reverse()
        try:
            return batch(self, ct, worker)
        finally:
            request_slots.reverse()

    patch.setattr(CellScheduler, "_batch", crossed)


@bug(num_workers=2)
def the_capacity_of_all_workers_is_counted_on_each(patch: pytest.MonkeyPatch) -> None:
    init = BankRows.__init__
    patch.setattr(BankRows, "__init__", lambda self, spec, num_rows: init(self, spec, 2 * num_rows))


@bug(num_workers=3)
def rows_return_to_another_worker(patch: pytest.MonkeyPatch) -> None:
    init = CellScheduler.__init__

    def crossed(self: CellScheduler, *args: Any) -> None:
        init(self, *args)
        for banks in self.banks:
            patch.setattr(banks[0][0], "give", banks[1][0].give)

    patch.setattr(CellScheduler, "__init__", crossed)


@bug(num_workers=2)
def a_home_changes_in_flight(patch: pytest.MonkeyPatch) -> None:
    commit = Commit.tasks

    def moved(self: Commit, flight: Any, first: int, stop: int, *more: Any) -> None:
        commit(self, flight, first, stop, *more)
        slots = np.unique(flight.flying())
        going = slots[(self._subgraphs.left[slots] > 0) & (self._subgraphs.dead[slots] == 0)]
        self._subgraphs.home[going] = (flight.worker + 1) % len(flight.kind.queues)

    patch.setattr(Commit, "tasks", moved)


@bug(num_workers=2)
def what_was_waited_for_goes_on_on_the_next_worker(patch: pytest.MonkeyPatch) -> None:
    release = CellType.release

    def elsewhere(self: CellType, slots: np.ndarray, worker: int) -> None:
        release(self, slots, (worker + 1) % len(self.queues))

    patch.setattr(CellType, "release", elsewhere)


@bug(num_workers=2)
def nodes_of_other_workers_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CellType, "num_ready", lambda self, worker: sum(self._ready))


@bug()
def cursors_do_not_follow_when_tables_move(patch: pytest.MonkeyPatch) -> None:
    compact = GraphTable._compact
    patch.setattr(GraphTable, "_compact", lambda self, more, at, end: compact(self, more, at.copy(), end.copy()))


@bug()
def a_table_forgets_graphs_that_run(patch: pytest.MonkeyPatch) -> None:
    parts = CellScheduler._parts_of
    patch.setattr(CellScheduler, "_parts_of", lambda self, m, c: set(sorted(parts(self, m, c), key=id)[1:]))


# -- results ----------------------------------------------------------------------------------------


@bug()
def steps_past_the_stop_symbol_count(patch: pytest.MonkeyPatch) -> None:
    end = Running.end_chain

    def late(self: Running, number: int, slot: int, length: int, *, stopped: bool) -> None:
        end(self, number, slot, length + 1, stopped=stopped)

    patch.setattr(Running, "end_chain", late)


@bug()
def void_steps_are_streamed(patch: pytest.MonkeyPatch) -> None:
    keep = Commit._keep_values

    def blind(self: Commit, *args: Any, some_ended: bool) -> None:
        dead = self._subgraphs.dead.copy()
        self._subgraphs.dead[:] = 0
        keep(self, *args, some_ended=False)
        self._subgraphs.dead[:] |= dead

    patch.setattr(Commit, "_keep_values", blind)


@bug()
def a_slot_remembers_how_far_it_grew(patch: pytest.MonkeyPatch) -> None:
    queue = Admission._queue

    def stale(self: Admission, slots: np.ndarray, states: np.ndarray, worker: int) -> None:
        self._subgraphs.grown[slots] = 1
        queue(self, slots, states, worker)

    patch.setattr(Admission, "_queue", stale)


@bug()
def values_go_to_the_neighbours_place(patch: pytest.MonkeyPatch) -> None:
    assemble = cell_flight.assemble

    def shifted(*args: Any) -> Any:
        plan, flight = assemble(*args)
        for emit in flight.emits:
            if emit is not None and len(emit.places) > 2:
                emit.places[:2] = emit.places[:2][::-1].copy()
        return plan, flight

    patch.setattr("cellar.schedule.cells.scheduler.assemble", shifted)


@bug(at_once=5, max_tasks=5, num_workers=1)
def a_stop_symbol_amid_a_commit_is_seen_at_its_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Commit, "is_eventful", lambda self, flight, result: False)


@bug(at_once=5)
def a_commit_of_several_tasks_counts_each_subgraph_once(patch: pytest.MonkeyPatch) -> None:
    commit = Commit.tasks

    def once(self: Commit, flight: Any, first: int, stop: int, *more: Any) -> None:
        slots, counts = np.unique(flight.owners[flight.cu_batch[first] : flight.cu_batch[stop]], return_counts=True)
        self._subgraphs.uncommitted[slots] += (counts > 2) * (counts - 1)
        commit(self, flight, first, stop, *more)

    patch.setattr(Commit, "tasks", once)


@bug(at_once=5)
def values_of_several_tasks_are_those_of_the_first(patch: pytest.MonkeyPatch) -> None:
    keep = Commit._keep_values

    def short(self: Commit, flight: Any, first: int, stop: int, *more: Any, some_ended: bool) -> None:
        keep(self, flight, first, first + 1, *more, some_ended=some_ended)

    patch.setattr(Commit, "_keep_values", short)


@bug(at_once=5, abort=0.3)
def values_of_requests_that_ended_between_are_kept(patch: pytest.MonkeyPatch) -> None:
    keep = Commit._keep_values

    def blind(self: Commit, *args: Any, some_ended: bool) -> None:
        keep(self, *args, some_ended=False)

    patch.setattr(Commit, "_keep_values", blind)


@bug()
def requests_that_end_together_swap_their_results(patch: pytest.MonkeyPatch) -> None:
    results = RequestSlots.results
    patch.setattr(RequestSlots, "results", lambda self, numbers: results(self, numbers)[::-1])


@bug(num_requests=20)
def request_slots_that_are_added_forget_what_the_others_own(patch: pytest.MonkeyPatch) -> None:
    init = Roster.__init__
    patch.setattr(Roster, "__init__", lambda self, num_banks: init(self, num_banks, 4))
    take = Roster.take

    def careless(self: Roster, *args: Any) -> int:
        room = len(self.unfinished)
        number = take(self, *args)
        if len(self.unfinished) > room:
            self.owned[:, : room - 1] = 0
        return number

    patch.setattr(Roster, "take", careless)


@bug(bad=0.3)
def a_failed_request_takes_its_neighbour_along(patch: pytest.MonkeyPatch) -> None:
    fail = Running.fail

    def wide(self: Running, number: int, reason: str, output: Any) -> None:
        fail(self, number, reason, output)
        for other in list(self.requests)[:1]:
            fail(self, other, reason, output)

    patch.setattr(Running, "fail", wide)


@bug(abort=0.3)
def aborted_requests_still_answer(patch: pytest.MonkeyPatch) -> None:
    abort = CellScheduler.abort
    patch.setattr(
        CellScheduler,
        "abort",
        lambda self, id: abort(self, id) if not isinstance(self._running.numbers.get(id), int) else None,
    )


@bug(num_models=2, num_requests=20)
def only_the_first_model_is_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "cellar.schedule.cells.types.CellType.num_ready", lambda self, worker: 0 if self.model else self._ready[worker]
    )


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, where = BUGS[name]
    plant(monkeypatch)
    for seed in range(60):
        rng = random.Random(seed)
        case = Case(
            seed=seed,
            num_workers=rng.randint(1, 2),
            num_requests=10,
            tight=rng.random() < 0.5,
            run_ahead=rng.randint(1, 2),
            max_tasks=rng.randint(2, 5),
            at_once=rng.choice([1, 3]),
        )
        try:
            drive(replace(case, **where))
        except (CellarError, AssertionError, KeyError, IndexError, ValueError):
            return
    pytest.fail(f"{name} was not found")
