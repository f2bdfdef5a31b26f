"""What a pass of a streamed model takes, and how many sequences end within a bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.core.errors import ConfigError
from cellar.models.registry import open_model, shipped_config
from cellar.planner.capped import Room, capped_plan
from cellar.planner.cost import dimensions
from cellar.planner.moves import RECORDED_LAUNCHES, Away, Few, few_tokens, pass_moves
from cellar.planner.offload import Job
from cellar.planner.passes import (
    LAYER_LAUNCHES,
    between_products,
    block_seconds,
    channel_seconds,
    decode_seconds,
    longest,
    most_within,
    pass_cost,
    predicted_rate,
)
from cellar.planner.rates import Rates, in_formats
from cellar.planner.saved import Limits
from cellar.planner.work import FEW_TOKENS, StepWork, coming
from tests.tiny_checkpoint import CONFIG

WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16}
SPEC = open_model(CONFIG | WIDE, "float32", 16, 64).spec
LIMITS = Limits(64, 64, 64)
RATES = Rates(link=1e9, attention=2e9, device=4e9, disk=1e9, flops=1e11)
ROOM = Room(48 * 2**20, 0, 2**30, None, "cpu")


def test_moves_hide_behind_products_and_products_behind_moves() -> None:
    weights = sum(layer.nbytes for layer in SPEC.layers)
    resident = pass_cost(SPEC, RATES, Away(0, 0, "device", "cpu"))
    assert decode_seconds(resident, 1, 0) >= weights / RATES.device
    for host, disk in ((10**8, 0), (0, 10**8), (10**8, 10**8)):
        # Both go on at once. On a GPU what the disk has is moved, too; a processor multiplies what host memory has as
        # it lies, so that the disk alone is waited for.
        reading, moving = disk / RATES.disk, (host + disk) / RATES.link
        alone = decode_seconds(resident, 1, 10)
        for kind, seconds in (("cpu", max(reading, alone)), ("gpu", max(reading, moving))):
            cost = pass_cost(SPEC, RATES, Away(host, disk, "device", kind))
            assert decode_seconds(cost, 1, 10) == pytest.approx(seconds)
            many = decode_seconds(cost, 5000, 0)
            assert many == decode_seconds(replace(cost, streamed=0.0), 5000, 0) > seconds


def test_attention_is_priced_where_the_cache_lies() -> None:
    each = SPEC.kv.chunk_nbytes() / 16
    for place, kind, rate in (
        ("device", "gpu", RATES.device),
        ("host", "gpu", RATES.attention),
        ("device", "cpu", 2e9),
    ):
        cost = pass_cost(SPEC, RATES, Away(0, 0, place, kind))
        grown = decode_seconds(cost, 3, 200) - decode_seconds(cost, 3, 0)
        assert grown == pytest.approx(3 * 200 * each / rate)
    measured = pass_cost(SPEC, replace(RATES, device_attention=RATES.device / 3), Away(0, 0, "device", "gpu"))
    grown = decode_seconds(measured, 3, 200) - decode_seconds(measured, 3, 0)
    assert grown == pytest.approx(3 * 200 * each * 3 / RATES.device)


def test_few_tokens_on_an_accelerator_have_a_rate_of_their_own() -> None:
    """Up to 192 of them without a prompt; more, and prompts, have that of many. A processor has one for all."""
    weights, elements = sum(layer.nbytes for layer in SPEC.layers), 16 * dimensions(SPEC).layer_elements
    own = replace(RATES, device=1e15, few_flops=RATES.flops / 5)
    cost = replace(pass_cost(SPEC, own, Away(0, 0, "device", "gpu")), sampled=0.0, head=0.0)
    for tokens, rate in ((1, own.few_flops), (FEW_TOKENS, own.few_flops), (FEW_TOKENS + 1, own.flops)):
        assert decode_seconds(cost, tokens, 0) == pytest.approx(2 * elements * tokens / rate)
        prompts = StepWork(tokens, 0, 0.0, 0.0, True)
        assert cost.seconds(prompts) == pytest.approx(2 * elements * tokens / own.flops)
    slow = replace(cost, weights=weights / 1e6)
    assert decode_seconds(slow, FEW_TOKENS, 0) == pytest.approx(weights / 1e6), "the weights take longer"
    faster = pass_cost(SPEC, replace(own, few_flops=9 * own.flops), Away(0, 0, "device", "gpu"))
    assert faster.apart == 0, "reading them is what few tokens take"
    unmeasured = replace(own, few_flops=0.0)
    here, there = (pass_cost(SPEC, rates, Away(0, 0, "device", "cpu")) for rates in (own, unmeasured))
    assert here == there


def test_prompts_pay_for_what_lies_between_products() -> None:
    """By the rate of copies, if that is known; decodes of few tokens have it in what their kernels take to start."""
    alone, both = (pass_cost(SPEC, replace(RATES, copies=rate), Away(0, 0, "device", "gpu")) for rate in (0.0, 1e12))
    for tokens in (1000, 2000):
        work = StepWork(tokens, 0, 0.0, 0.0, True)
        assert both.seconds(work) - alone.seconds(work) == pytest.approx(tokens * between_products(SPEC) / 1e12)
    spec = open_model(CONFIG, "float32", 16, 64).spec
    each = 8 * CONFIG["hidden_size"] + 2 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    each += 3 * CONFIG["intermediate_size"]  # gate, up and what they make
    assert between_products(spec) == 4 * each * spec.num_layers


def test_launches_pass_beside_what_the_cpu_does_if_they_run_ahead() -> None:
    """A pass of a model that lies on the device, but for KV, lasts as long as its launches at least."""
    away, launches, waits = Away(0, 0, "host", "gpu"), 16 * RECORDED_LAUNCHES, 16 * RATES.exchange
    ahead = pass_cost(SPEC, RATES, away)
    beside = pass_cost(SPEC, replace(RATES, runs_ahead=False), away)
    attended = 10**6 * SPEC.kv.chunk_nbytes() / 16 / RATES.attention
    for cost, between in ((ahead, waits), (beside, waits + launches)):
        alone = decode_seconds(replace(cost, launches=0.0, streamed=0.0), 1, 0)
        assert decode_seconds(cost, 1, 10**6) == pytest.approx(alone + attended + between)
    quick = replace(RATES, exchange=0.0, device=1e15, flops=1e18)
    assert decode_seconds(pass_cost(SPEC, quick, away), 1, 0) == pytest.approx(launches)
    moved = Away(10**6, 0, "device", "gpu")
    assert decode_seconds(pass_cost(SPEC, replace(quick, link=1e9), moved), 1, 0) == pytest.approx(launches)
    few = pass_cost(SPEC, replace(quick, link=1e9, multiply=1e12), moved, Few(16))
    assert few.few == 16
    assert decode_seconds(few, 1, 0) == pytest.approx(launches)
    prompt = StepWork(64, 1, 64, 64, True)
    assert few.seconds(prompt) == pytest.approx(16 * LAYER_LAUNCHES), "prompts have no graphs"


@pytest.mark.parametrize("planned", [1, 6, 11, 16])
def test_the_cpus_rows_take_longer_with_each_token(planned: int) -> None:
    """Both memories end together in passes of as many tokens as are planned for; one of fewer waits for the link, and
    one of more for the CPU.
    """
    rates = replace(RATES, link=50e9, multiply=80e9, few_multiply=40e9, few_measured=11, exchange=1e-4, device=1e15)
    spec = open_model(shipped_config("llama-3-8b"), "bfloat16", 16, 64).spec
    rates, away, few = replace(rates, flops=1e20), Away(10**10, 0, "device", "gpu"), Few(16, planned)
    moves, cost = pass_moves(spec, rates, away, few), pass_cost(spec, rates, away, few)
    rows = moves.few_rows * 80e9
    assert rows + moves.few_link * 50e9 == pytest.approx(10**10)
    seconds = {n: rows / 80e9 * (1 + (n - 1) / 10) for n in (1, planned, 11, 16)}
    waits = {n: 32 * 1e-4 + (n - 1) * moves.few_sent for n in seconds}
    assert moves.few_link == pytest.approx(seconds[planned] + waits[planned], rel=1e-3)
    for tokens, cpu in seconds.items():
        least = max(moves.few_link, cpu + waits[tokens])
        assert decode_seconds(cost, tokens, 0) == pytest.approx(least, rel=1e-3)
        assert (least == moves.few_link) == (tokens < planned) or tokens == planned
        said = channel_seconds(cost, moves, StepWork(tokens, tokens, 0, 0))
        assert said["cpu"] == pytest.approx(cpu)
        assert said["link"] == moves.few_link
    assert decode_seconds(cost, 17, 0) == pytest.approx(10**10 / 50e9)
    none = replace(rates, few_multiply=0.0)
    unmeasured = pass_cost(spec, none, away, Few(16)), pass_moves(spec, none, away, Few(16))
    more = decode_seconds(unmeasured[0], 16, 0) - decode_seconds(unmeasured[0], 1, 0)
    assert more == pytest.approx(15 * unmeasured[1].few_sent), "what is sent alone"


def test_rows_and_attention_are_the_same_cpus() -> None:
    """One after the other: a pass with KV in host memory lasts as long as both."""
    rates = replace(RATES, link=50e9, multiply=80e9, attention=60e9, exchange=0.0, device=1e15, flops=1e20)
    away, few = Away(10**9, 0, "host", "gpu"), Few(16, 16)
    cost, moves = pass_cost(SPEC, rates, away, few), pass_moves(SPEC, rates, away, few)
    attention = 16 * 20_000 * SPEC.kv.chunk_nbytes() / SPEC.kv.chunk_size / 60e9
    assert attention > 0.1 * moves.few_link
    said = channel_seconds(cost, moves, StepWork(16, 16, 0, 16 * 20_000))
    assert said["cpu"] == pytest.approx(moves.few_rows + attention, rel=1e-3)
    waits = moves.few_waits + 15 * moves.few_sent
    assert decode_seconds(cost, 16, 20_000) == pytest.approx(said["cpu"] + waits, rel=1e-3)


def test_rows_are_left_to_the_cpu_for_as_many_as_there_may_be() -> None:
    """For one that is alone, where passes may have more than it is good for; in codes then for none. Matrix units take
    more of them, but not of codes.
    """
    codes = open_model(CONFIG, "bfloat16", 16, 64, "int8").spec
    assert [few_tokens(SPEC, count) for count in (1, 5, 16, 17, 256)] == [
        *(Few(16, 1), Few(16, 5), Few(16, 16)),
        *(Few(16, 1), Few(16, 1)),
    ]
    assert [few_tokens(codes, count) for count in (1, 4, 5)] == [Few(4, 1), Few(4, 4), Few(0, 1)]
    assert [few_tokens(SPEC, count, units=True) for count in (1, 17, 64, 65)] == [
        *(Few(64, 1), Few(64, 17)),
        *(Few(64, 64), Few(64, 1)),
    ]
    assert few_tokens(codes, 4, units=True) == Few(4, 4)


@settings(max_examples=60, deadline=None)
@given(host=st.integers(0, 10**9), prompt=st.integers(1, 200), generate=st.integers(2, 50), bound=st.floats(1e-3, 1e3))
def test_the_most_sequences_within_a_bound(host: int, prompt: int, generate: int, bound: float) -> None:
    cost, job = pass_cost(SPEC, RATES, Away(host, 0, "device", "cpu")), Job(prompt, generate)
    count = most_within(bound, cost, job, LIMITS)
    assert 0 <= count <= LIMITS.max_num_seqs
    assert count == 0 or block_seconds(cost, job, count, LIMITS) <= bound
    assert count == LIMITS.max_num_seqs or block_seconds(cost, job, count + 1, LIMITS) > bound


@pytest.mark.long
def test_a_plan_keeps_the_latency_with_fewer_sequences() -> None:
    """Each bound gives a plan that keeps it; a tighter one runs fewer at once, and keeps more rows on the device."""
    free = capped_plan(SPEC, ROOM, LIMITS, model="m", machine="any", rates=RATES)
    assert free.limits == LIMITS
    assert free.cost is not None
    most, rows = 0, 0
    whole = free.figures["predicted"]["request_seconds"]
    one = block_seconds(free.cost, longest(LIMITS), 1, LIMITS)
    for bound in (whole * 1.01, 0.5 * (whole + one), 1.05 * one, 0.97 * one):
        plan = capped_plan(SPEC, ROOM, LIMITS, model="m", machine="any", rates=RATES, latency=bound)
        assert plan.limits is not None
        assert plan.figures["predicted"]["request_seconds"] <= bound
        assert plan.placement.block is not None
        most = plan.placement.block.batch
        assert plan.limits.max_num_seqs == most
        assert plan.cost is not None
        assert block_seconds(plan.cost, longest(LIMITS), most, LIMITS) <= bound
        rows = max(rows, sum(p.stop - p.start for p in plan.placement.weights if p.device == "device"))
    assert most < LIMITS.max_num_seqs
    assert rows > sum(p.stop - p.start for p in free.placement.weights if p.device == "device")


@pytest.mark.long
def test_an_impossible_latency_says_what_is_possible() -> None:
    with pytest.raises(ConfigError, match=r"1 \+ 63 tokens takes .* at best; ask for (\S+) or more") as error:
        capped_plan(SPEC, ROOM, LIMITS, model="m", machine="any", rates=RATES, latency=1e-4)
    wish = float(str(error.value).split("ask for ")[1].split()[0])
    plan = capped_plan(SPEC, ROOM, LIMITS, model="m", machine="any", rates=RATES, latency=wish)
    assert plan.figures["predicted"]["request_seconds"] <= wish


def test_a_rate_for_as_many_as_there_are() -> None:
    plan = capped_plan(SPEC, ROOM, LIMITS, model="m", machine="any", rates=RATES)
    said = plan.figures["predicted"]
    assert predicted_rate(plan, 10**6) == pytest.approx(said["tokens_per_second"])
    few, one = predicted_rate(plan, 2), predicted_rate(plan, 1)
    assert few is not None
    assert one is not None
    assert one < few <= said["tokens_per_second"]
    assert predicted_rate(None, 1) is None


def test_what_comes_behind_a_computation_comes_faster() -> None:
    """A disk, or a link, is measured beside a processor at work, and waited for when that has ended."""
    assert coming(3.0, 4.0, 2.0) == 3.0, "it is there before"
    assert coming(5.0, 4.0, 2.0) == 4.5
    assert coming(5.0, 0.0, 2.0) == 2.5
    away, quick = Away(0, 10**9, "device", "cpu"), replace(RATES, disk=1e9, idle=1.25)
    cost = pass_cost(SPEC, quick, away)
    alone = decode_seconds(replace(cost, streamed=0.0), 4, 100)
    assert 0 < alone < 1
    assert decode_seconds(cost, 4, 100) == pytest.approx(alone + (1 - alone) / 1.25)
    moves = pass_moves(SPEC, quick, away)
    said = channel_seconds(cost, moves, StepWork(4, 4, 400, 400))
    assert said["disk"] == pytest.approx(decode_seconds(cost, 4, 100), rel=1e-3)
    # An accelerator's link: while its processor attends, and all the time where that does nothing.
    for place, busy in (("device", 0.0), ("host", 0.3)):
        linked = Away(25 * 10**9, 0, place, "gpu")
        rates = replace(quick, link=50e9)
        cost, moves = pass_cost(SPEC, rates, linked), pass_moves(SPEC, rates, linked)
        context = busy * rates.attention / (SPEC.kv.chunk_nbytes() / SPEC.kv.chunk_size) or 1.0
        said = channel_seconds(cost, moves, StepWork(20, 20, context, context))
        assert said["link"] == pytest.approx(busy + (0.5 - busy) / 1.25, rel=1e-3)
    # What the launches, or a disk beside a link, decide has no faster end.
    assert pass_cost(SPEC, replace(quick, disk=5e8), Away(1, 10**11, "device", "gpu")).idle == 1.0
    assert pass_cost(SPEC, quick, Away(1, 0, "device", "gpu")).idle == 1.0


@pytest.mark.parametrize(
    ("model", "sequences", "generate", "budget", "away", "attention", "measured"),
    [
        ("llama-3-70b", 128, 128, 4096, 26.5e9, 23.3e9, 16.72),
        ("llama-3-70b", 256, 128, 4096, 33.0e9, 55e9, 32.6),
        ("opt-30b", 200, 32, 8192, 2.4e9, 57.5e9, 10.0),
    ],
)
def test_decodes_beside_prompts_have_products_of_their_own(
    model: str, sequences: int, generate: int, budget: int, away: float, attention: float, measured: float
) -> None:
    """Steps with both, of models in int4 whose K and V the CPU attends to: seconds of all of them on an H200
    (docs/log/offload.md; the price is from twelve layers of the last model). Without it they are up to 15 % too short.
    """
    raw = shipped_config(model)
    assert raw is not None
    spec = open_model(raw, "bfloat16", 32, 512 + generate, "int4", "int4").spec
    rates = in_formats(Rates(link=50e9, attention=attention, idle=1.06), spec)
    cost = pass_cost(spec, rates, Away(int(away), 0, "host", "gpu"), over_link=0.35)
    assert cost.beside
    waiting, ages, found, plain = sequences * 512, list[int](), 0.0, 0.0
    while waiting > 0:
        new = min(waiting, budget - len(ages))
        context = float(sum(512 + age for age in ages))
        work = StepWork(len(ages) + new, len(ages), context + new * 256, context + new, True, len(ages))
        if ages:
            found += cost.seconds(work)
            plain += cost.seconds(work._replace(decodes=0))
        waiting -= new
        ages = [age + 1 for age in ages if age < generate] + [0] * ((sequences * 512 - waiting) // 512 - len(ages))
    assert found == pytest.approx(measured, rel=0.11)
    assert abs(found - measured) < 0.7 * abs(plain - measured)
