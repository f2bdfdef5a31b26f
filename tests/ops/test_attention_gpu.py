"""Attention on a CUDA device, in the shapes and dtypes that the interpreter is too slow or too coarse for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cellar.ops.attention import AttentionBuffers, AttentionShape, Softmax, attention, plan_attention
from cellar.ops.attention.definition import attention_definition
from cellar.ops.rotary import write_kv
from cellar.ops.rotary.definition import write_kv_definition
from tests.ops.attention_example import Span, example, shifted

pytestmark = pytest.mark.gpu

LIMITS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DEVICE = "cuda"


def step(seed: int, **kind: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A random step on the device, and the same one for the definition in float64 on the host."""
    pick = np.random.default_rng(seed)
    spans: list[Span] = []
    for row in range(int(pick.integers(1, 12))):
        cuts = np.sort(pick.choice(700, size=2 * int(pick.integers(1, 3)), replace=False))
        if pick.random() < 0.6:
            spans.append((row, int(cuts[-1]), int(cuts[-1]) + 1))
        else:
            spans += [(row, int(a), int(b)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    e = example(spans, seed=seed, **kind)
    names = ("q", "k_cache", "v_cache", "table")
    here = {name: getattr(e, name) for name in names}
    there = {name: tensor.to(DEVICE) for name, tensor in here.items()}
    wide = {name: t.double() if t.is_floating_point() else t for name, t in here.items()}
    return (
        there | {"work": e.work(DEVICE, programs=int(pick.choice([3, 64, 264]))), "scale": e.scale},
        wide | {"work": e.work(), "scale": e.scale},
    )


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("kind", [(4, 2, 64), (6, 1, 72), (8, 8, 80), (12, 4, 96), (32, 8, 128), (4, 2, 256)])
@pytest.mark.parametrize("seed", range(4))
def test_random_steps(dtype: torch.dtype, kind: tuple[int, int, int], seed: int) -> None:
    heads, kv_heads, dim = kind
    there, here = step(
        seed,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        chunk_size=(16, 32, 64)[seed % 3],
        window=(None, None, 50, 200)[seed],
        layout=("together", "apart")[seed % 2],
    )
    got = attention(**there).double().cpu()
    torch.testing.assert_close(got, attention_definition(**here), atol=LIMITS[dtype], rtol=LIMITS[dtype])


def test_many_launches_with_one_set_of_buffers() -> None:
    """The counters are back at zero and no partial result is read before it is written: 200 steps in a stream."""
    device = torch.device(DEVICE)
    heads, kv_heads, dim = 8, 2, 128
    buffers = AttentionBuffers.for_limits(AttentionShape(heads, kv_heads, dim, 32), 4096, 64, 264, device)
    spans = [[(r, 100 + 997 * r * s % 5000, 101 + 997 * r * s % 5000) for r in range(1 + s % 7)] for s in range(20)]
    for dtype in (torch.bfloat16, torch.float32):
        steps = [example(x, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, seed=k) for k, x in enumerate(spans)]
        inputs = [tuple(t.to(device) for t in (e.q, e.k_cache, e.v_cache, e.table)) for e in steps]
        first: list[torch.Tensor] = []
        for turn in range(10):
            results = []
            for e, tensors in zip(steps, inputs, strict=True):
                row, start, stop = zip(*e.spans, strict=True)
                work = plan_attention(row, start, stop, heads, kv_heads, dim, 32, None, device, 264, None, buffers)
                results.append(attention(*tensors, work, e.scale))
            if turn == 0:
                first = results
                for e, result in zip(steps, results, strict=True):
                    torch.testing.assert_close(
                        result.double().cpu(), torch.from_numpy(e.oracle()), atol=LIMITS[dtype], rtol=LIMITS[dtype]
                    )
            # Bit for bit: partial results are summed in the order of their parts, whoever arrives last.
            assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))
        assert int(buffers.counters.abs().sum()) == 0


@pytest.mark.parametrize("by", [-100.0, 100.0])
@pytest.mark.parametrize("dtype", list(LIMITS))
def test_scores_far_from_zero(dtype: torch.dtype, by: float) -> None:
    """Decodes, cut and whole, and a prompt whose sums leave the range without a maximum: computed once more."""
    spans = [(0, 900, 901), (1, 30, 31), (2, 4000, 4001), (3, 100, 400)]
    e = shifted(example(spans, heads=8, kv_heads=2, dtype=dtype, garbage=0.0), by)
    tensors = [t.to(DEVICE) for t in (e.q, e.k_cache, e.v_cache, e.table)]
    wanted = torch.from_numpy(e.oracle())
    # A float32 score of 100 stands for steps of 2^-17, and so does the logarithm of its weight.
    limit = max(2 * LIMITS[dtype], 5 * 2.0**-17)
    softmaxes: tuple[Softmax, ...] = ("unified", "maximum", "auto")
    for softmax in softmaxes:
        work = e.work(DEVICE, programs=264)
        work.softmax = softmax
        got = attention(*tensors, work, e.scale).double().cpu()
        torch.testing.assert_close(got, wanted, atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_a_fixed_split_makes_results_independent_of_company(dtype: torch.dtype) -> None:
    e = example([(0, 900, 901), (1, 30, 31), (2, 4000, 4001), (3, 100, 400)], heads=8, kv_heads=2, dtype=dtype)
    tensors = [t.to(DEVICE) for t in (e.k_cache, e.v_cache, e.table)]
    q = e.q.to(DEVICE)
    together = attention(q, *tensors, e.work(DEVICE, programs=264, split=256), e.scale)
    for k, span in enumerate(e.spans[:3]):
        work = plan_attention(*([x] for x in span), 8, 2, 64, 32, None, DEVICE, split=256)
        assert torch.equal(attention(q[k : k + 1], *tensors, work, e.scale), together[k : k + 1])


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("tokens", [1, 7, 4000])
def test_write_kv(dtype: torch.dtype, tokens: int) -> None:
    slots, heads, chunk, dim = 200, 8, 32, 128
    qkv = torch.randn(tokens, 48, dim, device=DEVICE, dtype=dtype)
    places = torch.randperm(slots * chunk, device=DEVICE)[:tokens]
    arenas = [torch.zeros(slots, 3, 2, heads, chunk, dim, device=DEVICE, dtype=dtype) for _ in range(2)]
    for function, arena in zip((write_kv, write_kv_definition), arenas, strict=True):
        function(qkv[:, 32:40], qkv[:, 40:], arena[:, 1, 0], arena[:, 1, 1], places)
    assert torch.equal(*arenas)
