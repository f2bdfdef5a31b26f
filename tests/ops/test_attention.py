from __future__ import annotations

import itertools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.errors import CapacityError, ConfigError
from cellar.core.kv_formats import KVFormat
from cellar.core.specs import RopeSpec
from cellar.ops.attention import AttentionBuffers, AttentionShape, Softmax, attention, decode_attention, plan_attention
from cellar.ops.attention import plan as attention_plan
from cellar.ops.attention.cases import case
from cellar.ops.attention.contexts import plain_contexts
from cellar.ops.attention.definition import attention_definition, decode_attention_definition
from cellar.ops.attention.plan import (
    COUNTER,
    FIRST,
    GRAPH_TILE,
    HOPPER_TILE,
    KV_FIRST,
    KV_LAST,
    LAST,
    NARROW_TILE,
    PARTIAL,
    PARTS,
    PIECE,
    ROW,
    START,
    TOKEN,
    Captured,
    work_items,
)
from cellar.ops.attention.triton import _attention_kernel, attention_kernel, launch_settings, unified_by
from cellar.ops.registry import TOLERANCE
from cellar.ops.rotary import rope_table
from tests.limits import SECONDS, run_python
from tests.ops.attention_example import Example, Span, example, shifted

# Of Triton's interpreter, with this NumPy.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

FLOAT32_LIMIT = 5e-6


@st.composite
def span_lists(draw: st.DrawFn, rows: int = 4, longest: int = 150) -> list[Span]:
    """Rows with 1 to 3 ascending spans each: holes and a tail, or a decode."""
    spans: list[Span] = []
    for row in draw(st.lists(st.integers(0, rows), min_size=1, max_size=rows, unique=True)):
        if draw(st.booleans()):
            position = draw(st.integers(0, longest))
            spans.append((row, position, position + 1))
            continue
        cuts = sorted(draw(st.sets(st.integers(0, longest), min_size=2, max_size=6)))
        spans += [(row, a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    return spans


@st.composite
def examples(draw: st.DrawFn, longest: int = 150) -> Example:
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 3), (3, 2), (1, 8)]))
    return example(
        draw(span_lists(longest=longest)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([64, 72, 80, 96, 128, 256])),
        chunk_size=draw(st.sampled_from([16, 32, 64])),
        window=draw(st.sampled_from([None, None, 1, 17, 64])),
        seed=draw(st.integers(0, 1000)),
        garbage=draw(st.sampled_from([float("nan"), float("inf"), None])),
        layout=draw(st.sampled_from(["apart", "together"])),
        scattered=draw(st.booleans()),
    )


def run(function: Any, e: Example, **plan: Any) -> np.ndarray:
    result = function(e.q, e.k_cache, e.v_cache, e.table, e.work(**plan), e.scale)
    assert result.shape == e.q.shape
    assert result.is_contiguous()
    return result.double().numpy()


@settings(max_examples=60, deadline=None)
@given(examples())
def test_definition_and_cpu_path_agree_with_the_oracle(e: Example) -> None:
    wanted = e.oracle()
    for function in (attention_definition, attention):
        np.testing.assert_allclose(run(function, e), wanted, atol=FLOAT32_LIMIT, rtol=1e-5)


@settings(max_examples=12, deadline=None)
@given(examples(longest=90), st.sampled_from([(1, None), (5, None), (300, None), (2, 48)]))
def test_kernel_agrees_with_the_oracle(e: Example, plan: tuple[int, int | None]) -> None:
    np.testing.assert_allclose(
        run(attention_kernel, e, programs=plan[0], split=plan[1]), e.oracle(), atol=FLOAT32_LIMIT, rtol=1e-5
    )


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 299, 300)],
        [(0, 31, 32)],
        [(0, 0, 1)],
        [(0, 99, 100), (1, 249, 250), (2, 0, 1), (3, 63, 64)],
        [(0, 99, 100), (1, 99, 100)],
        [(0, 98, 100), (1, 20, 21)],
        [(0, 300, 301), (1, 0, 300), (2, 10, 11), (3, 100, 240)],
    ],
    ids=["alone", "full chunk", "first token", "uneven", "even", "pairs", "mixed"],
)
@pytest.mark.parametrize("garbage", [None, float("nan")], ids=["finite", "nan"])
@pytest.mark.parametrize("scattered", [False, True], ids=["in a row", "scattered"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("layout", ["apart", "together"])
def test_every_way_of_the_cpu_path(
    spans: list[Span], garbage: float | None, scattered: bool, window: int | None, layout: str
) -> None:
    e = example(spans, heads=6, kv_heads=2, garbage=garbage, scattered=scattered, window=window, layout=layout)
    np.testing.assert_allclose(run(attention, e), e.oracle(), atol=FLOAT32_LIMIT, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_other_dtypes_on_the_cpu(dtype: torch.dtype, limit: float) -> None:
    e = example([(0, 99, 100), (1, 0, 40), (2, 10, 12)], dtype=dtype)
    assert attention(e.q, e.k_cache, e.v_cache, e.table, e.work(), e.scale).dtype == dtype
    np.testing.assert_allclose(run(attention, e), e.oracle(), atol=limit, rtol=limit)


@pytest.mark.parametrize("function", [attention, attention_definition, attention_kernel])
def test_large_scores_do_not_overflow(function: Any) -> None:
    e = example([(0, 40, 41), (1, 0, 20), (2, 50, 51)], loud=200.0, garbage=None)
    np.testing.assert_allclose(run(function, e), e.oracle(), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("spans", [[(0, 99, 100)], [(0, 99, 100), (1, 40, 41)], [(0, 5, 60), (1, 40, 41)]])
@pytest.mark.parametrize("function", [attention, attention_kernel])
def test_writes_into_a_given_tensor(function: Any, spans: list[Span]) -> None:
    e = example(spans, garbage=None, layout="apart", scattered=False)
    out = torch.full((e.q.shape[0] + 2, *e.q.shape[1:]), 7.0)
    result = function(e.q, e.k_cache, e.v_cache, e.table, e.work(), e.scale, out[1:-1])
    assert result.data_ptr() == out[1].data_ptr()
    np.testing.assert_allclose(out[1:-1].double().numpy(), e.oracle(), atol=FLOAT32_LIMIT)
    assert (out[[0, -1]] == 7).all()


def test_one_work_serves_layers_with_different_caches() -> None:
    e = example([(0, 99, 100), (1, 31, 32), (2, 3, 60)], layout="apart")
    other = example(e.spans, layout="apart", seed=0)
    other.v_cache.mul_(2)
    work = e.work()
    first = attention(e.q, e.k_cache, e.v_cache, e.table, work, e.scale).clone()
    second = attention(e.q, other.k_cache, other.v_cache, e.table, work, e.scale)
    torch.testing.assert_close(second, 2 * first)


@pytest.mark.parametrize("threads", [1, 3])
def test_company_does_not_change_a_row_on_the_cpu(threads: int) -> None:
    """Not a bit of it: neither other rows nor how many threads there are nor how a prompt is cut."""
    spans = [(r, 40 * r + 7, 40 * r + 8) for r in range(5)] + [(5, 0, 77)]
    e = example(spans, layout="apart", garbage=None)
    together = run(attention, e)
    torch.set_num_threads(threads)
    for k, span in enumerate(spans[:5]):
        work = plan_attention(*([x] for x in span), e.heads, 2, 64, 32)
        alone = attention(e.q[k : k + 1], e.k_cache, e.v_cache, e.table, work, e.scale)
        assert np.array_equal(alone[0].double().numpy(), together[k])
    for cuts in ([0, 77], [0, 1, 2, 40, 76, 77]):
        pieces = [(5, a, b) for a, b in itertools.pairwise(cuts)]
        work = plan_attention(*zip(*pieces, strict=True), e.heads, 2, 64, 32)
        cut = attention(e.q[5:], e.k_cache, e.v_cache, e.table, work, e.scale)
        assert np.array_equal(cut.double().numpy(), together[5:])


@pytest.mark.parametrize(
    ("heads", "chunk", "window"),
    [
        ((6, 2, 64), 32, None),
        ((3, 3, 48), 16, 40),
        ((5, 1, 16), 64, None),
        ((16, 2, 128), 32, 70),
        ((4, 2, 72), 32, None),
    ],
)
@pytest.mark.parametrize("kv_format", ["plain", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_queries_in_tiles_are_what_each_is_alone_on_the_cpu(
    heads: tuple[int, int, int], chunk: int, window: int | None, kv_format: KVFormat, dtype: torch.dtype
) -> None:
    """Bit for bit, and near the definition: many at a time where they see whole chunks, one at a time elsewhere. Some
    begin just before a chunk's last position, or end where their window begins just behind a chunk's first.
    """
    spans = ((0, 0, 150), (1, 97, 203), (2, 30, 73), (3, 62, 90), (4, 30, 103))
    prompts = case("tiles", spans, heads, chunk, window, kv_format=kv_format).make(torch.device("cpu"), dtype)
    q, k_cache, v_cache, table, work, scale = (prompts[name] for name in list(prompts)[:6])
    together = attention(q, k_cache, v_cache, table, work, scale)
    places = [(row, p, p + 1) for row, start, stop in spans for p in range(start, stop)]
    decodes = plan_attention(*zip(*places, strict=True), *heads, chunk, window, kv_format=kv_format)
    assert torch.equal(attention(q, k_cache, v_cache, table, decodes, scale), together)
    wanted = attention_definition(q, k_cache, v_cache, table, work, scale)
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(together, wanted, atol=limit, rtol=limit)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("rotary_dim", [0, 40, 64])
@pytest.mark.parametrize("heads", [(6, 2), (71, 1)])
def test_decodes_of_one_row_see_each_other(apart: bool, rotary_dim: int, heads: tuple[int, int]) -> None:
    """Two spans of a row in one step: the second needs what the first writes."""
    spans = [(0, 40, 41), (1 if apart else 0, 41, 42)]
    e = example(spans, heads=heads[0], kv_heads=heads[1])
    new = torch.randn(2, 2 * heads[1], 64, generator=torch.Generator().manual_seed(1))
    k, v = new[:, : heads[1]], new[:, heads[1] :]
    cos_sin = rope_table(RopeSpec(64, rotary_dim, 10_000.0, max_position=50), "cpu") if rotary_dim else None
    caches = [cache.clone() for cache in (e.k_cache, e.v_cache)]
    wanted = decode_attention_definition(e.q, k, v, cos_sin, *caches, e.table, e.work(), e.scale)
    got = decode_attention(e.q, k, v, cos_sin, e.k_cache, e.v_cache, e.table, e.work(), e.scale)
    torch.testing.assert_close(got, wanted, atol=FLOAT32_LIMIT, rtol=1e-5)
    torch.testing.assert_close(e.k_cache, caches[0], equal_nan=True)


def test_what_is_no_number_stays_none_and_spreads_no_further_on_the_cpu() -> None:
    e = example([(0, 40, 41), (1, 0, 20)], garbage=None)
    wanted = run(attention, e)
    e.q[7, 1, 3] = torch.nan
    got = run(attention, e)
    assert np.isnan(got[7, 1]).all()
    got[7, 1] = wanted[7, 1]
    assert np.array_equal(got, wanted)


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_decodes_and_prompts_of_a_step_are_cut_as_if_they_were_alone() -> None:
    """Each class runs by itself, and has all programs."""
    shape = AttentionShape(32, 8, 128, 32)
    spans = {False: [(0, 9000, 9001), (1, 12000, 12001), (2, 150, 151)], True: [(3, 3000, 3200), (4, 0, 90)]}

    def ranges(some: list[Span], wide: bool) -> list[list[int]]:
        row, start, stop = (np.array(x, np.int32) for x in zip(*some, strict=True))
        offset = np.append(0, np.cumsum(stop - start)).astype(np.int32)
        items = work_items(shape, row, start, stop, offset, 264, wide_tile=128)
        part = items.table[items.narrow :] if wide else items.table[: items.narrow]
        return part[:, [ROW, FIRST, KV_FIRST, KV_LAST]].tolist()

    for wide in (False, True):
        alone = ranges(spans[wide], wide)
        assert len(alone) > len(spans[wide]), "some are cut"
        assert ranges(spans[False] + spans[True], wide) == alone


@settings(max_examples=80, deadline=None)
@given(
    span_lists(rows=12, longest=1200),
    st.sampled_from([(1, 1), (8, 4), (2, 3), (1, 71), (32, 1)]),
    st.sampled_from([None, 1, 100, 4096]),
    st.sampled_from([1, 8, 264]),
    st.sampled_from([None, 200, 1000]),
    st.sampled_from([64, 128, 256]),
)
def test_the_plan_covers_every_query_and_position_once(
    spans: list[Span], kind: tuple[int, int], window: int | None, programs: int, split: int | None, dim: int
) -> None:
    kv_heads, group = kind
    row, start, stop = (np.array(x, np.int32) for x in zip(*spans, strict=True))
    offset = np.append(0, np.cumsum(stop - start)).astype(np.int32)
    shape = AttentionShape(kv_heads * group, kv_heads, dim, 32, window)
    items = work_items(shape, row, start, stop, offset, programs, split)
    table, narrow = items.table.astype(np.int64), items.narrow
    tile = np.where(np.arange(len(table)) < narrow, NARROW_TILE, items.wide_tile)
    length = table[:, KV_LAST] - table[:, KV_FIRST]
    assert (length > 0).all()
    assert (table[:, LAST] - table[:, FIRST] > 0).all()
    assert (table[:, LAST] - table[:, FIRST] <= tile).all()

    # Longest first, in each class.
    cost = 2 * tile + length
    assert (np.diff(cost[:narrow]) <= 0).all()
    assert (np.diff(cost[narrow:]) <= 0).all()

    scratch = np.zeros(items.partial_rows, int)
    counters = np.zeros(items.counters, int)
    for s in range(len(spans)):
        mine = table[table[:, TOKEN] == offset[s]]
        assert (mine[:, ROW] == row[s]).all()
        assert (mine[:, START] == start[s]).all()
        assert np.isin(np.flatnonzero(table[:, TOKEN] == offset[s]) < narrow, len_rows(s, spans, group)).all()
        at = 0
        for first in np.unique(mine[:, FIRST]):
            parts = mine[mine[:, FIRST] == first]
            parts = parts[np.argsort(parts[:, KV_FIRST])]
            last = int(parts[0, LAST])
            assert first == at
            at = last
            # The parts join, and reach from the first position that any row sees to the last.
            low = start[s] + first // group - (window or 1 << 30) + 1
            assert parts[0, KV_FIRST] == max(0, low)
            assert parts[-1, KV_LAST] == start[s] + (last - 1) // group + 1
            assert (parts[1:, KV_FIRST] == parts[:-1, KV_LAST]).all()
            assert (parts[:, PARTS] == len(parts)).all()
            assert list(parts[:, attention_plan.PART]) == list(range(len(parts)))
            if len(parts) > 1:
                tile_rows = NARROW_TILE if (stop[s] - start[s]) * group <= NARROW_TILE else items.wide_tile
                base = int(parts[0, PARTIAL])
                scratch[base : base + len(parts) * tile_rows] += 1
                counters[parts[0, COUNTER]] += 1
        assert at == (stop[s] - start[s]) * group
    # No two tiles share scratch or a counter, and none is left over.
    assert (scratch == 1).all()
    assert (counters == 1).all()


def len_rows(s: int, spans: list[Span], group: int) -> list[bool]:
    """The class that a span's items must have: [True] for narrow."""
    return [(spans[s][2] - spans[s][1]) * group <= NARROW_TILE]


def test_full_devices_are_not_split_and_empty_ones_are() -> None:
    def parts(n: int, context: int, programs: int = 264) -> int:
        start = np.full(n, context, np.int32)
        work = plan_attention(np.arange(n), start, start + 1, 32, 8, 128, 32, programs=programs)
        return len(work.items.table) // n

    assert parts(64, 1024) == 1
    assert parts(1, 8000) > 16
    assert parts(1, PIECE - 1) == 1
    assert parts(8, 1024) > 2


@pytest.mark.parametrize("by", [-100.0, 0.0, 100.0])
@pytest.mark.parametrize("softmax", ["maximum", "unified"])
def test_scores_far_from_zero(by: float, softmax: Softmax) -> None:
    """Powers without a maximum leave float32's range at a shift of 100: such tiles are computed once more."""
    e = shifted(example([(0, 140, 141), (1, 30, 31), (2, 0, 40)], garbage=0.0), by)
    work = e.work(programs=64)
    work.softmax = softmax
    result = attention_kernel(e.q, e.k_cache, e.v_cache, e.table, work, e.scale)
    np.testing.assert_allclose(result.double().numpy(), e.oracle(), atol=20 * FLOAT32_LIMIT)


def test_a_fixed_split_does_not_depend_on_company() -> None:
    def cuts(contexts: list[int]) -> list[list[int]]:
        start = np.array(contexts, np.int32)
        work = plan_attention(np.arange(len(start)), start, start + 1, 8, 2, 64, 32, programs=64, split=256)
        table = work.items.table
        return sorted(table[table[:, ROW] == 0][:, [KV_FIRST, KV_LAST]].tolist())

    assert cuts([1000]) == cuts([1000, 5000, 10, 700]) == [[i, min(i + 256, 1001)] for i in range(0, 1001, 256)]


def test_buffers_are_reused_and_guarded() -> None:
    shape = AttentionShape(4, 2, 64, 32)
    buffers = AttentionBuffers.for_limits(shape, max_tokens=64, max_spans=4, programs=8, device=torch.device("cpu"))
    address = buffers.meta.data_ptr()
    for spans in ([(0, 40, 41)], [(0, 40, 41), (1, 0, 60)]):
        e = example(spans)
        work = e.work()
        work.buffers = buffers
        result = attention_kernel(e.q, e.k_cache, e.v_cache, e.table, work, e.scale)
        np.testing.assert_allclose(result.double().numpy(), e.oracle(), atol=FLOAT32_LIMIT)
        assert buffers.meta.data_ptr() == address
        assert (buffers.counters == 0).all()
    starts = np.arange(200)
    too_much = plan_attention(starts, starts, starts + 1, 4, 2, 64, 32, buffers=buffers)
    with pytest.raises(CapacityError, match="max_num_batched_tokens"):
        _ = too_much.resident


def test_a_list_of_one_step_comes_as_who_plans_it_brings_arrays() -> None:
    """And so do the lists and tables of prompts over K and V in fewer bits."""
    spans = [(0, 40, 41), (1, 0, 60)]
    e = example(spans)
    brought: list[int] = []

    def upload(arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        brought.append(len(arrays))
        return [torch.from_numpy(array.copy()) for array in arrays]

    work = e.work()
    work.upload = upload
    result = attention_kernel(e.q, e.k_cache, e.v_cache, e.table, work, e.scale)
    np.testing.assert_allclose(result.double().numpy(), e.oracle(), atol=FLOAT32_LIMIT)
    assert brought == [1], "the list, once for all layers"
    written = plain_contexts(work, e.table)
    assert brought == [1, 3]
    assert written.sources.tolist() == e.table[1, : -(-60 // work.shape.chunk_size)].tolist()
    assert written.work.resident.meta.tolist()[:2] == [0, len(written.work.items.table)]
    assert brought == [1, 3, 1]


@settings(max_examples=100, deadline=None)
@given(span_lists(rows=7, longest=4000), st.sampled_from([(32, 8), (6, 2), (8, 1)]), st.sampled_from([8, 264]))
def test_buffers_for_limits_hold_every_plan_in_the_limits(
    spans: list[Span], kind: tuple[int, int], programs: int
) -> None:
    row, start, stop = zip(*spans, strict=True)
    work = plan_attention(row, start, stop, *kind, 128, 32, programs=programs)
    limits = AttentionBuffers.for_limits(
        work.shape, work.num_tokens, len(spans), programs, torch.device("meta"), depth=0
    ).capacity
    needed = (len(work.items.table), work.items.partial_rows, work.items.counters)
    assert all(n <= c for n, c in zip(needed, limits, strict=True)), (needed, limits)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 20_000), min_size=1, max_size=300),
    st.sampled_from([(32, 8), (6, 2), (8, 1), (32, 32), (32, 1), (71, 1), (136, 1)]),
    st.sampled_from([8, 264]),
    st.sampled_from([GRAPH_TILE, HOPPER_TILE]),
)
def test_a_graph_of_decodes_holds_every_plan(
    starts: list[int], kind: tuple[int, int], programs: int, tile: int
) -> None:
    start = np.array(starts, np.int32)
    work = plan_attention(np.arange(len(start)), start, start + 1, *kind, 128, 32, programs=programs)
    items = work_items(work.shape, work.row, work.start, work.stop, work.offset, programs, wide_tile=tile)
    captured = Captured.decodes(len(start), work.shape, programs, tile)
    assert captured.holds(items)
    assert min(captured.narrow, captured.wide) == 0
    limits = AttentionBuffers.for_limits(
        work.shape, len(start), 2 * len(start), programs, torch.device("meta"), depth=0
    )
    assert limits.holds(items)


@settings(max_examples=100, deadline=None)
@given(
    span_lists(rows=7, longest=4000),
    st.sampled_from([(32, 8), (6, 2), (8, 1)]),
    st.sampled_from([8, 264]),
    st.sampled_from([GRAPH_TILE, HOPPER_TILE]),
)
def test_a_graph_with_prompts_holds_every_plan(
    spans: list[Span], kind: tuple[int, int], programs: int, tile: int
) -> None:
    row, start, stop = zip(*spans, strict=True)
    work = plan_attention(row, start, stop, *kind, 128, 32, programs=programs)
    items = work_items(work.shape, work.row, work.start, work.stop, work.offset, programs, wide_tile=tile)
    assert items.wide_tile == tile
    assert Captured.prompts(work.num_tokens, len(spans), work.shape, programs, tile).holds(items)
    assert not Captured(items.narrow, len(items.table) - items.narrow - 1).holds(items)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": 5}, "multiple"), ({"kv_heads": 0}, "multiple"), ({"window": 0}, "window"), ({"split": 0}, "split")],
)
def test_impossible_shapes_are_refused(change: dict[str, int], message: str) -> None:
    options = {"heads": 4, "kv_heads": 2, "head_dim": 64, "chunk_size": 32} | change
    with pytest.raises(ConfigError, match=message):
        plan_attention([0], [0], [1], **options)


# -- compiled for a GPU that is not here ------------------------------------------------------------------------------


TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@pytest.mark.parametrize(
    ("tile", "dim", "dtype", "wgmma", "new"),
    [
        (16, 128, "bf16", False, True),
        (16, 128, "bf16", False, False),
        (64, 128, "bf16", True, False),
        (128, 128, "bf16", True, False),
        (128, 80, "fp16", True, False),
        (128, 128, "fp16", True, False),
        (64, 256, "bf16", True, False),
        (64, 128, "fp32", False, False),
        (64, 128, "bf16", True, None),
        (64, 64, "fp16", True, None),
        (64, 128, "fp16", True, None),
    ],
)
def test_compiles_for_sm_90_without_spills(
    tile: int, dim: int, dtype: str, wgmma: bool, new: bool | None, tmp_path: Path
) -> None:
    """`new`: decodes that bring their K and V; None: prompts that read theirs through the copy engine."""
    settings_ = launch_settings(tile, dim, 4 if dtype == "fp32" else 2)
    options = {name: settings_.pop(name) for name in ("num_warps", "num_stages")}
    pointers = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache", "out"), f"*{dtype}")
    lists = {"table": "*i32", "meta": "*i32", "partial": "*fp32", "extents": "*fp32", "counters": "*i32"}
    lists |= {"cos_sin": "*fp32"}
    strides = dict.fromkeys(
        (
            "rotary_dim",
            "q_token_stride",
            "q_head_stride",
            "k_token_stride",
            "k_head_stride",
            "v_token_stride",
            "v_head_stride",
            "k_slot_stride",
            "v_slot_stride",
            "kv_head_stride",
            "table_stride",
            "out_token_stride",
            "out_head_stride",
        ),
        "i32",
    )
    constants = {"KV_HEADS": 8, "GROUP": 4, "DIM": dim, "CHUNK": 32, "WINDOW": 0, "WIDE": tile > 16, "TILE": tile}
    constants |= {
        "NEW": bool(new),
        "FRESH": new is None,
        "UNIFIED": unified_by(
            "unified", getattr(torch, TORCH_NAMES[dtype]), tile > 16, crowded=new is None and dim > 64
        ),
        "UPCAST": False,
        "PDL": True,
    }
    rows = {}
    if new is None:
        rows = dict.fromkeys(("k_rows", "v_rows"), f"tensordesc<{dtype}[{settings_['TURN']}, {dim}]>")
    else:
        constants |= dict.fromkeys(("k_rows", "v_rows"))
    compiled = _attention_kernel.compile_for(
        90,
        pointers | lists | rows | {"scale": "fp32"} | strides,
        constants | settings_,
        aligned={*pointers, *lists, *strides},
        **options,
    )
    # Two programs of prompts' tiles share a multiprocessor.
    assert compiled.metadata.shared <= (227 if new is not None else 113) * 1024
    assert ("wgmma" in compiled.asm["ptx"]) == wgmma
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [cuobjdump(), "-res-usage", cubin]
    usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS).stdout
    numbers = {k: int(v) for k, _, v in (w.partition(":") for w in usage.split() if ":" in w) if v.isdigit()}
    assert numbers["STACK"] == 0, usage
    assert numbers["REG"] <= 255


def cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def test_the_cpu_path_needs_no_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from cellar.ops.attention import attention, plan_attention\n"
        "work = plan_attention([0], [3], [4], 4, 2, 64, 16)\n"
        "cache = torch.zeros(2, 2, 16, 64)\n"
        "attention(torch.ones(1, 4, 64), cache, cache, torch.tensor([[1]], dtype=torch.int32), work, 1.0)\n"
    )
    run_python(program)


def test_a_whole_prompt_sees_nothing_of_the_next() -> None:
    """Its last turn reaches into the rows of another request, which may hold anything."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(70, heads, 32, generator=generator).bfloat16() for heads in (4, 2, 2))
    cache = torch.zeros(8, 2, 2, 16, 32, dtype=torch.bfloat16)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    for row, start, stop in ((0, 0, 40), (1, 0, 30)):
        for position in range(stop - start):
            token = 40 * row + position
            slot = int(table[row, position // 16])
            cache[slot, 0, :, position % 16], cache[slot, 1, :, position % 16] = k[token], v[token]
    work = plan_attention([0, 1], [0, 0], [40, 30], heads=4, kv_heads=2, head_dim=32, chunk_size=16)
    wanted = attention_definition(q, cache[:, 0], cache[:, 1], table, work, 0.2)
    k[40:], v[40:] = 0.0, torch.inf
    got = attention_kernel(q, cache[:, 0], cache[:, 1], table, work, 0.2, new=(k, v))
    torch.testing.assert_close(got[:40], wanted[:40], atol=0.02, rtol=0.02)
    assert not got[40:].isfinite().any()
