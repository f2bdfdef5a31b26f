"""Contexts of prompts written out as plain rows: the numbers that codes mean, and the same attention over them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cellar.core.kv_formats import KVFormat
from cellar.ops.attention import contexts
from cellar.ops.attention.cases import case
from cellar.ops.attention.contexts import contexts_fit, plain_contexts, written_out
from cellar.ops.attention.definition import attention_definition
from cellar.ops.attention.plan import Captured
from cellar.ops.attention.triton import attention_kernel
from cellar.ops.kv_format import dequantized, quantized_cache

CPU = torch.device("cpu")
FORMATS: tuple[KVFormat, ...] = ("fp8", "int4")
# A decode between prompts, a row with a hole, one whose context is longer than what it computes.
SPANS = ((3, 70, 71), (0, 0, 20), (0, 64, 90), (1, 40, 60), (2, 7, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", FORMATS)
def test_numbers_are_those_of_the_definition(form: KVFormat, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(1)
    plain = torch.randn(7, 2, 2, 16, 64, generator=noise) * torch.exp2(torch.randint(-9, 9, (7, 2, 2, 16, 1)).float())
    plain[3, 0, 0, 0] = torch.linspace(65000, 65504, 64)
    arena = quantized_cache(plain, form)
    sources = torch.tensor([3, 0, 6, 3], dtype=torch.int32)
    found = written_out(arena[:, 0], arena[:, 1], sources, 64, dtype)
    for which in (0, 1):
        wanted = dequantized(arena[:, which], 64)[sources]
        if dtype == torch.float16:
            wanted = wanted.clamp(-65504, 65504)
        torch.testing.assert_close(found[which], wanted.to(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_wide_spans_have_the_same_attention(form: KVFormat) -> None:
    given = case("mixed", SPANS, (8, 2, 64), chunk=16, kv_format=form).make(CPU, torch.float32)
    work, table = given["work"], given["table"]
    assert contexts_fit(work)
    found = plain_contexts(work, table)
    assert plain_contexts(work, table) is found, "once for all layers"
    # 90 positions of row 0 and 60 of row 1: of nobody else.
    assert len(found.sources) == 6 + 4
    k, v = written_out(given["k_cache"], given["v_cache"], found.sources, 64, torch.float32)
    out = torch.full(given["q"].shape, torch.nan)
    attention_kernel(given["q"], k, v, found.table, found.work, given["scale"], out)
    wanted = attention_definition(**given)
    wide = torch.cat([torch.arange(1, 67)])
    torch.testing.assert_close(out[wide], wanted[wide], atol=2e-5, rtol=2e-5)
    assert out[[0, 67]].isnan().all(), "decodes are left to others"


def test_what_does_not_fit_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    work = case("mixed", SPANS, (8, 2, 64), chunk=16, kv_format="fp8").make(CPU, torch.float32)["work"]
    assert contexts_fit(work)
    decodes = case("decodes", ((0, 70, 71), (1, 3, 4)), (8, 2, 64), kv_format="fp8").make(CPU, torch.float32)["work"]
    assert not contexts_fit(decodes)
    assert not contexts_fit(replace(work, captured=Captured(1, 1), buffers=work.resident))
    monkeypatch.setattr(contexts, "MOST_NBYTES", 10 * 16 * 2 * 64 * 4 - 1)
    assert not contexts_fit(work)
