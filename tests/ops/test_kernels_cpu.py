"""The CPU's kernels beyond what their operations' cases try: lanes, odd sizes, threads, the disk."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from numba import cfunc, types

from cellar.ops.activation import gated
from cellar.ops.activation.definition import gated_definition
from cellar.ops.attention import attention, plan_attention
from cellar.ops.cpu import kernels as kernels_cpu
from cellar.ops.cpu import launch as launch_cpu
from cellar.ops.cpu.lanes import (
    WIDTH,
    brains,
    floats,
    front,
    get,
    greater,
    halves,
    largest,
    load,
    power,
    put,
    store,
    total,
    totals,
)
from cellar.ops.cpu.wide import wide_turn
from cellar.ops.norm import add_rms_norm, rms_norm
from cellar.ops.norm.definition import add_rms_norm_definition, rms_norm_definition
from cellar.ops.registry import TOLERANCE
from tests.limits import run_python
from tests.ops.attention_example import example

NUMBERS = (
    torch.tensor([0.0, -0.0, 1.0, -1.5, 65504.0, 1e-7, 6e-8, 1e-40, torch.inf, -torch.inf, torch.nan, 0.1, 3e38, 1e5])
    .repeat(2)
    .clone()
)


def compiled(function: object, *arguments: torch.Tensor) -> None:
    """Call a function of addresses."""
    made = cfunc(types.void(*(types.int64,) * len(arguments)), error_model="numpy")(function)
    ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * len(arguments))(made.address)(*(x.data_ptr() for x in arguments))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_powers_of_two() -> None:
    x = torch.cat((torch.linspace(-130, 100, 4001), torch.linspace(-2, 2, 4001)[:-2]))
    out = torch.empty_like(x)
    count = len(x)
    assert count % WIDTH == 0

    def all_of(source, target):  # type: ignore[no-untyped-def]
        for n in range(0, count, WIDTH):
            store(floats(target), n, power(load(floats(source), n)))

    compiled(all_of, x, out)
    wanted = x.double().exp2()
    normal = x >= -126
    assert ((out - wanted).abs()[normal] <= 3e-7 * wanted[normal]).all()
    assert (out[x < -126] == 0).all()
    edge = torch.tensor([torch.nan, -torch.inf, 0.0, -1e30, 1.0, -1.0, 127.0, -126.0])
    count = WIDTH
    compiled(all_of, edge, out)
    assert out[0].isnan()
    assert out[1:8].tolist() == [0.0, 1.0, 0.0, 2.0, 0.5, 2.0**127, 2.0**-126]


def test_sums_and_maxima_of_lanes() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    out = torch.zeros(32)

    def all_of(source, target):  # type: ignore[no-untyped-def]
        p, q = floats(source), floats(target)
        a, b, c, d = load(p, 0), load(p, 8), load(p, 16), load(p, 24)
        e, f, g, h = load(p, 32), load(p, 40), load(p, 48), load(p, 56)
        store(q, 0, totals(a, b, c, d, e, f, g, h))
        store(q, 8, greater(a, b))
        store(q, 16, front(a, 3))
        put(q, 24, total(c))
        put(q, 25, largest(d))

    compiled(all_of, x, out)
    torch.testing.assert_close(out[:8], x.sum(1))
    assert torch.equal(out[8:16], x[0].maximum(x[1]))
    assert out[16:24].tolist() == [*x[0, :3].tolist(), 0, 0, 0, 0, 0]
    torch.testing.assert_close(out[24], x[2].sum())
    assert out[25] == x[3].max()


def test_the_place_among_the_lanes_does_not_change_a_sum() -> None:
    x = torch.randn(8, generator=torch.Generator().manual_seed(4)).repeat(8)
    out = torch.zeros(8)

    def all_of(source, target):  # type: ignore[no-untyped-def]
        p = floats(source)
        a, b, c, d = load(p, 0), load(p, 8), load(p, 16), load(p, 24)
        store(floats(target), 0, totals(a, b, c, d, load(p, 32), load(p, 40), load(p, 48), load(p, 56)))

    compiled(all_of, x, out)
    assert (out == out[0]).all()


@pytest.mark.parametrize(("dtype", "pointer"), [(torch.float16, halves), (torch.bfloat16, brains)])
def test_narrow_elements_are_rounded_as_torch_rounds_them(dtype: torch.dtype, pointer: object) -> None:
    x = torch.cat((NUMBERS, torch.randn(1004, generator=torch.Generator().manual_seed(5))))
    out, one_by_one, back = x.to(dtype), x.to(dtype), torch.empty_like(x)
    out.zero_()
    one_by_one.zero_()
    count = len(x)

    def all_of(source, target, other, wide):  # type: ignore[no-untyped-def]
        for n in range(0, count, WIDTH):
            store(pointer(target), n, load(floats(source), n))
            store(floats(wide), n, load(pointer(target), n))
        for n in range(count):
            put(pointer(other), n, get(floats(source), n))

    compiled(all_of, x, out, one_by_one, back)
    for got in (out, one_by_one, back):
        torch.testing.assert_close(got.float(), x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 7, 8, 33, 2000])
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_odd_sizes(dtype: torch.dtype, columns: int, rows: int, threads: None) -> None:
    noise = torch.Generator().manual_seed(columns)
    x, delta = torch.randn(2, rows, 2 * columns, generator=noise).to(dtype)
    weight = torch.randn(2 * columns, generator=noise).to(dtype)
    limit = TOLERANCE[dtype]
    for count in (1, 3):
        torch.set_num_threads(count)
        for got, wanted in (
            (rms_norm(x, weight, 1e-6), rms_norm_definition(x, weight, 1e-6)),
            (
                rms_norm(x[None, :, ::2], weight[:columns], 1e-6),
                rms_norm_definition(x[None, :, ::2], weight[:columns], 1e-6),
            ),
            (
                torch.cat(add_rms_norm(x, delta, weight, 1e-6)),
                torch.cat(add_rms_norm_definition(x, delta, weight, 1e-6)),
            ),
            (gated(x, "silu"), gated_definition(x, "silu")),
        ):
            torch.testing.assert_close(got, wanted, atol=limit, rtol=limit)


def test_what_is_no_number_is_seen_in_its_row_alone() -> None:
    x = torch.randn(3, 40)
    x[1, 39] = torch.nan
    for got in (rms_norm(x, torch.ones(40), 1e-6), gated(x, "silu")):
        assert got[1].isnan().any()
        assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dim", [2, 12, 20])
def test_heads_that_are_no_whole_lanes(dim: int) -> None:
    e = example([(0, 70, 71), (1, 3, 40)], heads=6, kv_heads=2, dim=dim, chunk_size=16, window=30)
    got = attention(e.q, e.k_cache, e.v_cache, e.table, e.work(), e.scale)
    torch.testing.assert_close(got.double(), torch.from_numpy(e.oracle()), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_query_has_the_same_bits_whoever_shares_its_keys(dtype: torch.dtype, window: int | None) -> None:
    """Keys and values of 16 bits are made float32 once for several queries, and for one as they are loaded."""
    made = example([(0, 99, 100), (1, 7, 8), (2, 40, 59)], heads=6, kv_heads=2, dim=80, dtype=dtype, window=window)
    row, start, stop = (list(column) for column in zip(*made.spans, strict=True))
    kept, shared = made.k_cache.shape[2], [made.k_cache, made.v_cache]
    together = attention(made.q, *shared, made.table, made.work(), made.scale)
    for head in range(6):
        one = [cache[:, head // 3 : head // 3 + 1].contiguous() for cache in shared]
        work = plan_attention(row, start, stop, 1, 1, 80, kept, window)
        alone = attention(made.q[:, head : head + 1].contiguous(), *one, made.table, work, made.scale)
        assert torch.equal(alone[:, 0], together[:, head])


def test_without_a_team_the_calling_thread_computes(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    torch.set_num_threads(2)
    e = example([(0, 300, 301), (1, 3, 140)], layout="apart", garbage=None)
    wanted = attention(e.q, e.k_cache, e.v_cache, e.table, e.work(), e.scale)
    monkeypatch.setattr(launch_cpu, "_region", lambda: 0)
    launch_cpu.kernel.cache_clear()
    try:
        assert torch.equal(attention(e.q, e.k_cache, e.v_cache, e.table, e.work(), e.scale), wanted)
    finally:
        launch_cpu.kernel.cache_clear()


WHERE_KERNELS_LIE = """
import torch
from cellar.ops.cpu import kernels as kernels_cpu
from cellar.ops.norm import rms_norm
assert rms_norm(torch.ones(1, 8), torch.ones(8), 0.0).tolist() == [[1.0] * 8]
print(kernels_cpu.compiled("norm", torch.float32).cache_hits)
"""


def test_sixteen_by_sixteen_numbers_are_turned() -> None:
    """In place, and nothing before or behind them is touched."""
    x = torch.randn(16 * 16 + 8, generator=torch.Generator().manual_seed(1))
    wanted = x.clone()
    wanted[3:259] = x[3:259].view(16, 16).t().reshape(-1)

    def turned(address: int) -> None:
        wide_turn(floats(address), 3)

    compiled(turned, x)
    assert torch.equal(x, wanted)


@pytest.mark.long
def test_kernels_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert run_python(WHERE_KERNELS_LIE).strip() == "0"
    assert run_python(WHERE_KERNELS_LIE).strip() == "1"


def test_where_nothing_can_be_kept_kernels_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(shape: object, **options: object) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return cfunc(shape, **options)

    monkeypatch.setattr(kernels_cpu, "cfunc", refuse)
    kernels_cpu.compiled.cache_clear()
    launch_cpu.kernel.cache_clear()
    try:
        test_what_is_no_number_is_seen_in_its_row_alone()
        assert not kernels_cpu.compiled("norm", torch.float32).cache_hits
    finally:
        kernels_cpu.compiled.cache_clear()
        launch_cpu.kernel.cache_clear()


def test_ops_are_imported_without_numba() -> None:
    code = "import sys, cellar.runtime.steps.executor; print('numba' in sys.modules)"
    assert run_python(code).strip() == "False"
