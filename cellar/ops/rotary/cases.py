"""Example calls of rotary embedding and of the write into the cache."""

from __future__ import annotations

from typing import Any

import torch

from cellar.core.kv_formats import KVFormat
from cellar.core.specs import RopeSpec
from cellar.ops.kv_format import quantized_cache
from cellar.ops.registry import Case
from cellar.ops.rotary.table import rope_table


def _rotary(name: str, t: int, heads: int, kv_heads: int, dim: int, rotary_dim: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        generator = torch.Generator().manual_seed(t + heads)
        qkv = torch.randn((t, (heads + 2 * kv_heads) * dim), generator=generator).to(dtype).to(device)
        vectors = qkv.view(t, heads + 2 * kv_heads, dim)
        return {
            "q": vectors[:, :heads],
            "k": vectors[:, heads : heads + kv_heads],
            "positions": torch.randint(0, 50, (t,), generator=generator).to(device),
            "cos_sin": rope_table(RopeSpec(dim, rotary_dim, 10_000.0, max_position=50), device),
        }

    return Case(name, make)


def _write(tokens: int, kv_heads: int, dim: int, chunk: int, kv_format: KVFormat = "plain") -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        noise = torch.Generator().manual_seed(tokens * dim)
        slots = tokens // chunk + 3
        k, v = (torch.randn(tokens, kv_heads + 2, dim, generator=noise)[:, 1:-1] for _ in range(2))
        arena = quantized_cache(
            torch.randn(slots, 2, kv_heads, chunk, dim, generator=noise).to(device, dtype), kv_format
        )
        mapping = torch.randperm(slots * chunk, generator=noise)[:tokens]
        return {
            "k": k.to(device, dtype),
            "v": v.to(device, dtype),
            "k_cache": arena[:, 0],
            "v_cache": arena[:, 1],
            "slot_mapping": mapping.to(device),
        }

    return Case(f"{tokens}x{kv_heads}x{dim} in {chunk} {kv_format}", make)


def _fused(
    name: str,
    t: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rotary_dim: int,
    chunk: int = 32,
    keep: bool = False,
    kv_format: KVFormat = "plain",
) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        noise = torch.Generator().manual_seed(t + heads)
        qkv = torch.randn((t, (heads + 2 * kv_heads) * dim), generator=noise).to(dtype).to(device)
        vectors = qkv.view(t, heads + 2 * kv_heads, dim)
        slots = t // chunk + 3
        arena = quantized_cache(
            torch.randn(slots, 2, kv_heads, chunk, dim, generator=noise).to(device, dtype), kv_format
        )
        turned = torch.zeros(t, kv_heads, dim, dtype=dtype, device=device)
        return {
            "q": vectors[:, :heads],
            "k": vectors[:, heads : heads + kv_heads],
            "v": vectors[:, heads + kv_heads :],
            "positions": torch.randint(0, 50, (t,), generator=noise).to(device),
            "cos_sin": rope_table(RopeSpec(dim, rotary_dim, 10_000.0, max_position=50), device),
            "k_cache": arena[:, 0],
            "v_cache": arena[:, 1],
            "slot_mapping": torch.randperm(slots * chunk, generator=noise)[:t].to(device),
            "turned": turned if keep else None,
        }

    return Case(name, make)


ROTARY = (
    _rotary("grouped", 3, 4, 2, 64, 64),
    _rotary("partial, odd dim", 2, 3, 3, 20, 12),
    _rotary("many heads", 1, 40, 2, 64, 64),
)
WRITE_KV = (
    _write(7, 2, 64, 32),
    _write(1, 1, 128, 16),
    _write(12, 3, 80, 64),
    _write(9, 5, 72, 32),
    _write(12, 3, 80, 64, "fp8"),
    _write(9, 5, 72, 32, "int4"),
)
ROTARY_KV = (
    _fused("grouped", 3, 4, 2, 64, 64),
    _fused("partial, odd dim", 2, 3, 3, 20, 12, chunk=16),
    _fused("many heads", 1, 40, 2, 64, 64, chunk=64),
    _fused("keys kept", 5, 4, 2, 32, 32, keep=True),
    _fused("fp8", 9, 8, 2, 128, 128, kv_format="fp8"),
    _fused("fp8, partial, odd dim", 2, 3, 3, 20, 12, chunk=16, kv_format="fp8"),
    _fused("int4", 9, 8, 2, 128, 128, kv_format="int4"),
    _fused("int4, partial, odd dim", 2, 3, 3, 20, 12, chunk=16, kv_format="int4"),
)
