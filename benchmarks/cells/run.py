"""`python -m benchmarks.cells`: a load sweep of all systems, or the saturated system (`load` "max")."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cells.arrivals import poisson
from benchmarks.cells.busy import busy_seconds
from benchmarks.cells.clock import Pace
from benchmarks.cells.drive import all_at_once
from benchmarks.cells.report import Report, finite, plot
from benchmarks.cells.setup import WIDTHS, Setup
from benchmarks.cells.subject import Local, Remote
from benchmarks.cells.sweep import Quantiles, Schedule, Sweep
from benchmarks.cells.system import System
from cellar.core.errors import ConfigError

OURS, LIBRARY = "cellar", "library"

Say = Callable[[str], None]


@dataclass(frozen=True)
class CellsOptions:
    """What to measure, and where to write it. `systems` are names such as `open_system` takes; empty: all that fit."""

    setup: Setup = field(default_factory=Setup)
    schedule: Schedule = field(default_factory=Schedule)
    systems: tuple[str, ...] = ()
    load: str = "sweep"
    json: Path | None = None
    png: Path | None = None


def run(options: CellsOptions, say: Say = print) -> dict[str, Any]:
    """Measure, write files, and say the summary as a last line of JSON. Raises CellarError."""
    if options.load not in ("sweep", "max"):
        raise ConfigError(f"load is {options.load!r}; use sweep or max.")
    setup = options.setup.resolved()
    keys = options.systems or systems_of(setup)
    if keys[0] != OURS:
        raise ConfigError(f"the first system must be {OURS}; the others are compared with it.")
    if options.load == "max":
        found = saturate(setup, keys, options.schedule, say)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        say(json.dumps(found))
        return found
    report = sweep(setup, keys, options.schedule, say)
    if options.json is not None:
        report.save(options.json)
    if options.png is not None:
        plot(report, options.png)
    for line in report.table():
        say(line)
    say(report.summary())
    return report.to_dict()


def systems_of(setup: Setup) -> tuple[str, ...]:
    """Every system that can serve a resolved setup, ours first."""
    found = [OURS]
    if setup.model == "treelstm":
        found.append("merging")
    else:
        found += [f"padding-{width}" for width in WIDTHS] + ["library-10"]
    if setup.fixed_length is not None:
        found.append("ideal")
    return tuple(found)


def open_system(setup: Setup, key: str) -> System:
    """A system by name: cellar[-CAP], merging[-CAP][-ahead], padding-WIDTH, library-WIDTH, ideal. `setup` is resolved.

    CAP is, in place of the setup's, the most nodes of a task of ours, or the most requests of a merged graph.

    Raises ConfigError for another name, and for data that the system cannot serve.
    """
    from benchmarks.cells import baselines, ours

    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    torch.backends.cudnn.allow_tf32 = False  # as our own products: the library's LSTM shall not round to 10 bits
    kind, _, width = key.partition("-")
    if kind == OURS and (not width or _is_count(width)):
        return ours.open_ours(setup, int(width) if width else None)
    if kind == "merging":
        cap, _, how = width.partition("-") if width != "ahead" else ("", "", width)
        if (not cap or _is_count(cap)) and how in ("", "ahead"):
            return ours.open_merging(setup, int(cap) if cap else None, ahead=how == "ahead")
    if key == "ideal":
        return baselines.ideal(setup)
    if kind in ("padding", "library") and _is_count(width):
        return (baselines.padding if kind == "padding" else baselines.library)(setup, int(width))
    raise ConfigError(f"system {key!r} is not known; use cellar, merging, padding-10, library-10 or ideal.")


def _is_count(text: str) -> bool:
    return text.isdigit() and int(text) > 0


def sweep(setup: Setup, keys: tuple[str, ...], schedule: Schedule, say: Say) -> Report:
    """All systems over rising loads, each in a process of its own, by turns."""
    if setup.clock == "work":
        setup = replace(setup, pace=Pace().fastest())
    subjects = []
    try:
        for key in keys:  # one after the other: they would slow down each other's preparations
            subjects.append(Remote(key, partial(open_system, setup, key)))
            subjects[-1].ready()
        apart = [key for key in keys if key.startswith(LIBRARY)]
        measured = Sweep(subjects, schedule, say, apart)
        comparisons = measured.run()
    finally:
        for subject in subjects:
            subject.close()
    return Report(description(setup, schedule), measured.bound, list(measured.curves.values()), comparisons)


def saturate(setup: Setup, keys: tuple[str, ...], schedule: Schedule, say: Say) -> dict[str, Any]:
    """Each system with everything there at once, then its p90 at each of the schedule's `rates`; ours also at half of
    what it can, and with its idle share.

    Of each the best of `rounds` runs: what disturbs can only slow down.
    """
    found: dict[str, Any] = {"benchmark": "cells", "load": "max", "setup": description(setup, schedule), "systems": {}}
    for key in keys:
        system = open_system(setup, key)
        subject = Local(system)
        subject.unloaded(20)
        full = max(
            (subject.saturated(schedule.saturating_requests) for _ in range(schedule.rounds)),
            key=lambda trace: trace.throughput,
        )
        figures: dict[str, Any] = {"requests_per_second": full.throughput}
        if schedule.rates:
            figures["p90_at"] = [latency_at(subject, rate, schedule) for rate in schedule.rates]
        if key == OURS:
            figures["p90_at_half"] = latency_at(subject, full.throughput / 2, schedule)
            figures["idle_share"] = _idle(system, setup, min(schedule.saturating_requests, 20_000))
        subject.close()
        found["systems"][key] = figures
        say(f"{key}: {json.dumps(figures)}")
    systems = found["systems"]
    for key, figures in systems.items():
        if key != OURS:
            figures["ours_by_this"] = systems[OURS]["requests_per_second"] / figures["requests_per_second"]
    return found


def latency_at(subject: Local, rate: float, schedule: Schedule) -> dict[str, Any]:
    """At a load: `late` requests were not done two seconds after the last had come, and count as infinitely slow."""
    trace = subject.loaded(poisson(rate, schedule.seconds + schedule.warm_up, schedule.seed), 2.0)
    trace = trace.measured(schedule.warm_up)
    found: dict[str, Any] = finite(
        {
            "rate": rate,
            "latency": asdict(Quantiles.of(trace.latency)),
            "queueing": asdict(Quantiles.of(trace.queueing)),
            "late": int(np.isinf(trace.ended).sum()),
        }
    )
    return found


def _idle(system: System, setup: Setup, count: int) -> float | None:
    """Share of the time in which the device computes nothing, with everything there at once; None on a CPU.

    What its kernels take is recorded; what the same load takes is not, as recording would slow down the host.
    """
    if setup.torch_device.type == "cpu":
        return None
    seconds = min(all_at_once(system, count).seconds for _ in range(3))
    busy = busy_seconds(lambda: all_at_once(system, count))
    return None if busy is None else 1 - busy / seconds


def description(setup: Setup, schedule: Schedule) -> dict[str, Any]:
    """The setup in a report."""
    threads = setup.threads or torch.get_num_threads()
    return {
        "title": f"{setup.model}, h = {setup.hidden}, {setup.source}, {setup.dtype} on {setup.device}",
        **asdict(setup),
        "threads": threads,
        "schedule": asdict(schedule),
        "torch": torch.__version__,
    }


def parse_rates(text: str) -> tuple[float, ...]:
    """`100,200,400`, requests/s. Raises ConfigError."""
    try:
        rates = tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        raise ConfigError(f"rates is {text!r}; give numbers with commas between, such as 100,200,400.") from None
    if any(rate <= 0 for rate in rates):
        raise ConfigError(f"rates is {text!r}; every rate must be positive.")
    return rates
