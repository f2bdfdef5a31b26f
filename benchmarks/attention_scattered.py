"""Several query tokens over context that lies scattered in chunks, against the other ways (Pensieve, figure 3.17).

    python -m benchmarks.attention --comparison scattered --json FILE --png FILE
    python -m benchmarks.attention_scattered --draw FILE --png FILE

32 requests with 8 query tokens each attend to their last 256 to 16 K tokens:

    scattered    the kernel over chunks in no order: how the engine runs
    contiguous   the same kernel, the chunks of a request one after another
    copied out   the chunks copied to contiguous memory, then the kernel over that
    one by one   eight calls with one query token each
    torch        torch's fused attention over contiguous K and V, the fastest of its ways that runs here

K and V rotate over at least 512 MB. All ways are timed by turns, on an accelerator as graphs. The first two are checked
against the definition in float32, the others against the first two.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention import (
    CHUNK,
    DEMO,
    TOLERANCE,
    Shape,
    by_turns,
    caches_of,
    captured,
    difference,
    work_of,
)
from cellar.core.errors import ConfigError
from cellar.ops.attention import attention
from cellar.reports.limits import describe

BATCH, QUERIES = 32, 8
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
CPU_CONTEXTS = (256, 512)
SCATTERED, CONTIGUOUS, COPIED, SINGLY, TORCH = WAYS = ("scattered", "contiguous", "copied out", "one by one", "torch")
# Even is within what two measurements of one kernel differ by.
EVEN = 1.02


@dataclass(frozen=True)
class Line:
    """One context. `seconds` of a layer by each way that ran; `peer` says which of torch's ways is the fastest."""

    context: int
    nbytes: int
    seconds: Mapping[str, float]
    peer: str
    errors: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Time over scattered chunks by that over contiguous memory."""
        return self.seconds[SCATTERED] / self.seconds[CONTIGUOUS]


def run(device: torch.device, dtype: torch.dtype, report: Path | None, png: Path | None) -> int:
    """Measure all contexts and tell; 0 if all results were right."""
    shapes = [Shape(f"{QUERIES} queries {BATCH}x{n}", BATCH, n, QUERIES) for n in CONTEXTS]
    if device.type == "cpu":
        shapes = [Shape("demo", 4, n, QUERIES, **DEMO) for n in CPU_CONTEXTS]
    print(f"{describe(device)}, batch {shapes[0].batch}, {QUERIES} query tokens each; microseconds a layer")
    print(
        f"{'context':>8} " + " ".join(f"{way:>11}" for way in WAYS) + f" {'GB/s':>6} {'ratio':>6}  error, torch's way"
    )
    lines = []
    with torch.inference_mode():
        for shape in shapes:
            lines.append(measure(shape, device, dtype))
            print(formatted(lines[-1]), flush=True)
    even = sum(line.ratio <= EVEN for line in lines)
    print(f"at least even with contiguous memory (up to {EVEN}) at {even} of {len(lines)} contexts")
    wrong = [line.context for line in lines if not all(e <= TOLERANCE[dtype] for e in line.errors.values())]
    found = {
        "comparison": "scattered",
        "machine": describe(device),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": shapes[0].batch,
        "queries": QUERIES,
        "lines": [{**asdict(line), "ratio": line.ratio} for line in lines],
        "even": even,
        "wrong": wrong,
    }
    if report is not None:
        report.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if png is not None:
        try:
            draw(found, png)
        except ConfigError as error:
            print(f"no figure: {error} Then draw it from the JSON with --draw.", file=sys.stderr)
    print(json.dumps(found))
    return 1 if wrong else 0


def formatted(line: Line) -> str:
    """One row of the table."""
    times = " ".join(f"{line.seconds[way] * 1e6:11.1f}" if way in line.seconds else f"{'-':>11}" for way in WAYS)
    rate = line.nbytes / line.seconds[SCATTERED] / 1e9
    return f"{line.context:8} {times} {rate:6.0f} {line.ratio:6.3f}  {max(line.errors.values()):.1e}, {line.peer}"


def measure(shape: Shape, device: torch.device, dtype: torch.dtype) -> Line:
    """All ways at one context, a multiple of the chunk."""
    chunks = shape.context // CHUNK
    slots = shape.batch * chunks
    caches = caches_of(shape, slots, device, dtype)
    in_order = torch.arange(slots, dtype=torch.int32, device=device).view(shape.batch, chunks)
    order = torch.from_numpy(np.random.default_rng(0).permutation(slots)).to(device)
    scattered = order.to(torch.int32).view(shape.batch, chunks)
    q = torch.randn(shape.batch * shape.queries, shape.heads, shape.dim, device=device).to(dtype)
    by_query = q.view(shape.batch, shape.queries, shape.heads, shape.dim)
    out, scale = torch.empty_like(q), shape.dim**-0.5
    start = np.full(shape.batch, shape.context - shape.queries)
    # A plan belongs to one table.
    work, straight = (work_of(shape, start, device) for _ in range(2))
    single = [work_of(shape, start + i, device, 1) for i in range(shape.queries)]
    room = torch.empty_like(caches[0])

    def copied(cache: Tensor) -> None:
        for side in (0, 1):
            torch.index_select(cache[side], 0, order, out=room[side])
        attention(q, room[0], room[1], in_order, straight, scale, out)

    def singly(cache: Tensor) -> None:
        for i, one in enumerate(single):
            attention(by_query[:, i], cache[0], cache[1], scattered, one, scale, out.view(by_query.shape)[:, i])

    ways: dict[str, Callable[[Tensor], object]] = {
        SCATTERED: lambda cache: attention(q, cache[0], cache[1], scattered, work, scale, out),
        CONTIGUOUS: lambda cache: attention(q, cache[0], cache[1], in_order, straight, scale, out),
        COPIED: copied,
        SINGLY: singly,
    }
    errors = {
        CONTIGUOUS: difference(shape, q, caches[0], in_order, straight, scale),
        SCATTERED: difference(shape, q, caches[0], scattered, work, scale),
    }
    expected = attention(q, caches[0][0], caches[0][1], scattered, work, scale).clone()
    for way in (COPIED, SINGLY):
        ways[way](caches[0])
        errors[way] = float((out - expected).abs().max())
    calls = {way: _over(call, caches, device) for way, call in ways.items()}

    expected = attention(q, caches[0][0], caches[0][1], in_order, straight, scale)
    plain = [_plain(cache, shape) for cache in caches]
    peers = {}
    for name, call in torch_ways(shape, by_query, scale).items():
        error = _tried(call, plain[0], expected)
        if error is not None and error <= TOLERANCE[dtype]:
            # A backend that cannot be captured is none of the fastest.
            with suppress(RuntimeError):
                peers[name] = _over(call, plain, device)
                errors[name] = error
    seconds = {name: s / len(caches) for name, s in by_turns(calls | peers, device).items()}
    peer = min(peers, key=lambda name: seconds[name], default="none of torch's ways runs here")
    if peers:
        seconds[TORCH] = seconds[peer]
    return Line(shape.context, shape.nbytes(dtype.itemsize), seconds, peer, errors)


def torch_ways(shape: Shape, q: Tensor, scale: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """Torch's fused attention over K and V [2, batch, kv_heads, context, dim] -> [tokens, heads, dim], causal from the
    last position back. q: [batch, queries, heads, dim].

    `by head`: query heads share K and V by its own option. `grouped`: the queries of a group stand together under an
    explicit mask, so that K and V are read once per group.
    """
    batch, queries, heads, dim = q.shape
    group = shape.heads // shape.kv_heads
    causal = causal_lower_right(queries, shape.context)
    by_head = q.transpose(1, 2)
    together = (
        q.view(batch, queries, shape.kv_heads, group, dim)
        .permute(0, 2, 1, 3, 4)
        .reshape(batch, -1, queries * group, dim)
    )
    last = shape.context - queries + torch.arange(queries, device=q.device).repeat_interleave(group)
    mask = torch.arange(shape.context, device=q.device)[None, :] <= last[:, None]

    def heads_apart(kv: Tensor) -> Tensor:
        found: Tensor = scaled_dot_product_attention(
            by_head, kv[0], kv[1], attn_mask=causal, scale=scale, enable_gqa=group > 1
        )
        return found.transpose(1, 2).reshape(-1, heads, dim)

    def grouped(kv: Tensor) -> Tensor:
        found = scaled_dot_product_attention(together, kv[0], kv[1], attn_mask=mask, scale=scale)
        return found.view(batch, -1, queries, group, dim).permute(0, 2, 1, 3, 4).reshape(-1, heads, dim)

    backends: dict[str, SDPBackend | None] = {"": None}
    if q.device.type != "cpu":
        kinds = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
        backends = {f", {kind.name.lower()}": kind for kind in kinds}
    return {
        f"{name}{suffix}": _under(call, backend)
        for name, call in (("by head", heads_apart), ("grouped", grouped))
        for suffix, backend in backends.items()
    }


def _under(call: Callable[[Tensor], Tensor], backend: SDPBackend | None) -> Callable[[Tensor], Tensor]:
    def chosen(kv: Tensor) -> Tensor:
        with_it: AbstractContextManager[Any] = nullcontext() if backend is None else sdpa_kernel(backend)
        with with_it:
            return call(kv)

    return chosen


def _tried(call: Callable[[Tensor], Tensor], kv: Tensor, expected: Tensor) -> float | None:
    """Largest difference from `expected`; None if this torch has no such way."""
    with warnings.catch_warnings():
        # It says at length why a backend cannot.
        warnings.simplefilter("ignore")
        try:
            return float((call(kv) - expected).abs().max())
        except (RuntimeError, ValueError):
            return None


def _plain(cache: Tensor, shape: Shape) -> Tensor:
    """Chunks in order as K and V [2, batch, kv_heads, context, dim]."""
    apart = cache.view(2, shape.batch, -1, shape.kv_heads, CHUNK, shape.dim)
    return apart.transpose(2, 3).reshape(2, shape.batch, shape.kv_heads, shape.context, shape.dim)


def _over(call: Callable[[Tensor], object], caches: Sequence[Tensor], device: torch.device) -> Callable[[], None]:
    """The call for all caches one after another, on an accelerator as one graph."""

    def layers() -> None:
        for cache in caches:
            call(cache)

    return layers if device.type == "cpu" else captured(layers, device)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write figure 3.17 as PNG, from what `run` wrote as JSON. Raises ConfigError without matplotlib."""
    try:
        agg, drawing = import_module("matplotlib.backends.backend_agg"), import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("plots need matplotlib; install it with `pip install matplotlib`.") from error
    figure = drawing.Figure(figsize=(7.5, 4.8), layout="constrained")
    agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles = {SCATTERED: ("#c0392b", "o-"), CONTIGUOUS: ("#2471a3", "s--"), COPIED: ("#e67e22", "^-")}
    styles |= {SINGLY: ("#27ae60", "v-"), TORCH: ("#7f8c8d", "D:")}
    for way, (color, style) in styles.items():
        points = [(line["context"], line["seconds"][way] * 1e3) for line in found["lines"] if way in line["seconds"]]
        if points:
            name = f"{way} (fused attention, contiguous)" if way == TORCH else way
            axes.plot(*zip(*points, strict=True), style, color=color, label=name, markersize=5, linewidth=1.5)
    contexts = [line["context"] for line in found["lines"]]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [str(n) for n in contexts])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("ms a layer")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    title = (
        f"Attention of {found['queries']} query tokens, batch {found['batch']}, {found['dtype']}\n{found['machine']}"
    )
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a figure from JSON: for machines that measure but have no matplotlib."""
    parser = argparse.ArgumentParser(description="The figure of a measured comparison.")
    parser.add_argument("--draw", type=Path, required=True, help="what --comparison scattered --json wrote")
    parser.add_argument("--png", type=Path, required=True)
    options = parser.parse_args(arguments)
    draw(json.loads(options.draw.read_text(encoding="utf-8")), options.png)


if __name__ == "__main__":
    main()
