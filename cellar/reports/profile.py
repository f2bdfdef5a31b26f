"""Measuring this machine and showing what was found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from cellar.core import collectives
from cellar.core.hardware import Measure, Profile
from cellar.models.hub import resolve
from cellar.models.registry import shipped_config
from cellar.ops.linear.choice import inflections, timings_of
from cellar.planner.collectives import read
from cellar.reports.models import model_spec
from cellar.runtime.device import resolve_device
from cellar.runtime.probes import scores
from cellar.runtime.probes.context import ProbeContext
from cellar.runtime.probes.registry import default_path, machine_name, measure

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))


def measure_machine(
    device: str,
    threads: int | None,
    output: Path | None,
    report: Callable[[str], None],
    model: str | None = None,
    ranks: int | None = None,
) -> tuple[Profile, Path]:
    """Measure and save. The disk measured is the one that the profile is written to.

    `model` is what `cellar inspect` takes; None measures the machine alone. `ranks`: collectives among so many, too.
    Raises DeviceError for a device that is not there, CheckpointError for a model that is not, ConfigError for more
    ranks than GPUs.
    """
    resolved = resolve_device(device)
    accelerator = None if resolved.type == "cpu" else resolved
    path = output or default_path(machine_name(accelerator))
    context = replace(ProbeContext(accelerator, path.parent), ranks=ranks)
    if model is not None:
        checkpoint = resolve(model) if shipped_config(model) is None else None
        context = replace(context, model=model, spec=model_spec(model, resolved.type), checkpoint=checkpoint)
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        profile = measure(context, report)
    finally:
        torch.set_num_threads(before)
    profile.save(path)
    return profile, path


def human(measure: Measure) -> str:
    """`55.3 GB/s`: the value with a prefix that leaves one to three digits before the point."""
    if measure.unit == "1" or measure.value == 0:
        return f"{measure.value:.3g}"
    size, prefix = next(((s, p) for s, p in _PREFIXES if abs(measure.value) >= s), _PREFIXES[-1])
    unit = "B" + measure.unit.removeprefix("bytes") if measure.unit.startswith("bytes") else measure.unit
    return f"{measure.value / size:.3g} {prefix}{unit}"


def rows(profile: Profile) -> list[tuple[str, str, str]]:
    """What, value with unit, and where from: a line for each number of devices and links."""
    found: list[tuple[str, Measure]] = []
    for device in profile.devices:
        found += [(f"{device.name}: capacity", device.capacity), (f"{device.name}: read bandwidth", device.bandwidth)]
        found += [(f"{device.name}: {dtype} matrix products", rate) for dtype, rate in device.flops.items()]
        if device.launch is not None:
            found.append((f"{device.name}: launch of one operation", device.launch))
    for link in profile.links:
        way = f"{link.source} -> {link.target}"
        found.append((f"{way}: bandwidth", link.bandwidth))
        if link.latency is not None:
            found.append((f"{way}: latency", link.latency))
        if link.duplex is not None:
            found.append((f"{way}: share kept when both ways are busy", link.duplex))
    return [(what, human(value), value.source) for what, value in found]


def linear_rows(profile: Profile) -> list[tuple[str, str, str, str]]:
    """[N, K], M1, M2, and how the best kernel compares with the library's at one token and at 8."""
    found = []
    for shape, timings in timings_of(profile.tables).items():
        m1, m2 = inflections(timings)
        gain = {t.m: t.library / min(s for s in (t.gemv, t.flat, t.library) if s is not None) for t in timings}
        gains = ", ".join(f"{gain[m]:.2f}x at {m}" for m in (1, 8) if m in gain)
        beyond = f"> {timings[-1].m}"
        found.append((str(shape), str(m1 or beyond), str(m2 or beyond), gains))
    return found


def score_rows(profile: Profile) -> list[tuple[str, str, str, str, str]]:
    """Model, layer, the bounds of 99.99 % of its attention scores, and the softmax that it gets."""
    found = profile.tables.get(scores.TABLE)
    return [
        (str(model), str(layer), f"{low} to {high}", f"{least} to {most}", "running maximum" if wide else "unified")
        for _, model, layer, low, high, least, most, again in (() if found is None else found.rows)
        for wide in [float(again) > scores.MOST_AGAIN]
    ]


def collective_rows(profile: Profile) -> list[tuple[str, ...]]:
    """Way, kind, ranks, up to which size, latency, rate, and the worst error on sizes that were not fitted: a row for
    each line that prices follow.
    """
    found = profile.tables.get(collectives.TABLE)
    return [
        (
            fit.way,
            fit.kind,
            str(fit.ranks),
            "any" if line.most == math.inf else human(Measure(line.most, "bytes", "measured")),
            human(Measure(line.start, "s", "measured")),
            human(Measure(line.rate, "bytes/s", "measured")) if line.each else "any",
            "" if fit.missed is None else f"{100 * fit.missed:.0f} %",
        )
        for fit in (() if found is None else read(found))
        for line in fit.lines
    ]


def print_profile(profile: Profile, console: Console | None = None) -> None:
    """A table of the profile, one of its linear layers and one of its attention scores if they were measured."""
    table = Table(title=profile.machine, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("where from")
    for row in rows(profile):
        table.add_row(*row)
    console = console or Console()
    console.print(table)
    if linear := linear_rows(profile):
        table = Table(title="linear layers: GEMV, from M1 tokens on flat, from M2 on the library", title_justify="left")
        for name in ("N x K", "M1", "M2", "ours over the library"):
            table.add_column(name, justify="right")
        for line in linear:
            table.add_row(*line)
        console.print(table)
    if exchanges := collective_rows(profile):
        title = "collectives by bytes sent (ranks: as engines run them), and how far off sizes are that were not fitted"
        table = Table(title=title, title_justify="left")
        for name in ("way", "kind", "ranks", "up to", "latency", "rate", "off by"):
            table.add_column(name, justify="left" if name in ("way", "kind") else "right")
        for figures in exchanges:
            table.add_row(*figures)
        console.print(table)
    if attention := score_rows(profile):
        table = Table(title="attention scores: how wide, and what softmax follows", title_justify="left")
        for name in ("model", "layer", "99.99 %", "all", "softmax"):
            table.add_column(name, justify="left" if name == "model" else "right")
        for entry in attention:
            table.add_row(*entry)
        console.print(table)
