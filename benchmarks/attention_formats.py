"""Decodes over K and V in each format: microseconds of writing and attending, and bytes per second of what each reads.

    python -m benchmarks.attention_formats [--shapes 128x1024x8,256x512x8,128x1024x32] [--sweep] [--json FILE]

A shape is batch x context x KV heads, of 32 heads of 128. Plain K and V are bfloat16. Rotary embedding and writing are
inside the kernel, or in one before it where that kernel does not write the format. `--sweep` tries sizes of Hopper's
kernel over fp8: warps, stages, blocks that share a multiprocessor, tiles of 16 tokens of a warp in a stage.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention import captured, typical_seconds
from cellar.core.kv_formats import KVFormat, row_nbytes
from cellar.core.specs import RopeSpec
from cellar.ops.attention import attention, decode_attention, decodes_at_once, plan_attention
from cellar.ops.attention.definition import attention_definition
from cellar.ops.attention.hopper import Sizes
from cellar.ops.kv_format import quantized_cache
from cellar.ops.rotary import rope_table, rotary_kv

HEADS, DIM, CHUNK = 32, 128, 32
FORMATS: tuple[KVFormat, ...] = ("plain", "fp8", "int4")
SWEEP = (
    *(Sizes(4, stages, 2) for stages in (3, 4, 5, 6)),
    *(Sizes(4, stages, 2, 2) for stages in (2, 3)),
    *(Sizes(8, stages, 1, tiles) for tiles in (1, 2) for stages in (4, 6)),
    *(Sizes(8, 12, 1), Sizes(12, 12, 1)),
)


def layer(
    batch: int, context: int, kv_heads: int, form: KVFormat, device: torch.device
) -> tuple[Callable[[], None], Callable[[], float], int]:
    """A layer's attention of one step, over some caches; its distance from the definition in a few rows; how many."""
    noise = np.random.default_rng(0)
    chunks = -(-context // CHUNK)
    slots = batch * chunks
    table = torch.from_numpy(noise.permutation(slots).astype(np.int32).reshape(batch, chunks)).to(device)
    # So many that none stays in the processor's cache.
    count = max(1, min(4, 2**30 // (slots * CHUNK * kv_heads * DIM * 4)))
    plain = torch.randn(slots, 2, kv_heads, CHUNK, DIM, device=device, dtype=torch.bfloat16)
    caches = [quantized_cache(plain, form) if n == 0 else quantized_cache(plain, form).clone() for n in range(count)]
    del plain
    qkv = torch.randn(batch, HEADS + 2 * kv_heads, DIM, device=device, dtype=torch.bfloat16)
    q, k, v = qkv[:, :HEADS], qkv[:, HEADS : HEADS + kv_heads], qkv[:, HEADS + kv_heads :]
    angles = rope_table(RopeSpec(DIM, DIM, 10_000.0, max_position=context), device)
    positions = torch.full((batch,), context - 1, dtype=torch.int64, device=device)
    places = table[:, -1].long() * CHUNK + (context - 1) % CHUNK
    rows = np.arange(batch, dtype=np.int32)
    start = np.full(batch, context - 1, np.int32)
    work = plan_attention(rows, start, start + 1, HEADS, kv_heads, DIM, CHUNK, device=device, kv_format=form)

    def one(cache: Tensor) -> Tensor:
        keys, values = cache[:, 0], cache[:, 1]
        if decodes_at_once(q, keys, values, work):
            return decode_attention(q, k, v, angles, keys, values, table, work, DIM**-0.5)
        turned = rotary_kv(q, k, v, positions, angles, keys, values, places)
        return attention(turned, keys, values, table, work, DIM**-0.5)

    def all_of_them() -> None:
        for cache in caches:
            one(cache)

    def error() -> float:
        found = one(caches[0])
        few = plan_attention(
            rows[:4], start[:4], start[:4] + 1, HEADS, kv_heads, DIM, CHUNK, device=device, kv_format=form
        )
        turned = rotary_kv(q, k, v, positions, angles, caches[0][:, 0], caches[0][:, 1], places)
        wanted = attention_definition(turned[:4].float(), caches[0][:, 0], caches[0][:, 1], table, few, DIM**-0.5)
        return float((found[:4].float() - wanted).abs().max())

    return all_of_them, error, count


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_formats", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shapes", default="128x1024x8,256x512x8,128x1024x32,1x1024x8")
    parser.add_argument("--seconds", type=float, default=0.1, help="time per measurement")
    parser.add_argument("--sweep", action="store_true", help="try sizes for fp8, too")
    parser.add_argument("--part", default="0/1", help="of the sweep: i/n is every n-th from the i-th on")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = []

    def measure(shape: str, form: KVFormat, name: str) -> None:
        batch, context, kv_heads = map(int, shape.split("x"))
        nbytes = 2 * batch * context * kv_heads * row_nbytes("bfloat16" if form == "plain" else form, DIM)
        try:
            run, error, count = layer(batch, context, kv_heads, form, device)
            wrong = error()
            each = typical_seconds(captured(run, device) if device.type == "cuda" else run, device, options.seconds)
        except Exception as problem:  # another row may still be had
            print(f"{shape:12} {form:6} {name:24} {type(problem).__name__}: {str(problem)[:150]}", flush=True)
            return
        each /= count
        lines.append({"shape": shape, "format": form, "sizes": name, "us": each * 1e6, "gbs": nbytes / each / 1e9})
        print(
            f"{shape:12} {form:6} {name:24} {each * 1e6:8.1f} us {nbytes / each / 1e9:6.0f} GB/s  {wrong:.1e}",
            flush=True,
        )

    with torch.inference_mode():
        for shape in options.shapes.split(","):
            for form in FORMATS:
                measure(shape, form, "default")
            if not options.sweep:
                continue
            first, step = map(int, options.part.split("/"))
            for sizes in SWEEP[first::step]:
                with patch("cellar.ops.attention.hopper.sizes_for", lambda *_, sizes=sizes: sizes):
                    measure(shape, "fp8", f"w {sizes.warps} st {sizes.stages} x {sizes.at_once} t {sizes.tiles}")
    print(json.dumps(lines))
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
