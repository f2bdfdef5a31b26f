"""Each planted bug of the routers must be found by one of their tests: a check that cannot fail checks nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cellar.core.messages import Tier
from cellar.kv.costs import CostCurve
from cellar.routing import baselines as baselines_module
from cellar.routing import costs as costs_module
from cellar.routing import drain as drain_module
from cellar.routing import flights as flights_module
from cellar.routing import holdings as holdings_module
from cellar.routing import prices as prices_module
from cellar.routing import router as router_module
from cellar.routing.columns import Columns
from cellar.routing.digest import Digest, DigestKeeper, Keys
from cellar.routing.flights import Flight, Flights, Unseen
from cellar.routing.holdings import Holdings
from cellar.routing.prices import RoutePrices, StepPrice
from cellar.routing.replicas import Replicas
from cellar.routing.report import ReplicaReport
from cellar.routing.request import RoutedRequest
from cellar.routing.router import AffinityRouter
from cellar.routing.sessions import Session, Sessions
from tests.routing import test_baselines, test_digest, test_drain, test_report, test_router
from tests.routing.test_model import RouterMachine

pytestmark = pytest.mark.long

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Plant] = {}


def bug(plant: Plant) -> Plant:
    BUGS[plant.__name__] = plant
    return plant


# -- digests and the table -----------------------------------------------------------------------------


@bug
def filters_have_one_hash(patch: pytest.MonkeyPatch) -> None:
    def one(keys: Keys, num_bits: int) -> np.ndarray:
        low = (keys & np.uint64(num_bits - 1)).astype(np.int64)
        return np.stack((low, low))

    patch.setattr("cellar.routing.digest.positions", one)
    patch.setattr("cellar.routing.columns.positions", one)


@bug
def changes_are_taken_whatever_they_follow(patch: pytest.MonkeyPatch) -> None:
    take = Holdings.take

    def credulous(holdings: Holdings, column: int, digest: Digest) -> bool:
        if digest.base is not None:
            holdings._versions[column] = digest.base
        return take(holdings, column, digest)

    patch.setattr(Holdings, "take", credulous)


@bug
def changes_are_made_to_the_filter_before_the_last_one(patch: pytest.MonkeyPatch) -> None:
    digest = DigestKeeper.digest

    def stale(keeper: DigestKeeper, keys: Mapping[Tier, Keys], whole: bool = False) -> Digest:
        before = dict(keeper._filters)
        made = digest(keeper, keys, whole)
        keeper._filters = before
        return made

    patch.setattr(DigestKeeper, "digest", stale)


@bug
def whole_filter_is_added_to_what_was_there(patch: pytest.MonkeyPatch) -> None:
    def write(columns: Columns, column: int, packed: np.ndarray) -> None:
        words, bit = columns._place(column)
        held = np.unpackbits(packed, bitorder="little").astype(np.bool_)
        words |= np.where(held, bit, np.uint64(0))
        columns._count[column] = int(held.sum())

    patch.setattr(Columns, "write", write)


@bug
def changed_bits_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    flip = Columns.flip

    def uncounted(columns: Columns, column: int, changed: np.ndarray) -> None:
        before = int(columns._count[column])
        flip(columns, column, changed)
        columns._count[column] = before

    patch.setattr(Columns, "flip", uncounted)


@bug
def column_of_who_is_gone_keeps_its_bits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Columns, "clear", lambda columns, column: None)


@bug
def table_that_is_widened_loses_what_it_had(patch: pytest.MonkeyPatch) -> None:
    widened = Columns.widened

    def fresh(columns: Columns) -> None:
        widened(columns)
        columns._words[:] = 0

    patch.setattr(Columns, "widened", fresh)


@bug
def replicas_beyond_a_word_are_the_first_ones_again(patch: pytest.MonkeyPatch) -> None:
    def place(columns: Columns, column: int) -> tuple[np.ndarray, np.uint64]:
        return columns._words[0], np.uint64(1 << column % 64)

    patch.setattr(Columns, "_place", place)


@bug
def false_hits_are_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holdings, "false_share", lambda holdings, count: {})


# -- who holds what ------------------------------------------------------------------------------------


def after(name: str, change: Callable[..., Any]) -> Plant:
    """A method of Holdings whose result is changed."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        method = getattr(Holdings, name)
        patch.setattr(Holdings, name, lambda holdings, *rest: change(method(holdings, *rest), *rest))

    return plant


@bug
def tiers_are_all_alike(patch: pytest.MonkeyPatch) -> None:
    def alike(found: dict[Tier, np.ndarray], *rest: object) -> dict[Tier, np.ndarray]:
        return {Tier.DEVICE: np.max(np.stack(list(found.values())), 0)} if found else found

    after("held", alike)(patch)


@bug
def slower_tiers_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    after("held", lambda found, *rest: {t: where for t, where in found.items() if t is Tier.DEVICE})(patch)


@bug
def chunk_in_two_tiers_counts_twice(patch: pytest.MonkeyPatch) -> None:
    find = Columns.find

    def held(holdings: Holdings, keys: Keys, count: int) -> dict[Tier, np.ndarray]:
        words = {tier: find(columns, keys) for tier, columns in holdings._tiers.items()}
        if Tier.DEVICE in words:
            words[Tier.DEVICE] |= find(holdings._sent, keys)
        if Tier.REMOTE in words:
            known = words[Tier.REMOTE].any(1, keepdims=True)
            words[Tier.REMOTE] = np.where(known, holdings_module.ALL, np.uint64(0))
        return {tier: holdings_module.unpacked(word, count) for tier, word in words.items() if word.any()}

    patch.setattr(Holdings, "held", held)


@bug
def remote_tier_is_its_writers_alone(patch: pytest.MonkeyPatch) -> None:
    def held(holdings: Holdings, keys: Keys, count: int) -> dict[Tier, np.ndarray]:
        words = {tier: columns.find(keys) for tier, columns in holdings._tiers.items()}
        words[Tier.DEVICE] |= holdings._sent.find(keys)
        faster = np.zeros_like(words[Tier.DEVICE])
        found = {}
        for tier, word in words.items():
            found[tier] = holdings_module.unpacked(word & ~faster, count)
            faster |= word
        return found

    patch.setattr(Holdings, "held", held)


@bug
def sent_chunks_are_not_remembered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holdings, "send", lambda holdings, column, keys: None)


@bug
def sent_chunks_are_remembered_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holdings, "settle", lambda holdings, column, gone, left: None)


@bug
def settling_one_request_takes_the_chunks_of_others(patch: pytest.MonkeyPatch) -> None:
    settle = Holdings.settle
    patch.setattr(Holdings, "settle", lambda holdings, column, gone, left: settle(holdings, column, gone, left[:0]))


@bug
def chunks_are_for_digests_a_report_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(flights_module, "REPORTS", 1)


# -- requests under way --------------------------------------------------------------------------------


@bug
def requests_under_way_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replicas, "sent", lambda replicas, flight, now: None)


def reported(change: Callable[[Flight, int], bool], work: bool = True) -> Plant:
    """A report after which the flights count for which `change` says so."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        true = Flights.reported

        def wrong(flights: Flights, column: int, seen: int, reports: int) -> Any:
            mine = list(flights._of.get(column, {}).values())
            _, settled = true(flights, column, seen, reports)
            unseen = Unseen()
            for flight in mine:
                if change(flight, seen):
                    unseen.work += flight.work if work or not flight.begun else 0.0
                    unseen.requests += 1
                    unseen.context += flight.context
                    unseen.memory += flight.memory
            return unseen, settled

        patch.setattr(Flights, "reported", wrong)

    return plant


@bug
def what_a_report_has_seen_counts_twice(patch: pytest.MonkeyPatch) -> None:
    reported(lambda flight, seen: not flight.ended, work=False)(patch)


@bug
def what_a_report_has_not_seen_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    reported(lambda flight, seen: False)(patch)


@bug
def what_has_ended_is_still_on_its_way(patch: pytest.MonkeyPatch) -> None:
    reported(lambda flight, seen: not flight.seen, work=False)(patch)


@bug
def prompt_that_was_computed_is_still_waited_for(patch: pytest.MonkeyPatch) -> None:
    reported(lambda flight, seen: not flight.seen and not flight.ended)(patch)


@bug
def request_ends_each_time_it_is_said(patch: pytest.MonkeyPatch) -> None:
    ended = AffinityRouter.ended

    def again(router: AffinityRouter, number: int, num_output: int, now: float) -> None:
        flight = router._flights.get(number)
        if flight is not None and flight.ended:
            router._replicas.ended(flight, now)
        ended(router, number, num_output, now)

    patch.setattr(AffinityRouter, "ended", again)


@bug
def ended_requests_are_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flights, "surplus", lambda flights: {})


@bug
def requests_of_who_is_gone_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flights, "drop", lambda flights, column: None)


# -- replicas ------------------------------------------------------------------------------------------


@bug
def who_drains_is_chosen(patch: pytest.MonkeyPatch) -> None:
    true = Replicas.reported

    def steady(replicas: Replicas, column: int, report: ReplicaReport, unseen: Unseen, now: float) -> None:
        true(replicas, column, replace(report, draining=False), unseen, now)

    patch.setattr(Replicas, "reported", steady)


@bug
def who_drains_is_never_chosen(patch: pytest.MonkeyPatch) -> None:
    candidates = Replicas.candidates

    def without(replicas: Replicas, among: Collection[str] | None) -> np.ndarray:
        found = candidates(replicas, among)
        return found[~replicas.draining[found]]

    patch.setattr(Replicas, "candidates", without)


@bug
def anybody_may_be_chosen(patch: pytest.MonkeyPatch) -> None:
    candidates = Replicas.candidates
    patch.setattr(Replicas, "candidates", lambda replicas, among: candidates(replicas, None))


@bug
def who_is_gone_may_be_chosen(patch: pytest.MonkeyPatch) -> None:
    remove = Replicas.remove

    def stays(replicas: Replicas, name: str) -> int | None:
        column = remove(replicas, name)
        if column is not None:
            replicas.present[column] = True
        return column

    patch.setattr(Replicas, "remove", stays)


@bug
def queues_do_not_empty(patch: pytest.MonkeyPatch) -> None:
    company = Replicas.company
    patch.setattr(Replicas, "company", lambda replicas, now: company(replicas, 0.0))


@bug
def idle_time_is_saved_up(patch: pytest.MonkeyPatch) -> None:
    sent = Replicas.sent

    def lazy(replicas: Replicas, flight: Flight, now: float) -> None:
        clear = float(replicas.clear[flight.column])
        sent(replicas, flight, now)
        replicas.clear[flight.column] = clear + flight.work

    patch.setattr(Replicas, "sent", lazy)


@bug
def prompt_that_ends_unread_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    ended = Replicas.ended

    def begun(replicas: Replicas, flight: Flight, now: float) -> None:
        before = float(replicas.clear[flight.column])
        ended(replicas, flight, now)
        replicas.clear[flight.column] = before

    patch.setattr(Replicas, "ended", begun)


@bug
def memory_of_what_has_ended_is_not_back(patch: pytest.MonkeyPatch) -> None:
    ended = Replicas.ended

    def kept(replicas: Replicas, flight: Flight, now: float) -> None:
        before = float(replicas.cached[flight.column])
        ended(replicas, flight, now)
        replicas.cached[flight.column] = before

    patch.setattr(Replicas, "ended", kept)


@bug
def ties_always_go_to_the_same(patch: pytest.MonkeyPatch) -> None:
    sent = Replicas.sent

    def unnoted(replicas: Replicas, flight: Flight, now: float) -> None:
        sent(replicas, flight, now)
        replicas.turn[flight.column] = 0

    patch.setattr(Replicas, "sent", unnoted)


@bug
def free_memory_breaks_no_tie(patch: pytest.MonkeyPatch) -> None:
    least = AffinityRouter._least

    def blind(router: AffinityRouter, found: costs_module.Costs, allowed: np.ndarray) -> int:
        free = router._replicas.free.copy()
        router._replicas.free[:] = 0
        column = least(router, found, allowed)
        router._replicas.free[:] = free
        return column

    patch.setattr(AffinityRouter, "_least", blind)


# -- costs ---------------------------------------------------------------------------------------------


def priced(**changes: Any) -> Plant:
    """The same costs of other prices."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        true = router_module.costs

        def wrong(prices: RoutePrices, *rest: Any) -> costs_module.Costs:
            return true(replace(prices, **{name: change(prices) for name, change in changes.items()}), *rest)

        patch.setattr(router_module, "costs", wrong)

    return plant


@bug
def decodes_cost_nothing(patch: pytest.MonkeyPatch) -> None:
    priced(step=lambda prices: StepPrice())(patch)


@bug
def who_is_there_does_not_count(patch: pytest.MonkeyPatch) -> None:
    true = router_module.costs

    def selfish(*given: Any) -> costs_module.Costs:
        found = true(*given)
        return replace(found, others=np.zeros_like(found.others))

    patch.setattr(router_module, "costs", selfish)


@bug
def loads_have_no_fixed_part(patch: pytest.MonkeyPatch) -> None:
    priced(load=lambda prices: {tier: replace(price, fixed=0.0) for tier, price in prices.load.items()})(patch)


@bug
def loads_cost_nothing(patch: pytest.MonkeyPatch) -> None:
    def free(prices: RoutePrices) -> dict[Tier, prices_module.LoadPrice]:
        return {tier: prices_module.LoadPrice(0.0, 0.0) for tier in prices.load}

    priced(load=free)(patch)


@bug
def moves_cost_nothing(patch: pytest.MonkeyPatch) -> None:
    priced(move=lambda prices: None if prices.move is None else 0.0)(patch)


@bug
def every_chunk_costs_what_the_first_one_does(patch: pytest.MonkeyPatch) -> None:
    call = CostCurve.__call__
    patch.setattr(CostCurve, "__call__", lambda curve, contexts: call(curve, np.zeros_like(contexts)))


@bug
def what_is_slower_to_load_is_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prices_module, "MARGIN", 1e9)
    patch.setattr(costs_module, "MARGIN", 1e9)


@bug
def what_is_as_fast_to_compute_is_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prices_module, "MARGIN", -0.5)
    patch.setattr(costs_module, "MARGIN", -0.5)


@bug
def table_of_chunks_is_that_of_the_first_prompt(patch: pytest.MonkeyPatch) -> None:
    seconds = prices_module.ChunkTable.seconds

    def short(table: prices_module.ChunkTable, count: int) -> np.ndarray:
        known = seconds(table, max(count, 1))
        return known if count < 4 else np.append(known[:3], np.full(count - 3, known[2]))

    patch.setattr(prices_module.ChunkTable, "seconds", short)


@bug
def memory_is_never_full(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(costs_module, "_room", lambda need, company, decode: np.zeros(len(company.free)))


@bug
def cached_chunks_do_not_make_room(patch: pytest.MonkeyPatch) -> None:
    room = costs_module._room
    patch.setattr(
        costs_module,
        "_room",
        lambda need, company, decode: room(need, replace(company, cached=np.zeros(len(company.free))), decode),
    )


@bug
def chunks_behind_a_hole_do_not_count(patch: pytest.MonkeyPatch) -> None:
    def leading(found: dict[Tier, np.ndarray], *rest: object) -> dict[Tier, np.ndarray]:
        if not found:
            return found
        there = np.cumprod(np.max(np.stack(list(found.values())), 0), 0)
        return {tier: where * there for tier, where in found.items()}

    after("held", leading)(patch)


@bug
def last_token_need_not_be_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoutePrices, "ranges", lambda prices, ranges: 0.0)


@bug
def chunk_of_the_last_token_is_looked_for(patch: pytest.MonkeyPatch) -> None:
    keys = AffinityRouter._keys
    patch.setattr(
        AffinityRouter,
        "_keys",
        lambda router, request: keys(router, replace(request, prompt_tokens=request.prompt_tokens + 1)),
    )


# -- conversations and answers -------------------------------------------------------------------------


@bug
def conversations_are_not_remembered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sessions, "note", lambda sessions, name, session: None)


@bug
def conversations_are_remembered_against_digests(patch: pytest.MonkeyPatch) -> None:
    note = Sessions.note
    patch.setattr(Sessions, "note", lambda sessions, name, one: note(sessions, name, replace(one, until=1 << 60)))


@bug
def all_conversations_are_one(patch: pytest.MonkeyPatch) -> None:
    note, get = Sessions.note, Sessions.get
    patch.setattr(Sessions, "note", lambda sessions, name, session: note(sessions, b"", session))
    patch.setattr(Sessions, "get", lambda sessions, name: None if name is None else get(sessions, b""))


@bug
def successor_of_who_is_gone_has_its_conversations(patch: pytest.MonkeyPatch) -> None:
    add = Replicas.add

    def same(replicas: Replicas, name: str) -> int:
        column = add(replicas, name)
        replicas.life[column] = column + 1
        return column

    patch.setattr(Replicas, "add", same)


@bug
def answer_is_not_part_of_the_conversation(patch: pytest.MonkeyPatch) -> None:
    note = Sessions.note
    patch.setattr(Sessions, "note", lambda sessions, name, one: note(sessions, name, replace(one, tokens=0)))


@bug
def conversations_are_unbounded(patch: pytest.MonkeyPatch) -> None:
    def note(sessions: Sessions, name: bytes, session: Session) -> None:
        sessions._known[name] = session

    patch.setattr(Sessions, "note", note)


@bug
def conversation_in_use_is_forgotten_first(patch: pytest.MonkeyPatch) -> None:
    def note(sessions: Sessions, name: bytes, session: Session) -> None:
        sessions._known[name] = session
        if len(sessions._known) > sessions._capacity:
            sessions._known.popitem(last=False)

    patch.setattr(Sessions, "note", note)


@bug
def answers_are_always_as_long_as_at_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(router_module, "MEMORY", 1.0)


@bug
def most_tokens_of_an_answer_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    true = AffinityRouter._costs

    def unbounded(router: AffinityRouter, request: RoutedRequest, keys: Keys, now: float) -> Any:
        return true(router, replace(request, max_tokens=None), keys, now)

    patch.setattr(AffinityRouter, "_costs", unbounded)


# -- draining ------------------------------------------------------------------------------------------


@bug
def more_is_written_than_there_is_time_for(patch: pytest.MonkeyPatch) -> None:
    move = drain_module._move
    patch.setattr(drain_module, "_move", lambda index, held, prices, room: move(index, held, prices, len(held.ends)))


@bug
def first_chunks_are_written_instead_of_the_last(patch: pytest.MonkeyPatch) -> None:
    move = drain_module._move
    patch.setattr(drain_module, "_move", lambda k, held, *rest: move(k, replace(held, ends=held.ends[::-1]), *rest))


@bug
def chance_to_go_on_does_not_count(patch: pytest.MonkeyPatch) -> None:
    move = drain_module._move
    patch.setattr(drain_module, "_move", lambda index, held, *rest: move(index, replace(held, chance=1.0), *rest))


@bug
def writing_costs_nothing(patch: pytest.MonkeyPatch) -> None:
    move = drain_module._move
    patch.setattr(drain_module, "_move", lambda k, held, prices, room: move(k, held, replace(prices, move=0.0), room))


# -- routers that know nothing of chunks ---------------------------------------------------------------


@bug
def fewest_are_the_most(patch: pytest.MonkeyPatch) -> None:
    def pick(allowed: Sequence[str], known: baselines_module.Outstanding) -> str:
        return max(allowed, key=known.count.__getitem__)

    patch.setattr(test_baselines, "least_loaded", lambda: baselines_module.RuleRouter(pick))


@bug
def one_is_drawn_instead_of_two(patch: pytest.MonkeyPatch) -> None:
    def two_choices(seed: int = 0) -> baselines_module.RuleRouter:
        random = np.random.default_rng(seed)
        return baselines_module.RuleRouter(lambda allowed, known: allowed[int(random.integers(len(allowed)))])

    patch.setattr(test_baselines, "two_choices", two_choices)


@bug
def rule_does_not_look_who_drains(patch: pytest.MonkeyPatch) -> None:
    def candidates(known: baselines_module.Outstanding, among: Collection[str] | None) -> list[str]:
        return sorted(name for name in known.count if among is None or name in among)

    patch.setattr(baselines_module.Outstanding, "candidates", candidates)


# -- the hunt ------------------------------------------------------------------------------------------

QUICK = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def cases(module: ModuleType) -> Iterator[Callable[[], None]]:
    """The tests of a module with each of their parameters."""
    for name, test in vars(module).items():
        if not name.startswith("test_"):
            continue
        marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
        if not marks:
            yield test
            continue
        (names, values) = marks[0].args
        names = names.split(", ") if isinstance(names, str) else names
        for value in values:
            given = dict(zip(names, value if len(names) > 1 else (value,), strict=True))
            assert not inspect.signature(test).parameters.keys() - given.keys(), name
            yield lambda test=test, given=given: test(**given)


def hunt() -> None:
    """What is quick first."""
    tests = [
        test for module in (test_router, test_digest, test_report, test_drain, test_baselines) for test in cases(module)
    ]
    for test in sorted(tests, key=lambda test: hasattr(test, "hypothesis")):
        test()
    run_state_machine_as_test(RouterMachine, settings=QUICK)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises(Exception) as found:  # a bug may show itself as anything but one that does not fit its place
        hunt()
    assert not isinstance(found.value, TypeError), found.value


def test_without_a_bug_nothing_is_found() -> None:
    hunt()
