"""The planner beside FlexGen: its published rows predicted from the other half of them, its ablations, its figure 1.

    python -m benchmarks.flexgen [--plot docs/performance/flexgen.png]

Nothing is run here: published figures are FlexGen's on a T4 (its tables 2 to 5), those named as measured are of
`docs/performance/h200-offload.md`, all others the planner's predictions, for that machine and for an H200 held to 16
GiB beside 110 GiB of host memory and a disk of 2 GB/s. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cellar.core.errors import CapacityError, ConfigError
from cellar.core.hardware import Measure
from cellar.models.registry import open_model, shipped_config
from cellar.planner.capped import Room, capped_plan
from cellar.planner.flexgen import (
    FOUR_BITS,
    HALVES,
    JOB,
    MODELS,
    ROWS,
    Row,
    fit,
    fit_unpacking,
    four_bits,
    predicted,
    with_constants,
)
from cellar.planner.linear import OffloadPlan, policy, search, solve, without_overlap
from cellar.planner.machines import Machine, flexgen_t4, h200
from cellar.planner.offload import Block, problem
from cellar.planner.partition import BF16, INT4_KV4, Formats
from cellar.planner.saved import Limits

GIB = 2**30
HELD = {"device": 16 * GIB, "host": 110 * GIB, "disk": 1000 * GIB}
DISK = 2e9

ABLATIONS = {
    "30B": {"all": 7.32, "no overlap": 5.86, "no CPU attention": 4.03, "no disk": 7.32, "DeepSpeed's policy": 1.57},
    "175B": {"all": 0.69, "no overlap": 0.59, "no CPU attention": 0.62, "no disk": 0.0, "DeepSpeed's policy": 0.01},
}
"""FlexGen's table 5, tokens/s; 0: it does not fit. Its worse policies are among the rows that are predicted."""

REACHED = {"30B": [(7.32, 64 * 2), (6.93, 64 * 2)], "175B": [(0.69, 32 * 8), (0.27, 32)]}
"""Its figures with known blocks: tokens/s and sequences, from which a block's seconds follow."""

OTHERS = {
    "30B": {"FlexGen, 4 bits": 8.38, "Accelerate": 0.62, "DeepSpeed": 0.60},
    "175B": {"FlexGen, 4 bits": 1.12, "Accelerate, DeepSpeed": 0.01},
}
"""Measured, with a block that nobody names."""

RUN = {
    "30B": {"Cellar, 16 bits": (85, 79.0), "Cellar, 4 bits": (200, 274.0), "FlexGen 0.1.8, 16 bits": (8, 5.39)},
    "175B": {"Cellar, 4 bits": (47, 23.5)},
}
"""Measured on H200s held to 16 GiB: sequences of a block, tokens/s."""

WITHOUT = {"30B": {"all": 79.0, "no overlap": 46.7, "no CPU attention": 38.2, "DeepSpeed's policy": 13.1}}
"""Measured there by `benchmarks.offload --without`: in one lease 85 sequences, and in another the last, of 14."""


@dataclass(frozen=True)
class Judged:
    """A row, predicted by constants fitted to the half that has it, and by those of the other."""

    row: Row
    own: float
    other: float


def judged(machine: Machine) -> Iterator[Judged]:
    """All rows."""
    fitted = [with_constants(machine, fit(half, machine)) for half in HALVES]
    for row in ROWS:
        mine = 0 if row in HALVES[0] else 1
        yield Judged(row, predicted(row, fitted[mine]), predicted(row, fitted[1 - mine]))


def held_h200() -> Machine:
    """An H200 with memory as in `HELD`, and a disk of its own."""
    machine = h200().limited(HELD)
    assert machine.disk is not None
    rate = Measure(DISK, "bytes/s", "assumed")
    return replace(machine, disk=replace(machine.disk, bandwidth=rate), disk_write=rate)


def ablated(model: str, machine: Machine) -> dict[str, float]:
    """Tokens/s of the best plan, and of the best one without each technique; 0 if nothing fits."""
    best = search(MODELS[model], machine, JOB)[0]
    # Never worth it at a byte a second.
    slow = replace(machine.constants, host_attention=Measure(1.0, "bytes/s", "assumed"))
    apart = solve(without_overlap(best.problem))
    found: dict[str, Sequence[OffloadPlan | None]] = {
        "all": [best],
        "no overlap": [apart],
        "no CPU attention": search(MODELS[model], replace(machine, constants=slow), JOB)[:1],
        "no disk": search(MODELS[model], replace(machine, disk=None, disk_write=None), JOB)[:1],
        "DeepSpeed's policy": [row_by_row(model, machine)],
    }
    rates = {name: [plan.tokens_per_second for plan in plans if plan] for name, plans in found.items()}
    return {name: rate[0] if rate else 0.0 for name, rate in rates.items()}


def row_by_row(model: str, machine: Machine) -> OffloadPlan | None:
    """Weights streamed from where they fit, all else on the device: one batch, as large as it may be."""
    found = None
    for gbs in range(1, 257):
        p = problem(MODELS[model], machine, JOB, Block(gbs, 1))
        for place in ("host", "disk"):
            plan = policy(p, **{f"weights__{place}": 1.0, "hidden__device": 1.0, "kv__device": 1.0})
            if all(memory.used(plan.shares) <= memory.capacity for memory in p.memory):
                found = plan
                break
        else:
            return found
    return found


Point = tuple[float, float]
"""Seconds of a block, tokens/s."""


def frontier(model: str, machine: Machine, formats: Formats) -> list[Point]:
    """The best plans of all blocks within bounds of latency, as FlexGen has it (§6.1)."""
    free = search(MODELS[model], machine, JOB, (formats,))
    points = [(plan.seconds, plan.tokens_per_second) for plan in free]
    for part in (0.5, 0.2, 0.1, 0.05, 0.02):
        bounded = search(MODELS[model], machine, JOB, (formats,), max_seconds=part * free[0].seconds)
        points += [(plan.seconds, plan.tokens_per_second) for plan in bounded[:1]]
    return _best_of(points)


def engines_frontier(model: str, bits: str | None = None) -> list[Point]:
    """Of the plans that an engine makes for `--device-memory 16` and `--latency`: those that run. `bits`: of weights, K
    and V.
    """
    raw = shipped_config(f"opt-{model.lower()}")
    assert raw is not None
    spec = open_model(raw, "bfloat16", 32, JOB.prompt + JOB.generate, bits, bits or "auto").spec
    room = Room(HELD["device"], HELD["host"], HELD["disk"], None, "gpu")
    points = []
    for most in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        try:
            limits = Limits(most, 8192, JOB.prompt + JOB.generate)
            plan = capped_plan(spec, room, limits, model=model, machine="H200", job=JOB)
        except (CapacityError, ConfigError):
            continue
        said: Any = plan.figures["predicted"]
        points.append((said["request_seconds"], said["tokens_per_second"]))
    return _best_of(points)


def _best_of(points: Sequence[Point]) -> list[Point]:
    found: list[Point] = []
    for point in sorted(points):
        if not found or point[1] > found[-1][1]:
            found.append(point)
    return found


def plot(file: Path, curves: dict[str, dict[str, list[Point]]]) -> None:
    """FlexGen's figure 1: lines are predicted, large points and dotted lines were measured."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(12, 8), layout="constrained")
    for axis, (model, lines) in zip(axes, curves.items(), strict=True):
        for name, points in lines.items():
            if len(points) < 2:
                continue  # buffers of larger blocks leave no room for the model's layers
            axis.plot(*zip(*points, strict=True), "-o", markersize=3, label=f"{name} (Cellar, predicted)")
        reached = [(block * JOB.generate / rate, rate) for rate, block in REACHED[model]]
        axis.plot(*zip(*reached, strict=True), "k*", markersize=11, label="FlexGen on a T4 (published)")
        for marker, (name, (block, rate)) in zip("DsX", RUN[model].items(), strict=False):
            seconds, label = block * JOB.generate / rate, f"{name}, H200 held to 16 GiB (measured)"
            axis.plot([seconds], [rate], marker, markersize=9, markeredgecolor="black", label=label)
        for style, (name, rate) in zip((":", "--", "-."), OTHERS[model].items(), strict=False):
            axis.axhline(rate, color="gray", linestyle=style, linewidth=1, label=f"{name} (measured)")
        axis.set(xscale="log", yscale="log", title=f"OPT-{model}, 512 + 32 tokens")
        axis.set(xlabel="seconds of a block", ylabel="tokens a second")
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.suptitle("Latency against throughput: lines are predictions by Cellar's planner, large points were measured")
    figure.savefig(file, dpi=120)


def main() -> None:
    """Print the tables, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    t4, capped = flexgen_t4(), held_h200()
    rows = list(judged(t4))
    print("| row | published | by the other half | by its own |\n|---|---|---|---|")
    for one in rows:
        off, own = (f"{value / one.row.published:.2f}" for value in (one.other, one.own))
        print(f"| {one.row.name} | {one.row.published:,} | {off} | {own} |")
    worst = {part: [abs(math.log(getattr(one, part) / one.row.published)) for one in rows] for part in ("other", "own")}
    means = {part: math.exp(sum(errors) / len(errors)) for part, errors in worst.items()}
    print(f"factor in the mean: {means['other']:.2f} by the other half, {means['own']:.2f} by its own\n")
    whole = with_constants(t4, fit(ROWS, t4))
    unpacking = fit_unpacking("30B", whole)
    print(f"four bits, {unpacking:.3g} s to unpack a number, fitted to 30B; predicted / published, and with none:")
    for model, rate in FOUR_BITS.items():
        print(f"{model}: {four_bits(model, whole, unpacking) / rate:.2f}, {four_bits(model, whole, 0.0) / rate:.2f}")
    print(
        "\n| OPT | technique | FlexGen on a T4 | its machine, predicted | H200 held to 16 GiB, predicted | measured |"
    )
    print("|---|---|---|---|---|---|")
    ablations = {model: {"T4": ablated(model, t4), "H200": ablated(model, capped)} for model in ABLATIONS}
    for model, published in ABLATIONS.items():
        for name, rate in published.items():
            both = (f"{ablations[model][where][name]:.3g}" for where in ("T4", "H200"))
            measured = WITHOUT.get(model, {}).get(name)
            print(f"| {model} | {name} | {rate:g} | {' | '.join(both)} | {'' if measured is None else measured} |")
    found: dict[str, Any] = {"factors": means, "ablations": ablations}
    if options.plot is not None:
        curves = {
            model: {
                "planner, T4, 16 bits": frontier(model, t4, BF16),
                "planner, T4, 4 bits": frontier(model, t4, INT4_KV4),
                "planner, H200 held to 16 GiB, 16 bits": frontier(model, capped, BF16),
                "engine's plans, H200 held to 16 GiB, 16 bits": engines_frontier(model),
                "engine's plans, H200 held to 16 GiB, 4 bits": engines_frontier(model, "int4"),
            }
            for model in ("175B", "30B")
        }
        plot(options.plot, curves)
        found["curves"] = curves
    print(json.dumps(found))


if __name__ == "__main__":
    main()
