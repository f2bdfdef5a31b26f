"""The joint search: frontier, objectives, bounds, warnings, several devices and hosts; placements to the row."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from cellar.core.config import step_tokens
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.hardware import Device, Link, Measure, Profile
from cellar.core.layouts import Layout, Mesh, relay
from cellar.core.messages import Placement
from cellar.core.specs import ModelSpec
from cellar.planner import saving
from cellar.planner.cost import Dimensions, dimensions
from cellar.planner.linear import policy, solve
from cellar.planner.machines import LIBRARY, Machine, from_profile, h200, machine
from cellar.planner.models import decoder_spec, known_spec
from cellar.planner.offload import Block, Job, Slice, problem
from cellar.planner.partition import (
    BF16,
    FORMATS,
    INT4,
    INT8,
    Work,
    block_timeline,
    choices,
    kv_bytes_per_chip,
    meshes,
    padded_heads,
)
from cellar.planner.plans import Plan, ways
from cellar.planner.resident import resident_bytes
from cellar.planner.saved import read_plan
from cellar.planner.search import Answer, find, frontier
from cellar.reports.plan_formats import in_formats
from cellar.reports.plan_rows import busy, origins, prediction, where

JOB = Job(512, 32)


def spec_of(layers: int, embed: int, mlp: int, heads: int, kv_heads: int, vocab: int = 128_256) -> ModelSpec:
    return decoder_spec(
        "llama",
        layers=layers,
        embed=embed,
        mlp=mlp,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        vocab=vocab,
        gated=True,
        parallel=False,
        tied=False,
    )


LLAMA_70B = spec_of(80, 8192, 28672, 64, 8)
LLAMA_8B = spec_of(32, 4096, 14336, 32, 8)
BIG, SMALL = dimensions(LLAMA_70B), dimensions(LLAMA_8B)


@pytest.fixture(scope="module")
def eight() -> Answer:
    return find(BIG, machine("8xh200"), JOB, formats=(BF16, INT8))


def test_seventy_billion_on_eight_devices_within_five_seconds() -> None:
    start = time.process_time()  # of this process: other tests share the cores
    find(BIG, machine("8xh100"), JOB)
    assert time.process_time() - start < 5


def test_the_frontier_is_one(eight: Answer) -> None:
    assert len(eight.pareto) > 5
    for plan in eight.pareto:
        for other in eight.plans:
            assert other.latency >= plan.latency or other.tokens_per_second <= plan.tokens_per_second * (1 + 1e-9)
    assert frontier(eight.plans) == list(eight.pareto)


def test_small_batches_are_split_wide_and_large_ones_narrow(eight: Answer) -> None:
    fastest, widest = eight.pareto[0], eight.pareto[-1]
    assert fastest.tensor == 8
    assert fastest.batch < widest.batch
    assert widest.tensor < 8
    assert widest.dollars_per_million < fastest.dollars_per_million


def test_no_plan_passes_memory_or_its_bound(eight: Answer) -> None:
    for plan in eight.plans:
        assert 0 < plan.bound <= plan.latency
        padded = padded_heads(plan.d, plan.tensor)
        assert padded is not None
        if plan.offload is None:
            assert plan.decode is not None
            context = plan.job.prompt + plan.job.generate
            kv = kv_bytes_per_chip(padded, plan.decode.layout, plan.batch, context, plan.formats) / plan.stages
            held = resident_bytes(padded, plan.formats, plan.tensor, plan.stages)
            assert held + kv < plan.machine.usable("device")


def test_objectives() -> None:
    def chosen(objective: str) -> Plan:
        return find(SMALL, machine("2xh200"), JOB, objective).chosen  # type: ignore[arg-type]

    fast, cheap, wide = chosen("latency"), chosen("cost"), chosen("throughput")
    assert fast.latency < min(cheap.latency, wide.latency)
    assert wide.tokens_per_second > fast.tokens_per_second
    assert cheap.dollars_per_million < fast.dollars_per_million


def test_a_latency_bound_is_kept(eight: Answer) -> None:
    bound = eight.chosen.latency / 3
    found = find(BIG, machine("8xh200"), JOB, max_latency=bound)
    assert found.chosen.latency <= bound
    assert found.chosen.tokens_per_second < eight.chosen.tokens_per_second


@pytest.mark.parametrize(
    ("on", "job", "why"),
    [
        ("4xa100", Job(2048, 512), "K and V would move between XYZ batch for prompts and 1D heads for decodes;"),
        (
            "4xh200",
            Job(128, 512),
            "it is 2 copies, and a plan is of one engine (serve --replicas 2 --tensor-parallel-size 2);",
        ),
        (
            "8xh200",
            Job(512, 512),
            "it has 2 pipeline stages, and a plan's have one device each (serve --replicas 2 "
            "--tensor-parallel-size 2 --pipeline-parallel-size 2);",
        ),
    ],
)
def test_a_plan_that_no_engine_runs_says_so_and_what_runs(on: str, job: Job, why: str) -> None:
    """The best that runs is no worse than any pair of layouts, of its batch, that leaves K and V where they are."""
    answer = find(BIG, machine(on), job)
    assert why in answer.warnings[0]
    running = answer.running
    assert running is not None
    assert answer.chosen.obstacle
    assert not running.obstacle
    assert running.name in answer.warnings[0]
    assert running.tokens_per_second < answer.chosen.tokens_per_second
    assert running.tokens_per_second >= 0.99 * _most_that_stays(running)


def _most_that_stays(running: Plan) -> float:
    """Tokens a second of the best pair, found by trying all with the batch of `running`, in steps of as many prompts
    as an engine takes at once.
    """
    d, on, job, batch, chips = running.d, running.machine, running.job, running.batch, running.tensor
    room, best = on.usable("device") - resident_bytes(d, BF16, chips, 1), 0.0
    each = min(batch, step_tokens("gpu") // job.prompt)
    count = batch // each
    for decode in choices(d, on, chips, Work(batch, 1, job.prompt + job.generate / 2)):
        if kv_bytes_per_chip(d, decode.layout, batch, job.prompt + job.generate) > room:
            continue
        mesh = decode.layout.mesh
        for prefill in choices(d, on, chips, Work(each, job.prompt, job.prompt), mesh=mesh):
            if not relay(prefill.layout, decode.layout, d.kv_heads):
                seconds = count * prefill.timeline.seconds + (job.generate - 1) * decode.timeline.seconds
                best = max(best, batch * job.generate / seconds)
    return best


def test_pipelines_are_considered_and_split_the_memory() -> None:
    """Two stages: half the layers on each device; one sequence gains nothing, as each token passes both."""
    assert (1, 2, 1) in ways(2, 80)
    assert ways(3, 80) == [(1, 1, 3), (3, 1, 1)]
    plans = [p for p in find(SMALL, machine("2xh200"), JOB).plans if p.stages == 2 and p.offload is None]
    alone = {p.batch: p for p in find(SMALL, machine("h200"), JOB).plans if p.offload is None}
    assert {p.batch for p in plans} & set(alone)
    for plan in plans:
        if plan.batch == 1:
            assert plan.latency >= alone[1].latency
    big = max(plans, key=lambda p: p.batch)
    same = alone.get(big.batch) or alone[max(alone)]
    assert big.tokens_per_second > same.tokens_per_second


def test_offloading_what_fits_is_pure_loss() -> None:
    answer = find(BIG, h200(), JOB, formats=(BF16, INT8))
    assert answer.chosen.kind == "resident"
    assert any("pure loss" in w and "55 GB/s" in w and "4,800" in w for w in answer.warnings)


def test_a_link_that_makes_the_wish_impossible_is_named() -> None:
    answer = find(BIG, machine("t4"), JOB)
    assert answer.chosen.kind == "offload"
    assert any("12.9 GB/s" in w and "s a token" in w for w in answer.warnings)


def test_streamed_weights_are_shared_over_all_links() -> None:
    """Two devices that gather stream half each: a block that waits for its weights is nearly twice as fast."""
    m = h200().with_devices(2)
    shares = {"weights__host": 1.0, "hidden__device": 1.0, "kv__device": 1.0}
    one = policy(problem(BIG, m, JOB, Block(8, 1), Slice(BIG.layers, sharers=2)), **shares)
    two = policy(problem(BIG, m, JOB, Block(8, 1), Slice(BIG.layers, gathered=2, sharers=2)), **shares)
    assert 0.5 * one.seconds < two.seconds < 0.55 * one.seconds
    # They share the host: its disk gives each half.
    alone = problem(BIG, m, JOB, Block(8, 1), Slice(BIG.layers))
    shared = problem(BIG, m, JOB, Block(8, 1), Slice(BIG.layers, sharers=2))
    assert shared.memory[1].capacity == alone.memory[1].capacity / 2


def test_four_machines_in_a_row_decode_more_than_four_times_as_fast() -> None:
    """FlexGen, table 3: OPT-30B on 4 T4 in a pipeline; each keeps a quarter of the layers, so less must move."""
    spec = decoder_spec(
        "opt", layers=48, embed=7168, mlp=28672, heads=56, kv_heads=56, head_dim=128, vocab=50272,
        gated=False, parallel=False,
    )  # fmt: skip
    d, m = dimensions(spec), machine("t4")

    def decoding(part: Slice, gbs: int, batches: int) -> float:
        plan = solve(problem(d, m, JOB, Block(gbs, batches), part))
        assert plan is not None
        return plan.block.bls * (JOB.generate - 1) / plan.timeline("decode").seconds

    one = max(decoding(Slice(48), 16, batches) for batches in (4, 8, 12))
    four = max(decoding(Slice(12, stages=4), 16, batches) for batches in (4, 8, 12))
    assert four > 4 * one


# -- several hosts ---------------------------------------------------------------------------------


def test_axes_that_cross_hosts_are_priced_at_the_outer_network() -> None:
    m = machine("16xh200")
    found = {outer for _, outer in meshes(16, hosts=2)}
    assert found == {"x", "y", "z"}
    d = padded_heads(BIG, 16)
    assert d is not None
    work = Work(16_384, 1, 512)  # so much that hops and launches do not matter: z carries more than x
    inside = block_timeline(d, m, Layout(Mesh(2, 1, 8), ""), work, outer="")
    across = block_timeline(d, m, Layout(Mesh(2, 1, 8), ""), work, outer="x")
    worst = block_timeline(d, m, Layout(Mesh(2, 1, 8), ""), work, outer="z")
    assert inside.seconds < across.seconds < worst.seconds


def test_the_search_keeps_the_outer_network_for_the_smaller_traffic() -> None:
    m = machine("16xh200")
    best = min(choices(BIG, m, 16, Work(64, 1, 512), hosts=2), key=lambda c: c.timeline.seconds)
    assert best.layout.mesh.count(best.outer) == 2


def test_looped_collectives_hide() -> None:
    d, m, work = BIG, machine("8xa100"), Work(64, 512, 512)
    layout = Layout(Mesh(1, 1, 8), "", "zyx")
    plain, looped = (block_timeline(d, m, layout, work, looped=way) for way in (False, True))
    assert looped.seconds < plain.seconds
    # A quarter is left of what the feed-forward hides; attention's own sums are longer than its products.
    talk = next(group for group in looped.groups if group.name == "collectives").seconds
    assert 0.25 < talk / plain.busy()["collectives"] < 0.6
    few = Work(8, 100, 100)
    assert block_timeline(d, m, layout, few, looped=True) == block_timeline(d, m, layout, few), "one chunk is no loop"
    still = next(c for c in choices(d, m, 8, work, looped=True) if c.layout == Layout(Mesh(2, 2, 2), "xyz"))
    assert not still.looped, "what sends no activations has nothing to hide"


def test_gathered_weights_hide_and_activations_do_not() -> None:
    d, m, work = BIG, machine("8xa100"), Work(512, 512, 512)
    gathered = block_timeline(d, m, Layout(Mesh(2, 2, 2), "xyz"), work)
    assert gathered.busy()["weight gathers"] > 0
    slow = replace(m, networks=tuple(replace(n, bandwidth=_slower(n.bandwidth)) for n in m.networks))
    slower, first = block_timeline(d, slow, Layout(Mesh(2, 2, 2), "xyz"), work), gathered.busy()["weight gathers"] / 80
    first -= m.networks[0].hop.value
    assert slower.seconds == pytest.approx(gathered.seconds + first), "the first layer's alone are waited for"
    still = Layout(Mesh(1, 1, 8), "", "zyx")
    assert block_timeline(d, slow, still, work).seconds > block_timeline(d, m, still, work).seconds


def _slower(rate: Measure) -> Measure:
    return replace(rate, value=rate.value / 2)


# -- bad wishes -----------------------------------------------------------------------------------


def test_what_fits_nowhere() -> None:
    spec = known_spec("mt-nlg-530b")
    assert spec is not None
    # Two laptops have the memory, but nothing joins them.
    with pytest.raises(CapacityError, match=r"986.3 GiB in bf16.*laptop has 49\d.\d GiB.*more memory a device"):
        find(dimensions(spec), machine("laptop"), JOB)


@pytest.mark.parametrize(
    ("model", "on"), [("mt-nlg-530b", "t4"), ("palm-540b", "t4"), ("palm-540b", "8xtpuv4"), ("mt-nlg-530b", "laptop")]
)
def test_advice_does(model: str, on: str) -> None:
    """Whatever a refusal advises is taken, and then a plan is found."""
    spec = known_spec(model)
    assert spec is not None
    d, m = dimensions(spec), machine(on)
    with pytest.raises(CapacityError) as refused:
        find(d, m, JOB)
    advice = str(refused.value).split("; take ")[1].rstrip(".")
    if advice.endswith("such devices"):
        assert find(d, m.with_devices(int(advice.split()[0])), JOB).plans
    elif advice.startswith("--formats"):
        assert find(d, m, JOB, formats=(FORMATS[advice.split()[1]],)).plans
    else:
        assert advice == "a machine with more memory a device"
        assert find(d, h200(), JOB).plans


@pytest.mark.parametrize("job", [Job(1, 1), Job(2000, 1), Job(1, 100), JOB])
@pytest.mark.parametrize("on", ["h200", "4xh200", "t4"])
def test_no_utilization_passes_the_whole(on: str, job: Job) -> None:
    """One token of a model with a large table: rows that are looked up are no work for the matrix units."""
    for plan in find(SMALL, machine(on), job).plans:
        assert 0 < plan.utilization < plan.machine.constants.matmul.value


def test_a_latency_below_the_bound(eight: Answer) -> None:
    with pytest.raises(ConfigError, match=r"even at peak rates .* needs .* ask for --latency (\S+) or more") as e:
        find(BIG, machine("8xh200"), JOB, max_latency=1e-3)
    wish = float(str(e.value).split("--latency ")[1].split()[0])
    assert find(BIG, machine("8xh200"), JOB, max_latency=wish).chosen.latency <= wish


@pytest.mark.parametrize("name", ["abacus", "0x", "4xabacus", ""])
def test_unknown_machines(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        machine(name)


def test_no_devices() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        machine("0xh200")


def test_no_tokens() -> None:
    with pytest.raises(ConfigError, match="at least 1 token"):
        find(SMALL, h200(), Job(0, 1))


# -- machines -------------------------------------------------------------------------------------


def test_a_t4_offers_less_than_its_datasheet() -> None:
    assert machine("t4").device.capacity.value == 14.75 * 2**30
    assert machine("t4").usable("device") < 14.75 * 2**30


@pytest.mark.parametrize("name", LIBRARY)
def test_every_number_of_a_machine_has_unit_and_origin(name: str) -> None:
    rows = origins(machine(name))
    assert len(rows) > 15
    assert {origin for _, _, origin in rows} <= {"measured", "datasheet", "fitted", "assumed"}
    assert all(len(value.split()) == 2 for _, value, _ in rows)


def test_a_profile_is_a_machine() -> None:
    def rate(value: float) -> Measure:
        return Measure(value, "bytes/s", "measured")

    gpu = Device("gpu", "gpu", Measure(80e9, "bytes", "datasheet"), rate(3e12), {"bfloat16": rate(7e14)})
    cpu = Device("cpu", "cpu", Measure(5e11, "bytes", "measured"), rate(2e11))
    wires = (Link("cpu", "gpu", rate(5e10)), Link("gpu", "cpu", rate(4e10)))
    m = from_profile(Profile("mine", (cpu, gpu), wires))
    assert find(SMALL, m, JOB).chosen.kind == "resident"
    assert m.to_host.bandwidth.value == 4e10
    assert m.networks == ()
    two = replace(gpu, name="gpu1")
    through_host = from_profile(Profile("mine", (cpu, gpu, two), wires))
    assert [(n.name, n.bandwidth) for n in through_host.networks] == [("PCIe", rate(5e10))]
    seen = from_profile(Profile("mine", (cpu, gpu, two), (*wires, Link("gpu", "gpu1", rate(2e11)))))
    assert seen.networks[0].bandwidth == rate(2e11)
    known = from_profile(Profile("nvidia-h200-some-cpu-16", (cpu, gpu, two), wires))
    assert known.networks == h200().networks[:1]
    with pytest.raises(ConfigError, match="no accelerator"):
        from_profile(Profile("mine", (cpu,), wires))
    with pytest.raises(ConfigError, match="no link from gpu to cpu"):
        from_profile(Profile("mine", (cpu, gpu), wires[:1]))


# -- placements -----------------------------------------------------------------------------------


def rows_of(found: Placement, spec: ModelSpec) -> None:
    """Every row of every tensor lies in exactly one place."""
    for name, tensor in spec.named_tensors():
        parts = sorted((p.start, p.stop) for p in found.weights if p.tensor == name)
        assert parts[0][0] == 0
        assert parts[-1][1] == tensor.shape[0]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        assert all(a < b for a, b in parts)


def planned(d: Dimensions, spec: ModelSpec, m: Machine, **options: object) -> tuple[Plan, Placement]:
    plan = find(d, m, JOB, **options).chosen  # type: ignore[arg-type]
    return plan, saving.saved_plan(plan, spec, "model").placement


def test_an_offloaded_placement_is_complete() -> None:
    spec = in_formats(LLAMA_70B, INT4)
    plan, found = planned(BIG, spec, machine("t4"), formats=(INT4,))
    rows_of(found, LLAMA_70B)
    assert found.kind == "offload"
    assert found.block is not None
    assert found.block.batch * found.block.num_batches == plan.batch
    assert sum(u.units for u in found.kv) == plan.batch * 17  # chunks of 512 + 32 tokens
    assert sum(u.units for u in found.activations) == plan.batch
    formats = {p.format for p in found.weights if p.tensor.endswith(".down")}
    assert formats == {"int4"}
    assert {p.format for p in found.weights if p.tensor == "embed"} == {"bfloat16"}
    assert {p.format for p in found.weights if p.tensor == "lm_head"} == {"int8"}
    saved = saving.saved_plan(plan, spec, "x", prompt=512)
    assert read_plan(saved.to_json()) == saved
    assert (saved.limits, saved.cost) == (None, None)


def test_a_resident_placement_is_what_the_local_runtime_takes() -> None:
    plan, found = planned(SMALL, LLAMA_8B, h200())
    rows_of(found, LLAMA_8B)
    assert found.kind == "resident"
    assert {p.device for p in found.weights} == {found.kv_device} == {"device"}
    assert found.num_chunks >= plan.batch * 17


def test_a_partitioned_placement_says_both_layouts(eight: Answer) -> None:
    plan = next(p for p in eight.pareto if p.tensor == 8)
    found = saving.saved_plan(plan, LLAMA_70B, "x").placement
    assert found.partition is not None
    x, y, z = found.partition.mesh
    assert x * y * z == 8
    saved = saving.saved_plan(plan, LLAMA_70B, "x")
    assert read_plan(saved.to_json()) == saved


def test_a_split_offload_keeps_rows_of_a_shard() -> None:
    answer = find(BIG, machine("8xt4"), JOB)
    plan = next(p for p in answer.plans if p.offload is not None and p.stages > 1)
    found = saving.saved_plan(plan, LLAMA_70B, "x").placement
    assert found.partition is not None
    assert found.partition.stages == 8


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 9, "placement": {}}', '{"schema": 2, "placement": {}}'])
def test_damaged_plans(text: str) -> None:
    with pytest.raises(ConfigError):
        read_plan(text)


def test_reports_say_all(eight: Answer) -> None:
    plan = eight.chosen
    assert plan.figures()["tokens_per_second"] == plan.tokens_per_second
    assert {"throughput", "latency", "lower bound", "cost", "binds"} <= {label for label, _ in prediction(plan)}
    assert busy(plan)[0][0] == plan.binds
    assert any("device" in value for _, value in where(plan))
