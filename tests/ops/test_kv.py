from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.ops.rotary import write_kv
from cellar.ops.rotary.triton import write_kv_kernel


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([write_kv, write_kv_kernel]),
    st.integers(0, 9),
    st.sampled_from([(1, 64), (2, 64), (3, 80), (5, 72)]),
    st.sampled_from([16, 32, 64]),
    st.sampled_from(["apart", "together"]),
    st.sampled_from([torch.float32, torch.float16]),
    st.integers(0, 99),
)
def test_writes_each_token_to_its_place_and_nothing_else(
    function: type, tokens: int, kind: tuple[int, int], chunk: int, layout: str, dtype: torch.dtype, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    heads, dim = kind
    if layout == "apart":
        caches = [torch.randn(3, heads, chunk, dim, generator=noise).to(dtype) for _ in range(2)]
    else:
        caches = list(torch.randn(3, 2, heads, chunk, dim, generator=noise).to(dtype).unbind(1))
    k, v = (torch.randn(tokens, heads + 1, dim, generator=noise).to(dtype)[:, 1:] for _ in range(2))
    places = torch.randperm(3 * chunk, generator=noise)[:tokens]
    wanted = [cache.clone() for cache in caches]
    for i, place in enumerate(places.tolist()):
        for cache, new in zip(wanted, (k, v), strict=True):
            for head in range(heads):
                cache[place // chunk, head, place % chunk] = new[i, head]
    function(k, v, *caches, places)
    for got, cache in zip(caches, wanted, strict=True):
        assert torch.equal(got, cache)
