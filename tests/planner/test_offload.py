"""The offload search: FlexGen's figures, the LP against a grid, integers against the relaxation, memory replayed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellar.core.hardware import Measure
from cellar.planner import blocks
from cellar.planner.cost import Dimensions, dimensions
from cellar.planner.integer import integer, row_classes
from cellar.planner.linear import OffloadPlan, block_seconds, by_tensor, policy, search, solve, without_overlap
from cellar.planner.machines import flexgen_t4, h200, laptop
from cellar.planner.models import decoder_spec
from cellar.planner.offload import Block, Job, Problem, Schedule, kv_growth, problem
from cellar.planner.partition import BF16, INT4_KV4, Formats
from cellar.planner.replay import replay


def opt(layers: int, embed: int, heads: int) -> Dimensions:
    spec = decoder_spec(
        "opt", layers=layers, embed=embed, mlp=4 * embed, heads=heads, kv_heads=heads, head_dim=embed // heads,
        vocab=50272, gated=False, parallel=False, dtype="float16",
    )  # fmt: skip
    return dimensions(spec)


MODELS = {"6.7B": opt(32, 4096, 32), "30B": opt(48, 7168, 56), "175B": opt(96, 12288, 96)}
MACHINE, JOB = flexgen_t4(), Job(512, 32)

# Policies of FlexGen, table 5, and its published commands; 6.7B lies wholly on the device.
PAPER: dict[str, tuple[Block, dict[str, float]]] = {
    "6.7B": (Block(2, 1), {"weights__device": 1, "hidden__device": 1, "kv__device": 1}),
    "30B": (Block(64, 2), {"weights__device": 0.2, "weights__host": 0.8, "hidden__host": 1, "kv__host__cpu": 1}),
    "175B": (Block(32, 8), {"weights__host": 0.5, "weights__disk": 0.5, "hidden__host": 1, "kv__disk__cpu": 1}),
}


def paper(name: str) -> OffloadPlan:
    block, shares = PAPER[name]
    return policy(problem(MODELS[name], MACHINE, JOB, block), **shares)


@pytest.mark.parametrize(("name", "published"), [("6.7B", 25.26), ("30B", 7.32), ("175B", 0.69)])
def test_flexgens_throughput_within_a_factor_of_1_4(name: str, published: float) -> None:
    found = paper(name).tokens_per_second
    assert 1 / 1.4 < found / published < 1.4


@pytest.mark.parametrize("name", PAPER)
def test_the_searched_policy_is_no_worse_than_the_papers(name: str) -> None:
    assert search(MODELS[name], MACHINE, JOB)[0].tokens_per_second >= paper(name).tokens_per_second


def test_table_4_channel_by_channel() -> None:
    """OPT-175B, overlap off, in seconds.

    The published 768 s of reading weights in the prefill are no part of its total of 2,711 (2,220 + 768 + 261 is more),
    and are 7.8 times what one pass takes in the decode (3,047 / 31): once per GPU batch of 8, not once per layer. The
    model reads them once, so it is compared eight times.
    """
    block, shares = PAPER["175B"]
    p = without_overlap(problem(MODELS["175B"], MACHINE, JOB, block))
    plan = policy(p, **shares)
    prefill, decode = by_tensor(p, plan.shares, "prefill"), by_tensor(p, plan.shares, "decode")
    for found, published in (
        (prefill["compute"], 2220),
        (8 * prefill["weights"], 768),
        (prefill["kv write"], 261),
        (decode["compute"], 1498),
        (decode["weights"], 3047),
        (decode["kv read"], 7046),
        (decode["kv write"], 124),
    ):
        assert found == pytest.approx(published, rel=0.2)
    assert "kv read" not in prefill
    assert sum(prefill.values()) == pytest.approx(2711, rel=0.05)
    assert sum(decode.values()) == pytest.approx(11315, rel=0.1)
    assert plan.tokens_per_second == pytest.approx(0.584, rel=0.1)


def test_a_disk_at_its_own_rate_could_not_have_fed_the_decode() -> None:
    """175B: 638 GB of KV a token at 2 GB/s are 9,900 s, more than the 7,046 s that the paper measured."""
    d = MODELS["175B"]
    kv = 256 * (512 + 16) * d.kv_elements() * 2.0 * d.layers
    assert 31 * kv / 2e9 > 1.3 * 7046


@pytest.mark.parametrize("name", ["30B", "175B"])
def test_ablations_have_the_papers_sign(name: str) -> None:
    """Table 5: without overlap and without CPU attention it is slower."""
    plan = paper(name)
    assert policy(without_overlap(plan.problem), **PAPER[name][1]).tokens_per_second < plan.tokens_per_second
    shares = {key.replace("cpu", "device"): value for key, value in PAPER[name][1].items()}
    assert policy(plan.problem, **shares).tokens_per_second < plan.tokens_per_second


def test_four_bits_are_faster() -> None:
    assert (
        search(MODELS["175B"], MACHINE, JOB, formats=(INT4_KV4,))[0].tokens_per_second
        > search(MODELS["175B"], MACHINE, JOB, formats=(BF16,))[0].tokens_per_second
    )


# -- the solver -------------------------------------------------------------------------------------


def grid(p: Problem, steps: int) -> float:
    """Seconds of the best point of a coarse grid of shares that fits."""
    best = np.inf
    thirds = [(a, b, steps - a - b) for a in range(steps + 1) for b in range(steps + 1 - a)]
    fifths = [c for c in itertools.product(range(steps + 1), repeat=4) if sum(c) <= steps]
    for w, h in itertools.product(thirds, thirds):
        for c in fifths:
            shares = np.array([*w, *h, *c, steps - sum(c)]) / steps
            if all(m.used(shares) <= m.capacity for m in p.memory):
                best = min(best, block_seconds(p, shares))
    return best


@pytest.mark.parametrize(("name", "block"), [("30B", Block(16, 4)), ("175B", Block(8, 8)), ("6.7B", Block(16, 2))])
def test_the_lp_is_no_worse_than_a_grid(name: str, block: Block) -> None:
    p = problem(MODELS[name], MACHINE, JOB, block)
    plan = solve(p)
    assert plan is not None
    on_grid = grid(p, 3)
    assert plan.seconds <= on_grid * (1 + 1e-6)
    assert on_grid < 3 * plan.seconds  # the grid is coarse, not elsewhere
    for memory in p.memory:
        assert memory.used(plan.shares) <= memory.capacity * (1 + 1e-6)


@pytest.mark.parametrize("schedule", ["zigzag", "diagonal"])
@pytest.mark.parametrize(
    ("name", "block"), [("6.7B", (8, 2)), ("30B", (64, 1)), ("30B", (16, 12)), ("175B", (32, 8)), ("175B", (4, 1))]
)
def test_integers_within_two_percent_and_memory_within_capacity(
    name: str, block: tuple[int, int], schedule: str
) -> None:
    p = problem(MODELS[name], MACHINE, JOB, Block(*block, schedule=schedule))  # type: ignore[arg-type]
    relaxed = solve(p)
    assert relaxed is not None
    found = integer(relaxed)
    assert found is not None
    assert relaxed.seconds * (1 - 1e-6) <= found.plan.seconds <= 1.02 * relaxed.seconds
    for rows in found.rows.values():
        assert all(isinstance(r, int) and r >= 0 for r in rows)
    peaks = replay(found)
    for memory in p.memory:
        assert peaks[memory.tier] <= memory.capacity
        # The replay is no empty exercise: it comes near what the model counted.
        assert peaks[memory.tier] >= 0.85 * memory.used(found.plan.shares)


def test_more_memory_buys_what_the_dual_says() -> None:
    p = problem(MODELS["175B"], MACHINE, JOB, Block(32, 8))
    plan = solve(p)
    assert plan is not None
    more = 2**30
    wider = [m if m.tier != "host" else type(m)(m.tier, m.vector, m.constant, m.capacity + more) for m in p.memory]
    richer = solve(type(p)(**{**p.__dict__, "memory": tuple(wider)}))
    assert richer is not None
    assert richer.tokens_per_second - plan.tokens_per_second == pytest.approx(plan.duals["host"] * more, rel=0.02)
    assert any("host memory buys" in line for line in plan.words())


def test_a_latency_bound_is_kept() -> None:
    free = search(MODELS["30B"], MACHINE, JOB)[0]
    bound = free.seconds / 4
    found = search(MODELS["30B"], MACHINE, JOB, max_seconds=bound)
    assert found
    assert all(plan.seconds <= bound * (1 + 1e-6) for plan in found)
    assert found[0].tokens_per_second < free.tokens_per_second


def test_what_fits_is_not_offloaded() -> None:
    plan = search(MODELS["6.7B"], h200(), JOB, gbs=(8,), batches=(1,))[0]
    assert plan.share("weights.device") == pytest.approx(1)
    assert plan.share("kv.device") == pytest.approx(1)


def test_nothing_fits() -> None:
    assert search(MODELS["175B"], laptop(), Job(2048, 2048), gbs=(64,), batches=(1,)) == []


def test_no_estimate_is_below_its_bound() -> None:
    for name in PAPER:
        timeline = paper(name).timeline()
        assert 0 < timeline.lower_bound < timeline.seconds


# -- block schedules --------------------------------------------------------------------------------


@pytest.mark.parametrize(("s", "n"), [(512, 32), (512, 512), (32, 2048)])
def test_the_diagonal_block_is_larger_by_the_closed_form(s: int, n: int) -> None:
    d = MODELS["30B"]
    layer, hidden, kv = 2.0 * d.layer_elements, 2.0 * d.embed, 2.0 * d.layers * d.kv_elements()
    sizes = [f(200e9, layer, hidden, kv, s, n) for f in (blocks.zigzag_block, blocks.diagonal_block)]
    assert sizes[1] / sizes[0] == pytest.approx(blocks.diagonal_gain(s, n), rel=2 / n)
    assert kv_growth(Job(s, n), "diagonal") == pytest.approx(1 / blocks.diagonal_gain(s, n), rel=2 / n)
    # Theorem 4.1: the zig-zag schedule moves at most twice the weights of the optimal one.
    assert sizes[1] / sizes[0] <= 2


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    device=st.floats(2, 24),
    host=st.floats(8, 256),
    disk=st.sampled_from([0.0, 200.0, 2000.0]),
    gbs=st.sampled_from([1, 3, 8, 32]),
    batches=st.integers(1, 6),
    prompt=st.integers(1, 700),
    generate=st.integers(2, 40),
    formats=st.sampled_from([BF16, INT4_KV4]),
    schedule=st.sampled_from(["zigzag", "diagonal"]),
    name=st.sampled_from(list(MODELS)),
)
def test_any_plan_is_executable(
    device: float,
    host: float,
    disk: float,
    gbs: int,
    batches: int,
    prompt: int,
    generate: int,
    formats: Formats,
    schedule: Schedule,
    name: str,
) -> None:
    """Any machine and job: what the solver returns fits when replayed, and no share is lost in rounding."""
    m = replace(
        MACHINE,
        device=replace(MACHINE.device, capacity=Measure(device * 2**30, "bytes", "assumed")),
        host=replace(MACHINE.host, capacity=Measure(host * 2**30, "bytes", "assumed")),
    )
    if disk:
        assert m.disk is not None
        m = replace(m, disk=replace(m.disk, capacity=Measure(disk * 1e9, "bytes", "assumed")))
    else:
        m = replace(m, disk=None, disk_write=None)
    p = problem(MODELS[name], m, Job(prompt, generate), Block(gbs, batches, formats, schedule))
    relaxed = solve(p)
    if relaxed is None:
        return
    found = integer(relaxed)
    if found is None:
        return  # the last row did not fit: said so, not squeezed in
    peaks = replay(found)
    for memory in p.memory:
        assert peaks[memory.tier] <= memory.capacity
    for c in row_classes(p.d, formats.weight_bytes):
        assert sum(found.rows[c.name]) == c.rows
    assert sum(found.kv.values()) == p.block.bls * -(-(prompt + generate) // 32)
    assert sum(found.hidden) == p.block.bls
    assert found.plan.seconds >= relaxed.seconds * (1 - 1e-6)
    if not disk:
        assert found.plan.share("weights.disk") == found.plan.share("kv.disk.cpu") == 0
