"""Each planted bug must be found by the random operations of `driver.py`: a check that cannot fail checks nothing."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cellar.core.errors import CellarError
from cellar.core.messages import CopyResult, Emit, KeptChunk
from cellar.kv import restored
from cellar.kv import store as store_module
from cellar.kv.behind import WriteBehind
from cellar.kv.directory import Directory, Tails
from cellar.kv.leaving import Leaving
from cellar.kv.movement import Movement
from cellar.kv.pool import SlotPool
from cellar.kv.shelves import Shelves
from cellar.kv.states import State
from cellar.kv.store import KVStore, Reservation, Residency
from cellar.schedule.steps import batch as batch_module
from cellar.schedule.steps.batch import StepBatch
from cellar.schedule.steps.holders import Holders
from cellar.schedule.steps.plans import Plans
from cellar.schedule.steps.prompts import Prompts
from cellar.schedule.steps.queue import WaitingQueue
from cellar.schedule.steps.request import Phase, RequestState
from cellar.schedule.steps.rows import Index, Rows
from cellar.schedule.steps.scheduler import StepScheduler
from tests.schedule.steps.driver import drive, end_during_a_suspension, random_case

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, tuple[Plant, dict[str, Any]]] = {}


def bug(**where: Any) -> Callable[[Plant], Plant]:
    """`where` says in what settings the bug shows, and in which case first, so that the hunt is short."""

    def register(plant: Plant) -> Plant:
        BUGS[plant.__name__] = plant, where
        return plant

    return register


# -- memory and rows -----------------------------------------------------------------------------------


@bug(pressure=False, caching=True)
def shared_lookup_takes_no_reference(patch: pytest.MonkeyPatch) -> None:
    def hold(pool: SlotPool, slots: np.ndarray) -> None:
        pool.num_referenced += int(np.count_nonzero(pool.references[slots] == 0))
        pool.references[slots] = np.maximum(1, pool.references[slots])

    patch.setattr(SlotPool, "hold", hold)


@bug()
def slots_are_released_before_plans_in_flight_commit(patch: pytest.MonkeyPatch) -> None:
    retire = Holders.retire

    def early(holders: Holders, state: RequestState) -> None:
        rows, row = holders.rows, state.row
        if rows.in_flight[row]:
            holders.store._shelves.drop(rows.slots(row))
            rows.num_chunks[row] = 0
        retire(holders, state)

    patch.setattr(Holders, "retire", early)


@bug()
def row_is_reused_before_plans_in_flight_commit(patch: pytest.MonkeyPatch) -> None:
    retire, free = Holders.retire, Rows.free

    def early(holders: Holders, state: RequestState) -> None:
        if holders.rows.in_flight[state.row]:
            holders.rows._free.append(state.row)
        retire(holders, state)

    def late(rows: Rows, row: int) -> None:
        free(rows, row)
        rows._free[:] = dict.fromkeys(rows._free)

    patch.setattr(Holders, "retire", early)
    patch.setattr(Rows, "free", late)


@bug()
def everything_is_given_back_at_once(patch: pytest.MonkeyPatch) -> None:
    """The rule of reuse is missing altogether, so that the bookkeeping agrees with itself."""

    def retire(holders: Holders, state: RequestState) -> None:
        holders.rows.decodes[state.row] = False
        holders.running -= 1
        holders.prompts = [other for other in holders.prompts if other is not state]
        holders.release(state.row)

    patch.setattr(Holders, "retire", retire)


@bug()
def ended_requests_keep_their_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVStore, "release", lambda store, slots, conversation, now: None)


@bug(pressure=True, caching=True)
def hole_is_skipped(patch: pytest.MonkeyPatch) -> None:
    ranges = store_module._ranges
    patch.setattr(store_module, "_ranges", lambda *args: ranges(*args)[-1:])


@bug(pressure=True, caching=True)
def holes_are_computed_last(patch: pytest.MonkeyPatch) -> None:
    ranges = store_module._ranges

    def turned(*args: object) -> object:
        found = ranges(*args)  # type: ignore[arg-type]
        return (*found[1:-1], *found[:1], *found[-1:]) if len(found) > 2 else found[::-1]

    patch.setattr(store_module, "_ranges", turned)


@bug(pressure=False, caching=True)
def cached_chunk_in_use_can_be_reclaimed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shelves, "hold", lambda shelves, slots: shelves.device.hold(slots))


@bug(pressure=True)
def decode_gets_its_chunk_one_token_late(patch: pytest.MonkeyPatch) -> None:
    decode = Plans._decode

    def late(plans: Plans, batch: StepBatch) -> bool:
        rows = plans._holders.rows
        rows.capacity += 1
        enough = decode(plans, batch)
        rows.capacity -= 1
        return enough

    patch.setattr(Plans, "_decode", late)


# -- identity ------------------------------------------------------------------------------------------


@bug(pressure=False, caching=True, run_ahead=4, one_plan_a_row=False, first=17)
def identity_comes_from_tokens_not_committed(patch: pytest.MonkeyPatch) -> None:
    def completed(rows: Rows, of: Index) -> Index:
        return of[rows.planned[of] >= rows.next_named[of]]

    def name(holders: Holders, row: int) -> None:
        rows, size = holders.rows, holders.store.chunk_size
        first, last = int(rows.next_named[row]) // size - 1, int(rows.planned[row]) // size
        state = rows.state(row)
        state.chain.grow(rows.tokens[row], last)
        holders.store.names.commit(rows.table[row, first:last].tolist(), state.chain, first, state.conversation)
        rows.next_named[row] = (last + 1) * size

    patch.setattr(Rows, "completed", completed)
    patch.setattr(Holders, "name", name)


@bug(pressure=False, caching=True, error_every=9)
def failed_steps_give_their_chunks_an_identity(patch: pytest.MonkeyPatch) -> None:
    end = StepScheduler._end

    def careless(scheduler: StepScheduler, row: int, *rest: object) -> None:
        rows = scheduler._rows
        rows.computed[row] = rows.planned[row]
        if len(rows.completed(np.array([row]))):
            scheduler._holders.name(row)
        end(scheduler, row, *rest)  # type: ignore[arg-type]

    patch.setattr(StepScheduler, "_end", careless)


@bug(pressure=False, caching=True)
def whole_prompt_is_taken_from_the_cache(patch: pytest.MonkeyPatch) -> None:
    find = KVStore.find
    patch.setattr(KVStore, "find", lambda store, chain, tokens: find(store, chain, np.append(tokens, np.int32(0))))


@bug(pressure=False, caching=True)
def scored_prompts_use_the_cache(patch: pytest.MonkeyPatch) -> None:
    def reserve(prompts: Prompts, state: RequestState, step_tokens: int) -> object:
        holders = prompts._holders
        found = holders.store.find(state.chain, state.known)
        keep_free = prompts._keep_free if holders.running else 0
        return holders.store.reserve(found, len(state.known), keep_free, now=holders.now)

    patch.setattr(Prompts, "_reserve", reserve)


# -- suspension ----------------------------------------------------------------------------------------


@bug(pressure=True)
def tokens_in_flight_at_a_suspension_are_lost(patch: pytest.MonkeyPatch) -> None:
    suspend = Holders.suspend

    def forgetful(holders: Holders, row: int) -> None:
        holders.rows.accepts[row] = False
        suspend(holders, row)

    patch.setattr(Holders, "suspend", forgetful)


@bug(pressure=True)
def suspended_request_goes_to_the_end_of_the_queue(patch: pytest.MonkeyPatch) -> None:
    push = WaitingQueue.push

    def behind(queue: WaitingQueue, state: RequestState) -> None:
        if state.num_output:
            state.key = (state.key[0], state.key[1] + 10**6)
        push(queue, state)

    patch.setattr(WaitingQueue, "push", behind)


@bug(pressure=True)
def suspended_request_forgets_how_much_it_has_written(patch: pytest.MonkeyPatch) -> None:
    open_ = StepBatch.open

    def anew(batch: StepBatch, state: RequestState) -> None:
        open_(batch, state)
        batch._opens[-1] = dataclasses.replace(batch._opens[-1], num_output=0)

    patch.setattr(StepBatch, "open", anew)


@bug(pressure=True)
def penalties_restart_after_a_suspension(patch: pytest.MonkeyPatch) -> None:
    open_ = StepBatch.open

    def anew(batch: StepBatch, state: RequestState) -> None:
        open_(batch, state)
        opened = batch._opens[-1]
        if opened.output is not None:
            batch._opens[-1] = dataclasses.replace(opened, output=opened.output * 0)

    patch.setattr(StepBatch, "open", anew)


@bug(pressure=True)
def earliest_arrival_is_suspended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rows, "in_order", lambda rows, of: of[np.lexsort((-rows.arrival[of], -rows.priority[of]))])


def newcomers_overtake_a_pending_suspension(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prompts, "_may_admit", lambda prompts: len(prompts._queue) > 0)


@bug(pressure=True)
def waiting_rows_never_suspend_anyone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rows, "any_draining", lambda rows: True)


@bug()
def reserve_is_demanded_of_an_empty_batch(patch: pytest.MonkeyPatch) -> None:
    def reserve(prompts: Prompts, state: RequestState, step_tokens: int) -> object:
        holders = prompts._holders
        return holders.store.reserve(None, len(state.known), prompts._keep_free, now=holders.now)

    patch.setattr(Prompts, "_reserve", reserve)


@bug(owners=3)
def rows_that_were_given_up_still_count(patch: pytest.MonkeyPatch) -> None:
    suspend = Holders.suspend

    def counted(holders: Holders, row: int) -> None:
        owner = holders.rows.state(row).owner
        suspend(holders, row)
        holders.shares[owner] += 1

    patch.setattr(Holders, "suspend", counted)


@bug(owners=3)
def owner_loses_who_stands_behind(patch: pytest.MonkeyPatch) -> None:
    def advance(queue: WaitingQueue, name: tuple[int, str], line: object) -> None:
        del queue._lines[name]

    patch.setattr(WaitingQueue, "_advance", advance)


# -- admission and budget ------------------------------------------------------------------------------


@bug()
def budget_ignores_decodes(patch: pytest.MonkeyPatch) -> None:
    decode = StepBatch.decode

    def free_of_charge(batch: StepBatch, rows: Index) -> None:
        decode(batch, rows)
        batch.budget += len(rows)

    patch.setattr(StepBatch, "decode", free_of_charge)


@bug()
def small_requests_overtake_large_ones(patch: pytest.MonkeyPatch) -> None:
    first = WaitingQueue.first

    def smallest(queue: WaitingQueue) -> RequestState | None:
        return min(queue._members, key=lambda s: (len(s.known), s.key)) if first(queue) else None

    def remove(queue: WaitingQueue, state: RequestState) -> None:
        queue._members.remove(state)

    patch.setattr(WaitingQueue, "first", smallest)
    patch.setattr(WaitingQueue, "remove", remove)


@bug(first=16)
def long_prompts_beside_decodes_take_the_whole_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prompts, "_share", lambda prompts, batch: None)


@bug()
def aborted_requests_stay_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    remove = WaitingQueue.remove

    def keep(queue: WaitingQueue, state: RequestState) -> None:
        if state.phase is not Phase.ENDED:
            remove(queue, state)

    patch.setattr(WaitingQueue, "remove", keep)


@bug()
def prompt_chunk_emits_before_its_prompt_ends(patch: pytest.MonkeyPatch) -> None:
    prompt = StepBatch.prompt

    def eager(batch: StepBatch, state: RequestState) -> None:
        prompt(batch, state)
        batch._spans = [(r, a, b, Emit.LAST if e is Emit.NONE else e) for r, a, b, e in batch._spans]

    patch.setattr(StepBatch, "prompt", eager)


@bug()
def table_of_a_new_chunk_is_not_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepBatch, "_update", lambda batch: batch_module._NO_UPDATE)


@bug(pressure=True, run_ahead=1, max_delay=0, num_rows=1)
def a_piece_of_a_prompt_is_planned_for_ever(patch: pytest.MonkeyPatch) -> None:
    prompt = StepBatch.prompt

    def again(batch: StepBatch, state: RequestState) -> None:
        before = deque(state.todo)
        prompt(batch, state)
        if state.todo:
            state.todo = before

    patch.setattr(StepBatch, "prompt", again)


# -- endings -------------------------------------------------------------------------------------------


@bug()
def tokens_after_an_end_are_delivered(patch: pytest.MonkeyPatch) -> None:
    drop = StepScheduler._drop

    def open_ended(scheduler: StepScheduler, state: RequestState) -> None:
        row = state.row
        drop(scheduler, state)
        if state.row >= 0:
            scheduler._rows.accepts[row] = True

    patch.setattr(StepScheduler, "_drop", open_ended)


@bug()
def stop_ids_end_before_min_tokens(patch: pytest.MonkeyPatch) -> None:
    """With the runtime's ban gone as well it would be silent; the ban makes the count of tokens wrong."""
    open_ = Rows.open

    def short(rows: Rows, state: RequestState, slots: np.ndarray) -> int:
        row = open_(rows, state, slots)
        rows.min_length[row] += 1
        return row

    patch.setattr(Rows, "open", short)


@bug()
def only_some_stop_ids_are_tested(patch: pytest.MonkeyPatch) -> None:
    open_ = Rows.open

    def few(rows: Rows, state: RequestState, slots: np.ndarray) -> int:
        row = open_(rows, state, slots)
        rows._many_stops.clear()
        return row

    patch.setattr(Rows, "open", few)


@bug()
def decodes_are_planned_past_max_tokens(patch: pytest.MonkeyPatch) -> None:
    open_ = Rows.open

    def long(rows: Rows, state: RequestState, slots: np.ndarray) -> int:
        row = open_(rows, state, slots)
        rows.last[row] += 3
        return row

    patch.setattr(Rows, "open", long)


@bug()
def one_token_too_many_is_delivered(patch: pytest.MonkeyPatch) -> None:
    open_ = Rows.open

    def long(rows: Rows, state: RequestState, slots: np.ndarray) -> int:
        row = open_(rows, state, slots)
        rows.limit[row] += 1
        rows.last[row] += 1
        return row

    patch.setattr(Rows, "open", long)


@bug(error_every=9)
def error_ends_only_the_first_row(patch: pytest.MonkeyPatch) -> None:
    commit = StepScheduler.commit

    def partly(scheduler: StepScheduler, result: object, now: float) -> object:
        if result.error is not None:  # type: ignore[attr-defined]
            for row in scheduler._plans.in_flight[0].rows[1:].tolist():
                scheduler._rows.accepts[row] = False
        return commit(scheduler, result, now)  # type: ignore[arg-type]

    patch.setattr(StepScheduler, "commit", partly)


@bug()
def finish_forgets_to_take_tokens_back(patch: pytest.MonkeyPatch) -> None:
    def finish(scheduler: StepScheduler, request_id: str, num_tokens: int, reason: object) -> None:
        scheduler.abort(request_id)

    patch.setattr(StepScheduler, "finish", finish)


@bug(pressure=True)
def scores_are_delivered_twice_after_a_suspension(patch: pytest.MonkeyPatch) -> None:
    release = Holders.release

    def again(holders: Holders, row: int) -> None:
        state = holders.rows.state(row)
        release(holders, row)
        state.num_scored = 1

    patch.setattr(Holders, "release", again)


# -- tiers ---------------------------------------------------------------------------------------------


@bug(tiers=True)
def slot_that_a_copy_uses_is_given_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotPool, "unused", lambda pool, slots: pool.references[slots] == 0)


@bug(tiers=True)
def request_starts_before_its_chunks_have_come(patch: pytest.MonkeyPatch) -> None:
    plan = Prompts.plan_waiting

    def early(prompts: Prompts, batch: StepBatch) -> None:
        for state in prompts._holders.loading:
            state.awaits.clear()
        plan(prompts, batch)

    patch.setattr(Prompts, "plan_waiting", early)


@bug(tiers=True, max_copy_delay=5)
def load_that_another_began_is_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Movement, "fills", lambda movement, slot: -1)


@bug(tiers=True, copy_fails_every=2)
def failed_copies_count_as_arrived(patch: pytest.MonkeyPatch) -> None:
    commit = Movement.commit

    def trusting(movement: Movement, result: CopyResult, *rest: Any) -> np.ndarray:
        return commit(movement, dataclasses.replace(result, ok=np.ones(len(result.ok), np.bool_)), *rest)

    patch.setattr(Movement, "commit", trusting)


@bug(tiers=True, copy_fails_every=2)
def hole_of_a_failed_load_is_not_computed(patch: pytest.MonkeyPatch) -> None:
    commit = KVStore.commit_copy

    def silent(store: KVStore, result: CopyResult, *rest: Any) -> np.ndarray:
        return commit(store, result, *rest)[:0]

    patch.setattr(KVStore, "commit_copy", silent)


@bug(tiers=True, max_copy_delay=5, first=61)
def aborted_load_gives_its_slots_back_at_once(patch: pytest.MonkeyPatch) -> None:
    drop = Shelves.drop

    def hasty(shelves: Shelves, slots: np.ndarray) -> None:
        drop(shelves, slots)
        device = shelves.device
        loading = slots[(device.state[slots] == State.LOADING) & (device.references[slots] == 0)]
        shelves.directory.slot[0, device.chunk[loading][device.chunk[loading] >= 0]] = -1
        device.give_back(loading)

    patch.setattr(Shelves, "drop", hasty)


@bug(tiers=True, max_copy_delay=5, first=26)
def aborted_load_keeps_its_references(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holders, "unload", lambda holders, state: holders.loading.remove(state))


@bug(tiers=True, max_copy_delay=5)
def rows_of_those_who_load_are_given_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rows, "num_free", property(lambda rows: len(rows._free) + 99 if rows._free else 0))


@bug(tiers=True)
def copies_are_decided_and_not_handed_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVStore, "copies", lambda store, now: ())


@bug(tiers=True, max_copy_delay=5)
def copies_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepScheduler, "next_event", lambda scheduler, now: None)


@bug(tiers=True)
def tail_is_found_whatever_its_tokens(patch: pytest.MonkeyPatch) -> None:
    def find_tail(directory: Directory, parent: bytes, tokens: bytes) -> tuple[int, int]:
        for held, chunk in directory._tails.get(parent, Tails()).numbers.items():
            if len(held) <= len(tokens):
                return chunk, len(held)
        return -1, 0

    patch.setattr(Directory, "find_tail", find_tail)


@bug(tiers=True)
def tail_covers_the_token_whose_logits_are_wanted(patch: pytest.MonkeyPatch) -> None:
    find = KVStore.find
    patch.setattr(KVStore, "find", lambda store, chain, tokens: find(store, chain, np.append(tokens, np.int32(0))))


@bug(tiers=True, first=107)
def tail_is_written_on_by_two(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVStore, "_is_free_to_write", lambda store, chunks: store._shelves.directory.slot[0, chunks] >= 0)


@bug(tiers=True, first=14)
def tail_is_said_to_be_longer_than_its_kv(patch: pytest.MonkeyPatch) -> None:
    """The last sampled token has no KV yet."""
    release = Holders.release

    def whole(holders: Holders, row: int) -> None:
        holders.rows.computed[row] = max(holders.rows.computed[row], holders.rows.length[row])
        release(holders, row)

    patch.setattr(Holders, "release", whole)


@bug(tiers=True)
def place_of_a_copy_is_mixed_up(patch: pytest.MonkeyPatch) -> None:
    order = Movement._order

    def turned(movement: Movement, source: int, source_slots: np.ndarray, *rest: Any) -> int:
        number = order(movement, source, source_slots, *rest)
        batch = movement._orders[-1]
        movement._orders[-1] = dataclasses.replace(batch, source_slots=batch.source_slots[::-1])
        return number

    patch.setattr(Movement, "_order", turned)


# -- tails on the device alone -------------------------------------------------------------------------


@bug(caching=True, first=29)
def tail_of_the_device_is_found_whatever_its_tokens(patch: pytest.MonkeyPatch) -> None:
    tail_is_found_whatever_its_tokens(patch)


@bug(caching=True, first=324)
def tail_of_the_device_is_written_on_by_two(patch: pytest.MonkeyPatch) -> None:
    tail_is_written_on_by_two(patch)


@bug(caching=True)
def tail_of_the_device_is_said_to_be_longer_than_its_kv(patch: pytest.MonkeyPatch) -> None:
    tail_is_said_to_be_longer_than_its_kv(patch)


# -- tiers that outlive the process --------------------------------------------------------------------


@bug(tiers=True, disk=60, first=245)
def forgotten_chunk_stays_on_the_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotPool, "vacate", SlotPool.give_back)


@bug(tiers=True, disk=60)
def chunks_at_rest_wait_until_memory_is_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WriteBehind, "add", lambda behind, chunks, now: None)


@bug(tiers=True, disk=60, max_copy_delay=5)
def chunk_that_moves_while_its_time_comes_is_passed_over(patch: pytest.MonkeyPatch) -> None:
    take = WriteBehind.take

    def once(behind: WriteBehind, count: int, now: float) -> np.ndarray:
        length = len(behind._queue)
        found = take(behind, count, now)
        if len(behind._queue) == length and length:
            behind._queue.pop()
        return found

    patch.setattr(WriteBehind, "take", once)


@bug(tiers=True, disk=60)
def label_is_that_of_another_chunk(patch: pytest.MonkeyPatch) -> None:
    labels = Shelves.labels
    patch.setattr(Shelves, "labels", lambda shelves, chunks: labels(shelves, chunks)[::-1])


@bug(tiers=True, disk=60)
def restored_chunks_are_looked_for_in_the_next_slot(patch: pytest.MonkeyPatch) -> None:
    def turned(shelves: Shelves, tier: int, chunks: list[KeptChunk], numbers: dict[bytes, int]) -> None:
        slots = [chunk.slot for chunk in chunks]
        moved = [dataclasses.replace(c, slot=s) for c, s in zip(chunks, slots[1:] + slots[:1], strict=True)]
        place(shelves, tier, moved, numbers)

    place = restored._place
    patch.setattr(restored, "_place", turned)


@bug(tiers=True, disk=60)
def restored_chunk_may_never_leave(patch: pytest.MonkeyPatch) -> None:
    classify = Leaving.classify

    def some(leaving: Leaving, chunks: np.ndarray) -> None:
        if not leaving._pools[0].num_referenced and not (leaving._directory.slot[0] >= 0).any():
            return
        classify(leaving, chunks)

    patch.setattr(Leaving, "classify", some)


@bug(tiers=True, disk=60)
def forgotten_conversation_keeps_what_copies_are_writing(patch: pytest.MonkeyPatch) -> None:
    remove = Shelves.remove

    def some(shelves: Shelves, chunks: np.ndarray) -> None:
        slots = shelves.directory.slot[shelves.persistent % len(shelves.tiers), chunks]
        remove(shelves, chunks[slots < 0])
        for chunk in chunks[slots >= 0].tolist():
            shelves.directory.slot[:, chunk] = -1

    patch.setattr(Shelves, "remove", some)


@bug(tiers=True, host=40, recovery="load")
def what_is_loaded_is_computed_as_well(patch: pytest.MonkeyPatch) -> None:
    reserve = KVStore.reserve

    def twice(store: KVStore, found: Residency | None, count: int, *rest: Any, **options: Any) -> Reservation | None:
        made = reserve(store, found, count, *rest, **options)
        return dataclasses.replace(made, compute=((0, count),)) if made is not None and made.awaits else made

    patch.setattr(KVStore, "reserve", twice)


@bug(tiers=True, host=40, recovery="any")
def what_is_not_loaded_is_taken_for_there(patch: pytest.MonkeyPatch) -> None:
    load = KVStore._load

    def less(store: KVStore, found: Residency, columns: np.ndarray, *rest: Any) -> set[int]:
        first = columns & (np.cumsum(columns) <= max(1, columns.sum() - 1))
        return load(store, found, first, *rest)

    patch.setattr(KVStore, "_load", less)


@bug(tiers=True, host=40, recovery="any")
def what_is_computed_again_counts_as_a_hit(patch: pytest.MonkeyPatch) -> None:
    reserve = KVStore.reserve

    def more(store: KVStore, *rest: Any, **options: Any) -> Reservation | None:
        made = reserve(store, *rest, **options)
        if made is None:
            return None
        return dataclasses.replace(made, num_cached_tokens=made.num_cached_tokens + made.num_recomputed)

    patch.setattr(KVStore, "reserve", more)


@bug(tiers=True, host=40, recovery="any")
def who_is_put_off_waits_though_nothing_runs(patch: pytest.MonkeyPatch) -> None:
    reserve = KVStore.reserve

    def anyhow(store: KVStore, *rest: Any, **options: Any) -> Reservation | None:
        return reserve(store, *rest, **options | {"patience": 1.0})

    patch.setattr(KVStore, "reserve", anyhow)
    patch.setattr(Movement, "puts_off", lambda movement, missing, *rest: missing > 0)


def hunt(cases: int, pressure: bool | None = None, tiers: bool = False, first: int = 0, **fixed: Any) -> None:
    """All cases, from the `first` on and then those before it: where another finds it first, it takes longer."""
    for seed in (*range(first, cases), *range(first)):
        setting, ops = random_case(seed, pressure=pressure, tiers=tiers)
        drive(dataclasses.replace(setting, **{"recovery": "load"} | fixed), ops)


@pytest.mark.long
@pytest.mark.parametrize("name", BUGS)
def test_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, where = BUGS[name]
    plant(monkeypatch)
    with pytest.raises((AssertionError, CellarError, IndexError, KeyError, ValueError)):
        hunt(400, **where)


def test_overtaking_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too rare for random operations: a row ends between a suspension and the commit that completes it."""
    newcomers_overtake_a_pending_suspension(monkeypatch)
    with pytest.raises(AssertionError, match="overtook"):
        end_during_a_suspension()


def test_without_a_bug_nothing_is_found() -> None:
    hunt(20)
