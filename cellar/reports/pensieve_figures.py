"""Figures 3.12 to 3.16 and 3.18 of Pensieve's evaluation, simulated, with what the paper says of them beside."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from textwrap import wrap
from typing import Any

from cellar.core.errors import ConfigError
from cellar.reports.pensieve import LINES, WINDOW, Cell, Point, Window, run

Say = Callable[[str], None]
Curves = Mapping[Cell, Sequence[Point]]

EQUAL_P90 = 0.1
"""Seconds per output token at which throughputs are compared."""

GROWTH = 1.4
"""From one offered rate to the next."""

MOST_POINTS = 12

WORTH_COMPARING = 0.99
"""Policies are compared in tokens where at most so much of the history is found: of a few any share is chance."""

NEXT_TO_NOTHING = 50e-6
"""Seconds recomputed a request that are not worth comparing."""

SEEDS = 8
"""Policies are compared over so many loads of the same statistics: what one load loses of its history depends on a few
long conversations, and says nothing of a few per cent.
"""

FIRST_RATES = {"OPT-13B": 1.0, "Llama 2-13B": 1.8, "OPT-66B": 1.0, "Llama 2-70B": 1.8}
"""Requests per second at which every curve of a model begins."""


@dataclass(frozen=True)
class Panel:
    """One diagram: curves of `y` (a field of Point) over `x`."""

    title: str
    cells: tuple[Cell, ...]
    x: str = "throughput"
    y: str = "p90"


@dataclass(frozen=True)
class Figure:
    """A figure of the paper. `claims` make rows of what the paper says and what was found; they need curves of `more`
    cells that no panel shows.
    """

    number: str
    title: str
    panels: tuple[Panel, ...]
    claims: tuple[Callable[[Curves], Claim], ...] = ()
    more: tuple[Cell, ...] = ()

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Its curves, each once."""
        return tuple(dict.fromkeys((*(cell for panel in self.panels for cell in panel.cells), *self.more)))


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper as a number, and the same number here."""

    what: str
    paper: str
    here: str
    holds: bool
    values: Mapping[str, float] = field(default_factory=dict)


# -- curves -------------------------------------------------------------------------------------------


def curve(cell: Cell, window: Window, say: Say = lambda line: None) -> tuple[Point, ...]:
    """Runs at growing rates until the 90th percentile is beyond EQUAL_P90, and one in between; by offered rate."""
    points: list[Point] = []
    offered = FIRST_RATES[cell.model]
    while len(points) < MOST_POINTS and (not points or points[-1].p90 <= EQUAL_P90):
        points.append(_told(cell, offered, window, say))
        offered *= GROWTH
    if len(points) > 1 and points[-1].p90 > EQUAL_P90:
        points.insert(-1, _told(cell, math.sqrt(points[-1].offered * points[-2].offered), window, say))
    return tuple(points)


def _told(cell: Cell, offered: float, window: Window, say: Say) -> Point:
    point = run(cell, offered, window)
    turns = f", at least {cell.min_turns} turns" if cell.min_turns > 1 else ""
    say(
        f"{cell.model}, {LINES[cell.line].label}{turns}, {cell.think:g} s, load {cell.seed}: {offered:.2f} requests/s "
        f"offered, {point.throughput:.2f} served, p90 {1e3 * point.p90:.0f} ms a token, {100 * point.hit_share:.1f} % "
        f"of the history found ({point.seconds:.1f} s)"
    )
    return point


def throughput_at(points: Sequence[Point], p90: float = EQUAL_P90) -> float:
    """Requests per second served at that latency: between two points in the logarithm of the latency.

    The first point's throughput if it is later than that already, the last one's if none is.
    """
    for before, after in pairwise(points):
        if before.p90 <= p90 < after.p90:
            share = math.log(p90 / before.p90) / math.log(after.p90 / before.p90)
            return before.throughput + share * max(0.0, after.throughput - before.throughput)
    return points[0].throughput if points[0].p90 > p90 else points[-1].throughput


# -- claims -------------------------------------------------------------------------------------------


def gain(cell: Cell, percent: float, baseline: str = "apart", text: str = "") -> Callable[[Curves], Claim]:
    """Throughput of a line over that of another at equal latency, which the paper says is so many percent."""

    def claim(curves: Curves) -> Claim:
        other = throughput_at(curves[replace(cell, line=baseline, think=60.0)])
        mine = throughput_at(curves[cell])
        found = 100 * (mine / other - 1)
        turns = f", at least {cell.min_turns} turns" if cell.min_turns > 1 else ""
        think = f", {cell.think:g} s of thinking" if cell.think != 60.0 else ""
        return Claim(
            f"{cell.model}{turns}{think}{text}: throughput at {1e3 * EQUAL_P90:.0f} ms a token (p90)",
            f"+{percent:g} %",
            f"{found:+.0f} % ({mine:.2f} over {other:.2f} requests/s)",
            found >= percent,
            {"percent": found, "throughput": mine, "baseline": other},
        )

    return claim


def lower_latency(cell: Cell, percent: float) -> Callable[[Curves], Claim]:
    """Device only: the p90 is lower than the stateless one's before the peak, by up to so many percent."""

    def claim(curves: Curves) -> Claim:
        other = {p.offered: p for p in curves[replace(cell, line="apart")]}
        shares = [
            100 * (1 - p.p90 / other[p.offered].p90)
            for p in curves[cell]
            if p.offered in other and other[p.offered].p90 <= EQUAL_P90
        ]
        found = max(shares, default=0.0)
        return Claim(
            f"{cell.model}, device only: p90 below stateless before the peak",
            f"up to {percent:g} % lower",
            f"up to {found:.0f} % lower",
            found >= percent,
            {"percent": found},
        )

    return claim


def ordered_thinking(cells: Sequence[Cell]) -> Callable[[Curves], Claim]:
    """The longer users think, the less throughput."""

    def claim(curves: Curves) -> Claim:
        found = [throughput_at(curves[cell]) for cell in cells]
        return Claim(
            "thinking " + ", ".join(f"{cell.think:g}" for cell in cells) + " s: throughput at equal latency",
            "falls",
            ", ".join(f"{value:.2f}" for value in found) + " requests/s",
            found == sorted(found, reverse=True),
            {f"{cell.think:g}": value for cell, value in zip(cells, found, strict=True)},
        )

    return claim


def policies(value: Cell, other: Cell, seeds: int = 1) -> tuple[Callable[[Curves], Claim], ...]:
    """The value policy against another: recomputed seconds, tokens, hits at equal rates, means of `seeds` loads."""

    def pairs(curves: Curves) -> list[list[tuple[Point, Point]]]:
        """By rate, the points of each load."""
        found: dict[float, list[tuple[Point, Point]]] = {}
        for seed in range(seeds):
            known = {p.offered: p for p in curves[replace(other, seed=seed)]}
            for p in curves[replace(value, seed=seed)]:
                if p.offered in known:
                    found.setdefault(p.offered, []).append((p, known[p.offered]))
        return [both for both in found.values() if len(both) == seeds]

    def means(both: Sequence[tuple[Point, Point]], name: str) -> tuple[float, float]:
        mine, others = ([getattr(pair[k], name) for pair in both] for k in (0, 1))
        return fmean(mine), fmean(others)

    label = LINES[other.line].label.rsplit(", ", 1)[-1] + (f", means of {seeds} loads" if seeds > 1 else "")

    def seconds(curves: Curves) -> Claim:
        rates = pairs(curves)
        found = [means(both, "recomputed_seconds") for both in rates]
        more = [p - o for p, o in found]
        # What may be chance: two standard errors of the mean difference, and next to nothing.
        errors = [_standard_error([p.recomputed_seconds - o.recomputed_seconds for p, o in both]) for both in rates]
        holds = all(m <= max(2 * e, NEXT_TO_NOTHING) for m, e in zip(more, errors, strict=True))
        shown = (
            f"{1e3 * p:.1f} and {1e3 * o:.1f} ms" + (f" (difference {1e3 * (p - o):+.1f} ± {1e3 * e:.1f})" if e else "")
            for (p, o), e in zip(found, errors, strict=True)
        )
        return Claim(
            f"value against {label}: recomputed seconds",
            "never more",
            "; ".join(shown) + " a request",
            holds,
            {"most_more_ms": 1e3 * max(0.0, *more)},
        )

    def tokens(curves: Curves) -> Claim:
        found = [
            means(both, "recomputed_tokens") for both in pairs(curves) if means(both, "hit_share")[1] <= WORTH_COMPARING
        ]
        best = max((100 * (1 - p / o) for p, o in found), default=0.0)
        return Claim(
            f"value against {label}: recomputed tokens",
            "up to 14.6 % fewer",
            f"up to {best:.1f} % fewer",
            best >= 14.6,
            {"percent": best},
        )

    def hits(curves: Curves) -> Claim:
        found = [means(both, "hit_share") for both in pairs(curves)]
        best = max((100 * (p - o) for p, o in found), default=0.0)
        return Claim(
            f"value against {label}: hits",
            "up to 4.4 points more",
            f"up to {best:.1f} points more",
            best >= 4.4,
            {"points": best},
        )

    return seconds, tokens, hits


def _standard_error(values: Sequence[float]) -> float:
    """Of their mean; 0 for a single one."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


# -- the figures --------------------------------------------------------------------------------------


def figures() -> tuple[Figure, ...]:
    """What is drawn, and what the paper says of it."""
    small, grouped, large, larger = "OPT-13B", "Llama 2-13B", "OPT-66B", "Llama 2-70B"
    ways = ("apart", "unified", "device", "tiers")

    def panel(model: str, lines: Sequence[str] = ways, **more: Any) -> Panel:
        return Panel(model, tuple(Cell(model, line, **more) for line in lines))

    policy = tuple(Cell(small, line) for line in ("tiers", "lru", "chance"))
    thinking = tuple(Cell(grouped, "tiers", think) for think in (30.0, 60.0, 120.0))
    return (
        Figure(
            "3.12",
            "One A100",
            (panel(small), panel(grouped)),
            (
                gain(Cell(small, "tiers"), 25),
                gain(Cell(grouped, "tiers"), 52),
                lower_latency(Cell(small, "device"), 20),
                lower_latency(Cell(grouped, "device"), 40),
            ),
        ),
        Figure(
            "3.13",
            "Four A100, tensor parallel",
            (panel(large), panel(larger)),
            (gain(Cell(large, "tiers"), 50), gain(Cell(larger, "tiers"), 60)),
        ),
        Figure(
            "3.14",
            "Eviction policies, OPT-13B",
            (
                Panel("latency", policy),
                Panel("history found", policy, "offered", "hit_share"),
                Panel("recomputed", policy, "offered", "recomputed_seconds"),
            ),
            policies(policy[0], policy[1], SEEDS),
            tuple(replace(cell, seed=seed) for cell in policy[:2] for seed in range(1, SEEDS)),
        ),
        Figure(
            "3.15",
            "Conversations of at least five turns",
            (panel(small, ("apart", "tiers"), min_turns=5), panel(grouped, ("apart", "tiers"), min_turns=5)),
            (gain(Cell(small, "tiers", min_turns=5), 30), gain(Cell(grouped, "tiers", min_turns=5), 70)),
        ),
        Figure(
            "3.16",
            "Time to think",
            (Panel(grouped, (*thinking, Cell(grouped, "apart"))),),
            (ordered_thinking(thinking), gain(thinking[2], 40)),
        ),
        Figure(
            "3.18",
            "Unified scheduling",
            (panel(grouped, ("tiers", "tiers apart")),),
            (gain(Cell(grouped, "tiers"), 0, "tiers apart", ", unified against phases apart"),),
        ),
    )


def write_figures(
    folder: Path, say: Say, window: Window = WINDOW, chosen: Sequence[Figure] | None = None
) -> Sequence[Claim]:
    """Simulate all curves, and write a PNG for each figure and `figures.json`; -> the claims. Raises ConfigError."""
    chosen = figures() if chosen is None else chosen
    plotting()  # before minutes of work
    curves: dict[Cell, tuple[Point, ...]] = {}
    claims: list[Claim] = []
    document: dict[str, Any] = {"window": asdict(window), "equal_p90": EQUAL_P90, "figures": {}}
    folder.mkdir(parents=True, exist_ok=True)
    for figure in chosen:
        for cell in figure.cells:
            if cell not in curves:
                first = curves.get(replace(cell, seed=0), ())  # other loads are compared at the same rates
                again = tuple(_told(cell, p.offered, window, say) for p in first)
                curves[cell] = again or curve(cell, window, say)
        made = [claim(curves) for claim in figure.claims]
        claims += made
        draw(figure, curves, made, folder / f"figure-{figure.number}.png")
        document["figures"][figure.number] = {
            "title": figure.title,
            "claims": [asdict(claim) for claim in made],
            "curves": [{**asdict(cell), "points": [asdict(p) for p in curves[cell]]} for cell in figure.cells],
        }
        say(f"written: {folder / f'figure-{figure.number}.png'}")
    document["seconds"] = sum(p.seconds for points in curves.values() for p in points)
    (folder / "figures.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for line in claims_table(claims):
        say(line)
    say(f"{sum(map(len, curves.values()))} runs in {document['seconds']:.0f} s of one processor")
    say(json.dumps({claim.what: dict(claim.values) for claim in claims}))
    return claims


def claims_table(claims: Sequence[Claim]) -> list[str]:
    """Rows of Markdown."""
    rows = ["| what | paper | here | met |", "|---|---|---|---|"]
    return rows + [f"| {c.what} | {c.paper} | {c.here} | {'yes' if c.holds else 'no'} |" for c in claims]


AXES = {
    "throughput": ("requests per second served", 1.0),
    "offered": ("requests per second offered", 1.0),
    "p90": ("p90 of latency per output token (ms)", 1e3),
    "hit_share": ("history found (%)", 100.0),
    "recomputed_seconds": ("recomputed, ms of the device a request", 1e3),
}


_LINE = 90  # characters below a panel


def draw(figure: Figure, curves: Curves, claims: Sequence[Claim], path: Path) -> None:
    """One PNG: the panels, and under them what the paper says and what was found. Raises ConfigError."""
    figures_, canvas = plotting()
    count = len(figure.panels)
    said = [f"{claim.what}: {claim.here} (paper: {claim.paper})" for claim in claims]
    lines = [line for one in said for line in wrap(one, _LINE * count, subsequent_indent="    ")]
    drawn = figures_.Figure(figsize=(5.2 * count, 4.2 + 0.2 * len(lines)), layout="constrained")
    canvas(drawn)
    for axes, panel in zip(drawn.subplots(1, count, squeeze=False)[0], figure.panels, strict=True):
        thinking = len({cell.think for cell in panel.cells}) > 1
        for number, cell in enumerate(panel.cells):
            label = LINES[cell.line].label + (f", {cell.think:g} s" if thinking and cell.line != "apart" else "")
            (xlabel, xscale), (ylabel, yscale) = AXES[panel.x], AXES[panel.y]
            points = curves[cell]
            axes.plot(
                [xscale * getattr(p, panel.x) for p in points],
                [yscale * getattr(p, panel.y) for p in points],
                "o-",
                color=f"C{number}",
                label=label,
            )
        axes.set(xlabel=xlabel, ylabel=ylabel, title=panel.title)
        if panel.y == "p90":
            axes.axhline(1e3 * EQUAL_P90, color="0.7", linewidth=0.8)
            axes.set_ylim(0, 2.5e3 * EQUAL_P90)
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    drawn.suptitle(f"Figure {figure.number} of Pensieve, simulated: {figure.title}", fontsize=11)
    drawn.supxlabel("\n".join(lines), fontsize=7.5, ha="left", x=0.02)
    drawn.savefig(path, dpi=120)


def plotting() -> tuple[Any, Any]:
    """matplotlib's figures and canvas. Raises ConfigError without it."""
    try:
        figures_ = import_module("matplotlib.figure")
        canvas = import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    except ImportError as error:
        raise ConfigError("figures need matplotlib; install it with `pip install matplotlib`.") from error
    return figures_, canvas
