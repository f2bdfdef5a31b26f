"""Attention by itself, checked and timed beside what memory and arithmetic of this machine allow.

    python -m benchmarks.attention [--json FILE] [--seconds S] [--only NAME]
    python -m benchmarks.attention --comparison scattered [--json FILE] [--png FILE]
    python -m benchmarks.attention --comparison unified [--json FILE]

Every shape is first compared with the definition in float32, then timed over caches that rotate, so that none stays in
the processor's cache; decodes as models run them, with rotary embedding and the write of the new K and V inside. On an
accelerator the launches of all caches are captured in one graph: its time per launch is the kernel's, and the time of
eager launches stands beside it. `share` is the part of the limit that was reached: bytes of K and V over the measured
read rate, or products over the measured rate of dense ones, whichever takes longer. The last line is JSON. The
comparisons stand in `attention_scattered.py` and `attention_unified.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cellar.core.specs import RopeSpec
from cellar.ops.attention import AttentionWork, attention, decode_attention, plan_attention
from cellar.ops.attention.definition import attention_definition, decode_attention_definition
from cellar.ops.rotary import rope_table
from cellar.reports.limits import describe

CHUNK = 32
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Shape:
    """`batch` rows that each compute `queries` tokens at the end of `context` ones."""

    name: str
    batch: int
    context: int
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    def flops(self) -> int:
        """Multiply-adds count 2; hidden pairs do not count."""
        pairs = self.queries * self.context - self.queries * (self.queries - 1) // 2
        return 4 * self.batch * pairs * self.heads * self.dim

    def nbytes(self, itemsize: int) -> int:
        """K and V, once."""
        return 2 * self.batch * self.context * self.kv_heads * self.dim * itemsize


ACCELERATOR_SHAPES = (
    *(Shape(f"decode {b}x{c}", b, c) for b, c in ((1, 1024), (8, 1024), (32, 1024), (64, 1024), (128, 1024))),
    *(Shape(f"decode {b}x{c}", b, c) for b, c in ((256, 512), (1, 8000), (16, 8000), (1, 32000))),
    Shape("decode MHA 32x1024", 32, 1024, kv_heads=32),
    *(Shape(f"prompt {n}", 1, n, n) for n in (128, 1024, 4000, 8000)),
    Shape("chunk 512 at 8000", 1, 8000, 512),
    Shape("8 queries 32x1024", 32, 1024, 8),
)

DEMO = {"heads": 6, "kv_heads": 2, "dim": 64}
CPU_SHAPES = (
    *(Shape(f"decode {b}x{c}", b, c, **DEMO) for b, c in ((1, 64), (1, 300), (1, 1500), (16, 330), (64, 330))),
    *(Shape(f"prompt {n}", 1, n, n, **DEMO) for n in (64, 128, 256, 512)),
    Shape("chunk 128 at 400", 1, 400, 128, **DEMO),
    Shape("8B decode 1x1000", 1, 1000),
)


@dataclass(frozen=True)
class Line:
    """One measured shape. Times in microseconds."""

    name: str
    dtype: str
    microseconds: float
    eager_microseconds: float
    plan_microseconds: float
    gigabytes_per_second: float
    teraflops: float
    limit_microseconds: float
    share: float
    error: float


@dataclass(frozen=True)
class Rates:
    """What the machine does at best, measured: bytes/s and FLOP/s."""

    read: float
    products: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 if all results were right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per measurement")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--comparison", choices=("scattered", "unified"), help="a comparison instead of single shapes")
    parser.add_argument("--png", type=Path, help="figure of --comparison scattered")
    options = parser.parse_args(arguments)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    dtype = torch.float32 if accelerator is None else torch.bfloat16
    if options.comparison is not None:
        from benchmarks import attention_scattered, attention_unified

        if options.comparison == "scattered":
            return attention_scattered.run(device, dtype, options.json, options.png)
        return attention_unified.run(device, options.json)
    with torch.inference_mode():
        rates = measured_rates(device, dtype, options.seconds)
        print(f"{describe(device)}: reads {rates.read / 1e9:.0f} GB/s, {rates.products / 1e12:.2f} TFLOP/s")
        print(
            f"{'shape':22} {'us':>9} {'eager':>9} {'plan':>7} {'GB/s':>7} {'TFLOP/s':>8} {'limit us':>9} {'share':>6} "
            "error"
        )
        lines = []
        for shape in CPU_SHAPES if accelerator is None else ACCELERATOR_SHAPES:
            if options.only in shape.name:
                lines.append(measure(shape, device, dtype, rates, options.seconds))
                print(formatted(lines[-1]), flush=True)
    wrong = [line.name for line in lines if not line.error <= TOLERANCE[dtype]]
    report = {
        "machine": describe(device),
        "torch": torch.__version__,
        "rates": asdict(rates),
        "lines": [asdict(line) for line in lines],
        "wrong": wrong,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return 1 if wrong else 0


def formatted(line: Line) -> str:
    """One row of the table."""
    return (
        f"{line.name:22} {line.microseconds:9.1f} {line.eager_microseconds:9.1f} {line.plan_microseconds:7.0f} "
        f"{line.gigabytes_per_second:7.0f} {line.teraflops:8.3f} {line.limit_microseconds:9.1f} {line.share:6.2f} "
        f"{line.error:.1e}"
    )


def measure(shape: Shape, device: torch.device, dtype: torch.dtype, rates: Rates, seconds: float) -> Line:
    """Check one shape, then time it."""
    generator = np.random.default_rng(0)
    chunks = -(-shape.context // CHUNK)
    slots = shape.batch * chunks + 1
    order = generator.permutation(slots - 1) if device.type != "cpu" else np.arange(slots - 1)
    table = torch.from_numpy(order.astype(np.int32).reshape(shape.batch, chunks)).to(device)
    caches = caches_of(shape, slots, device, dtype)
    copies = len(caches)
    q = torch.randn(shape.batch * shape.queries, shape.heads, shape.dim, device=device).to(dtype)
    scale = shape.dim**-0.5
    decode = Decode(shape, table, device, dtype) if shape.queries == 1 else None

    def plan() -> AttentionWork:
        return work_of(shape, np.full(shape.batch, shape.context - shape.queries), device)

    def layer(cache: Tensor, work: AttentionWork) -> Tensor:
        return attention(q, cache[0], cache[1], table, work, scale) if decode is None else decode(cache, work)

    work = plan()

    def layers() -> None:
        for cache in caches:
            layer(cache, work)

    if decode is None:
        error = difference(shape, q, caches[0], table, work, scale)
    else:
        error = decode_difference(shape, decode, caches[0], table, work)
    eager = typical_seconds(layers, device, seconds) / copies
    alone = eager if device.type == "cpu" else typical_seconds(captured(layers, device), device, seconds) / copies
    if device.type == "cpu":
        planning = typical_seconds(lambda: layer(caches[0], plan()), device, seconds) - eager
    else:
        planning = typical_seconds(plan, torch.device("cpu"), seconds / 2)
    limit = max(shape.nbytes(dtype.itemsize) / rates.read, shape.flops() / rates.products)
    return Line(
        name=shape.name,
        dtype=str(dtype).removeprefix("torch."),
        microseconds=alone * 1e6,
        eager_microseconds=eager * 1e6,
        plan_microseconds=max(0.0, planning) * 1e6,
        gigabytes_per_second=shape.nbytes(dtype.itemsize) / alone / 1e9,
        teraflops=shape.flops() / alone / 1e12,
        limit_microseconds=limit * 1e6,
        share=limit / alone,
        error=error,
    )


def caches_of(shape: Shape, slots: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Random K and V [2, slots, kv_heads, CHUNK, dim], as often as it takes that no cache of the processor helps."""
    enough = 2**28 if device.type == "cpu" else 2**29
    copies = min(32, max(2, -(-enough // shape.nbytes(dtype.itemsize))))
    layout = (2, slots, shape.kv_heads, CHUNK, shape.dim)
    return [torch.randn(layout, device=device).to(dtype) for _ in range(copies)]


def work_of(shape: Shape, start: np.ndarray, device: torch.device, queries: int | None = None) -> AttentionWork:
    """A plan for spans of all rows from `start` on."""
    stop = start + (queries or shape.queries)
    rows = np.arange(len(start))
    return plan_attention(rows, start, stop, shape.heads, shape.kv_heads, shape.dim, CHUNK, None, device)


def difference(shape: Shape, q: Tensor, cache: Tensor, table: Tensor, work: AttentionWork, scale: float) -> float:
    """Largest difference to the definition, over the last 16 queries of each of the first 8 rows."""
    got = attention(q, cache[0], cache[1], table, work, scale)
    rows, queries = min(shape.batch, 8), min(shape.queries, 16)
    start = np.full(rows, shape.context - queries)
    mine, part = (_last(x, shape, rows, queries) for x in (got, q))
    work = work_of(shape, start, torch.device("cpu"), queries)
    expected = attention_definition(part, cache[0], cache[1], table, work, scale)
    return float((mine - expected).abs().max())


def decode_difference(shape: Shape, decode: Decode, cache: Tensor, table: Tensor, work: AttentionWork) -> float:
    """The same for the newest token of the first 8 rows."""
    rows = min(shape.batch, 8)
    mine, q, k, v = (_last(x, shape, rows, 1) for x in (decode(cache, work), decode.q, decode.k, decode.v))
    q, k, v = (x.to(cache.dtype) for x in (q, k, v))
    work = work_of(shape, np.full(rows, shape.context - 1), torch.device("cpu"), 1)
    scale = shape.dim**-0.5
    expected = decode_attention_definition(q, k, v, decode.cos_sin, cache[0], cache[1], table, work, scale)
    return float((mine - expected.float()).abs().max())


def _last(x: Tensor, shape: Shape, rows: int, queries: int) -> Tensor:
    each = x.reshape(shape.batch, shape.queries, *x.shape[1:])
    return each[:rows, -queries:].flatten(0, 1).float()


class Decode:
    """One layer of decodes as models run it: rotary embedding, the write of the new K and V, and attention at once."""

    def __init__(self, shape: Shape, table: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        heads, kv_heads = shape.heads, shape.kv_heads
        qkv = torch.randn(shape.batch, heads + 2 * kv_heads, shape.dim, device=device).to(dtype)
        self.q, self.k, self.v = qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
        self.cos_sin = rope_table(RopeSpec(shape.dim, shape.dim, 10_000.0, max_position=shape.context), device)
        self._table, self._scale = table, shape.dim**-0.5

    def __call__(self, cache: Tensor, work: AttentionWork) -> Tensor:
        """cache: K and V, [2, slots, kv_heads, CHUNK, dim]."""
        return decode_attention(
            self.q, self.k, self.v, self.cos_sin, cache[0], cache[1], self._table, work, self._scale
        )


def captured(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The call's launches as one graph."""
    backend = torch.get_device_module(device)
    graph = backend.CUDAGraph()
    call()
    backend.synchronize()
    with backend.graph(graph):
        call()
    replay: Callable[[], None] = graph.replay
    return replay


def by_turns(calls: Mapping[str, Callable[[], None]], device: torch.device, rounds: int = 9) -> dict[str, float]:
    """Seconds of each call: the median of `rounds`, taken by turns, so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_elapsed(call, device))
    return {name: float(np.median(found)) for name, found in times.items()}


def _elapsed(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def typical_seconds(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median time of a call by an accelerator's own clock; on the CPU, which others use too, the tenth percentile."""
    call()
    times: list[float] = []
    if device.type == "cpu":
        end = time.perf_counter() + seconds
        while len(times) < 5 or (time.perf_counter() < end and len(times) < 1000):
            times.append(_elapsed(call, device))
        return float(np.quantile(times, 0.1))
    torch.accelerator.synchronize()
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 1000):
        times.append(_elapsed(call, device))
    return float(np.median(times))


def measured_rates(device: torch.device, dtype: torch.dtype, seconds: float) -> Rates:
    """Read rate of a sum over a large tensor, and rate of a large square product in `dtype`."""
    large = torch.ones(2**26 if device.type == "cpu" else 2**29, device=device)
    read = large.nbytes / typical_seconds(large.sum, device, seconds)
    del large
    n = 1024 if device.type == "cpu" else 8192
    a = torch.randn(n, n, device=device).to(dtype)
    products = 2 * n**3 / typical_seconds(lambda: a @ a, device, seconds)
    return Rates(read, products)


if __name__ == "__main__":
    raise SystemExit(main())
