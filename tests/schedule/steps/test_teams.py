"""Teams: plans that pass the stages of a pipeline are alike long, wait for no token that is on its way, and leave
nobody out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellar.core.config import ScheduleConfig
from cellar.core.messages import StepPlan
from cellar.runtime.protocol import Capacity
from cellar.runtime.steps.fake import FakeRuntime
from cellar.schedule.steps.rows import Index, Rows
from cellar.schedule.steps.scheduler import StepScheduler
from cellar.schedule.steps.teams import Teams
from tests.schedule.steps.driver import KINDS, VOCAB, Op, Setting, drive, random_case, request

byte = st.integers(0, 255)
MANY = 24


class Pipeline:
    """Rows that decode, and plans that pass so many stages; a plan ends when as many others have begun after it."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.rows = Rows(MANY, 64, 4)
        self.rows.last[:] = 10**9
        self.teams = Teams(self.rows, stages)
        self.flying: deque[Index] = deque()
        self.plans: list[set[int]] = []

    def live(self) -> set[int]:
        return set(np.flatnonzero(self.rows.decodes).tolist())

    def join(self, row: int) -> None:
        self.rows.decodes[row] = True

    def leave(self, row: int) -> None:
        self.rows.decodes[row] = False

    def plan(self) -> None:
        """Plans until there is one with rows, as plans before it end."""
        if not self.live():
            return
        while not len(found := self.found()):
            assert self.flying, "nothing runs, and nothing is planned: a deadlock"
            self.end()
        self.rows.in_flight[found] += 1
        self.teams.planned(found)
        self.flying.append(found)
        if len(self.flying) > self.stages:
            self.end()
        self.plans.append(set(found.tolist()))

    def found(self) -> Index:
        found = self.teams.of(self.rows.ready(2), again=False)
        return found if len(found) else self.teams.of(self.rows.ready(2), again=True)

    def end(self) -> None:
        self.rows.in_flight[self.flying.popleft()] -= 1

    def check(self) -> None:
        """With the same rows for a while: nobody is left out, nobody is in twice, and plans are alike long."""
        live, stages = self.live(), self.stages
        for _ in range(2 * stages):
            self.plan()
        begin = len(self.plans)
        for _ in range(4 * stages):
            self.plan()
        for k in range(begin, len(self.plans) - stages + 1):
            window = self.plans[k : k + stages]
            if len(live) >= stages:
                assert set().union(*window) == live, "somebody starves"
                assert sum(map(len, window)) == len(live), "a row is in a plan whose last token is on its way"
                sizes = [len(plan) for plan in window]
                assert max(sizes) - min(sizes) <= 1, "a long plan keeps the stages of short ones waiting"
            else:
                assert set().union(*self.plans[k - stages : k + stages]) == live, "somebody starves"


def play(stages: int, changes: list[tuple[bool, int, int]]) -> None:
    """Rows join and leave, so many plans apart."""
    pipeline = Pipeline(stages)
    for joins, row, plans in changes:
        (pipeline.join if joins else pipeline.leave)(row)
        for _ in range(plans):
            pipeline.plan()
    if pipeline.live():
        pipeline.check()


CHANGES = st.lists(st.tuples(st.sampled_from((True, True, False)), st.integers(0, MANY - 1), st.integers(0, 5)))


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 6), CHANGES)
def test_teams_are_even_and_nobody_starves_whoever_joins_and_leaves(
    stages: int, changes: list[tuple[bool, int, int]]
) -> None:
    play(stages, changes)


def _lowest(teams: Teams, ready: Index, again: bool) -> Index:
    return ready[: max(1, len(ready) // teams._stages)]


def _all(teams: Teams, ready: Index, again: bool) -> Index:
    return ready


def _forgetful(teams: Teams, rows: Index) -> None:
    teams._latest[rows] = -1
    teams._made += 1


def _strict(teams: Teams, ready: Index, again: bool) -> Index:
    return OF(teams, ready[teams._latest[ready] <= teams._made - teams._stages], False)


OF = Teams.of
BUGS: dict[str, tuple[str, Callable[..., object], list[tuple[bool, int, int]]]] = {
    "those with low numbers always": ("of", _lowest, [(True, row, 0) for row in range(9)]),
    "everybody in every plan": ("of", _all, [(True, row, 0) for row in range(9)]),
    "nobody remembers who was in": ("planned", _forgetful, [(True, row, 1) for row in range(9)]),
    "fewer rows than stages wait for plans that nobody makes": ("of", _strict, [(True, 3, 0)]),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(name: str) -> None:
    method, wrong, changes = BUGS[name]
    play(3, changes)
    with patch.object(Teams, method, wrong), pytest.raises(AssertionError):
        play(3, changes)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(
        Setting,
        num_slots=st.sampled_from((10, 13, 24)),
        num_rows=st.sampled_from((1, 3, 7)),
        chunk_size=st.sampled_from((2, 4)),
        max_model_len=st.sampled_from((20, 40)),
        budget=st.sampled_from((2, 8, 32)),
        short=st.sampled_from((None, 2, 5)),
        run_ahead=st.integers(1, 3),
        one_plan_a_row=st.booleans(),
        policy=st.sampled_from(("fcfs", "priority")),
        reserve=st.sampled_from((0.0, 0.1)),
        max_delay=st.sampled_from((0, 2)),
        error_every=st.sampled_from((0, 0, 9)),
        host=st.sampled_from((0, 0, 10)),
        max_copy_delay=st.sampled_from((0, 2)),
        pressure=st.booleans(),
        owners=st.sampled_from((0, 0, 3)),
        stages=st.sampled_from((2, 3, 4)),
    ),
    st.lists(st.tuples(st.sampled_from(KINDS), byte, byte), max_size=40),
)
def test_random_operations_with_stages(setting: Setting, ops: list[Op]) -> None:
    """Tokens by hand calculation, books after each plan and commit, everybody ends."""
    drive(setting, ops)


@pytest.mark.long
@pytest.mark.parametrize("tiers", [False, True])
def test_hundreds_of_cases_with_stages(tiers: bool) -> None:
    for seed in range(50):
        setting, ops = random_case(seed, tiers=tiers)
        drive(replace(setting, stages=2 + seed % 3), ops)


def plans_of(stages: int, lengths: list[int], budget: int) -> list[StepPlan]:
    """All plans of requests with these prompts, each for eight tokens."""
    config = ScheduleConfig(max_num_seqs=16, max_num_batched_tokens=budget)
    scheduler = StepScheduler(400, 16, 4, 256, config, stages=stages)
    runtime = FakeRuntime(Capacity(400, 16, 4, 256), vocab_size=VOCAB)
    for k, length in enumerate(lengths):
        scheduler.add(request(f"r{k}", [k + 1] * length, 8), 0.0)
    made: list[StepPlan] = []
    while scheduler.has_work():
        while runtime.in_flight < config.run_ahead + stages - 1 and (plan := scheduler.plan(0, 0.0)) is not None:
            made.append(plan)
            runtime.submit(plan)
        for result in runtime.poll(0):
            scheduler.commit(result, 0.0)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("stages", [2, 4])
def test_prompts_are_cut_evenly_and_their_pieces_fill_the_stages(stages: int) -> None:
    plans = plans_of(stages, [240], 160)
    pieces = [plan.spans.num_tokens for plan in plans[: 240 * stages // 160]]
    assert pieces == [160 // stages] * (240 * stages // 160)


def test_decodes_and_prompts_together_are_alike_long() -> None:
    """While prompts last: rows that decode are shared out, and prompts take what they leave."""
    plans = plans_of(2, [3, 3, 3, 3, 3, 120, 120], 40)
    tokens = [plan.spans.num_tokens for plan in plans]
    assert tokens[:12] == [20] * 12
    decodes = [int(plan.spans.source.sum()) for plan in plans[2:8]]
    assert max(decodes) - min(decodes) <= 1
    assert sum(decodes[:2]) == 5
