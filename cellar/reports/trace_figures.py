"""What a production trace would find in a cache: by policy and capacity, beside the best that anyone could do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cellar.bench.workloads import HASH_BLOCK, Trace, read_trace, spread_bins
from cellar.core.errors import ConfigError
from cellar.core.messages import IntArray
from cellar.kv.policy import PolicyName, named_policy
from cellar.planner.steps import chunk_costs
from cellar.reports.pensieve import MODELS
from cellar.reports.pensieve_figures import plotting
from cellar.simulate.replay import Replayed, optimum, replay

Say = Callable[[str], None]

MODEL = "Llama 2-70B"
"""Whose costs the policies weigh, and whose memory the blocks take: the trace's own model is of its shape."""

CAPACITIES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
"""Blocks of HASH_BLOCK tokens."""

POLICIES: tuple[PolicyName, ...] = ("lru", "value", "chance")
LABELS = {
    "lru": "least recent use",
    "value": "cost / idle time",
    "chance": "cost x learned chance",
    "optimum": "knowing the future (Belady)",
}


@dataclass(frozen=True)
class Row:
    """One policy with one capacity, in blocks."""

    policy: str
    capacity: int
    found: Replayed


def replay_trace(trace: Trace, capacities: Sequence[int] = CAPACITIES, say: Say = lambda line: None) -> list[Row]:
    """All policies and the optimum with each capacity. Raises ConfigError for a trace that names no blocks."""
    if trace.hash_ids is None:
        raise ConfigError("the trace names no blocks, so nothing in it is shared; give Mooncake's .jsonl.")
    # A block that a prompt does not fill is another one in the next turn.
    whole = (trace.input_tokens // HASH_BLOCK).tolist()
    prompts: list[IntArray] = [np.array(ids[:n], np.int32) for ids, n in zip(trace.hash_ids, whole, strict=True)]
    moments = spread_bins(trace.stamps) if trace.is_binned else trace.stamps
    longest = max(len(ids) for ids in prompts)
    served = MODELS[MODEL]
    seconds = chunk_costs(served.prices, HASH_BLOCK, HASH_BLOCK * longest)
    blocks = {max(1.0, context / HASH_BLOCK): cost for context, cost in seconds.items()}
    ends = np.arange(1, longest + 1)
    costs = np.interp(ends, list(blocks), list(blocks.values()))
    rows = []
    for capacity in capacities:
        if capacity < longest:
            raise ConfigError(f"a capacity of {capacity} blocks is less than the longest prompt has, {longest}.")
        for name in POLICIES:
            policy = named_policy(name, {round(end): cost for end, cost in blocks.items()})
            rows.append(Row(name, capacity, replay(prompts, moments, capacity, policy, costs)))
        rows.append(Row("optimum", capacity, optimum(prompts, capacity, costs)))
        said = ", ".join(f"{LABELS[r.policy]} {100 * r.found.hit_share:.1f} %" for r in rows[-len(LABELS) :])
        say(f"{capacity:,} blocks: {said}")
    return rows


def write_trace_figure(path: Path, folder: Path, say: Say, capacities: Sequence[int] = CAPACITIES) -> list[Row]:
    """Replay a trace; write `trace.png` and `trace.json`, and say the table."""
    plotting()
    rows = replay_trace(read_trace(path), capacities, say)
    folder.mkdir(parents=True, exist_ok=True)
    _draw(rows, folder / "trace.png")
    (folder / "trace.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    for line in trace_table(rows):
        say(line)
    say(f"written: {folder / 'trace.png'}")
    say(json.dumps([{"policy": r.policy, "capacity": r.capacity, "hit_share": r.found.hit_share} for r in rows]))
    return rows


def trace_table(rows: Sequence[Row]) -> list[str]:
    """Rows of Markdown: hits and seconds saved, in per cent."""
    lines = ["| blocks (GB of KV) | " + " | ".join(LABELS.values()) + " |", "|---" * (1 + len(LABELS)) + "|"]
    for capacity in dict.fromkeys(row.capacity for row in rows):
        found = {row.policy: row.found for row in rows if row.capacity == capacity}
        cells = [f"{100 * found[name].hit_share:.1f} / {100 * found[name].saved_share:.1f}" for name in LABELS]
        lines.append(f"| {capacity:,} ({_nbytes(capacity) / 1e9:,.0f}) | " + " | ".join(cells) + " |")
    return lines


def _nbytes(blocks: int) -> float:
    return blocks * HASH_BLOCK * MODELS[MODEL].spec.kv.nbytes_per_token()


def _draw(rows: Sequence[Row], path: Path) -> None:
    figures, canvas = plotting()
    figure = figures.Figure(figsize=(10.5, 4.2), layout="constrained")
    canvas(figure)
    for axes, share, title in zip(
        figure.subplots(1, 2),
        ("hit_share", "saved_share"),
        ("blocks found (%)", "seconds of computing saved (%)"),
        strict=True,
    ):
        for name, label in LABELS.items():
            mine = [row for row in rows if row.policy == name]
            style = "k--" if name == "optimum" else "o-"
            axes.plot([r.capacity for r in mine], [100 * getattr(r.found, share) for r in mine], style, label=label)
        axes.set(xscale="log", xlabel=f"capacity, blocks of {HASH_BLOCK} tokens", ylabel=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"A production trace in one tier of the KV store, costs of {MODEL}", fontsize=11)
    figure.savefig(path, dpi=120)
