"""Attention to a share of the values: against float64, row by row, and by what it reads."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellar.core.errors import ConfigError
from cellar.core.kv_formats import KVFormat
from cellar.core.specs import RopeSpec
from cellar.ops.attention import AttentionWork, attention, decode_attention, plan_attention
from cellar.ops.attention.definition import attention_definition, decode_attention_definition
from cellar.ops.kv_format import dequantized, quantized_cache
from cellar.ops.rotary import rope_table
from tests.ops.attention_example import Example, Span, example

LIMIT = 5e-6
NEAR = 1e-3
"""Scores that differ by less may change their order by how a sum is rounded."""


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


def work_of(e: Example, share: float | None, kv_format: KVFormat = "plain") -> AttentionWork:
    work = e.work()
    work.shape = replace(work.shape, sparse_v=share, kv_format=kv_format)
    return work


def run(function: Any, e: Example, share: float | None) -> NDArray[np.float64]:
    result = function(e.q, e.k_cache, e.v_cache, e.table, work_of(e, share), e.scale)
    assert result.shape == e.q.shape
    return result.double().numpy()


def oracle(e: Example, share: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[tokens, heads, dim], and how much of each is in doubt [tokens, heads]: the weight of values whose scores are so
    near the least that counts that float32 may take one for the other.
    """
    out, doubt = np.zeros(e.q.shape), np.zeros(e.q.shape[:2])
    group = e.heads // e.k_cache.shape[1]
    token = 0
    for row, start, stop in e.spans:
        for position in range(start, stop):
            low = 0 if e.window is None else max(0, position - e.window + 1)
            for head in range(e.heads):
                keys = e.keys[row][low : position + 1, head // group]
                values = e.values[row][low : position + 1, head // group]
                scores = e.scale * (keys @ e.q[token, head].double().numpy())
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                count = -(-(position - low) * round(share * 1_000_000) // 1_000_000)
                order = np.argsort(-scores[:-1], kind="stable")
                read = np.append(order[:count], position - low)
                out[token, head] = weights[read] @ values[read]
                if 0 < count < position - low:
                    least = scores[order[count - 1]]
                    near = np.abs(scores[:-1] - least) < NEAR
                    if near.sum() > 1:
                        doubt[token, head] = 2 * (weights[:-1] * np.abs(values[:-1]).max(-1))[near].sum()
            token += 1
    return out, doubt


def check(got: NDArray[np.float64], wanted: NDArray[np.float64], doubt: NDArray[np.float64], limit: float) -> None:
    assert (np.abs(got - wanted) <= limit + limit * np.abs(wanted) + doubt[..., None]).all()


@st.composite
def examples(draw: st.DrawFn) -> Example:
    spans: list[Span] = []
    for row in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)):
        start = draw(st.integers(0, 150))
        spans.append((row, start, start + draw(st.sampled_from([1, 1, 2, 40]))))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 8)]))
    return example(
        spans,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([64, 72, 20, 128])),
        chunk_size=draw(st.sampled_from([16, 32, 64])),
        window=draw(st.sampled_from([None, None, 1, 17, 64])),
        seed=draw(st.integers(0, 1000)),
        garbage=draw(st.sampled_from([float("nan"), float("inf"), None])),
        layout=draw(st.sampled_from(["apart", "together"])),
        scattered=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(examples(), st.sampled_from([1e-6, 0.1, 0.25, 0.9, 1.0]))
def test_definition_and_kernel_agree_with_the_oracle(e: Example, share: float) -> None:
    wanted, doubt = oracle(e, share)
    for function in (attention_definition, attention):
        check(run(function, e, share), wanted, doubt, LIMIT)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_other_dtypes(dtype: torch.dtype, limit: float) -> None:
    e = example([(0, 399, 400), (1, 0, 40), (2, 10, 12)], dtype=dtype)
    check(run(attention, e, 0.1), *oracle(e, 0.1), limit)


@pytest.mark.parametrize("form", ["fp8", "int4"])
@pytest.mark.parametrize("dim", [64, 72])
def test_values_in_fewer_bits(form: KVFormat, dim: int) -> None:
    """Those of the chunks as they are read back."""
    e = example([(0, 299, 300), (1, 31, 32), (2, 20, 70), (3, 0, 1)], dim=dim, garbage=None, layout="apart")
    k_cache, v_cache = quantized_cache(e.k_cache, form), quantized_cache(e.v_cache, form)
    keys, values = dequantized(k_cache, dim), dequantized(v_cache, dim)
    for row in e.keys:
        slots = e.table[row][e.table[row] >= 0].long()
        for cache, held in ((keys, e.keys), (values, e.values)):
            found = cache[slots].transpose(1, 2).flatten(0, 1)[: len(held[row])]
            held[row] = found.double().numpy()
    wanted, doubt = oracle(e, 0.2)
    for function in (attention_definition, attention):
        got = function(e.q, k_cache, v_cache, e.table, work_of(e, 0.2, form), e.scale)
        check(got.double().numpy(), wanted, doubt, 2 * LIMIT)


def test_only_the_chosen_rows_are_read() -> None:
    """What stands in the others, NaN here, does no harm; each query chooses its own."""
    e = example([(0, 499, 500)], heads=1, kv_heads=1, garbage=None)
    scores = e.scale * (e.keys[0][:, 0] @ e.q[0, 0].double().numpy())
    order = np.argsort(-scores[:-1])
    count = 50  # a tenth of 499, rounded up
    assert scores[order[count - 1]] - scores[order[count]] > NEAR, "take another seed"
    wanted = run(attention, e, 0.1)
    for n in order[count:]:
        e.v_cache[e.table[0, n // 32].item(), :, n % 32] = torch.nan
    assert np.array_equal(run(attention, e, 0.1), wanted)
    e.v_cache[e.table[0, order[count - 1] // 32].item(), :, order[count - 1] % 32] = torch.nan
    assert np.isnan(run(attention, e, 0.1)).all()


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_of_equal_scores_the_first_are_taken(share: float) -> None:
    e = example([(0, 200, 201)], heads=1, kv_heads=1, garbage=None)
    e.q.zero_()
    count = -(-200 * round(share * 10) // 10)
    wanted = (e.values[0][:count, 0].sum(0) + e.values[0][200, 0]) / 201
    for function in (attention_definition, attention):
        np.testing.assert_allclose(run(function, e, share)[0, 0], wanted, atol=LIMIT)


@pytest.mark.parametrize("order", ["rising", "falling", "organ pipe", "saw"])
def test_no_order_of_scores_is_slow_or_wrong(order: str) -> None:
    """20,000 of them: were it by squares, this would take minutes."""
    e = example([(0, 19_999, 20_000)], heads=1, kv_heads=1, dim=16, garbage=None, scattered=False)
    n = torch.arange(20_000, dtype=torch.float32)
    scores = {"rising": n, "falling": -n, "organ pipe": -(n - 10_000).abs(), "saw": n % 100}[order] / 1000
    e.q.zero_()
    e.q[0, 0, 0] = 4.0
    slots = e.table[0].long()
    e.k_cache[slots] = 0.0
    e.k_cache.view(-1, 32, 16)[slots, :, 0] = scores.view(-1, 32)
    e.keys[0][:] = 0.0
    e.keys[0][:, 0, 0] = scores.numpy()
    wanted, doubt = oracle(e, 0.1)
    got = run(attention, e, 0.1)
    if order == "saw":  # equal scores are exactly equal, and the first of them count
        doubt[:] = 0
    check(got, wanted, doubt, LIMIT)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("window", [None, 40])
def test_company_does_not_change_a_row(threads: int, window: int | None) -> None:
    """Not a bit of it: neither other rows nor how many threads there are nor how a prompt is cut."""
    spans = [(r, 140 * r + 7, 140 * r + 8) for r in range(5)] + [(5, 0, 177)]
    e = example(spans, layout="apart", garbage=None, window=window)
    together = run(attention, e, 0.1)
    torch.set_num_threads(threads)
    for k, span in enumerate(spans[:5]):
        work = plan_attention(*([x] for x in span), e.heads, 2, 64, 32, window, sparse_v=0.1)
        alone = attention(e.q[k : k + 1], e.k_cache, e.v_cache, e.table, work, e.scale)
        assert np.array_equal(alone[0].double().numpy(), together[k])
    for cuts in ([0, 177], [0, 1, 2, 40, 76, 177]):
        pieces = [(5, a, b) for a, b in itertools.pairwise(cuts)]
        work = plan_attention(*zip(*pieces, strict=True), e.heads, 2, 64, 32, window, sparse_v=0.1)
        cut = attention(e.q[5:], e.k_cache, e.v_cache, e.table, work, e.scale)
        assert np.array_equal(cut.double().numpy(), together[5:])


def test_more_threads_in_a_later_layer_have_room_of_their_own() -> None:
    e = example([(r, 300, 301) for r in range(12)], garbage=None, layout="apart")
    wanted = run(attention, e, 0.1)
    work = work_of(e, 0.1)
    for threads in (1, 4, 2):
        torch.set_num_threads(threads)
        got = attention(e.q, e.k_cache, e.v_cache, e.table, work, e.scale)
        assert np.array_equal(got.double().numpy(), wanted)


@pytest.mark.parametrize("rotary_dim", [0, 40])
def test_decodes_write_what_they_attend_to(rotary_dim: int) -> None:
    e = example([(0, 140, 141), (1, 41, 42)], heads=6, garbage=None)
    new = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(1))
    k, v = new[:, :2], new[:, 2:]
    cos_sin = rope_table(RopeSpec(64, rotary_dim, 10_000.0, max_position=150), "cpu") if rotary_dim else None
    caches = [cache.clone() for cache in (e.k_cache, e.v_cache)]
    wanted = decode_attention_definition(e.q, k, v, cos_sin, *caches, e.table, work_of(e, 0.1), e.scale)
    got = decode_attention(e.q, k, v, cos_sin, e.k_cache, e.v_cache, e.table, work_of(e, 0.1), e.scale)
    torch.testing.assert_close(got, wanted, atol=LIMIT, rtol=1e-5)
    torch.testing.assert_close(e.k_cache, caches[0])


def test_what_is_no_number_stays_none_and_spreads_no_further() -> None:
    e = example([(0, 140, 141), (1, 0, 20)], garbage=None)
    wanted = run(attention, e, 0.1)
    e.q[7, 1, 3] = torch.nan
    got = run(attention, e, 0.1)
    assert np.isnan(got[7, 1]).all()
    got[7, 1] = wanted[7, 1]
    assert np.array_equal(got, wanted)


def test_large_scores_do_not_overflow() -> None:
    e = example([(0, 140, 141), (1, 0, 20)], loud=200.0, garbage=None)
    check(run(attention, e, 0.1), *oracle(e, 0.1), 2e-4)


@pytest.mark.parametrize(("share", "device", "message"), [(0.0, "cpu", "above 0"), (0.1, "cuda", "of the CPU")])
def test_other_shares_and_devices_are_refused(share: float, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_attention([0], [0], [1], 4, 2, 64, 32, device=device, sparse_v=share)
