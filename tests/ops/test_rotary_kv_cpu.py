"""The CPU's kernel of rotary embedding and write, for the views that a step has of its projection and its cache."""

import pytest
import torch

from cellar.core.specs import RopeSpec
from cellar.ops.rotary import rope_table
from cellar.ops.rotary.cpu import rotary_kv_cpu, write_kv_cpu
from cellar.ops.rotary.definition import rotary_kv_definition

TOKENS, HEADS, KV_HEADS, DIM, CHUNK, SLOTS = 5, 6, 2, 16, 8, 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [DIM, DIM // 2])
@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("contiguous", [True, False])
def test_layers_of_a_step(dtype: torch.dtype, rotary_dim: int, side_by_side: bool, contiguous: bool) -> None:
    noise = torch.Generator().manual_seed(1)
    positions = torch.tensor([0, 3, 40, 7, 8])
    cos_sin = rope_table(RopeSpec(DIM, rotary_dim, 10_000.0, max_position=50), "cpu")
    mapping = torch.tensor([9, 55, 0, 17, 16])
    for _ in range(3):
        vectors = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, DIM, generator=noise).to(dtype)
        q, k, v = vectors.split([HEADS, KV_HEADS, KV_HEADS], 1)
        if not side_by_side:
            k = k.clone()
        caches = torch.randn(SLOTS, 2, KV_HEADS, CHUNK, DIM, generator=noise).to(dtype)
        if contiguous:
            caches = caches.transpose(0, 1).contiguous().transpose(0, 1)
        expected = caches.clone()
        given = vectors.clone()
        want = rotary_kv_definition(q, k, v, positions, cos_sin, expected[:, 0], expected[:, 1], mapping)
        got = rotary_kv_cpu(q, k, v, positions, cos_sin, caches[:, 0], caches[:, 1], mapping)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(caches, expected)
        assert torch.equal(vectors, given)


def test_write_alone() -> None:
    k, v = torch.randn(2, TOKENS, KV_HEADS, DIM)
    mapping = torch.tensor([9, 55, 0, 17, 16])
    k_cache, v_cache = torch.zeros(2, SLOTS, KV_HEADS, CHUNK, DIM)
    write_kv_cpu(k, v, k_cache, v_cache, mapping)
    for i, place in enumerate(mapping.tolist()):
        assert torch.equal(k_cache[place // CHUNK, :, place % CHUNK], k[i])
        assert torch.equal(v_cache[place // CHUNK, :, place % CHUNK], v[i])
    assert int((k_cache != 0).any(-1).sum()) == TOKENS * KV_HEADS
