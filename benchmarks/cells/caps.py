"""`python -m benchmarks.cells.caps`: cellular batching and merged graphs, each at several caps, and the best of each.

A cap of ours is the most nodes of a task, of merging the most requests of a merged graph (whose tasks have no limit).
`ahead`: the next merged graph is prepared while the last one runs, and follows it without a gap, as BatchMaker did for
Fold (§2.7.5). The paper's own setting is 64 and 64. Caps differ in kind, so each system is judged at its best, and p90
is compared at half of what merging can do at its best. Requests are unfolded before the clock starts.

    python -m benchmarks.cells.caps --model treelstm --hidden 1024
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells.run import description, latency_at, open_system
from benchmarks.cells.setup import MODELS, Setup
from benchmarks.cells.subject import Local
from benchmarks.cells.sweep import Schedule
from cellar.core.errors import CellarError, ConfigError

NODES, REQUESTS = (64, 256, 512, 1024, 2048), (64, 128, 256, 512)
"""Caps of ours, which go as far as the tasks of merged graphs do, and of merging."""

PAPER = "cellar-64", "merging-64-ahead"


def keys_of(nodes: Sequence[int], requests: Sequence[int]) -> tuple[str, ...]:
    """The systems: ours, merging, and merging with its next graph prepared, at every cap."""
    merging = [f"merging-{cap}{how}" for how in ("", "-ahead") for cap in requests]
    return (*[f"cellar-{cap}" for cap in nodes], *merging)


def throughput(setup: Setup, key: str, schedule: Schedule) -> float:
    """Requests/s with everything there at once, the best of the rounds: what disturbs can only slow down."""
    subject = Local(open_system(setup, key))
    try:
        subject.saturated(min(500, schedule.saturating_requests))
        return max(subject.saturated(schedule.saturating_requests).throughput for _ in range(schedule.rounds))
    finally:
        subject.close()
        _tidy()


def measure(setup: Setup, keys: Sequence[str], schedule: Schedule) -> dict[str, Any]:
    """All systems saturated; then p90 of the best two and of the paper's two, at half of what that merging can."""
    begun, found = time.monotonic(), dict[str, float]()
    for key in keys:
        found[key] = throughput(setup, key, schedule)
        print(f"{key:20} {found[key]:10,.0f} requests/s   ({time.monotonic() - begun:.0f} s)", flush=True)
    best = tuple(max((k for k in found if k.startswith(kind)), key=found.__getitem__) for kind in ("cellar", "merging"))
    pairs = {"best": best} | ({"paper": PAPER} if set(PAPER) <= found.keys() else {})
    report: dict[str, Any] = {
        "benchmark": "cells.caps",
        "setup": description(setup, schedule),
        "requests_per_second": found,
    }
    for name, (ours, theirs) in pairs.items():
        rate = found[theirs] / 2
        figures = {key: _latency(setup, key, rate, schedule) for key in (ours, theirs)}
        p90 = [figures[key]["latency"]["p90"] for key in (ours, theirs)]
        report[name] = {
            "ours": ours,
            "merging": theirs,
            "ours_by_merging": found[ours] / found[theirs],
            "rate": rate,
            "p90_ours": p90[0],
            "p90_merging": p90[1],
            "p90_change": None if None in p90 else p90[0] / p90[1] - 1,
        }
        print(f"{name}: {_sentence(report[name], found)}", flush=True)
    report["seconds"] = time.monotonic() - begun
    return report


def _latency(setup: Setup, key: str, rate: float, schedule: Schedule) -> dict[str, Any]:
    subject = Local(open_system(setup, key))
    try:
        subject.saturated(min(500, schedule.saturating_requests))
        return latency_at(subject, rate, schedule)
    finally:
        subject.close()
        _tidy()


def _sentence(pair: dict[str, Any], found: dict[str, float]) -> str:
    def ms(seconds: float | None) -> str:
        return "never" if seconds is None else f"{1e3 * seconds:.2f} ms"

    ours, theirs = pair["ours"], pair["merging"]
    return (
        f"{ours} {found[ours]:,.0f} and {theirs} {found[theirs]:,.0f} requests/s, a factor of "
        f"{pair['ours_by_merging']:.2f}; p90 at {pair['rate']:,.0f} requests/s {ms(pair['p90_ours'])} and "
        f"{ms(pair['p90_merging'])}"
    )


def _caps(text: str) -> list[int]:
    if not all(part.isdigit() and int(part) for part in text.split(",")):
        raise ConfigError(f"caps are {text!r}; give numbers with commas between, such as 64,128.")
    return [int(part) for part in text.split(",")]


def _tidy() -> None:
    """Leave the device's memory to the next system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print; JSON last. 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cells.caps", description=__doc__)
    add = parser.add_argument
    add("--model", choices=MODELS, default="treelstm")
    add("--hidden", type=int, default=256)
    add("--data")
    add("--device", default="auto")
    add("--dtype", default="float32")
    add("--nodes", default=",".join(map(str, NODES)), help="caps of ours")
    add("--merged", default=",".join(map(str, REQUESTS)), help="caps of merging, in requests")
    add("--max-tasks", type=int)
    add("--threads", type=int)
    add("--clock", choices=("wall", "work"), default="wall")
    add("--requests", type=int, default=8000)
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=2.0)
    add("--pool", type=int, default=2000, help="different requests")
    add("--json", type=Path)
    given = parser.parse_args(arguments)
    try:
        keys = keys_of(_caps(given.nodes), _caps(given.merged))
        setup = Setup(
            model=given.model,
            hidden=given.hidden,
            data=given.data,
            device=given.device,
            dtype=given.dtype,
            threads=given.threads,
            max_tasks=given.max_tasks,
            clock=given.clock,
            pool=given.pool,
            ahead=True,
        )
        schedule = Schedule(seconds=given.seconds, rounds=given.rounds, saturating_requests=given.requests)
        report = measure(replace(setup.resolved(), ahead=True), keys, schedule)
    except CellarError as error:
        print(f"caps: {error}", file=sys.stderr)
        return 2
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
