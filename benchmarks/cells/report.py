"""What a run leaves behind: JSON, a table, and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cells.sweep import Comparison, Curve
from cellar.core.errors import ConfigError


@dataclass(frozen=True)
class Report:
    """One sweep. `setup` tells model, sizes, data, device and threads; times are in seconds, rates in requests/s."""

    setup: Mapping[str, Any]
    bound: float
    curves: Sequence[Curve]
    comparisons: Sequence[Comparison] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what is infinite (a request that was never done) is null."""
        plain: dict[str, Any] = {
            "benchmark": "cells",
            "setup": dict(self.setup),
            "p90_bound": self.bound,
            "curves": [asdict(curve) for curve in self.curves],
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
        }
        found: dict[str, Any] = finite(plain)
        return found

    def save(self, path: Path) -> None:
        """Write the JSON, whole."""
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def summary(self) -> str:
        """The last line of the benchmark: everything but the curves' points."""
        found = self.to_dict()
        for curve in found["curves"]:
            del curve["points"], curve["distribution"]
        return json.dumps(found)

    def table(self) -> list[str]:
        """Lines for people."""
        lines = [
            f"p90 bound {1e3 * self.bound:.1f} ms",
            f"{'system':24} {'unloaded p90':>12} {'peak':>8} {'saturated':>9}",
        ]
        for curve in self.curves:
            unloaded = f"{1e3 * curve.unloaded.p90:.2f} ms"
            lines.append(f"{curve.system:24} {unloaded:>12} {curve.peak:8.0f} {curve.saturated:9.0f}")
        for c in self.comparisons:
            lines.append(
                f"against {c.baseline}: p90 at {c.rate:.0f} requests/s {1e3 * c.p90_ours:.2f} instead of "
                f"{1e3 * c.p90_baseline:.2f} ms ({-100 * c.latency_reduction:+.1f} %), "
                f"throughput {100 * c.throughput_gain:+.1f} %"
            )
        return lines


def plot(report: Report, path: Path) -> None:
    """Three pictures side by side: p90 latency against throughput, and the CDFs of queueing and of compute.

    Raises ConfigError where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("--png needs matplotlib; pip install 'cellar-llm[bench]', or leave it out.") from error
    figure = Figure(figsize=(15, 4.2), dpi=80, layout="constrained")
    latency, queueing, compute = figure.subplots(1, 3)
    for curve in report.curves:
        held = [p for p in curve.points if math.isfinite(p.latency.p90)]
        xs, ys = [p.throughput for p in held], [1e3 * p.latency.p90 for p in held]
        latency.plot(xs, ys, marker=".", label=curve.system)
    latency.axhline(1e3 * report.bound, color="grey", linewidth=0.8, linestyle=":")
    latency.set(xlabel="requests/s done", ylabel="p90 latency, ms", yscale="log", title="latency and throughput")
    latency.legend(fontsize="small")
    shown = [(curve.system, curve.distribution) for curve in report.curves if curve.distribution is not None]
    for axis, name in ((queueing, "queueing"), (compute, "compute")):
        for system, distribution in shown:
            values = [1e3 * max(value, 1e-6) for value in getattr(distribution, name)]
            axis.plot(values, distribution.shares, label=system)
        rate = f" at {shown[0][1].rate:.0f} requests/s" if shown else ""
        axis.set(xlabel=f"{name}, ms", ylabel="share of requests", xscale="log", title=name + rate)
    for axis in (latency, queueing, compute):
        axis.grid(alpha=0.3)
    figure.suptitle(str(report.setup.get("title", "")))
    figure.savefig(path)


def finite(value: Any) -> Any:
    """Plain data, with null in place of what is infinite or no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value
