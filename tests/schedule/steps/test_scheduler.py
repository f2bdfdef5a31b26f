"""StepScheduler: chosen situations, and random ones held against arithmetic."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellar.core.config import ScheduleConfig
from cellar.core.errors import CapacityError, IntegrityError, RequestError
from cellar.core.messages import (
    Emit,
    Event,
    EventKind,
    FinishReason,
    Flag,
    Request,
    Source,
    StepOutput,
    StepPlan,
    StepResult,
    Tier,
)
from cellar.core.sampling import SamplingParams
from cellar.kv.movement import Movement
from cellar.kv.recovery import Recovery
from cellar.kv.store import KVStore
from cellar.runtime.protocol import Capacity
from cellar.runtime.steps.fake import FakeRuntime
from cellar.schedule.protocol import Scheduler
from cellar.schedule.steps.limits import chunks_of
from cellar.schedule.steps.pace import LATEST, Pace
from cellar.schedule.steps.portions import Portions
from cellar.schedule.steps.prompts import LATE_JOINING
from cellar.schedule.steps.scheduler import StepScheduler
from tests.schedule.steps.driver import (
    KINDS,
    VOCAB,
    Op,
    Setting,
    by_hand,
    drive,
    end_during_a_suspension,
    let_one_plan_name_a_row,
    random_case,
    request,
)

byte = st.integers(0, 255)


class Bench:
    """A scheduler and a fake runtime, stepped by hand."""

    def __init__(self, slots: int = 32, rows: int = 8, chunk: int = 4, longest: int = 64, **options: Any) -> None:
        caching = options.pop("caching", True)
        one_plan_a_row = options.pop("one_plan_a_row", False)
        short = options.pop("short", None)
        fake = {key: options.pop(key) for key in ("fail", "nan", "delay") if key in options}
        config = ScheduleConfig(max_num_seqs=rows, **{"max_num_batched_tokens": 64, **options})
        self.scheduler = StepScheduler(slots, rows, chunk, longest, config, caching)
        if one_plan_a_row:
            let_one_plan_name_a_row(self.scheduler)
        if short is not None:
            self.scheduler._prompts.pace = Pace(0.1, short, least=1)
        self.runtime = FakeRuntime(Capacity(slots, rows, chunk, longest), vocab_size=VOCAB, **fake)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.run_ahead = config.run_ahead
        self.now = 0.0

    def add(self, *requests: Request) -> None:
        for r in requests:
            self.scheduler.add(r, self.now)

    def plan(self) -> StepPlan:
        plan = self.try_plan()
        assert plan is not None
        return plan

    def try_plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(0, self.now)
        assert not self.scheduler.failed()
        if plan is not None:
            self.runtime.submit(plan)
        self.scheduler.check_integrity()
        return plan

    def commit(self) -> StepOutput:
        """Commit what one poll brings: at least one result."""
        results = self.runtime.poll(0)
        assert results
        output = StepOutput()
        for result in results:
            assert isinstance(result, StepResult)
            output = self.scheduler.commit(result, self.now)
            self.scheduler.check_integrity()
            for name, token in zip(output.ids, output.tokens, strict=True):
                self.tokens.setdefault(name, []).append(token)
            self.reasons.update({name: reason for name, (reason, _) in output.finished.items()})
        return output

    def step(self) -> tuple[StepPlan, StepOutput]:
        return self.plan(), self.commit()

    def run(self) -> None:
        while self.scheduler.has_work():
            while self.runtime.in_flight < self.run_ahead and self.try_plan() is not None:
                pass
            self.commit()


def spans(plan: StepPlan) -> list[tuple[int, int, int, Source, Emit]]:
    s = plan.spans
    return [
        (row, start, stop, Source(source), Emit(emit))
        for row, start, stop, source, emit in np.stack((s.row, s.start, s.stop, s.source, s.emit), 1).tolist()
    ]


# -- random operations ---------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(
        Setting,
        num_slots=st.sampled_from((10, 13, 24)),
        num_rows=st.sampled_from((1, 3, 7)),
        chunk_size=st.sampled_from((2, 4)),
        max_model_len=st.sampled_from((20, 40)),
        budget=st.sampled_from((2, 8, 32)),
        short=st.sampled_from((None, 2, 5)),
        run_ahead=st.integers(1, 4),
        one_plan_a_row=st.booleans(),
        policy=st.sampled_from(("fcfs", "priority")),
        reserve=st.sampled_from((0.0, 0.1, 0.4)),
        caching=st.booleans(),
        max_delay=st.sampled_from((0, 2)),
        error_every=st.sampled_from((0, 0, 9)),
        pressure=st.booleans(),
        diagonal=st.booleans(),
        owners=st.sampled_from((0, 0, 3)),
    ),
    st.lists(st.tuples(st.sampled_from(KINDS), byte, byte), max_size=40),
)
def test_random_operations(setting: Setting, ops: list[Op]) -> None:
    drive(setting, ops)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(
        Setting,
        num_slots=st.sampled_from((10, 13, 24)),
        num_rows=st.sampled_from((1, 3, 7)),
        chunk_size=st.sampled_from((2, 4)),
        max_model_len=st.sampled_from((20, 40)),
        budget=st.sampled_from((2, 8, 32)),
        short=st.sampled_from((None, 2, 5)),
        run_ahead=st.integers(1, 4),
        one_plan_a_row=st.booleans(),
        reserve=st.sampled_from((0.0, 0.1, 0.4)),
        max_delay=st.sampled_from((0, 2)),
        error_every=st.sampled_from((0, 0, 9)),
        host=st.sampled_from((0, 3, 10, 40)),
        disk=st.sampled_from((4, 60)),
        values=st.booleans(),
        max_copy_delay=st.sampled_from((0, 1, 5)),
        copy_fails_every=st.sampled_from((0, 2, 7)),
        pressure=st.booleans(),
        recovery=st.sampled_from(("load", "faster", "any", "compute")),
    ),
    st.lists(st.tuples(st.sampled_from(KINDS), byte, byte), max_size=40),
)
def test_random_operations_with_tiers(setting: Setting, ops: list[Op]) -> None:
    drive(setting, ops)


def test_who_has_its_memory_starts_though_all_who_ran_gave_theirs_back() -> None:
    """In this case the only row that runs needs a chunk while loads hold all others: it is suspended."""
    setting, ops = random_case(203, tiers=True)
    drive(replace(setting, recovery="load"), ops)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 300, 75))
def test_hundreds_of_cases_with_tiers(first: int) -> None:
    """Each is hundreds of turns; the books are checked after every one."""
    loads = stores = 0
    for seed in range(first, first + 75):
        world = drive(*random_case(seed, tiers=True))
        loads, stores = loads + world.loads, stores + world.stores
    assert loads > 75, "hardly anything comes back, though three of four cases load"
    assert stores > 1_500, "hardly anything leaves"


@pytest.mark.parametrize("run_ahead", [1, 2, 3, 4])
@pytest.mark.parametrize("slots", [6, 7, 11])
def test_tiny_pools_end_with_the_tokens_of_large_ones(slots: int, run_ahead: int) -> None:
    rng = np.random.default_rng(slots)
    requests = [request(f"r{k}", rng.integers(0, VOCAB, rng.integers(1, 12)).tolist(), 12) for k in range(12)]
    bench = Bench(slots=slots, run_ahead=run_ahead, decode_reserve=0.0, max_num_batched_tokens=9)
    bench.add(*requests)
    bench.run()
    for r in requests:
        assert bench.tokens[r.id] == by_hand(r, 64)[0]
    assert bench.scheduler.stats().preemptions > 0


# -- batching (§3.4.2) ---------------------------------------------------------------------------------


def test_prompt_chunks_and_decodes_share_a_step() -> None:
    bench = Bench(max_num_batched_tokens=6, run_ahead=1)
    bench.add(request("a", range(4), 9), request("b", range(10), 9))
    plan, output = bench.step()
    assert spans(plan) == [(0, 0, 4, Source.HOST, Emit.LAST), (1, 0, 2, Source.HOST, Emit.NONE)]
    assert output.ids == ["a"]
    plan, output = bench.step()
    assert spans(plan) == [(0, 4, 5, Source.DEVICE, Emit.LAST), (1, 2, 7, Source.HOST, Emit.NONE)]
    plan, output = bench.step()
    assert spans(plan) == [(0, 5, 6, Source.DEVICE, Emit.LAST), (1, 7, 10, Source.HOST, Emit.LAST)]
    assert output.ids == ["a", "b"]
    assert len(plan.tokens) == 3
    bench.run()


def test_long_prompts_beside_decodes_have_a_budget_of_their_own() -> None:
    bench = Bench(max_num_batched_tokens=20, run_ahead=1, short=3)
    bench.add(request("a", range(4), 9), request("b", range(30), 9))
    plan, _ = bench.step()
    assert spans(plan) == [(0, 0, 4, Source.HOST, Emit.LAST), (1, 0, 16, Source.HOST, Emit.NONE)], "nobody decodes"
    plan, _ = bench.step()
    assert spans(plan) == [(0, 4, 5, Source.DEVICE, Emit.LAST), (1, 16, 19, Source.HOST, Emit.NONE)]
    bench.scheduler.abort("a")
    plan, _ = bench.step()
    assert spans(plan) == [(1, 19, 22, Source.HOST, Emit.NONE)], "nothing was measured, and who decoded may be back"
    bench.now = 1.0
    plan, _ = bench.step()
    assert spans(plan) == [(1, 22, 30, Source.HOST, Emit.LAST)], "nobody decodes any more"
    bench.run()


def test_prompts_by_themselves_leave_room_for_who_has_just_decoded() -> None:
    """As many tokens as fit into the time, while somebody may be back; all of the step otherwise."""
    bench = Bench(max_num_batched_tokens=20, run_ahead=1, short=3)
    pace = bench.scheduler._prompts.pace
    bench.add(request("a", range(2), 3))
    for _ in range(3):
        bench.step()
    pace.measured(10, 0.066)
    bench.add(request("b", range(60), 1))
    assert len(bench.step()[0].tokens) == 20, "what decodes take is not known"
    pace.decoded(1, 0.001)
    assert len(bench.step()[0].tokens) == 5, "a third of 0.1 s: two more steps stand before who comes"
    bench.now = 0.9
    pace.decoded(1, 0.005)
    assert len(bench.step()[0].tokens) == 5
    for _ in range(LATEST):
        pace.decoded(1, 0.01)
    assert len(bench.step()[0].tokens) == 16, "a third of 32 times as long as a decode"
    bench.now = 1.0
    assert len(bench.step()[0].tokens) == 14, "all that are left"


def test_whole_steps_are_limited_by_what_is_known() -> None:
    pace = Pace(0.1, short=256, least=64)
    assert pace.whole() == 256, "a first step is there to be measured"
    pace.measured(1000, 0.2)
    assert pace.whole() is None, "what decodes take is not known"
    pace.decoded(5, 0.001)
    assert pace.whole() == 166
    pace.decoded(2, 0.01)
    assert pace.whole() == 533, "those of fewest rows"
    pace.measured(1000, 100.0)
    assert pace.whole() == 64, "but some go on"
    assert Pace(None).whole() is None
    assert Pace(float("inf")).whole() is None


def test_of_one_owner_a_first_short_prompt_is_short() -> None:
    """Many short ones of one owner are one long one to whoever decodes beside them."""
    bench = Bench(max_num_batched_tokens=40, run_ahead=1, short=6, rows=16, slots=100)
    bench.scheduler._prompts.pace.measured(10, 0.2)  # 5 tokens in 0.1 s
    bench.add(request("mine", range(4), 9))
    bench.step()
    bench.add(*(request(f"theirs-{k}", [k, k, k], 1, owner="they") for k in range(5)))
    bench.add(request("one", [3, 4, 5], 1, owner="one"))
    plan, _ = bench.step()
    assert [opened.name for opened in plan.opens] == ["theirs-0", "one", "theirs-1", "theirs-2"]
    assert len(plan.tokens) == 3 + 3 + 4
    bench.run()
    assert len(bench.reasons) == 7


def test_what_a_piece_reads_counts_against_long_prompts() -> None:
    """The rest of a prompt that is known up to position 400 is short, but it attends to all of that."""
    bench = Bench(slots=500, rows=8, longest=600, max_num_batched_tokens=500, run_ahead=1, max_mixed_seconds=0.1)
    prompt = list(range(200)) * 2
    bench.add(request("before", prompt, 1))
    bench.step()
    pace = bench.scheduler._prompts.pace = Pace(0.1, 256, least=1)
    pace.measured(10, 0.2)  # 5 tokens in 0.1 s
    bench.add(request("mine", range(4), 9))
    bench.step()
    bench.add(*(request(f"theirs-{k}", [*prompt, 7], 1, owner="they") for k in range(4)))
    plan, _ = bench.step()
    assert [opened.name for opened in plan.opens] == ["theirs-0", "theirs-1"], "1 token, then 1 and 6 for 400 before it"
    bench.run()


def test_the_rest_of_a_long_prompt_is_no_short_one() -> None:
    bench = Bench(max_num_batched_tokens=40, run_ahead=1, short=6)
    bench.scheduler._prompts.pace.measured(10, 0.2)  # 5 tokens in 0.1 s
    bench.add(request("mine", range(4), 9))
    bench.step()
    bench.add(request("long", range(20, 34), 1))
    assert [len(bench.step()[0].tokens) for _ in range(4)] == [4, 4, 4, 2]
    bench.run()


def test_who_is_new_does_not_wait_for_rows_that_may_not_join() -> None:
    """Requests that come back to an old turn stand before it, more of them than a step opens."""
    bench = Bench(rows=80, slots=400, max_num_batched_tokens=256, run_ahead=1, max_mixed_seconds=0.1)
    bench.add(request("mine", range(4), 40, owner="me"))
    bench.add(*(request(f"theirs-{k}", [k % 20], 40, owner="they") for k in range(71)))
    while bench.scheduler.stats().waiting or not bench.tokens:
        bench.step()
    holders = bench.scheduler._holders
    for row in [row for row, state in enumerate(holders.rows.states) if state is not None and state.owner == "they"]:
        holders.park(row)
    bench.step()
    bench.add(request("new", range(4), 2))
    for k in range(71):
        bench.scheduler.resume(f"theirs-{k}")
    plan, _ = bench.step()
    named = [opened.name for opened in plan.opens]
    assert "new" in named
    assert len(named) <= 1 + 1 + 32 // LATE_JOINING, "rows whose mask was late count as several"
    bench.run()
    assert len(bench.reasons) == 73


def test_who_has_no_mask_in_time_gets_no_token_and_waits_without_a_row() -> None:
    """Until what is late has come: then it goes on where it was. A row that could not be opened just ends."""
    bench = Bench(run_ahead=1)
    bench.add(*(request(name, range(5), 4) for name in ("late", "lost", "other")))
    plan = bench.plan()
    names = {opened.name: opened.row for opened in plan.opens}
    (result,) = bench.runtime.poll(0)
    assert isinstance(result, StepResult)
    rows = plan.spans.row.tolist()
    late = [rows.index(names[name]) for name in ("late", "lost")]
    result.flags[late] = Flag.LATE
    output = bench.scheduler.commit(replace(result, failed={names["lost"]: "no memory"}), 0.0)
    bench.scheduler.check_integrity()
    assert output.ids == ["other"]
    assert output.finished == {"lost": (FinishReason.ERROR, "no memory")}
    assert (bench.scheduler.stats().running, bench.scheduler.stats().waiting) == (1, 1)
    bench.tokens["other"] = output.tokens.copy()
    bench.step()
    bench.scheduler.resume("late")
    bench.run()
    assert {name: len(tokens) for name, tokens in bench.tokens.items()} == {"late": 4, "other": 4}


def test_short_prompts_fill_a_step_beside_decodes() -> None:
    """Of one owner so many as are short together; the next ones count as long, and share with all others."""
    bench = Bench(max_num_batched_tokens=20, run_ahead=1, short=3)
    bench.add(request("a", range(4), 9))
    bench.step()
    bench.add(*(request(f"short-{k}", range(3), 1) for k in range(4)))
    plan, _ = bench.step()
    assert len(plan.tokens) == 12
    bench.add(*(request(f"theirs-{k}", range(3), 1, owner="them") for k in range(4)))
    plan, _ = bench.step()
    assert len(plan.tokens) == 6
    bench.run()


def test_who_has_many_sequences_gets_a_few_rows_a_step_beside_others_decodes() -> None:
    bench = Bench(rows=80, slots=400, max_num_batched_tokens=256, run_ahead=1, max_mixed_seconds=0.1)
    bench.add(request("mine", range(4), 40, owner="me"))
    bench.step()
    bench.add(*(request(f"theirs-{k}", [k % 20], 9, owner="they") for k in range(100)))
    bench.add(*(request(f"one-{k}", [k % 20], 9, owner=f"one-{k}") for k in range(10)))
    plan, _ = bench.step()
    named = [opened.name for opened in plan.opens]
    assert [name for name in named if name.startswith("one")] == [f"one-{k}" for k in range(10)]
    assert len([name for name in named if name.startswith("theirs")]) == 1 + 16, "the first, and those that join it"
    plan, output = bench.step()
    assert "mine" in output.ids
    assert len(plan.opens) == 16
    bench.run()
    assert len(bench.reasons) == 111


@pytest.mark.parametrize("seconds", [0.1, None])
def test_rows_are_opened_at_once_where_nobody_waits(seconds: float | None) -> None:
    """An owner alone waits for nobody but itself, and offline nobody waits for single tokens."""
    bench = Bench(rows=80, slots=400, max_num_batched_tokens=256, run_ahead=1, max_mixed_seconds=seconds)
    bench.add(request("first", range(4), 40, owner="they" if seconds else "me"))
    bench.step()
    bench.add(*(request(f"theirs-{k}", [k % 20], 9, owner="they") for k in range(79)))
    plan, _ = bench.step()
    assert len(plan.opens) == 79
    bench.run()


@pytest.mark.parametrize(("rows", "seconds", "opened"), [(4, 0.5, 16), (5, 0.5, 70), (4, 1.5, 70)])
def test_rows_are_opened_little_by_little_while_somebody_of_few_may_be_back(
    rows: int, seconds: float, opened: int
) -> None:
    bench = Bench(rows=80, slots=400, max_num_batched_tokens=256, run_ahead=1, max_mixed_seconds=0.1)
    bench.add(*(request(f"mine-{k}", range(4), 2, owner="me") for k in range(rows)))
    bench.run()
    bench.now += seconds
    bench.add(request("first", range(4), 40, owner="they"))
    bench.step()
    bench.add(*(request(f"theirs-{k}", [k % 20], 9, owner="they") for k in range(70)))
    plan, _ = bench.step()
    assert len(plan.opens) == opened
    bench.run()


def test_an_owner_alone_waits_for_itself() -> None:
    bench = Bench(max_num_batched_tokens=20, run_ahead=1, short=3)
    bench.add(request("a", range(4), 9, owner="me"), request("b", range(40), 9, owner="me"))
    bench.step()
    plan, _ = bench.step()
    assert len(plan.tokens) == 19, "nobody else decodes"
    bench.add(request("c", range(40), 9, owner="other"))
    plan, _ = bench.step()
    assert len(plan.tokens) == 5 + 3
    bench.run()


def test_a_decode_that_is_under_way_counts_as_one() -> None:
    """With one plan in flight per row decodes are in every second plan; the others stand before them all the same."""
    bench = Bench(max_num_batched_tokens=20, run_ahead=2, one_plan_a_row=True, short=3)
    bench.add(request("a", range(4), 40))
    bench.step()
    bench.add(request("b", range(30), 1))
    sizes = []
    while "b" not in bench.reasons:
        plan, _ = bench.step()
        sizes.append(len(plan.tokens))
    assert max(sizes) <= 3


def test_the_share_of_long_prompts_is_what_fits_into_the_time() -> None:
    pace = Pace(0.1, short=256, least=64)
    assert pace.room(0) == 256, "nothing is known yet"
    pace.measured(63, 5.0)
    pace.measured(500, 0.0)
    assert pace.room(0) == 256, "this tells nothing"
    pace.measured(1000, 0.25)
    assert pace.room(0) == 400
    assert pace.room(100) == 300
    assert pace.room(390) == 64, "but some go on"
    for _ in range(20):
        pace.measured(100, 1.0)
    assert pace.room(0) == 64
    assert Pace(None).room(0) is None
    assert Pace(float("inf")).room(0) is None


def test_long_prompts_take_three_times_what_the_decodes_take() -> None:
    pace = Pace(0.1, short=256, least=64)
    pace.measured(1000, 0.1)
    pace.decoded(1, 0.0)
    assert pace.room(0) == 1000, "nothing is known of decodes"
    pace.decoded(2, 0.01001)
    assert pace.room(1) == 300 - 1
    assert pace.room(3) == 450 - 3, "more decodes take no more time each"
    assert pace.room(100) == 1000 - 100, "0.1 s are the limit still"
    pace.decoded(3, 0.9)
    assert pace.room(3) == 450 - 3, "the fastest of the latest says it"
    for _ in range(LATEST):
        pace.decoded(2, 0.02)
    assert pace.room(2) == 600 - 2, "which is forgotten in time"
    pace.decoded(1, 0.001)
    assert pace.room(1) == 64


def test_steps_without_prompts_are_measured_as_decodes() -> None:
    bench = Bench(max_num_batched_tokens=20, run_ahead=1, short=3)
    bench.add(request("a", range(3), 40))
    for seconds in (0.0, 0.01):
        bench.plan()
        (result,) = bench.runtime.poll(0)
        assert isinstance(result, StepResult)
        bench.scheduler.commit(replace(result, seconds=seconds), 0.0)
    bench.add(request("b", range(60), 1))
    bench.scheduler._prompts.pace.measured(1000, 0.999)
    assert bench.scheduler._prompts.pace.room(1) == 30 - 1, "beside one of 10 ms"


def test_steps_are_measured_with_the_tokens_that_they_had() -> None:
    bench = Bench(max_num_batched_tokens=20, run_ahead=1, short=3)
    bench.add(request("a", range(4), 40), request("b", range(60), 1))
    plan = bench.plan()
    (result,) = bench.runtime.poll(0)
    assert isinstance(result, StepResult)
    bench.scheduler.commit(replace(result, seconds=0.2), 0.0)
    assert len(plan.tokens) == 20
    plan = bench.plan()
    assert len(plan.tokens) == 9, "10 in 0.1 s, and one of them decodes"


def test_no_long_step_is_planned_behind_another() -> None:
    """Who comes during the first one would wait for both."""
    bench = Bench(max_num_batched_tokens=20, run_ahead=2, short=3)
    bench.add(request("a", range(60), 1))
    bench.scheduler._prompts.pace.measured(10, 1.0)
    assert bench.scheduler.plan(0, 0.0) is not None
    assert bench.scheduler.plan(0, 0.0) is None
    bench = Bench(max_num_batched_tokens=20, run_ahead=2, short=3)
    bench.add(request("a", range(60), 1))
    bench.scheduler._prompts.pace.measured(10, 0.05)
    assert bench.scheduler.plan(0, 0.0) is not None
    assert bench.scheduler.plan(0, 0.0) is not None, "both take 0.2 s"
    assert not Pace(None).is_long(10**9)
    assert not Pace(float("inf")).is_long(10**9)
    assert Pace(0.1, short=256).is_long(257), "nothing is known yet"
    assert not Pace(0.1, short=256).is_long(256)


def test_a_short_prompt_shares_no_step_with_all_of_a_long_one() -> None:
    bench = Bench(max_num_batched_tokens=20, run_ahead=1, short=3)
    bench.add(*(request(f"long-{k}", range(60), 1, owner="them") for k in range(2)))
    bench.step()
    bench.add(request("mine", range(2), 1, owner="me"))
    plan, output = bench.step()
    assert output.ids == ["mine"]
    assert len(plan.tokens) == 2 + 3, "nobody decodes, and yet somebody waits"
    plan, _ = bench.step()
    assert len(plan.tokens) == 20
    bench.run()


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    bench = Bench(max_num_batched_tokens=8, run_ahead=1, short=3)
    bench.add(request("long", range(40), 1), request("next", range(40), 1))
    bench.step()
    bench.add(request("short", range(3), 1), request("longer", range(5), 1))
    plan, output = bench.step()
    assert spans(plan) == [(1, 0, 3, Source.HOST, Emit.LAST), (0, 8, 11, Source.HOST, Emit.NONE)]
    assert output.ids == ["short"]
    bench.add(*(request(f"short-{k}", range(3), 1) for k in range(3)))
    plan, output = bench.step()
    assert [s[1:3] for s in spans(plan)] == [(0, 3), (11, 14)], "half of a step is kept for those they pass"
    bench.run()


def test_nobody_passes_while_memory_is_short() -> None:
    bench = Bench(slots=24, max_num_batched_tokens=16, run_ahead=1, short=3, decode_reserve=0)
    bench.add(request("long", range(60), 1), request("next", range(50), 1))
    bench.step()
    for count in range(200):
        bench.add(request(f"short-{count}", range(3), 40))
        bench.step()
        if "next" in bench.tokens:
            break
    assert any(name.startswith("short") for name in bench.tokens), "some have passed"
    assert "next" in bench.tokens, "but not for ever"
    bench.run()


def test_steady_decodes_send_no_deltas_but_new_chunks() -> None:
    bench = Bench(run_ahead=1)
    bench.add(request("a", range(3), 9))
    plan, _ = bench.step()
    assert len(plan.opens) == 1
    assert plan.table.column.tolist() == [0]
    columns = []
    while bench.scheduler.has_work():
        plan, _ = bench.step()
        assert not plan.opens
        assert not plan.closes
        columns.append(plan.table.column.tolist())
    assert columns == [[], [1], [], [], [], [2], [], []]


def test_more_decodes_than_budget_serve_the_earliest() -> None:
    bench = Bench(max_num_batched_tokens=2, run_ahead=2, one_plan_a_row=True)
    bench.add(*(request(f"r{k}", [k], 3) for k in range(4)))
    assert spans(bench.plan())[0][:3] == (0, 0, 1)
    assert spans(bench.plan())[0][:3] == (2, 0, 1)
    bench.commit()
    assert bench.plan().spans.row.tolist() == [0, 1]
    bench.run()
    assert {name: len(tokens) for name, tokens in bench.tokens.items()} == dict.fromkeys(["r0", "r1", "r2", "r3"], 3)


def test_decode_is_never_planned_past_max_tokens_or_context() -> None:
    bench = Bench(longest=8, run_ahead=4)
    bench.add(request("a", range(4), 2), request("b", range(6), 50))
    stops: dict[int, int] = {}
    while (plan := bench.try_plan()) is not None:
        for row, _, stop, _, _ in spans(plan):
            stops[row] = stop
    assert stops == {0: 5, 1: 7}
    bench.run()
    assert (len(bench.tokens["a"]), len(bench.tokens["b"])) == (2, 2)
    assert set(bench.reasons.values()) == {FinishReason.LENGTH}


def test_run_ahead_results_after_a_stop_are_void() -> None:
    first = by_hand(request("a", [1, 2, 3], 10), 64)[0]
    bench = Bench(run_ahead=3)
    bench.add(request("a", [1, 2, 3], 10, stop=[first[1]]))
    for _ in range(3):
        bench.plan()
    bench.commit()
    assert bench.tokens["a"] == first[: first.index(first[1]) + 1]
    assert bench.reasons["a"] is FinishReason.STOP
    assert not bench.scheduler.has_work()


def test_a_row_that_one_plan_may_name_is_not_in_the_next() -> None:
    bench = Bench(run_ahead=3, one_plan_a_row=True, max_num_batched_tokens=4)
    bench.add(request("a", range(6), 3), request("b", range(2), 3))
    assert [s[:3] for s in spans(bench.plan())] == [(0, 0, 4)]
    assert [s[:3] for s in spans(bench.plan())] == [(1, 0, 2)], "b, since a is in flight"
    assert bench.try_plan() is None
    bench.run()


# -- order ---------------------------------------------------------------------------------------------


def test_priority_goes_before_arrival_if_asked_for() -> None:
    for policy, order in (("fcfs", ["a", "b", "c"]), ("priority", ["c", "a", "b"])):
        bench = Bench(rows=1, scheduling_policy=policy)
        bench.add(request("a", [1], 2, priority=5), request("b", [1], 2, priority=5), request("c", [1], 2, priority=-1))
        bench.run()
        assert list(bench.reasons) == order


def test_large_request_at_the_head_is_not_overtaken() -> None:
    bench = Bench(slots=8, run_ahead=1)
    bench.add(request("a", range(16), 4), request("large", range(24), 4), request("small", [1], 1))
    bench.run()
    assert list(bench.reasons) == ["a", "large", "small"]


# -- memory (§3.4.3.5) ---------------------------------------------------------------------------------


def test_reserve_gates_admission_but_not_an_empty_batch() -> None:
    bench = Bench(slots=10, decode_reserve=0.3, run_ahead=1)
    bench.add(request("a", range(38), 3), request("b", range(4), 2))
    plan, _ = bench.step()
    assert len(plan.opens) == 1, "a takes 10 of 10 chunks, and starts, since nothing runs"
    bench.run()
    assert list(bench.reasons) == ["a", "b"]


@pytest.mark.parametrize(("share", "opened"), [(0.5, 5), (0.2, 8), (0.0, 10)])
def test_reserve_is_a_chunk_for_each_that_runs_and_at_most_a_share(share: float, opened: int) -> None:
    """Of ten chunks; each request takes one, and grows into a second with its second token."""
    bench = Bench(slots=10, rows=10, decode_reserve=share, run_ahead=1)
    bench.add(*(request(f"{k}", [k] * 4, 3) for k in range(10)))
    plan, _ = bench.step()
    assert len(plan.opens) == opened
    bench.run()
    assert len(bench.reasons) == 10


@pytest.mark.parametrize(("slots", "opened"), [(20, 5), (19, 4)])
def test_nothing_is_kept_while_all_have_room_however_long_they_get(slots: int, opened: int) -> None:
    """Each takes three chunks, and may grow into a fourth. Four of them have, and leave four chunks, or three."""
    bench = Bench(slots=slots, rows=10, decode_reserve=0.5, run_ahead=1)
    bench.add(*(request(f"{k}", [k] * 12, 4) for k in range(4)))
    for _ in range(3):
        bench.step()
    assert bench.scheduler.stats().free_chunks == slots - 16
    bench.add(request("new", [9] * 12, 4), request("next", [8] * 12, 4))
    plan, _ = bench.step()
    assert len(plan.opens) == opened - 4
    bench.run()
    assert len(bench.reasons) == 6
    assert bench.scheduler.stats().preemptions == 0


def test_requests_that_load_count_with_all_that_they_may_need() -> None:
    scheduler = Bench(slots=8, decode_reserve=0.5).scheduler
    one: Any = SimpleNamespace(known=np.zeros(12, np.int32), limit=16)  # four chunks
    kept = []
    for count in range(3):
        scheduler._holders.loading = [one] * count
        kept.append(scheduler._prompts._kept(one))
    assert kept == [0, 0, 2]


def test_a_request_needs_chunks_for_all_but_its_last_token() -> None:
    assert [chunks_of(12, limit, 4) for limit in (12, 16, 17, 18)] == [3, 4, 4, 5]


def test_latest_arrival_is_suspended_and_returns_to_its_place() -> None:
    bench = Bench(slots=8, decode_reserve=0.0, run_ahead=1)
    requests = [request(name, [k] * 8, 12) for k, name in enumerate("abcd")]
    bench.add(*requests)
    plan, _ = bench.step()
    assert len(plan.opens) == 4
    plan, _ = bench.step()
    assert bench.scheduler.stats().preemptions == 2, "two of eight chunks a request: half of them have to go"
    assert plan.spans.row.tolist() == [0, 1]
    assert bench.scheduler.stats().waiting == 2
    bench.run()
    assert list(bench.reasons) == ["a", "b", "c", "d"]
    for r in requests:
        assert bench.tokens[r.id] == by_hand(r, 64)[0]


def crowd(bench: Bench, count: int) -> list[Request]:
    """Many long sequences of one owner: they have all rows, and more wait."""
    many = [request(f"m{k}", [k + 1] * 4, 24, owner="greedy") for k in range(count)]
    bench.add(*many)
    bench.step()
    return many


def test_one_owner_makes_way_for_the_first_of_another() -> None:
    """Of four rows the greedy one gives its latest, at once; who gave it goes on where it was."""
    bench = Bench(rows=4, run_ahead=1)
    many = crowd(bench, 9)
    bench.add(request("first", [50] * 4, 8, owner="modest"), request("second", [51] * 4, 8, owner="modest"))
    names = []
    for _ in range(4):
        _, output = bench.step()
        names += [name for name in output.ids if name == "first"]
    assert names, "it waits, though another has all the rows"
    assert bench.scheduler.stats().preemptions == 1, "the second has no claim on another row"
    assert {state.request.id for state in bench.scheduler._rows.states if state} == {"m0", "m1", "m2", "first"}
    bench.run()
    for r in many:
        assert bench.tokens[r.id] == by_hand(r, 64)[0]
    assert list(bench.reasons).index("second") < list(bench.reasons).index("m4"), "its turn came before the rest"


def test_a_row_that_no_plan_names_makes_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that take turns: the latest are in the steps that run, and who comes need not wait for these."""
    bench = Bench(rows=4, run_ahead=1)
    crowd(bench, 9)
    monkeypatch.setattr(Portions, "of", lambda portions, ready, pace: ready[-2:])
    bench.step()
    bench.add(request("first", [50] * 4, 8, owner="modest"))
    bench.step()
    plan, _ = bench.step()
    assert [opened.row for opened in plan.opens] == [bench.scheduler._requests["first"].row]
    assert {state.request.id for state in bench.scheduler._rows.states if state} == {"m0", "m2", "m3", "first"}


def test_one_tenant_makes_way_for_the_first_of_another() -> None:
    """Each request of the greedy one is an owner of its own, so as owners all have their share."""
    bench = Bench(rows=4, run_ahead=1)
    many = [request(f"m{k}", [k + 1] * 4, 24, tenant="greedy") for k in range(9)]
    bench.add(*many)
    bench.step()
    bench.add(request("first", [50] * 4, 8, tenant="modest"), request("second", [51] * 4, 8, tenant="modest"))
    names = []
    for _ in range(4):
        _, output = bench.step()
        names += [name for name in output.ids if name == "first"]
        bench.scheduler.check_integrity()
    assert names, "it waits, though another has all the rows"
    assert bench.scheduler.stats().preemptions == 1, "the second has no claim on another row"
    bench.run()
    for r in many:
        assert bench.tokens[r.id] == by_hand(r, 64)[0]
    assert list(bench.reasons).index("second") < list(bench.reasons).index("m5"), "its turn came before the rest"


@pytest.mark.parametrize(("tenants", "kept"), [(("greedy", "modest"), 16), (("", ""), 0)])
def test_what_a_tenant_has_left_is_not_pushed_out_by_another(tenants: tuple[str, str], kept: int) -> None:
    bench, prompt = Bench(run_ahead=1), list(range(50, 66))
    bench.add(request("modest", prompt, 1, tenant=tenants[1]))
    bench.run()
    for k in range(12):
        bench.add(request(f"greedy{k}", [k + 1] * 16, 1, tenant=tenants[0]))
        bench.run()
    store = bench.scheduler._store
    found = store.find(store.chain(b""), np.array([*prompt, 1], np.int32))
    assert found.num_tokens == kept


@pytest.mark.parametrize(("waits_for_tokens", "served"), [(True, True), (False, False)])
def test_several_owners_of_many_make_way_for_the_first_of_another(waits_for_tokens: bool, served: bool) -> None:
    """Each has its share, half of the rows; both hold theirs for as long as all their tokens take."""
    bench = Bench(slots=128, rows=12, run_ahead=1, max_mixed_seconds=0.1 if waits_for_tokens else None)
    many = [request(f"{owner}{k}", [k + 1] * 4, 24, owner=owner) for k in range(9) for owner in "xy"]
    bench.add(*many)
    bench.step()
    bench.add(request("first", [50] * 4, 8, owner="modest"), request("second", [51] * 4, 8, owner="modest"))
    names = []
    for _ in range(4):
        _, output = bench.step()
        names += [name for name in output.ids if name == "first"]
    assert bool(names) is served
    assert bench.scheduler.stats().preemptions == int(served), "the second has no claim on another row"
    bench.run()
    for r in many:
        assert bench.tokens[r.id] == by_hand(r, 64)[0]


def test_few_rows_each_are_no_reason_to_make_way() -> None:
    """Three owners with two rows each: whoever comes has its turn when one of them ends."""
    bench = Bench(rows=6, run_ahead=1, max_mixed_seconds=0.1)
    bench.add(*(request(f"{owner}{k}", [k + 1] * 4, 24, owner=owner) for k in range(3) for owner in "xyz"))
    bench.step()
    bench.add(request("first", [50] * 4, 8, owner="modest"))
    for _ in range(6):
        bench.step()
    assert bench.scheduler.stats().preemptions == 0


def test_nobody_makes_way_for_requests_of_their_own() -> None:
    bench = Bench(rows=4, run_ahead=1)
    bench.add(*(request(f"r{k}", [k + 1] * 4, 24) for k in range(4)))
    bench.step()
    bench.add(request("late", [50] * 4, 2))
    for _ in range(8):
        bench.step()
    assert bench.scheduler.stats().preemptions == 0
    assert "late" not in bench.tokens


def test_return_finds_what_is_left_of_its_chunks_and_computes_the_holes() -> None:
    bench = Bench(slots=12, decode_reserve=0.0, run_ahead=1)
    a, b = request("a", range(8), 24), request("b", range(9, 25), 20)
    bench.add(a, b)
    seen = []
    while bench.scheduler.has_work():
        plan, _ = bench.step()
        if plan.opens and plan.opens[0].num_output:
            seen = spans(plan)
            assert plan.opens[0].num_output == len(bench.tokens["b"]) - 1
    starts = [start for _, start, *_ in seen]
    assert starts[0] == 0, "leading chunks were lost"
    assert len(starts) == 2, "later ones were found"
    assert [emit for *_, emit in seen] == [Emit.NONE, Emit.LAST]
    assert bench.tokens == {"a": by_hand(a, 64)[0], "b": by_hand(b, 64)[0]}


def test_end_during_a_suspension_lets_nobody_overtake() -> None:
    end_during_a_suspension()


def test_rows_wait_rather_than_suspend_while_memory_is_on_its_way_back() -> None:
    bench = Bench(slots=4, decode_reserve=0.0, run_ahead=2)
    # a's last token is planned with its prompt; b needs a chunk that a is about to give back
    bench.add(request("a", range(8), 1), request("b", range(8), 6))
    bench.plan()
    assert bench.try_plan() is None, "b waits"
    bench.run()
    assert bench.scheduler.stats().preemptions == 0
    assert len(bench.tokens["b"]) == 6


# -- prefix cache --------------------------------------------------------------------------------------


def test_equal_prefixes_are_shared_and_counted() -> None:
    bench = Bench()
    bench.add(request("a", range(12), 2))
    bench.run()
    bench.add(request("b", [*range(10), 7, 7, 7], 2), request("c", range(12), 2), request("d", range(12), 2, salt=b"x"))
    bench.plan()
    output = bench.commit()
    assert output.num_cached_tokens == {"b": 8, "c": 8, "d": 0}, "of c's 12 the last chunk is computed"
    stats = bench.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (49, 16, 49)
    bench.run()


def test_conversation_finds_its_output_too() -> None:
    bench = Bench()
    bench.add(request("a", range(6), 7))
    bench.run()
    bench.add(request("b", [*range(6), *bench.tokens["a"], 1, 2], 2))
    bench.plan()
    assert bench.commit().num_cached_tokens == {"b": 12}


def test_without_prefix_caching_nothing_is_kept() -> None:
    bench = Bench(caching=False)
    bench.add(request("a", range(12), 2))
    bench.run()
    assert bench.scheduler.stats().cached_chunks == 0
    bench.add(request("b", range(12), 2))
    bench.run()
    assert bench.scheduler.stats().prefix_hits == 0
    assert bench.tokens["a"] == bench.tokens["b"]


def test_chunks_with_tokens_that_do_not_count_lose_their_identity() -> None:
    bench = Bench()
    bench.add(request("a", range(4), 12))
    while len(bench.tokens.get("a", ())) < 10:
        bench.step()
    output = list(bench.tokens["a"])
    bench.scheduler.finish("a", 5, FinishReason.STOP)
    assert bench.scheduler.stats().generation_tokens == 5
    assert not bench.scheduler.has_work()
    bench.add(request("b", [*range(4), *output, 1], 1))
    bench.plan()
    assert bench.commit().num_cached_tokens == {"b": 9}, "4 + 5 tokens count"


# -- endings -------------------------------------------------------------------------------------------


def test_finish_from_outside_makes_tokens_in_flight_void() -> None:
    bench = Bench(run_ahead=3)
    bench.add(request("a", range(3), 20))
    bench.plan()
    bench.commit()
    bench.plan()
    bench.plan()
    bench.scheduler.finish("a", 1, FinishReason.STOP)
    assert bench.scheduler.stats().running == 0
    assert bench.commit().ids == []
    assert not bench.scheduler.has_work()
    bench.scheduler.finish("a", 1, FinishReason.STOP)  # ended: ignored


def test_finish_with_more_tokens_than_there_are_is_a_defect() -> None:
    bench = Bench()
    bench.add(request("a", range(3), 20))
    with pytest.raises(IntegrityError, match="not 4"):
        bench.scheduler.finish("a", 4, FinishReason.STOP)


def test_abort_anywhere() -> None:
    bench = Bench(rows=2, run_ahead=2)
    bench.add(*(request(name, range(5), 8) for name in "abc"))
    bench.plan()
    for name in ("c", "a", "nobody", "a"):
        bench.scheduler.abort(name)
        bench.scheduler.check_integrity()
    bench.run()
    assert set(bench.tokens) == {"b"}
    bench.add(request("a", range(5), 2))  # the id is free again
    bench.run()
    assert len(bench.tokens["a"]) == 2


def test_row_and_slots_are_not_reused_while_a_plan_in_flight_names_them() -> None:
    bench = Bench(rows=1, slots=2, run_ahead=3)
    bench.add(request("a", range(4), 4))
    bench.plan()
    bench.plan()
    bench.scheduler.abort("a")
    bench.add(request("b", range(4), 4))
    assert bench.try_plan() is None
    bench.run()
    assert len(bench.tokens["b"]) == 4


def test_stop_ids_count_only_after_min_tokens() -> None:
    every = list(range(VOCAB - 1))
    bench = Bench()
    bench.add(request("a", range(3), 8, stop=every, min_tokens=3))
    bench.run()
    assert bench.tokens["a"][:3] == [VOCAB - 1] * 3, "the only one allowed"
    assert len(bench.tokens["a"]) >= 4
    assert bench.tokens["a"] == by_hand(request("a", range(3), 8, stop=every, min_tokens=3), 64)[0]


def test_failed_step_ends_its_requests_and_nothing_else() -> None:
    bench = Bench(run_ahead=1, fail=lambda plan: "out of luck" if plan.step == 1 else None)
    bench.add(request("a", range(8), 8), request("b", range(60), 2))
    bench.step()
    bench.add(request("c", range(5), 2))
    bench.scheduler.abort("b")
    _, output = bench.step()
    assert output.finished == dict.fromkeys("ac", (FinishReason.ERROR, "out of luck"))
    bench.add(request("d", range(5), 3))
    bench.run()
    assert bench.tokens["d"] == by_hand(request("d", range(5), 3), 64)[0]
    stats = bench.scheduler.stats()
    assert stats.free_chunks + stats.cached_chunks == stats.total_chunks


def test_row_without_finite_logits_ends_alone() -> None:
    bench = Bench(run_ahead=2, nan=lambda step, row: (step, row) == (1, 0))
    bench.add(request("a", range(3), 8), request("b", range(4), 3))
    bench.run()
    assert bench.reasons == {"a": FinishReason.ERROR, "b": FinishReason.LENGTH}
    assert (len(bench.tokens["a"]), len(bench.tokens["b"])) == (1, 3)


def test_chunks_of_a_step_that_failed_are_not_found_though_later_steps_went_well() -> None:
    """Nobody is told of the failure: the request was dropped while the step ran."""
    bench = Bench(max_num_batched_tokens=8, fail=lambda plan: "out of luck" if plan.step == 0 else None)
    bench.add(request("a", range(16), 4))
    bench.plan()
    bench.plan()
    bench.scheduler.abort("a")
    bench.commit()
    bench.add(request("b", range(16), 4))
    bench.run()
    assert bench.tokens["b"] == by_hand(request("b", range(16), 4), 64)[0]


def test_chunks_of_a_row_without_finite_logits_are_not_found_again() -> None:
    """They may be the reason. Those that others use, too, stay."""
    bench = Bench(run_ahead=1, max_num_batched_tokens=4, nan=lambda step, row: (step, row) == (2, 0))
    bench.add(request("a", range(12), 3))
    for _ in range(3):
        _, output = bench.step()
    reason, why = output.finished["a"]
    assert reason is FinishReason.ERROR
    assert "not finite" in str(why)
    assert bench.scheduler.stats().cached_chunks == 0
    bench.add(request("again", range(12), 3))
    bench.run()
    assert bench.scheduler.stats().prefix_hits == 0
    assert bench.tokens["again"] == by_hand(request("a", range(12), 3), 64)[0]


def test_result_out_of_turn_is_a_defect() -> None:
    bench = Bench()
    bench.add(request("a", range(3), 8))
    bench.plan()
    nothing = np.empty(0, np.int32)
    with pytest.raises(IntegrityError, match="out of turn"):
        bench.scheduler.commit(StepResult(7, nothing.reshape(0, 1), nothing, nothing), 0.0)


# -- log-probabilities and penalties -------------------------------------------------------------------


def test_prompt_logprobs_are_whole_and_bypass_the_cache() -> None:
    bench = Bench(max_num_batched_tokens=5, run_ahead=1)
    bench.add(request("a", range(12), 2))
    bench.run()
    bench.add(request("b", range(12), 2, prompt_logprobs=1, logprobs=1))
    index: list[int] = []
    while bench.scheduler.has_work():
        plan, output = bench.step()
        if plan.targets is not None:
            assert set(plan.spans.emit.tolist()) == {Emit.ALL}
        if "b" in output.prompt_logprobs:
            index += output.prompt_logprobs["b"].index.tolist()
        assert set(output.logprobs) == set(output.ids)
        assert output.num_cached_tokens.get("b", 0) == 0
    assert index == list(range(1, 12))
    assert bench.tokens["a"] == bench.tokens["b"]


def test_penalties_get_their_tokens() -> None:
    bench = Bench()
    r = request("a", range(5), 6, repetition_penalty=1.5)
    bench.add(r)
    plan, _ = bench.step()
    assert plan.opens[0].prompt is not None
    assert plan.opens[0].prompt.tolist() == list(range(5))
    assert plan.opens[0].output is not None
    bench.run()
    assert bench.tokens["a"] == by_hand(r, 64)[0]


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (request("n", [], 4), RequestError, "empty"),
        (request("n", range(64), 4), RequestError, "raise max_model_len"),
        (request("n", range(30), 30), CapacityError, "15 chunks"),
        (request("kept", range(3), 4), RequestError, "another id"),
    ],
)
def test_request_that_could_never_run_is_refused(bad: Request, error: type[Exception], words: str) -> None:
    bench = Bench(slots=8)
    bench.add(request("kept", range(3), 4))
    with pytest.raises(error, match=words):
        bench.add(bad)
    bench.scheduler.check_integrity()
    bench.run()
    assert len(bench.tokens["kept"]) == 4
    assert "n" not in bench.tokens


def test_request_that_just_fits_runs() -> None:
    bench = Bench(slots=8, decode_reserve=0.5)
    bench.add(request("a", range(20), 13))  # 33 tokens, the last of which needs no KV
    bench.run()
    assert len(bench.tokens["a"]) == 13
    with pytest.raises(CapacityError):
        bench.add(request("b", range(20), 14))


def test_it_is_a_scheduler() -> None:
    scheduler: Scheduler[StepPlan, StepResult] = Bench().scheduler
    assert not scheduler.has_work()
    assert scheduler.plan(0, 0.0) is None
    stats = scheduler.stats()
    assert (stats.total_chunks, stats.free_chunks) == (32, 32)


def test_tail_ends_before_the_end_symbol() -> None:
    """The next turn may write that in another way; without it whatever follows finds all that was said."""
    bench = Bench(run_ahead=2)
    bench.add(request("free", range(4), 12))
    bench.run()
    said = bench.tokens["free"]
    end = next(k for k in range(2, 12) if (4 + k) % 4 and said.index(said[k]) == k)
    bench = Bench(run_ahead=2)
    bench.add(request("a", range(4), 12, stop=(said[end],)))
    bench.run()
    assert bench.tokens["a"] == said[: end + 1]
    other = (said[end] + 1) % VOCAB
    bench.add(request("b", [*range(4), *said[:end], other, 1], 1))
    bench.plan()
    assert bench.commit().num_cached_tokens == {"b": 4 + end}


def test_who_waits_alone_for_copies_is_looked_at_again_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the copies, which may take longer than anybody expected."""
    config = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=256)
    scheduler = StepScheduler(8, 4, 32, 200, config, tiers={Tier.HOST: 8})
    prompt, params = np.arange(3, 103, dtype=np.int32), SamplingParams(max_tokens=2, seed=0)
    scheduler.add(Request("alone", prompt, params, frozenset({1}), 2), now=10.0)
    monkeypatch.setattr(Recovery, "least_seconds", lambda recovery, missing: 1.0)
    monkeypatch.setattr(Movement, "puts_off", lambda movement, missing, most, again, *_: again > 0)
    monkeypatch.setattr(KVStore, "num_moving", 1)
    assert scheduler.next_event(10.0) == Event(EventKind.COPY), "nobody waits yet"
    assert scheduler.plan(0, 10.0) is None
    assert scheduler.next_event(10.25) == Event(EventKind.COPY, 11.0)
    assert scheduler.plan(0, 10.5) is None
    assert scheduler.next_event(10.5) == Event(EventKind.COPY, 11.0), "in all, not from the last look on"
    assert scheduler.plan(0, 11.0) is not None
    assert scheduler.next_event(11.0) == Event(EventKind.COPY)
