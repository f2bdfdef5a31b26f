"""The unified maximum in half precision, whose powers overflow; and where it is on (docs/decisions/0019-any-gpu.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cellar.ops.attention import Softmax
from cellar.ops.attention import triton as attention_triton
from cellar.ops.attention.triton import FIRST_MAXIMUM, NO_MAXIMUM, attention_kernel, decode_attention_kernel, unified_by
from tests.ops.attention_example import Example, example

HALF = 4e-3

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def rising(e: Example, jumps: dict[int, float], at: int) -> Example:
    """From position `at` on, the scores of these rows are so much higher (in powers of 2)."""
    loud = 8.0
    e.q[:, :, 0] = loud
    e.k_cache[..., 0] = 0.0
    size = e.k_cache.shape[2]
    for keys in e.keys.values():
        keys[..., 0] = 0.0
    for row, jump in jumps.items():
        value = float(torch.tensor(jump / (loud * e.scale * 1.4427)).half())
        for n in range(at, len(e.keys[row])):
            e.k_cache[int(e.table[row, n // size]), :, n % size, 0] = value
        e.keys[row][at:, ..., 0] = value
    return e


def half_example(spans: list[tuple[int, int, int]]) -> Example:
    return example(spans, heads=4, kv_heads=2, dtype=torch.float16, garbage=0.0)


def computed(e: Example, softmax: Softmax, monkeypatch: pytest.MonkeyPatch) -> Any:
    """In half precision as on a device: the interpreter's other products are in float32, where nothing overflows."""
    monkeypatch.setattr(attention_triton, "interpreted", lambda x: False)
    work = e.work(programs=8)
    work.softmax = softmax
    return attention_kernel(e.q, e.k_cache, e.v_cache, e.table, work, e.scale).double().numpy()


SPANS = [(0, 0, 70), (1, 90, 150), (2, 64, 65), (3, 0, 5)]


@pytest.mark.parametrize("jump", [-40.0, 0.0, 12.0, 17.0, 30.0])
def test_half_precision_is_right_however_scores_rise_or_fall(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2^16 weights are infinite, and 2^-40 is none: the first tile is computed again, the second need not be."""
    e = rising(half_example(SPANS), {0: jump, 1: jump, 2: jump}, at=40)
    np.testing.assert_allclose(computed(e, "unified", monkeypatch), e.oracle(), atol=HALF)


@pytest.mark.parametrize("level", [-60.0, 60.0])
def test_half_precision_is_right_wherever_all_scores_lie(level: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to 0 their weights would be 0 or infinite: this is what bfloat16's way would do."""
    e = rising(half_example(SPANS), dict.fromkeys(range(4), level), at=0)
    np.testing.assert_allclose(computed(e, "unified", monkeypatch), e.oracle(), atol=HALF)
    monkeypatch.setattr(attention_triton, "unified_by", lambda *_: NO_MAXIMUM)
    wrong = computed(e, "unified", monkeypatch)
    assert not np.allclose(wrong, e.oracle(), atol=HALF), "half precision without a maximum is silently wrong"


@pytest.mark.parametrize("score", [-300.0, 300.0])
def test_a_first_token_is_its_own_value_whatever_its_score(score: float) -> None:
    """A decode with nothing before it: 2^-300 is 0 in float32, and 0 / 0 is not its value."""
    e = example([(0, 0, 1), (1, 0, 1)], heads=4, kv_heads=2, garbage=0.0)
    dim = e.q.shape[-1]
    q, k, v = (torch.zeros(2, heads, dim) for heads in (4, 2, 2))
    q[..., 0], k[..., 0] = 1.0, score / (1.4427 * e.scale)
    v += torch.arange(dim)
    work = e.work(programs=8)
    work.softmax = "unified"
    got = decode_attention_kernel(q, k, v, None, e.k_cache, e.v_cache, e.table, work, e.scale)
    torch.testing.assert_close(got, v.repeat_interleave(2, dim=1))


def test_where_it_is_on() -> None:
    """The table of decision 0019."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    auto = {(d, wide): unified_by("auto", d, wide) for d in (half, brain, single) for wide in (False, True)}
    assert auto == {
        (half, False): 0,
        (half, True): FIRST_MAXIMUM,
        (brain, False): 0,
        (brain, True): NO_MAXIMUM,
        (single, False): 0,
        (single, True): 0,
    }
    assert unified_by("unified", half, False) == FIRST_MAXIMUM
    assert unified_by("unified", brain, False) == unified_by("unified", single, False) == NO_MAXIMUM
    assert unified_by("unified", half, True, window=4096) == 0
    assert unified_by("unified", half, True, crowded=True) == 0
    assert unified_by("unified", brain, True, crowded=True) == NO_MAXIMUM
    assert not any(unified_by("maximum", d, wide) for d in (half, brain, single) for wide in (False, True))
