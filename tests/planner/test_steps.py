"""Prices of steps of any composition: equal to those of uniform batches, and to a count token by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.core.errors import CapacityError, ConfigError
from cellar.core.hardware import Device, Measure, Profile
from cellar.core.layouts import Layout, Mesh
from cellar.planner.calibration import KERNELS, fit_kernels, fit_steps
from cellar.planner.cost import Dimensions, dimensions
from cellar.planner.machines import Machine, a100, h200, laptop, machine, processor
from cellar.planner.models import decoder_spec
from cellar.planner.partition import BF16, FLOAT32, Formats, Work, block_timeline
from cellar.planner.steps import StepPrices, kv_room, serving_layout
from cellar.planner.work import StepWork, step_work
from cellar.reports.models import model_spec


def model(layers: int = 32, heads: int = 32, kv_heads: int = 8) -> Dimensions:
    """Llama-3-8B's shape."""
    spec = decoder_spec(
        "llama", layers=layers, embed=4096, mlp=14336, heads=heads, kv_heads=kv_heads, head_dim=128, vocab=128_256,
        gated=True, parallel=False, tied=False,
    )  # fmt: skip
    return dimensions(spec)


def uniform(batch: int, new: int, context: int) -> StepWork:
    stop = np.full(batch, context, np.int32)
    return step_work(stop - new, stop, batch)


@pytest.mark.parametrize("name", ["h200", "t4", "4xA100", "8xH100"])
@pytest.mark.parametrize(("batch", "new", "context"), [(8, 1, 100), (64, 1, 3000), (8, 512, 512), (8, 100, 900)])
@pytest.mark.parametrize("looped", [False, True])
def test_a_uniform_step_costs_what_the_planner_says(
    name: str, batch: int, new: int, context: int, looped: bool
) -> None:
    d, m = model(), machine(name)
    m = replace(m, constants=replace(m.constants, eager_seconds=Measure(0.0, "s", "assumed")))
    prices = StepPrices(d, m, looped=looped)
    work = uniform(batch, new, context)
    expected = block_timeline(prices.d, m, prices.layout, Work(batch, new, context), looped=looped)
    # Where sums go through boxes in peers' memory no step is sent in chunks.
    assert prices.cost.chunks(work) == (4 if looped and new == 512 and name != "8xH100" else 1)
    assert prices.seconds(work) == pytest.approx(expected.seconds, rel=1e-9)
    assert prices.timeline(work).seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert prices.timeline(work).lower_bound == pytest.approx(expected.lower_bound, rel=1e-6)


@pytest.mark.parametrize("gather", ["x", "xyz"])
def test_a_step_that_gathers_waits_for_its_first_layers_weights_alone(gather: str) -> None:
    d, m = model(), machine("4xA100")
    m = replace(m, constants=replace(m.constants, eager_seconds=Measure(0.0, "s", "assumed")))
    layout = Layout(Mesh(2, 1, 2), gather)
    prices = StepPrices(d, m, layout=layout, looped=True)
    timeline = prices.timeline(uniform(16, 512, 512))
    expected = block_timeline(d, m, layout, Work(16, 512, 512), looped=True)
    assert prices.seconds(uniform(16, 512, 512)) == pytest.approx(expected.seconds, rel=1e-9)
    assert timeline.seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert {k: v for k, v in timeline.busy().items() if v} == pytest.approx(expected.busy())
    (first,) = (group for group in timeline.groups if group.name == "awaited gathers")
    assert first.seconds == pytest.approx(timeline.busy()["weight gathers"] / d.layers)


spans = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 700)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(spans=spans, windows=st.lists(st.sampled_from([None, 1, 64, 1000]), max_size=4))
def test_counts_are_those_of_every_token(spans: list[tuple[int, int]], windows: list[int | None]) -> None:
    start = np.array([a for a, _ in spans], np.int32)
    stop = start + np.array([n for _, n in spans], np.int32)
    found = step_work(start, stop, len(spans), tuple(windows))
    layers = windows or [None]
    attended = np.mean([sum(min(p + 1, w or p + 1) for a, n in spans for p in range(a, a + n)) for w in layers])
    resident = np.mean([sum(min(a + n, a + n if w is None else w + n - 1) for a, n in spans) for w in layers])
    assert found.tokens == sum(n for _, n in spans)
    assert found.attended == pytest.approx(attended)
    assert found.resident == pytest.approx(resident)


def test_counts_of_long_contexts_do_not_wrap_around() -> None:
    found = step_work(np.array([1_000_000], np.int32), np.array([1_008_192], np.int32), 0)
    assert found.attended == pytest.approx(8192 * 1_004_096.5)


def test_the_price_is_the_timelines_sum_and_above_its_bound() -> None:
    prices = StepPrices(model(), h200())
    for work in (uniform(16, 1, 700), uniform(1, 40, 40), StepWork(600, 17, 90_000.0, 9_000.0, True)):
        timeline = prices.timeline(work)
        assert prices.seconds(work) == pytest.approx(timeline.seconds)
        assert 0 < timeline.lower_bound < timeline.seconds


def test_decodes_have_their_own_counting() -> None:
    d = replace(model(), windows=tuple([None, 64] * 16))
    stop = np.array([10, 500, 64, 65], np.int32)
    for dims in (model(), d):
        prices = StepPrices(dims, h200())
        counted = prices.work(stop - 1, stop, 4)
        assert prices.decodes(stop) == counted._replace(prompts=False)


PAGE = Path(__file__).parents[2] / "docs" / "performance" / "h200-llama-3-8b.md"


def measured() -> dict[str, list[tuple[StepWork, float]]]:
    """Steps of an H200 from the page that publishes them: its tables' heads name the shapes, `Cellar` the milliseconds.

    The first two tables are of Llama-3-8B, the third of Llama-2-7B.
    """
    lines = PAGE.read_text().splitlines()
    found: dict[str, list[tuple[StepWork, float]]] = {"llama-3-8b": [], "llama-2-7b": []}
    rows = [k for k, line in enumerate(lines) if line.startswith("| **Cellar** |")]
    assert len(rows) == 3
    for name, k in zip(("llama-3-8b", "llama-3-8b", "llama-2-7b"), rows, strict=True):
        shapes = [cell.strip() for cell in lines[k - 2].split("|")[2:-1]]
        figures = [float(cell.strip(" *").replace(",", "")) for cell in lines[k].split("|")[2:-1]]
        for shape, milliseconds in zip(shapes, figures, strict=True):
            if "x" in shape:
                batch, context = (int(part) for part in shape.split("x"))
                work = step_work(np.full(batch, context - 1), np.full(batch, context), batch)._replace(prompts=False)
            else:
                length = int(shape.split()[-1].replace(",", ""))
                work = uniform(1, length, length)
            found[name].append((work, milliseconds / 1e3))
    return found


def worst(name: str, m: Machine) -> float:
    """The largest error of a model's steps."""
    prices = StepPrices(dimensions(model_spec(name)), m)
    return max(abs(prices.seconds(work) / seconds - 1) for work, seconds in measured()[name])


def test_the_page_has_the_steps_that_are_fitted() -> None:
    assert [len(steps) for steps in measured().values()] == [12, 7]


def test_one_models_steps_predict_anothers_within_a_tenth() -> None:
    """The constants of the H200 are those that the fit to Llama-3-8B finds; Llama-2-7B, with four times the KV a token,
    was not fitted to.
    """
    seen = measured()["llama-3-8b"]
    found = fit_kernels(dimensions(model_spec("llama-3-8b")), h200(), BF16, seen)
    for name in KERNELS:
        assert getattr(found.constants, name).value == pytest.approx(getattr(h200().constants, name).value, rel=0.03)
    for m in (found, h200()):
        assert worst("llama-3-8b", m) < 0.08
        assert worst("llama-2-7b", m) < 0.08


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("matmul", 2.0),
        ("hbm", 0.5),
        ("attention_matmul", 2.0),
        ("attention_hbm", 0.5),
        ("product_overlap", 1 / 0.555),  # as if the longer hid all of the shorter
        ("layer_seconds", 0.0),
        ("eager_seconds", 0.0),
    ],
)
def test_a_cost_model_without_one_of_its_parts_misses(name: str, factor: float) -> None:
    m = h200()
    wrong = replace(getattr(m.constants, name), value=getattr(m.constants, name).value * factor)
    m = replace(m, constants=replace(m.constants, **{name: wrong}))
    assert max(worst("llama-3-8b", m), worst("llama-2-7b", m)) > 0.1


def test_a_device_more_has_room_for_more() -> None:
    d = model()
    rooms = [kv_room(StepPrices(d, a100().with_devices(n)), 0.9, 256, 8192) for n in (1, 2, 4)]
    assert rooms[0] < rooms[1] < rooms[2]
    assert rooms[0] * d.layers * d.kv_elements() * 2 < 0.9 * a100().device.capacity.value - 2 * d.parameters


def test_what_does_not_fit_is_said_with_the_number() -> None:
    with pytest.raises(CapacityError, match="GiB"):
        kv_room(StepPrices(model(), laptop()), 0.9, 256, 8192)
    with pytest.raises(CapacityError, match="3 devices"):
        serving_layout(model(), a100().with_devices(3))


def a_processor() -> Profile:
    cpu = Device(
        "cpu",
        "cpu",
        Measure(16e9, "bytes", "measured"),
        Measure(30e9, "bytes/s", "measured"),
        {"float32": Measure(100e9, "FLOP/s", "measured")},
        Measure(4e-6, "s", "measured"),
        4,
    )
    return Profile("some-cpu", (cpu,))


def small() -> Dimensions:
    spec = decoder_spec(
        "small", layers=6, embed=384, mlp=1024, heads=6, kv_heads=2, head_dim=64, vocab=4096, gated=True, parallel=False
    )
    return dimensions(spec)


def test_a_processor_computes_in_its_own_memory() -> None:
    m = processor(a_processor())
    prices = StepPrices(small(), m, FLOAT32)
    d = small()
    work = uniform(1, 1000, 1000)
    assert prices.seconds(work) > 2 * 1000 * d.layers * d.layer_elements / 100e9
    with pytest.raises(ConfigError, match="cellar profile"):
        processor(Profile("empty", ()))


def reached(m: Machine) -> tuple[float, ...]:
    c = m.constants
    shares = (c.matmul, c.hbm, c.attention_matmul, c.attention_hbm, c.step_seconds)
    return tuple(share.value for share in shares)


def test_measured_steps_move_the_constants() -> None:
    """Steps priced with known constants, one in ten of them stalled: the fit predicts the others."""
    rng = np.random.default_rng(0)
    d, m = small(), processor(a_processor())
    true = replace(
        m,
        constants=replace(
            m.constants,
            matmul=Measure(0.6, "share", "fitted"),
            hbm=Measure(1.5, "share", "fitted"),
            attention_hbm=Measure(0.1, "share", "fitted"),
            layer_seconds=Measure(0.0, "s", "fitted"),
            step_seconds=Measure(3e-3, "s", "fitted"),
        ),
    )
    prices = StepPrices(d, true, FLOAT32)
    works = [prices.decodes(rng.integers(16, 2000, rng.integers(1, 64))) for _ in range(150)]
    works += [uniform(int(rng.integers(1, 5)), n, n) for n in rng.integers(16, 512, 40).tolist()]
    seen = [(w, prices.seconds(w) * rng.normal(1, 0.05) * (20 if rng.random() < 0.1 else 1)) for w in works]
    found = fit_steps(d, m, FLOAT32, seen)
    fitted = StepPrices(d, found, FLOAT32)
    for work in works:
        assert fitted.seconds(work) == pytest.approx(prices.seconds(work), rel=0.2)
    assert all(value > 0 for value in reached(found))
    assert found.constants.matmul.source == "fitted"


def test_formats_change_the_weights_alone() -> None:
    half = StepPrices(model(), h200(), BF16)
    quarter = StepPrices(model(), h200(), Formats("int8", 1.0, 2.0))
    decode = half.decodes(np.full(4, 500))
    saved = half.seconds(decode) - quarter.seconds(decode)
    d = model()
    assert saved == pytest.approx(d.layers * d.layer_elements / (4.8e12 * 0.90), rel=1e-6)
