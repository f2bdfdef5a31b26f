"""What `cellar plan` shows: tables for a person, plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cellar.core.errors import ConfigError
from cellar.core.layouts import GATHERS, Layout, Mesh
from cellar.planner.layouts import communication, mlp_program
from cellar.planner.partition import Work, meshes, sizes_of
from cellar.planner.plans import Plan
from cellar.planner.search import Answer
from cellar.reports import plan_rows
from cellar.reports.plan_formats import FormatRow
from cellar.runtime.memory import human

FORMATS_NOTE = (
    "Fewer bits change answers (docs/quantization.md), so a plan has them only where they are asked for. An engine's "
    "options are --quantization and --kv-cache-dtype. Prices are by bytes alone: products take as long as in 16 bits."
)


def print_answer(
    answer: Answer,
    title: str,
    sources: bool = False,
    formats: Sequence[FormatRow] = (),
    console: Console | None = None,
) -> None:
    """What goes where, the prediction, busy channels, what binds, the next best, the frontier, and other formats."""
    console = console or Console(highlight=False)
    plan = answer.chosen
    console.print(_pairs(title, [("plan", plan.name), *plan_rows.where(plan), *plan_rows.prediction(plan)]))
    console.print(_busy(plan))
    if plan.offload is not None:
        for line in plan.offload.words():
            console.print(f"memory: {line}")
    if answer.next_best is not None:
        other = answer.next_best
        console.print(f"next best: {other.name}: {other.tokens_per_second:,.4g} tok/s, {other.latency:,.3g} s")
    console.print(_pareto(answer))
    if len(formats) > 1:
        console.print(_formats(formats))
        console.print(FORMATS_NOTE)
    if sources:
        table = Table("number", "value", "origin", title="What this rests on", title_justify="left")
        for row in plan_rows.origins(plan.machine):
            table.add_row(*row)
        console.print(table)
    for warning in answer.warnings:
        console.print(f"warning: {warning}", style="yellow")


def _pairs(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for label, value in rows:
        table.add_row(label, value)
    return table


def _busy(plan: Plan) -> Table:
    table = Table("channel", "busy s", "% of the time", title="Busy per channel", title_justify="left")
    for name, seconds, percent in plan_rows.busy(plan):
        table.add_row(name, _short(seconds), f"{percent:.0f}")
    return table


def _pareto(answer: Answer) -> Table:
    table = Table("latency s", "tok/s", "$ / 1M tokens", "MFU %", "plan", title="Frontier", title_justify="left")
    for plan in answer.pareto:
        price = f"{plan.dollars_per_million:,.3g}" if plan.dollars_per_million else ""
        figures = (_short(plan.latency), _short(plan.tokens_per_second), price, f"{100 * plan.utilization:.0f}")
        table.add_row(*figures, plan.name)
    return table


def _formats(rows: Sequence[FormatRow]) -> Table:
    table = Table("with", "weights", "KV a token", "tok/s", "latency s", title="In other formats", title_justify="left")
    for row in rows:
        figures = ("no such plan", "")
        if row.tokens_per_second is not None and row.latency_seconds is not None:
            figures = (_short(row.tokens_per_second), _short(row.latency_seconds))
        table.add_row(row.option, human(row.weight_nbytes), human(row.kv_nbytes_per_token), *figures)
    return table


def _short(value: float) -> str:
    """Three figures, or whole with separators."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def print_compared(first: Mapping[str, Any], second: Mapping[str, Any], console: Console | None = None) -> None:
    """Two plans' figures side by side, as `Plan.figures` gives them, with the ratio."""
    table = Table("", "this plan", "the other", "ratio", title="Compared", title_justify="left")
    for name, value in first.items():
        other = second.get(name)
        if isinstance(value, int | float) and isinstance(other, int | float):
            ratio = f"{value / other:.3g}" if other else ""
            table.add_row(name.replace("_", " "), f"{value:,.4g}", f"{other:,.4g}", ratio)
        elif isinstance(value, str):
            table.add_row(name, value, str(other), "")
    channels = {**first.get("busy_seconds", {}), **second.get("busy_seconds", {})}
    for name in channels:
        pair = [side.get("busy_seconds", {}).get(name, 0.0) for side in (first, second)]
        table.add_row(
            f"busy: {name}", f"{pair[0]:,.3g}", f"{pair[1]:,.3g}", f"{pair[0] / pair[1]:.3g}" if pair[1] else ""
        )
    (console or Console(highlight=False)).print(table)


def layout_curves(plan: Plan) -> dict[str, list[tuple[float, float]]]:
    """Per layout, (tokens, seconds of a block's MLP collectives at the network's full rate): a figure of Pope et al..

    On the box of chips that is most even. Empty for a plan of one device.
    """
    chips = plan.tensor if plan.tensor > 1 else plan.machine.num_devices
    if chips < 2 or not plan.machine.networks:
        return {}
    mesh = min((m for m, _ in meshes(chips)), key=lambda m: (max(m.x, m.y, m.z), -m.z))
    curves: dict[str, list[tuple[float, float]]] = {}
    rate = plan.machine.networks[0].bandwidth.value
    for name, box, gather in (("1D", Mesh(1, 1, chips), ""), *((Layout(mesh, g).name, mesh, g) for g in GATHERS)):
        program = mlp_program(Layout(box, gather))
        points = []
        for power in range(6, 23):
            sizes = sizes_of(plan.d, Work(2**power, 1, 1))
            points.append((2.0**power, 2 * sum(communication(program, sizes, box)) / rate))
        curves[name] = points
    return curves


def save_plots(answer: Answer, folder: Path) -> list[Path]:
    """Frontier, cost of the layouts against tokens, and busy channels, as PNG files. Raises ConfigError without
    matplotlib."""
    try:
        agg, drawing = import_module("matplotlib.backends.backend_agg"), import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("plots need matplotlib; install it with `pip install matplotlib`.") from error
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Path] = []

    def figure(name: str, x: str, y: str, logarithmic: bool = True) -> tuple[Any, Any]:
        drawn = drawing.Figure(figsize=(7, 4.5), layout="constrained")
        agg.FigureCanvasAgg(drawn)
        axes = drawn.add_subplot(xlabel=x, ylabel=y)
        if logarithmic:
            axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        found.append(folder / f"{name}.png")
        return drawn, axes

    drawn, axes = figure("pareto", "latency (s)", "generated tokens/s")
    axes.plot(*_xy(answer.plans), ".", color="0.75", label="all plans")
    axes.plot(*_xy(answer.pareto), "o-", color="C0", label="frontier")
    axes.plot(*_xy((answer.chosen,)), "*", color="C3", markersize=14, label="chosen")
    axes.legend()
    drawn.savefig(found[-1], dpi=120)
    curves = layout_curves(answer.chosen)
    if curves:
        drawn, axes = figure("layouts", "tokens in the step", "MLP collectives of a layer (s)")
        for name, points in curves.items():
            axes.plot([p[0] for p in points], [p[1] for p in points], label=name)
        axes.legend()
        drawn.savefig(found[-1], dpi=120)
    drawn, axes = figure("busy", "busy seconds", "", logarithmic=False)
    rows = plan_rows.busy(answer.chosen)[::-1]
    axes.barh([name for name, _, _ in rows], [seconds for _, seconds, _ in rows])
    axes.axvline(answer.chosen.latency, color="C3", linestyle="--")
    axes.set_title("dashed: the whole batch", fontsize="medium")
    drawn.savefig(found[-1], dpi=120)
    return found


def _xy(plans: tuple[Plan, ...]) -> tuple[list[float], list[float]]:
    return [plan.latency for plan in plans], [plan.tokens_per_second for plan in plans]
