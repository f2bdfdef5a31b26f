"""Evenly spread starts: what a start costs, that they are even, and what that is worth in the same memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.diagonal import planned, reached
from cellar.models.registry import open_model
from cellar.planner import blocks
from cellar.planner.capped import Room
from cellar.planner.offload import Job
from cellar.planner.passes import RESERVE
from cellar.planner.rates import Rates
from cellar.planner.saved import Limits
from cellar.schedule.steps.stagger import Stagger
from tests.tiny_checkpoint import CONFIG


@given(st.integers(1, 70), st.integers(0, 70), st.sampled_from((1, 4, 16)))
def test_a_start_costs_the_rows_and_chunks_of_all_its_passes(num_prompt: int, num_output: int, size: int) -> None:
    limit = num_prompt + num_output
    rows, chunks = Stagger(1, 1, size)._costs(num_prompt, limit)
    assert rows == num_output
    assert chunks == sum(math.ceil(length / size) for length in range(num_prompt, limit))


@pytest.mark.parametrize(("rows", "generate"), [(8, 32), (8, 4), (3, 7)])
def test_an_nth_of_the_rows_begins_in_each_pass(rows: int, generate: int) -> None:
    stagger, begun, running = Stagger(10**6, rows, 16), 0, list[int]()
    for _ in range(50 * generate):
        running = [left - 1 for left in running if left > 1]
        while stagger.may_begin(bool(running)):
            stagger.began(5, 5 + generate)
            running.append(generate)
            begun += 1
        stagger.passed()
        assert len(running) <= rows + 1
    assert begun == pytest.approx(50 * rows, abs=rows + 1)


def test_who_ends_early_makes_room_for_the_next() -> None:
    stagger = Stagger(100, 4, 16)
    assert stagger.may_begin(True)
    stagger.began(16, 16 + 400)
    stagger.passed()
    assert not stagger.may_begin(True)
    assert stagger.may_begin(False), "nobody is there"
    stagger.began(16, 16 + 400)
    stagger.ended(20, 16 + 400)
    stagger.passed()
    assert stagger.may_begin(True)


@pytest.mark.long
def test_more_sequences_share_a_pass_in_the_same_memory() -> None:
    """s = 16, n = 64: the block is larger by A.2's closed form, but for what is kept free for decodes, which a block of
    one age does not need; and so are tokens a second, without a suspension.
    """
    job = Job(16, 64)
    wide = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100, "intermediate_size": 256}
    spec = open_model(CONFIG | wide, "float32", 4, 80).spec
    kv = 10 * 20 * spec.kv.chunk_nbytes()
    limits, room = Limits(64, 256, 80), Room(kv + 1_800_000, 0, 2**30, kv, "cpu")
    plans = [planned(spec, room, limits, job, order, Rates(disk=1e7)) for order in ("zigzag", "diagonal")]
    counts = [plan.figures["predicted"]["sequences"] for plan in plans]
    assert counts[0] == 10
    gain = (1 - RESERVE) * blocks.diagonal_gain(job.prompt, job.generate)
    assert counts[1] / counts[0] == pytest.approx(gain, rel=0.1)
    first, second = reached(plans[0], spec, job, 30), reached(plans[1], spec, job, 80)
    assert first.most == counts[0]
    assert counts[1] * 0.8 <= second.most <= counts[1] * 1.25
    assert second.suspended == 0
    assert second.steady_tokens_per_second > 1.2 * first.steady_tokens_per_second
