"""Prices of several GPUs against what was measured on them (docs/performance/h200-ranks.md): fitted rows, and judged
ones, of another model or another layout.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from cellar.core.config import step_tokens
from cellar.core.hardware import Measure
from cellar.core.layouts import Layout, Mesh
from cellar.core.micro_batches import LANES
from cellar.planner.collectives import fit, ours
from cellar.planner.cost import Dimensions, dimensions
from cellar.planner.machines import Machine, machine
from cellar.planner.offload import Job
from cellar.planner.partition import BF16, Work, block_timeline, block_work, choices, parts_price
from cellar.planner.ranks import (
    LAID_CALL,
    LAID_GATHER,
    LAID_LAYER,
    LAID_START,
    LAID_SUM_OF_2,
    LAID_SUM_OF_4,
    NVLINK,
    PRODUCT,
    SUMS,
    SUMS_JUDGED,
    UNKNOWN,
)
from cellar.planner.resident import repeated_bytes
from cellar.planner.search import find
from cellar.planner.sharding import Kind
from cellar.planner.steps import StepPrices
from cellar.planner.work import StepWork, step_work
from cellar.reports.models import model_spec
from cellar.runtime.ranks.micro_batches import sizes_of
from tests.planner.rank_fits import device_seconds, fit_layouts, fit_products, with_product
from tests.planner.test_collectives import table

NEAR = 0.10

D_8B, D_70B = (dimensions(model_spec(name)) for name in ("llama-3-8b", "llama-3-70b"))
EIGHT_LAYERS = replace(D_70B, layers=8)

Row = tuple[int, StepWork, float]
"""Devices, a step, and its seconds."""


def decodes(batch: int, context: int) -> StepWork:
    return StepWork(batch, batch, batch * context, batch * context)


def prompts(count: int, length: int) -> StepWork:
    return step_work(np.zeros(count, np.int64), np.full(count, length), count)


FITTED = [
    (2, decodes(1, 1024), 2.39e-3),
    (2, decodes(32, 1024), 3.53e-3),
    (4, decodes(1, 1024), 2.04e-3),
    (4, decodes(32, 1024), 2.59e-3),
]
"""Llama-3-8B on two and four H200."""

JUDGED = [
    (4, decodes(1, 1024), 9.37e-3),
    (4, decodes(8, 1024), 10.70e-3),
    (4, decodes(32, 1024), 12.67e-3),
    (4, decodes(64, 1024), 14.06e-3),
    (4, decodes(128, 1024), 16.91e-3),
    (4, decodes(1, 8000), 9.80e-3),
    (4, decodes(16, 8000), 13.82e-3),
    (4, prompts(1, 128), 18.4e-3),
    (4, prompts(1, 1024), 73.1e-3),
    (4, prompts(1, 4000), 273e-3),
    (4, prompts(1, 8000), 559e-3),
]
"""Llama-3-70B on four H200; prompts of 4,000 and 8,000 tokens whole, as they were before micro-batches."""

QWEN = {
    "whole": [(2, prompts(1, 2000), 116.8e-3), (2, prompts(1, 4000), 232.6e-3), (2, prompts(1, 8000), 499.2e-3)],
    "in micro-batches": [(2, prompts(1, 4000), 228.0e-3), (2, prompts(1, 8000), 480.1e-3)],
}
"""Qwen3-32B's prompts on two H100 (docs/decisions/0089-micro-batches.md)."""

LAYOUTS = {
    "1D": Layout(Mesh(1, 1, 4), "", "zyx"),
    "2D": Layout(Mesh(2, 1, 2), "", "zyx"),
    "X": Layout(Mesh(2, 1, 2), "x", "zy"),
    "XYZ": Layout(Mesh(2, 1, 2), "xyz"),
}

LAID = {
    64: (3.6, 5.3, 29.0, 72.3),
    256: (4.9, 6.9, 29.8, 72.4),
    1024: (11.4, 13.6, 30.5, 73.6),
    2048: (21.0, 23.9, 36.7, 77.5),
    4096: (40.1, 44.2, 50.2, 86.6),
    8192: (78.6, 84.4, 76.6, 105.8),
    16384: (155.0, 163.4, 132.9, 149.7),
}
"""Milliseconds of the device by tokens of a step of prompts: Llama-3-70B with 8 layers on four H100."""

LAID_JUDGED = "X"


def in_prompts(tokens: int) -> StepWork:
    """As `benchmarks/layouts.py` deals them: prompts of up to 2,048 tokens, one for each rank at least."""
    count = -(-max(1, tokens // 2048) // 4) * 4
    return prompts(count, tokens // count)


def laid_rows(*names: str) -> list[tuple[Layout, StepWork, float]]:
    return [
        (layout, in_prompts(tokens), milliseconds / 1e3)
        for tokens, row in LAID.items()
        for (name, layout), milliseconds in zip(LAYOUTS.items(), row, strict=True)
        if name in names
    ]


def whole(m: Machine) -> Machine:
    """The same without copy engines: no step is cut."""
    return replace(m, ranks=replace(m.ranks, copies=Measure(0.0, "bytes/s", "assumed")))


def worst(d: Dimensions, m: Machine, rows: list[Row]) -> float:
    """The largest error."""
    return max(abs(StepPrices(d, m.with_devices(n)).seconds(work) / seconds - 1) for n, work, seconds in rows)


# -- sums ------------------------------------------------------------------------------------------


def test_the_lines_of_sums_are_the_fit_to_those_measured() -> None:
    points = [(1.5 * n, 1e-6 * took, n not in SUMS_JUDGED) for n, took in SUMS.items()]
    found, shipped = fit("ranks", Kind.SUM.value, 4, points), NVLINK.of(Kind.SUM.value, 4)
    assert found.missed is not None
    assert found.missed < 0.06
    for n, took in SUMS.items():
        assert shipped.seconds(1.5 * n) == pytest.approx(found.seconds(1.5 * n), rel=1e-3)
        assert shipped.seconds(1.5 * n) == pytest.approx(1e-6 * took, rel=0.08)


def test_a_profile_with_boxes_prices_tensor_parallelism_by_them_and_layouts_by_the_library() -> None:
    both = table(1e-5, ways=("ranks", "peers", "nccl"))
    slow = table(9e-5, ways=("nccl",))
    rows = [*(row for row in both.rows if row[0] != "nccl"), *slow.rows]
    found = ours(replace(both, rows=tuple(rows)))
    assert found is not None
    assert found.boxes
    assert found.of("sum", 4).lines[0].start == pytest.approx(1e-5)
    assert found.of("all-reduce", 4).lines[0].start == pytest.approx(9e-5)
    plain = ours(table(1e-5))
    assert plain is not None
    assert not plain.boxes
    assert plain.of("sum", 4) == plain.of("all-reduce", 4)


# -- tensor parallelism ----------------------------------------------------------------------------


def test_the_shortest_product_is_the_fit_to_one_model() -> None:
    found = fit_products(D_8B, machine("h200"), FITTED)
    assert found.ranks.product_seconds.value == pytest.approx(PRODUCT, rel=0.03)
    assert worst(D_8B, machine("h200"), FITTED) < NEAR
    assert worst(D_8B, with_product(machine("h200"), 0.0), FITTED) > 2 * NEAR, "without it four devices are too fast"


@pytest.mark.parametrize(("devices", "work", "seconds"), JUDGED)
def test_the_other_models_steps_are_within_a_tenth(devices: int, work: StepWork, seconds: float) -> None:
    m = whole(machine("h200")).with_devices(devices)
    assert StepPrices(D_70B, m).seconds(work) == pytest.approx(seconds, rel=NEAR)


def test_a_third_models_prompts_are_within_a_tenth_whole_and_in_micro_batches() -> None:
    d, m = dimensions(model_spec("qwen3-32b")), machine("2xh100")
    assert worst(d, whole(m), QWEN["whole"]) < NEAR
    assert worst(d, m, QWEN["in micro-batches"]) < NEAR
    cost = StepPrices(d, m).cost
    assert [cost.parts(work.tokens) > 1 for _, work, _ in QWEN["whole"]] == [False, True, True]


def test_sums_priced_as_scatters_and_gathers_of_a_library_are_too_slow() -> None:
    """What a layout takes is no price of tensor parallelism."""
    _, work, seconds = JUDGED[0]
    m = machine("4xh200")
    assert StepPrices(D_70B, m, laid=True).seconds(work) > 2 * seconds
    assert device_seconds(D_70B, m, StepPrices(D_70B, m).layout, work) > 1.5 * seconds


@pytest.mark.parametrize("m", [machine("4xh200"), machine("2xh100"), machine("8xh200"), whole(machine("4xh200"))])
@pytest.mark.parametrize("d", [D_8B, D_70B])
@pytest.mark.parametrize(("count", "length"), [(1, 100), (1, 1024), (4, 1024), (5, 4000), (64, 2048)])
def test_a_step_in_micro_batches_costs_what_the_planner_says(
    m: Machine, d: Dimensions, count: int, length: int
) -> None:
    prices = StepPrices(d, m)
    assert prices.tensor
    work, uniform = prompts(count, length), Work(count, length, length)
    assert prices.seconds(work) == pytest.approx(block_timeline(d, m, prices.layout, uniform).seconds, rel=1e-9)
    assert prices.timeline(work).seconds == pytest.approx(prices.seconds(work), rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("batch", "new"), [(4, 1), (128, 1), (4, 100), (8, 2048)])
def test_a_step_that_is_not_captured_costs_what_the_planner_says(layout: Layout, batch: int, new: int) -> None:
    m = machine("4xh100")
    prices = StepPrices(D_70B, m, layout=layout)
    stop = np.full(batch, 2048)
    work = prices.decodes(stop) if new == 1 else step_work(stop - new, stop, batch)
    expected = block_timeline(D_70B, m, layout, Work(batch, new, 2048))
    assert prices.seconds(work) == pytest.approx(expected.seconds, rel=1e-9)
    assert prices.timeline(work).seconds == pytest.approx(expected.seconds, rel=1e-9)


def test_micro_batches_hide_what_products_take_longer_than() -> None:
    m, layout = machine("2xh200"), Layout(Mesh(1, 1, 2), "", "zyx")
    parts = parts_price(D_70B, block_work(D_70B, layout, "", "switch"), m)
    assert parts is not None
    cost = StepPrices(D_70B, m).cost
    assert [cost.parts(n) for n in (1, 1024, 4000, 8192, 10_000)] == [1, 1, LANES, 4, 5]
    assert parts.exposed(4000, busy=1.0) == 4000 * parts.adding, "all of it is hidden"
    assert parts.exposed(4000, busy=0.0) == pytest.approx(4000 * (parts.adding + parts.copying))
    assert parts.copying == pytest.approx(2 * 2 * 8192 / m.ranks.copies.value), "two sums, of a rank half of each twice"
    for tokens in (4000, 8000):
        quick, slow = (StepPrices(D_70B, one).seconds(prompts(1, tokens)) for one in (m, whole(m)))
        assert 0.93 < quick / slow < 0.98
    far = replace(m, ranks=replace(m.ranks, copies=Measure(2e10, "bytes/s", "assumed")))
    assert StepPrices(D_70B, far).seconds(prompts(1, 8000)) > StepPrices(D_70B, whole(m)).seconds(prompts(1, 8000))


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "llama-2-7b"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_cut_steps_as_the_planner_prices_them(name: str, ranks: int) -> None:
    spec = model_spec(name, "cuda")
    cost = StepPrices(dimensions(spec), machine("h200").with_devices(ranks)).cost
    sizes = sizes_of(spec, ranks)
    assert cost.part_most == sizes.most
    assert cost.part_least == pytest.approx(sizes.least, abs=1), "the planner counts no norms"
    for tokens in (1, 1000, 2000, 4096, 8192, 30_000):
        assert cost.parts(tokens) == len(sizes.cut(tokens))


# -- layouts ---------------------------------------------------------------------------------------


def test_the_constants_of_layouts_are_the_fit_to_three_of_them() -> None:
    rows = laid_rows(*(name for name in LAYOUTS if name != LAID_JUDGED))
    shipped = LAID_START, LAID_LAYER, LAID_GATHER, LAID_SUM_OF_4, LAID_SUM_OF_2
    assert fit_layouts(EIGHT_LAYERS, machine("4xh100"), rows) == pytest.approx(shipped, rel=0.03)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_within_a_tenth_on_the_device(name: str) -> None:
    for layout, work, seconds in laid_rows(name):
        assert device_seconds(EIGHT_LAYERS, machine("4xh100"), layout, work) == pytest.approx(seconds, rel=NEAR)


@pytest.mark.parametrize(("other", "tokens"), [("X", 7_600), ("XYZ", 15_200)])
def test_layouts_cross_where_they_were_measured_to(other: str, tokens: int) -> None:
    m = machine("4xh100")

    def ahead(n: int) -> float:
        """How much longer 1D takes, as a logarithm."""
        both = (device_seconds(EIGHT_LAYERS, m, LAYOUTS[name], in_prompts(n)) for name in ("1D", other))
        return float(np.subtract(*map(np.log, both)))

    steps = [2048 * 4 * k for k in range(1, 5)] if tokens > 8192 else [4 * k for k in range(128, 4096, 64)]
    found = [
        left + (right - left) * ahead(left) / (ahead(left) - ahead(right))
        for left, right in pairwise(steps)
        if ahead(left) < 0 < ahead(right)
    ]
    assert found == pytest.approx([tokens], rel=NEAR)


def test_the_fastest_layout_by_price_is_the_fastest_measured() -> None:
    m = machine("4xh100")
    for tokens, row in LAID.items():
        priced = {name: device_seconds(EIGHT_LAYERS, m, lay, in_prompts(tokens)) for name, lay in LAYOUTS.items()}
        measured = dict(zip(LAYOUTS, row, strict=True))
        assert min(priced, key=priced.__getitem__) == min(measured, key=measured.__getitem__)


@pytest.mark.parametrize(
    ("axes", "milliseconds"), [("zyx", (69, 73, 73)), ("", (103, 110, 105))], ids=["fitted", "judged"]
)
def test_decodes_of_layouts_last_as_long_as_their_launches(axes: str, milliseconds: tuple[int, ...]) -> None:
    """StarCoder on four H200, 64 rows, attention by heads and by batch."""
    d, layout = dimensions(model_spec("starcoder")), Layout(Mesh(1, 1, 4), "", axes)
    prices = StepPrices(d, machine("4xh200"), layout=layout)
    assert not prices.tensor, "one KV head is not shared by four ranks"
    for context, taken in zip((2048, 8192, 32_768), milliseconds, strict=True):
        assert prices.seconds(decodes(64, context)) == pytest.approx(taken / 1e3, rel=NEAR)
    quick = replace(machine("4xh200"), ranks=UNKNOWN)
    assert StepPrices(d, quick, layout=layout).seconds(decodes(64, 2048)) < 0.5 * milliseconds[0] / 1e3
    assert machine("4xh200").ranks.call_seconds.value == LAID_CALL


# -- picks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["4xh200", "4xh100"])
def test_tensor_parallelism_is_picked_at_every_size_that_an_engine_runs(on: str) -> None:
    """It was the fastest of all at each: 559 ms for 8,000 tokens whole, where X, the best of the layouts, took 766."""
    m = machine(on)
    for tokens in (n for n in LAID if n <= step_tokens("gpu")):
        count = max(4, tokens // 2048)
        for one in (m, whole(m)):
            found = choices(D_70B, one, 4, Work(count, tokens // count, tokens // count))
            best = min(found, key=lambda choice: choice.timeline.seconds)
            assert best.layout.is_tensor_parallel(D_70B.kv_heads), tokens


@pytest.mark.parametrize("job", [Job(128, 512), Job(512, 32), Job(2048, 512), Job(8000, 200)])
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_the_plan_that_runs_on_four_is_tensor_parallelism(job: Job, objective: str) -> None:
    running = find(D_70B, machine("4xh200"), job, objective).running  # type: ignore[arg-type]
    assert running is not None
    for choice in (running.prefill, running.decode):
        assert choice is not None
        assert choice.layout.is_tensor_parallel(D_70B.kv_heads)
        assert not choice.looped


def test_tensor_parallelism_holds_the_whole_table() -> None:
    layout = LAYOUTS["1D"]
    assert repeated_bytes(D_70B, BF16, layout) == pytest.approx(0.75 * 2 * 128_256 * 8192)
    assert repeated_bytes(replace(D_70B, tied=True), BF16, layout) == pytest.approx(2 * 128_256 * 8192)
    assert repeated_bytes(D_70B, BF16, LAYOUTS["2D"]) == 0
