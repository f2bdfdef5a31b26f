"""The planner against the published times, layouts, utilizations and contexts of PaLM on TPU v4."""

from __future__ import annotations

import pytest

from cellar.core.layouts import Layout, Mesh
from cellar.planner.calibration import PALM, Case, best, fit, seconds, with_constants
from cellar.planner.cost import Dimensions, dimensions, flops_utilization
from cellar.planner.machines import TPU_HBM, TPU_HOP, TPU_MATMUL, TPU_NETWORK, tpu_v4
from cellar.planner.models import NAMES, decoder_spec, known_spec
from cellar.planner.partition import kv_bytes_per_chip, padded_heads


def palm(name: str) -> Dimensions:
    spec = known_spec(name)
    assert spec is not None
    return dimensions(spec)


MODELS = {name: palm(name) for name in ("palm-540b", "palm-62b")}
MACHINE = tpu_v4()


def case_name(case: Case) -> str:
    return f"{case.model}-{case.chips}-{case.phase}-{case.batch}"


@pytest.mark.parametrize(("name", "billions"), list(zip(NAMES, (530, 540, 62.5, 8.6), strict=True)))
def test_parameters(name: str, billions: float) -> None:
    assert palm(name).parameters == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize("case", PALM, ids=case_name)
def test_the_layout_is_the_papers_and_the_time_within_six_percent(case: Case) -> None:
    d = MODELS[case.model]
    assert best(case, d, MACHINE).name == case.layout
    assert seconds(case, d, MACHINE) == pytest.approx(case.seconds, rel=0.06)


def test_the_shipped_constants_are_the_fits() -> None:
    found = fit(PALM, MODELS, MACHINE)
    assert found == pytest.approx((TPU_MATMUL, TPU_HBM, TPU_NETWORK, TPU_HOP), rel=0.03)


def test_constants_of_540b_predict_62b() -> None:
    large = [case for case in PALM if case.model == "palm-540b"]
    machine = with_constants(MACHINE, *fit(large, MODELS, MACHINE))
    for case in PALM:
        d = MODELS[case.model]
        assert best(case, d, machine).name == case.layout
        assert seconds(case, d, machine) == pytest.approx(case.seconds, rel=0.06 if case in large else 0.08)


@pytest.mark.parametrize("case", PALM, ids=case_name)
def test_utilization_from_the_papers_own_times(case: Case) -> None:
    d = MODELS[case.model]
    every_token = 2 * d.parameters * case.tokens  # the paper's count has logits for prompts, too
    found = flops_utilization(every_token, case.seconds, case.chips, MACHINE.flops("bfloat16"))
    assert 100 * found == pytest.approx(case.mfu, abs=1)


@pytest.mark.parametrize("case", PALM, ids=case_name)
def test_no_estimate_is_below_its_bound(case: Case) -> None:
    timeline = best(case, MODELS[case.model], MACHINE).timeline
    assert 0 < timeline.lower_bound < timeline.seconds


@pytest.mark.parametrize(("batch", "published"), [(128, (1320, 660, 43_000)), (512, (330, 165, 10_700))])
def test_longest_contexts(batch: int, published: tuple[int, ...]) -> None:
    """Table 1: 30 % of 32 GiB for KV on each of 64 chips; the multi-head row has heads of 128, 48 padded to 64."""
    reserve = 0.3 * 32 * 2**30
    single = MODELS["palm-540b"]
    spec = decoder_spec(
        "mha", layers=118, embed=18432, mlp=73728, heads=48, kv_heads=48, head_dim=128, vocab=256_000,
        gated=True, parallel=True,
    )  # fmt: skip
    multi = padded_heads(dimensions(spec), 64)
    assert multi is not None
    assert multi.kv_heads == 64
    by_heads, by_batch = Layout(Mesh(4, 4, 4), "", "zyx"), Layout(Mesh(4, 4, 4))
    assert (by_heads.attention, by_batch.attention) == ("heads", "batch")
    found = [
        reserve / kv_bytes_per_chip(d, layout, batch, 1)
        for d, layout in ((multi, by_heads), (single, by_heads), (single, by_batch))
    ]
    assert found == pytest.approx(published, rel=0.02)


def test_where_the_cache_weighs_as_much_as_the_weights() -> None:
    """59,500 tokens in the paper; its own formula with its d = 384 gives a hundred times that, with d = 256 more."""
    weights = 1080e9
    assert weights / (4 * 118 * 384) == pytest.approx(5.96e6, rel=1e-3)
    d = MODELS["palm-540b"]
    assert weights / (2 * d.kv_elements() * d.layers) == pytest.approx(8.94e6, rel=1e-3)
