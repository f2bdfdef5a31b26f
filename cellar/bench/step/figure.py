"""A breakdown of a step as a picture: the time of each kind on the left, what it needs at best on the right."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from cellar.bench.step.breakdown import Breakdown
from cellar.bench.step.kinds import ACTIVATION, ATTENTION, COMBINE, COPIES, EMBEDDING, IDLE, NORM, ROTARY, SAMPLING
from cellar.core.errors import ConfigError

# Linear layers in blues, attention in reds, idle time in grey; all light enough to read a label on.
_COLORS = {
    "linear qkv": "#c6dbef",
    "linear out": "#9ecae1",
    "linear gate/up": "#6baed6",
    "linear up": "#6baed6",
    "linear down": "#85b8e0",
    "linear head": "#b9cfe8",
    ATTENTION: "#f4a582",
    COMBINE: "#fddbc7",
    ROTARY: "#f7c9d4",
    NORM: "#c7e9c0",
    ACTIVATION: "#a1d99b",
    SAMPLING: "#fee391",
    EMBEDDING: "#fff7bc",
    COPIES: "#dadaeb",
    IDLE: "#e4e4e4",
}
_OTHER_COLOR = "#d9c3a5"
# Thinner parts than this share of the bar stand in the legend instead.
_LABELLED = 0.03


def draw(found: Breakdown, path: Path) -> None:
    """Write a PNG. Raises ConfigError without matplotlib."""
    try:
        agg, drawing = import_module("matplotlib.backends.backend_agg"), import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("plots need matplotlib; install it with `pip install matplotlib`.") from error
    figure = drawing.Figure(figsize=(8.5, 6), layout="constrained")
    agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    heights = [0.0, 0.0]
    whole = sum(kind.seconds for kind in found.kinds)
    for kind in found.kinds:
        text = f"{kind.kind}  {kind.seconds * 1e3:.3g} ms"
        if kind.limit_seconds and kind.seconds:
            text += f"  ({kind.limit_seconds / kind.seconds:.0%} of limit)"
        for bar, seconds in enumerate((kind.seconds, kind.limit_seconds)):
            shown = seconds > _LABELLED * whole
            axes.bar(
                bar,
                seconds * 1e3,
                0.9,
                bottom=heights[bar] * 1e3,
                color=_COLORS.get(kind.kind, _OTHER_COLOR),
                edgecolor="white",
                linewidth=0.8,
                label=text if bar == 0 and not shown and seconds else None,
            )
            if shown:
                label = text if bar == 0 else f"{kind.kind}  {seconds * 1e3:.3g} ms"
                axes.text(bar, (heights[bar] + seconds / 2) * 1e3, label, ha="center", va="center", fontsize=8)
            heights[bar] += seconds
    axes.plot([0.5, 1.5], [found.seconds * 1e3] * 2, color="black", linewidth=1, linestyle="--")
    axes.text(1.48, found.seconds * 1e3, "the step without a profiler", ha="right", va="bottom", fontsize=8)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(reverse=True, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_xticks([0, 1], [f"measured, {heights[0] * 1e3:.3g} ms", f"limit of each kind, {heights[1] * 1e3:.3g} ms"])
    axes.set_xlim(-0.5, 1.5)
    axes.set_ylabel("ms a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{found.model}, batch {found.batch} x context {found.context}, {found.dtype}\n{found.device}", fontsize=10
    )
    figure.savefig(path, dpi=150)
