"""What `cellar plan --chips` shows: the frontier of both phases as tables, and as the paper's figure."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cellar.core.errors import ConfigError
from cellar.planner.sweep import Phase, Point, frontier

_WORDS: dict[Phase, str] = {"prefill": "Prompts", "decode": "Generated tokens"}


def print_sweep(points: Sequence[Point], title: str, console: Console | None = None) -> None:
    """A table a phase: what a reader may choose among, from the quickest to the cheapest."""
    console = console or Console(highlight=False)
    console.print(title)
    for phase, words in _WORDS.items():
        best = frontier(points, phase)
        if not best:
            continue
        latency = "s a prompt" if phase == "prefill" else "ms a token"
        table = Table("chips", "batch", latency, "chip-ms a token", "$ / 1M tokens", "MFU %", "split", "formats")
        table.title, table.title_justify = words, "left"
        for p in best:
            seconds = p.seconds if phase == "prefill" else 1e3 * p.seconds
            dollars = f"{p.dollars:,.3g}" if p.dollars else ""
            figures = (f"{seconds:,.3g}", f"{1e3 * p.chip_seconds:,.3g}", dollars, f"{100 * p.utilization:.1f}")
            table.add_row(f"{p.chips:,}", f"{p.batch:,}", *figures, p.split, p.formats)
        console.print(table)


def save_sweep(points: Sequence[Point], folder: Path) -> Path:
    """Cost and MFU against latency, a line for each number of chips. Raises ConfigError without matplotlib."""
    try:
        agg, drawing = import_module("matplotlib.backends.backend_agg"), import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("plots need matplotlib; install it with `pip install matplotlib`.") from error
    folder.mkdir(parents=True, exist_ok=True)
    drawn = drawing.Figure(figsize=(11, 8), layout="constrained")
    agg.FigureCanvasAgg(drawn)
    phases = [phase for phase in _WORDS if any(p.phase == phase for p in points)]
    for column, phase in enumerate(phases):
        unit = "s a prompt" if phase == "prefill" else "s a token"
        cost: Any = drawn.add_subplot(2, len(phases), column + 1, xlabel=unit, ylabel="chip-seconds a token")
        share: Any = drawn.add_subplot(2, len(phases), len(phases) + column + 1, xlabel=unit, ylabel="MFU (%)")
        cost.set(xscale="log", yscale="log", title=_WORDS[phase])
        share.set(xscale="log")
        for axes in (cost, share):
            axes.tick_params(axis="x", which="minor", labelbottom=False)
        mine = [p for p in points if p.phase == phase]
        for chips, formats in sorted({(p.chips, p.formats) for p in mine}):
            line = frontier([p for p in mine if (p.chips, p.formats) == (chips, formats)], phase)
            x = [p.seconds for p in line]
            cost.plot(x, [p.chip_seconds for p in line], "o-", markersize=3, label=f"{chips} chips, {formats}")
            share.plot(x, [100 * p.utilization for p in line], "o-", markersize=3)
        best = frontier(points, phase)
        cost.plot([p.seconds for p in best], [p.chip_seconds for p in best], "k--", linewidth=1, label="frontier")
        cost.legend(fontsize="small")
        cost.grid(alpha=0.3)
        share.grid(alpha=0.3)
    path = folder / "chips.png"
    drawn.savefig(path, dpi=120)
    return path
