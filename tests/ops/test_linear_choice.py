"""The lookup of linear kernels: by tokens, from a profile's tables, and its two inflection points."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cellar.core.errors import ConfigError
from cellar.core.hardware import Table
from cellar.ops.linear import device
from cellar.ops.linear.choice import (
    FUSED_TABLE,
    TABLE,
    WIDE_TABLE,
    Flat,
    Fused,
    FusedTiming,
    Gemv,
    LinearChoice,
    Shape,
    Timing,
    Wide,
    WideTiming,
    default_choice,
    inflections,
    linear_choices,
    tables_with,
    timings_of,
    wide_timings,
)
from cellar.ops.linear.definition import linear_definition, linear_kernel
from cellar.ops.linear.device import DeviceWeight, prepare
from cellar.runtime.probes.registry import shipped

GEMV, FLAT = Gemv(2, 2048, 1, 4), Flat(64, 128, 4, 2)
TIMINGS = [
    Timing(1, GEMV, 8e-6, 9e-6, 1.1e-5),
    Timing(2, FLAT, None, 9e-6, 1.1e-5),
    Timing(8, None, None, 1.2e-5, 1.1e-5),
    Timing(32, replace(FLAT, splits=1), None, 1.2e-5, 1.3e-5),
    Timing(64, None, None, 1.4e-5, 1.3e-5),
]


WIDES = [
    WideTiming(8, True, Wide(64, 224, 5), 9e-6, 8e-6),
    WideTiming(128, True, Wide(128, 224, 3, 2, 2, persistent=True), 1.2e-5, 1.4e-5),
]


def test_the_wide_product_goes_first_where_the_device_has_it() -> None:
    sizes = Wide(128, 224, 4)
    choice = LinearChoice((1, 8, 64), (GEMV, FLAT, None), wide=((48, None), (128, sizes), (256, None)))
    assert [choice.at(m, wide=True) for m in (1, 8, 48, 49, 128, 129)] == [GEMV, FLAT, None, sizes, sizes, None]
    few = LinearChoice((1, 8, 64), (GEMV, FLAT, None), wide=((64, sizes),))
    assert [few.at(m, wide=True) for m in (1, 8, 32, 33, 64, 65)] == [GEMV, FLAT, None, sizes, sizes, None]
    assert [choice.at(m) for m in (1, 8, 9, 64, 128, 129)] == [GEMV, FLAT, None, None, None, None]


def test_the_next_larger_number_of_tokens_decides_and_the_library_has_the_rest() -> None:
    choice = LinearChoice((1, 8, 64), (GEMV, FLAT, None))
    assert [choice.at(m) for m in (1, 2, 8, 9, 64, 65, 4096)] == [GEMV, FLAT, FLAT, None, None, None, None]
    assert LinearChoice((), ()).at(1) is None


def test_tables_of_a_profile_give_back_what_was_put_in() -> None:
    fused = {
        Shape(512, 256): FusedTiming(True, Fused(2, 4), 9e-6, 8e-6),
        Shape(96, 64): FusedTiming(False, Fused(1, 8), 3e-6, 4e-6),
    }
    tables = tables_with({}, {Shape(512, 256): TIMINGS, Shape(96, 64): TIMINGS[:1]}, fused, {Shape(512, 256): WIDES})
    assert timings_of(tables) == {Shape(512, 256): TIMINGS, Shape(96, 64): TIMINGS[:1]}
    choices = linear_choices(tables)
    assert choices[Shape(512, 256)].kernels == (GEMV, FLAT, None, Flat(64, 128, 4, 1), None)
    assert choices[Shape(512, 256)].tokens == (1, 2, 8, 32, 64)
    assert choices[Shape(512, 256)].fused is None, "apart was faster"
    assert choices[Shape(96, 64)].fused == Fused(1, 8)
    assert wide_timings(tables) == {Shape(512, 256): WIDES}
    assert choices[Shape(512, 256)].wide == ((8, None), (128, WIDES[1].sizes)), "at 8 tokens another was faster"
    assert choices[Shape(96, 64)].wide == ()
    assert linear_choices({}) == {}


def test_formats_and_groups_are_looked_up_apart() -> None:
    dense, quantized = Shape(512, 256), Shape(512, 256, "int4", 64)
    finer = quantized._replace(group=32)
    tables = tables_with({}, {dense: TIMINGS, quantized: TIMINGS[:1], finer: TIMINGS[:2]}, {}, {quantized: WIDES})
    assert timings_of(tables) == {dense: TIMINGS, quantized: TIMINGS[:1], finer: TIMINGS[:2]}
    assert set(linear_choices(tables)) == {dense, quantized, finer}
    assert set(wide_timings(tables)) == {quantized}
    assert [str(shape) for shape in (dense, quantized)] == ["512 x 256", "512 x 256 int4/64"]


def test_a_profile_from_before_there_were_formats_speaks_of_dense_matrices() -> None:
    shape = Shape(512, 256)
    fused = {shape: FusedTiming(True, Fused(2, 4), 7e-6, 8e-6)}
    tables = tables_with({}, {shape: TIMINGS}, fused, {shape: WIDES})

    def before(table: Table) -> Table:
        return Table(("n", "k", *table.columns[4:]), tuple((*row[:2], *row[4:]) for row in table.rows))

    old = {name: before(table) for name, table in tables.items()}
    assert linear_choices(old) == linear_choices(tables)
    assert tables_with(old, {}, {}, {}) == tables, "written again, they say their format"
    profile = shipped("h200")
    assert {shape.format for shape in linear_choices(profile.tables)} == {"dense"}
    assert linear_choices(profile.tables)[Shape(6144, 4096)].wide


def test_a_draw_is_the_wide_products() -> None:
    def chosen(seconds: float) -> Wide | None:
        wide = [replace(WIDES[1], wide=seconds, other=1e-5)]
        return linear_choices(tables_with({}, {Shape(512, 256): TIMINGS}, {}, {Shape(512, 256): wide}))[
            Shape(512, 256)
        ].wide_at(128)

    assert [chosen(s) is None for s in (0.9e-5, 1e-5, 1.02e-5, 1.03e-5)] == [False, False, False, True]


def test_measuring_a_shape_again_replaces_it_and_keeps_the_others() -> None:
    before = tables_with(
        {}, {Shape(512, 256): TIMINGS, Shape(96, 64): TIMINGS}, {}, {Shape(96, 64): WIDES, Shape(512, 256): WIDES}
    )
    fused = {Shape(96, 64): FusedTiming(False, Fused(1, 4), 1e-6, 2e-6)}
    after = tables_with(before, {Shape(96, 64): TIMINGS[:2]}, fused, {Shape(96, 64): WIDES[:1]})
    assert wide_timings(after) == {Shape(512, 256): WIDES, Shape(96, 64): WIDES[:1]}
    assert timings_of(after) == {Shape(512, 256): TIMINGS, Shape(96, 64): TIMINGS[:2]}
    assert linear_choices(after)[Shape(512, 256)].fused == default_choice(512, 256).fused, "not measured: the default"


def test_inflection_points() -> None:
    """M1: the flat product overtakes the GEMV. M2: from there on the library is always ahead of the flat product."""
    assert inflections(TIMINGS) == (2, 64)
    assert inflections(TIMINGS[:4]) == (2, None)
    assert inflections([replace(TIMINGS[0], flat=7e-6)]) == (1, None)
    assert inflections([replace(t, flat=None) for t in TIMINGS]) == (None, 1)
    assert inflections([]) == (None, None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gemv(3, 2048, 1, 4),
        lambda: Gemv(1, 2048, -1, 4),
        lambda: Flat(16, 128, 4, 1),
        lambda: Flat(64, 128, 0, 1),
        lambda: Flat(64, 100, 4, 1),
        lambda: Fused(0, 4),
        lambda: LinearChoice((8, 1), (None, None)),
        lambda: LinearChoice((1, 2), (GEMV, GEMV)),
        lambda: LinearChoice((128,), (FLAT,)),
        lambda: linear_choices({TABLE: Table(("n", "k"), ((1, 2),))}),
        lambda: linear_choices({TABLE: Table(_columns(), ((8, 8, 1, "magic", 0, 0, 0, 0, 0, 0, 0.0, 0.0, 1.0),))}),
        lambda: Wide(32, 128, 4),
        lambda: Wide(256, 128, 4),
        lambda: Wide(96, 128, 4),
        lambda: Wide(128, 264, 4),
        lambda: Wide(192, 208, 4),
        lambda: Wide(128, 16, 4, sharing_rows=2),
        lambda: Wide(128, 128, 4, sharing_tokens=3),
        lambda: Wide(128, 128, 4, sharing_tokens=4, parts=4),
        lambda: Wide(128, 128, 4, parts=2, persistent=True),
        lambda: Wide(128, 256, 0),
        lambda: Wide(128, 256, 5),
        lambda: linear_choices({WIDE_TABLE: Table(("n", "k"), ((1, 2),))}),
        lambda: linear_choices({FUSED_TABLE: Table(("n",), ((1,),))}),
    ],
)
def test_what_makes_no_sense_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        make()


def _columns() -> tuple[str, ...]:
    return tables_with({}, {}, {}, {})[TABLE].columns


@pytest.mark.parametrize(
    "shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (33, 48), (64, 20000)]
)
def test_defaults_cover_every_shape(shape: tuple[int, int]) -> None:
    choice = default_choice(*shape)
    assert isinstance(choice.at(1), Gemv)
    assert isinstance(choice.at(8), Flat)
    assert choice.at(65) is None
    assert (choice.fused is None) == (shape[1] > 8192)


def test_a_prepared_matrix_is_multiplied_by_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []

    def spy(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernel: object, arrivals: torch.Tensor | None
    ) -> torch.Tensor:
        assert arrivals is not None
        used.append(kernel)
        return linear_definition(x, weight, bias)

    monkeypatch.setattr(device, "multiply", spy)
    weight = torch.randn(40, 64)
    choice = LinearChoice((1, 4), (Gemv(1, 64, 0, 4), Flat(32, 32, 2, 2)))
    for prepared, wanted in (
        (prepare(weight.clone(), choice), choice),
        (prepare(weight.clone()), default_choice(40, 64)),
    ):
        assert prepared.choice == wanted
        used.clear()
        for m in (1, 3, 4, 5, 0):
            linear_kernel(torch.randn(m, 64), prepared)
        assert used == [wanted.at(1), wanted.at(3), wanted.at(4), wanted.at(5), None]
    assert DeviceWeight(weight).choice == default_choice(40, 64)


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
def test_split_products_leave_their_counters_zero() -> None:
    x, weight = torch.randn(5, 200), prepare(torch.randn(70, 200))
    for _ in range(2):
        got = weight.multiply_by(Flat(32, 64, 2, 3), x)
        torch.testing.assert_close(got, linear_definition(x, weight), rtol=1e-4, atol=1e-4)
    assert weight.arrivals is not None
    assert not weight.arrivals.any()
