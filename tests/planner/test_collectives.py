"""Collectives as a profile says them: lines through sizes, judged on others, and what plans cost by them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.core.collectives import COLUMNS, OURS, SEND, TABLE, sent_nbytes
from cellar.core.hardware import Device, Link, Measure, Profile, Table
from cellar.core.layouts import Layout, Mesh
from cellar.planner.collectives import KINDS, Collectives, Fit, Line, fit, ours, read
from cellar.planner.cost import dimensions
from cellar.planner.machines import Machine, from_profile
from cellar.planner.models import decoder_spec
from cellar.planner.offload import Job
from cellar.planner.partition import BF16, Sent, Term, Work, block_timeline, block_work
from cellar.planner.ranks import UNKNOWN
from cellar.planner.saved import read_plan
from cellar.planner.saving import saved_plan
from cellar.planner.search import find
from cellar.planner.sharding import Kind
from cellar.planner.steps import StepPrices
from cellar.planner.work import StepWork
from cellar.reports.models import model_spec
from cellar.reports.plan_rows import origins

SPEC = decoder_spec(
    "llama", layers=8, embed=4096, mlp=14336, heads=32, kv_heads=8, head_dim=128, vocab=128_256, gated=True,
    parallel=False, tied=False,
)  # fmt: skip
D = dimensions(SPEC)
MEASURED_KINDS = sorted(KINDS)


def points(
    small: tuple[float, float], large: tuple[float, float], at: float = 2**19
) -> list[tuple[float, float, bool]]:
    """Powers of two, fitted, and sizes between, which are not: `at` bytes end a line of (seconds, seconds a byte)."""
    sizes = [(2.0**k, True) for k in range(10, 27)] + [(1.5 * 2**k, False) for k in range(11, 26, 2)]
    return [(n, (small if n <= at else large)[0] + (small if n <= at else large)[1] * n, f) for n, f in sizes]


def table(start: float = 1e-5, each: float = 1 / 2e11, ranks: int = 4, ways: tuple[str, ...] = (OURS,)) -> Table:
    """A profile's, of lines alike for all kinds."""
    rows: list[tuple[Any, ...]] = []
    for way in ways:
        for kind in MEASURED_KINDS:
            for size in (2, ranks):
                for whole in (2**k for k in range(10, 27)):
                    sent = sent_nbytes(kind, whole, size)
                    rows.append((way, kind, size, whole, sent, start + each * sent, 1))
    return Table(COLUMNS, tuple(rows))


def profile(**tables: Table) -> Profile:
    def rate(value: float) -> Measure:
        return Measure(value, "bytes/s", "measured")

    gpu = Device("gpu", "gpu", Measure(141e9, "bytes", "datasheet"), rate(4e12), {"bfloat16": rate(7e14)})
    cpu = Device("cpu", "cpu", Measure(5e11, "bytes", "measured"), rate(2e11))
    wires = (Link("cpu", "gpu", rate(5e10)), Link("gpu", "cpu", rate(4e10)))
    return Profile("mine", (cpu, gpu), wires, tables=tables)


def measured_machine(start: float = 1e-5, each: float = 1 / 2e11) -> Machine:
    found = from_profile(Profile.from_json(profile(**{TABLE: table(start, each)}).to_json()))
    constants = replace(found.constants, eager_seconds=Measure(0.0, "s", "assumed"))
    return replace(found, constants=constants, ranks=UNKNOWN)


def test_two_ways_of_small_and_large_are_two_lines() -> None:
    found = fit(OURS, "all-reduce", 4, points((7e-6, 1e-11), (3e-5, 4e-12)))
    assert [line.most for line in found.lines] == [2**19, math.inf]
    assert [line.start for line in found.lines] == pytest.approx([7e-6, 3e-5], rel=1e-3)
    assert [line.each for line in found.lines] == pytest.approx([1e-11, 4e-12], rel=1e-3)
    assert found.missed == pytest.approx(0, abs=1e-6)


def test_one_way_is_one_line_and_noise_makes_no_second() -> None:
    noise = np.random.default_rng(3)
    seen = [(n, s * noise.uniform(1.0, 1.05), f) for n, s, f in points((15e-6, 5e-12), (15e-6, 5e-12))]
    found = fit(OURS, "all-reduce", 4, seen)
    assert len(found.lines) == 1
    assert found.lines[0].start == pytest.approx(15e-6, rel=0.06)
    assert found.missed is not None
    assert found.missed < 0.06


def test_a_fit_is_judged_by_what_it_has_not_seen() -> None:
    """A size between that took twice as long is said, and changes no line."""
    seen = points((15e-6, 5e-12), (15e-6, 5e-12))
    wrong = [(n, 2 * s if n == 1.5 * 2**15 else s, f) for n, s, f in seen]
    before, after = (fit(OURS, "all-reduce", 4, each) for each in (seen, wrong))
    assert after.lines == before.lines
    assert after.missed == pytest.approx(0.5)


def test_measured_sums_of_four_h200_are_one_line_within_a_tenth() -> None:
    """NCCL, microseconds by bytes: what one network constant and one latency cannot say of both ends."""
    took = {2**14: 15.4, 2**18: 16.5, 2**20: 22.5, 2**24: 97.0, 2**26: 328.0}
    seen = [(1.5 * n, s * 1e-6, n != 2**20) for n, s in took.items()]
    found = fit("nccl", "all-reduce", 4, seen)
    assert found.missed is not None
    assert found.missed < 0.11
    assert found.lines[-1].rate == pytest.approx(3.1e11, rel=0.05)


def test_ranks_that_were_not_measured_are_priced_as_the_next_more() -> None:
    known = Collectives(tuple(Fit(OURS, "all-gather", k, (Line(math.inf, k * 1e-6, 0.0),)) for k in (2, 8)))
    assert [known.of("all-gather", k).ranks for k in (2, 3, 8, 16)] == [2, 8, 8, 8]


def test_other_ways_and_missing_kinds_price_nothing() -> None:
    assert ours(table(ways=("nccl",))) is None
    some = table()
    assert ours(replace(some, rows=tuple(row for row in some.rows if row[1] != SEND))) is None
    assert {one.way for one in read(table(ways=("nccl", OURS)))} == {"nccl", OURS}


def test_a_profile_of_ranks_is_a_machine_of_so_many_devices() -> None:
    m = measured_machine()
    assert m.num_devices == 4
    assert m.networks[0].measured is not None
    assert m.constants.network.source == m.networks[0].hop.source == "measured"
    assert from_profile(profile()).networks == ()
    said = {name: (value, origin) for name, value, origin in origins(m)}
    assert said["all-reduce of 4, latency"] == ("1e-05 s", "measured")
    assert said["send of 2, rate"] == ("2e+11 bytes/s", "measured")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_spans_are_the_sum_of_the_collectives(data: st.DataObject) -> None:
    """Any collectives, any lines, any size: what a step is charged is what its collectives take one by one."""
    seconds, small = st.floats(1e-7, 1e-3), st.floats(1e-13, 1e-9)
    kinds = [Kind.ALL_REDUCE, Kind.ALL_GATHER]
    fits = []
    for kind in kinds:
        most = sorted(data.draw(st.lists(st.floats(100, 1e8), max_size=2, unique=True)))
        lines = tuple(Line(end, data.draw(seconds), data.draw(small)) for end in (*most, math.inf))
        fits.append(Fit(OURS, kind.value, 2, lines))
    known = Collectives(tuple(fits))
    terms = tuple(
        Term(data.draw(st.sampled_from(kinds)), 2, data.draw(st.floats(1, 1e5)), data.draw(st.sampled_from([0.0, 1.0])))
        for _ in range(data.draw(st.integers(1, 4)))
    )
    m = measured_machine()
    m = replace(m, networks=(replace(m.networks[0], measured=known),))
    tokens = data.draw(st.integers(1, 10_000))
    wanted = 0.0
    for term in terms:
        line = known.of(term.kind.value, 2).line(term.elements * tokens * 2.0)
        wanted += term.begins * line.start + line.each * term.elements * tokens * 2.0
    assert Sent(terms=terms).seconds(m, 2.0, tokens, 2) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("layout", [Layout(Mesh(1, 1, 4)), Layout(Mesh(2, 1, 2)), Layout(Mesh(2, 1, 2), "x")])
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize(("batch", "new"), [(4, 1), (64, 1), (256, 1), (8, 512)])
def test_a_step_costs_what_the_planner_says_on_each_line(layout: Layout, looped: bool, batch: int, new: int) -> None:
    m = measured_machine()
    ends = Line(2**18, 8e-6, 1e-11), Line(math.inf, 4e-5, 5e-12)
    fits = tuple(Fit(OURS, kind, k, ends) for kind in MEASURED_KINDS for k in (2, 4))
    m = replace(m, networks=(replace(m.networks[0], measured=Collectives(fits)),))
    prices = StepPrices(D, m, BF16, layout, looped=looped)
    assert prices.cost.talk_spans
    expected = block_timeline(prices.d, m, layout, Work(batch, new, 1000), looped=looped)
    work = StepWork(batch * new, batch, batch * new * (1000 - (new - 1) / 2), batch * 1000, new > 1)
    assert prices.seconds(work) == pytest.approx(expected.seconds, rel=1e-9)
    assert prices.timeline(work).seconds == pytest.approx(expected.seconds, rel=1e-9)


def test_slower_collectives_are_exactly_so_much_slower() -> None:
    """1D by heads: as many starts a layer as it has collectives that begin, whatever a step's size."""
    layout = Layout(Mesh(1, 1, 4))
    terms = block_work(D, layout, "", "switch").activations.terms
    begun = sum(term.begins for term in terms)
    assert begun >= 2
    for tokens in (1, 64, 1024):
        work = StepWork(tokens, 1, tokens * 1000, 1000)
        quick, slow = (StepPrices(D, measured_machine(s), BF16, layout).seconds(work) for s in (1e-5, 6e-5))
        assert slow - quick == pytest.approx(5e-5 * begun * D.layers, rel=1e-6)


def test_a_plan_rests_on_what_was_measured_and_keeps_it() -> None:
    """Slow collectives make plans slower, and a network that costs nearly nothing is worth cutting a model over."""
    job, spec = Job(128, 64), model_spec("llama-3-8b", "cuda")
    near, far = (
        find(dimensions(spec), measured_machine(s, e), job, "latency") for s, e in ((1e-6, 1e-13), (0.2, 1e-7))
    )
    assert near.chosen.tensor == 4
    assert far.chosen.tensor == 1
    assert near.running is not None
    saved = saved_plan(near.running, spec, "llama-3-8b")
    assert read_plan(saved.to_json()) == saved
