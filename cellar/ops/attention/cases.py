"""Example calls of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cellar.core.kv_formats import KVFormat
from cellar.core.specs import RopeSpec
from cellar.ops.attention.plan import plan_attention
from cellar.ops.kv_format import quantized_cache
from cellar.ops.registry import Case
from cellar.ops.rotary.table import rope_table


def case(
    name: str,
    spans: tuple[tuple[int, int, int], ...],
    heads: tuple[int, int, int] = (6, 2, 64),
    chunk: int = 32,
    window: int | None = None,
    programs: int = 8,
    split: int | None = None,
    heavy: bool = False,
    fresh: bool = False,
    kv_format: KVFormat = "plain",
) -> Case:
    """A case with the given spans (row, start, stop), slots in any order, and NaN wherever nothing was written.

    `fresh`: K and V of the spans are given once more.
    """

    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        noise = torch.Generator().manual_seed(len(name))
        num_heads, kv_heads, dim = heads
        length: dict[int, int] = {}
        for row, _, stop in spans:
            length[row] = max(length.get(row, 0), stop)
        widest = -(-max(length.values()) // chunk)
        num_rows = max(length) + 1
        order = torch.randperm(num_rows * widest + 2, generator=noise)
        table = torch.full((num_rows, widest), -1, dtype=torch.int32)
        arena = torch.full((len(order), 2, kv_heads, chunk, dim), torch.nan)
        for row, positions in length.items():
            for j in range(-(-positions // chunk)):
                slot = int(order[row * widest + j])
                table[row, j] = slot
                written = min(chunk, positions - j * chunk)
                arena[slot, :, :, :written] = torch.randn(2, kv_heads, written, dim, generator=noise)
        tokens = sum(stop - start for _, start, stop in spans)
        q = torch.randn(tokens, num_heads + 2 * kv_heads, dim, generator=noise)[:, :num_heads]
        arena = arena.to(device, dtype)
        span_rows, starts, stops = (list(column) for column in zip(*spans, strict=True))
        work = plan_attention(
            span_rows,
            starts,
            stops,
            heads=num_heads,
            kv_heads=kv_heads,
            head_dim=dim,
            chunk_size=chunk,
            window=window,
            device=device,
            programs=programs,
            split=split,
            kv_format=kv_format,
        )
        arena = quantized_cache(arena, kv_format)
        new = None
        if fresh:
            rows = np.repeat(work.row, work.stop - work.start)
            positions = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
            slots = table.numpy()[rows, positions // chunk]
            both = arena[slots, :, :, positions % chunk].contiguous()
            new = (both[:, 0], both[:, 1])
        return {
            "q": q.to(device, dtype),
            "k_cache": arena[:, 0],
            "v_cache": arena[:, 1],
            "table": table.to(device),
            "work": work,
            "scale": dim**-0.5,
            "new": new,
        }

    return Case(name, make, heavy=heavy)


def decode_case(name: str, lengths: tuple[int, ...], rotary_dim: int, **options: Any) -> Case:
    """A row per length, whose last position is new."""
    spans = tuple((row, length - 1, length) for row, length in enumerate(lengths))
    plain = case(name, spans, **options)

    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        found = plain.make(device, dtype)
        shape = found["work"].shape
        noise = torch.Generator().manual_seed(rotary_dim)
        new = torch.randn(len(lengths), 2 * shape.kv_heads + 1, shape.head_dim, generator=noise).to(device, dtype)
        rope = RopeSpec(shape.head_dim, rotary_dim, 10_000.0, max_position=max(lengths))
        order = ("q", "k", "v", "cos_sin", "k_cache", "v_cache", "table", "work", "scale")
        del found["new"]
        found |= {"k": new[:, : shape.kv_heads], "v": new[:, shape.kv_heads : -1]}
        found["cos_sin"] = rope_table(rope, device) if rotary_dim else None
        return {key: found[key] for key in order}

    return Case(name, make, heavy=options.get("heavy", False))


def _quantized(form: KVFormat) -> tuple[Case, ...]:
    few = form == "int4"  # in Triton's interpreter
    return (
        case(f"{form}: decodes", ((0, 99, 100), (1, 31, 32), (2, 0, 1), (3, 32, 33)), kv_format=form),
        case(
            f"{form}: mixed", ((0, 130, 131), (1, 0, 45), (2, 70, 72), (3, 20, 61)), chunk=64, kv_format=form, heavy=few
        ),
        case(f"{form}: holes", ((0, 0, 20), (0, 64, 90), (0, 120, 121), (1, 7, 8)), (8, 1, 96), kv_format=form),
        case(f"{form}: window", ((0, 75, 76), (1, 10, 80), (2, 5, 6)), window=24, chunk=16, kv_format=form),
        case(f"{form}: odd dim", ((0, 400, 401), (1, 200, 220)), (2, 2, 72), programs=64, kv_format=form, heavy=few),
        case(f"{form}: small heads", ((0, 0, 40), (1, 5, 6)), heads=(4, 2, 20), chunk=16, kv_format=form),
        case(f"{form}: wide heads", ((0, 40, 41), (1, 0, 5)), heads=(2, 1, 256), kv_format=form, heavy=few),
        case(
            f"{form}: many", tuple((i, 37 * i, 37 * i + 1) for i in range(40)), (32, 8, 128), kv_format=form, heavy=True
        ),
        case(
            f"{form}: long", ((0, 1000, 1700), (1, 8000, 8001)), (32, 8, 128), programs=264, kv_format=form, heavy=True
        ),
    )


QUANTIZED = _quantized("fp8") + _quantized("int4")

ATTENTION = (
    case("one decode", ((0, 40, 41),)),
    case("decodes", ((0, 99, 100), (1, 31, 32), (2, 0, 1), (3, 32, 33))),
    case("even decodes", ((0, 50, 51), (2, 50, 51)), chunk=16),
    case("prompt", ((0, 0, 70),), heads=(4, 4, 80)),
    case("mixed", ((0, 130, 131), (1, 0, 45), (2, 70, 72), (3, 20, 61)), chunk=64),
    case("holes and tail", ((0, 0, 20), (0, 64, 90), (0, 120, 121), (1, 7, 8)), heads=(8, 1, 96)),
    case("window", ((0, 75, 76), (1, 10, 80), (2, 5, 6)), window=24, chunk=16),
    case("split by load", ((0, 400, 401), (1, 200, 220)), heads=(2, 2, 72), programs=64),
    case("split fixed", ((0, 150, 151), (1, 60, 61)), split=48, programs=3),
    case("whole prompts", ((0, 0, 70), (1, 130, 131), (2, 0, 129)), heads=(4, 2, 64), fresh=True),
    case("whole and later", ((0, 0, 90), (1, 64, 150), (2, 0, 7)), heads=(8, 1, 32), chunk=16, fresh=True),
    case("a short whole prompt", ((0, 0, 40),), heads=(3, 1, 16), chunk=64, fresh=True),
    case("wide heads", ((0, 40, 41), (1, 0, 5)), heads=(2, 1, 256)),
    case("many", tuple((i, 37 * i, 37 * i + 1) for i in range(40)), heads=(32, 8, 128), heavy=True),
    case("long whole prompt", ((0, 0, 3000), (1, 0, 777)), heads=(32, 8, 128), fresh=True, heavy=True),
    case("long prompt", ((0, 1000, 1700), (1, 8000, 8001)), heads=(32, 8, 128), programs=264, heavy=True),
    *QUANTIZED,
)
DECODE_ATTENTION = (
    decode_case("first tokens", (1, 2, 33), 64),
    decode_case("cut", (400, 7, 129), 32, programs=64),
    decode_case("cut before the newest", (161,), 64, split=32),
    decode_case("no rotation, odd dim", (40, 65), 0, heads=(4, 4, 80), chunk=16),
    decode_case("window", (75, 11), 64, window=24, chunk=16),
    decode_case("many", tuple(37 * i + 1 for i in range(40)), 128, heads=(32, 8, 128), heavy=True),
)
