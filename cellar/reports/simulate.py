"""`cellar simulate`: loads and reports are those of `cellar bench serve`; the simulation is `cellar.simulate`."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from cellar.bench.serve.command import build_load, table
from cellar.bench.serve.options import DatasetOptions, ResultOptions, TrafficOptions
from cellar.bench.sharegpt import table_conversations
from cellar.bench.workloads import Load, Turn, Vocabulary, gamma_arrivals, with_think_times
from cellar.core.config import CacheConfig, ScheduleConfig
from cellar.core.errors import ConfigError
from cellar.kv.policy import named_policy
from cellar.planner.steps import chunk_costs
from cellar.reports.load import FloatArray, LoadReport, RequestTiming, Section, plot_cdfs, plot_sweep
from cellar.reports.simulate_check import Measured, beside, compared_lines, phases, read_measured
from cellar.reports.simulate_setup import Setup, open_setup
from cellar.simulate.options import RoutingOptions
from cellar.simulate.simulator import SimulatedRun, Simulation

Say = Callable[[str], None]

HOST_SECONDS = 150e-6
"""What a turn of the loop costs the host: plan, commit and delivery for some tens of requests (`bench.schedule`)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that `cellar simulate` is told. `chat`: conversations of `bench.sharegpt` instead of the dataset's.

    `check` is the file of a real run; `lengths` are the --input-len and --output-len of an offline one.
    """

    model: str
    machine: str
    weights: str | None = None
    max_model_len: int | None = None
    host_seconds: float = HOST_SECONDS
    max_seconds: float | None = None
    chat: bool = True
    dataset: DatasetOptions
    traffic: TrafficOptions
    cache: CacheConfig
    schedule: ScheduleConfig
    results: ResultOptions
    routing: RoutingOptions
    check: Path | None = None
    lengths: tuple[str, str] = ("16-512", "16-256")
    output: Path | None = None
    plots: Path | None = None


def run_simulations(settings: Settings, say: Say) -> list[LoadReport]:
    """Simulate one run, or each of a sweep; tell, and write the files. Raises ConfigError or CapacityError."""
    measured = None
    if settings.check is not None:
        measured = read_measured(settings.check, *settings.lengths, settings.dataset.seed)
    setup = open_setup(
        settings.model,
        settings.machine,
        settings.cache,
        settings.schedule,
        settings.weights,
        settings.max_model_len,
        measured.dtype if measured else None,
    )
    say(_described(settings, setup))
    load = _load(settings, setup, measured, say)
    points = [(r, c) for r in settings.traffic.rates for c in settings.traffic.concurrencies]
    if measured is not None and len(points) > 1:
        raise ConfigError("check is for one run; leave the sweep of request_rate or max_concurrency out.")
    found = []
    for rate, bound in points:
        begun = time.perf_counter()
        run = simulate(setup, _paced(settings, load, rate), settings, bound)
        taken = time.perf_counter() - begun
        report = load_report(run, settings, rate, bound)
        for line in report.lines("Simulated Serving Result"):
            say(line)
        say(f"{run.duration:,.1f} simulated seconds in {taken:.1f} s: {run.duration / taken:,.0f} times as fast")
        found.append((report, run))
    reports = [report for report, _ in found]
    if len(reports) > 1:
        for line in table(reports):
            say(line)
    result: Any = [report.to_dict() for report in reports] if len(reports) > 1 else reports[0].to_dict()
    if measured is not None:
        rows = beside({**result, **phases(found[0][1])}, measured.figures)
        for line in compared_lines(rows):
            say(line)
        result["check"] = {key: {"simulated": one, "measured": other} for key, one, other in rows}
    for path in _write(settings, found):
        say(f"written: {path}")
    say(json.dumps(result))
    return reports


def simulate(setup: Setup, load: Load, settings: Settings, max_concurrency: int | None = None) -> SimulatedRun:
    """Serve a load; turns that do not fit the context must have been left out (`Load.within`)."""
    words = Vocabulary(0, setup.spec.vocab_size, settings.dataset.seed)
    costs = chunk_costs(setup.prices, setup.capacity.chunk_size, setup.max_model_len)
    simulation: Simulation[Turn] = Simulation(
        load,
        words.tokens,
        setup.prices,
        setup.capacity,
        setup.schedule,
        prefix_caching=setup.cache.enable_prefix_caching,
        max_concurrency=max_concurrency,
        max_seconds=math.inf if settings.max_seconds is None else settings.max_seconds,
        host_seconds=settings.host_seconds,
        policy=lambda: named_policy(setup.cache.kv_eviction_policy, costs, bool(setup.capacity.tiers)),
        routing=settings.routing,
    )
    gc.collect()
    gc.freeze()  # what was there before lives on; walking through it again and again would take a tenth of the time
    try:
        return simulation.run()
    finally:
        gc.unfreeze()


def _described(settings: Settings, setup: Setup) -> str:
    tokens = setup.capacity.num_slots * setup.capacity.chunk_size
    layout = setup.prices.layout
    size = setup.capacity.chunk_size
    below = "".join(f", {n * size:,} in the {tier.name.lower()}" for tier, n in setup.capacity.tiers.items())
    beyond = f" (the model itself attends to {setup.spec.max_position:,})"
    context = f"{setup.max_model_len:,}" + (beyond if setup.max_model_len > setup.spec.max_position else "")
    several = f"{settings.routing.replicas} engines, each " if settings.routing.replicas > 1 else ""
    split = f", {layout.name} over {layout.mesh.size} devices" if layout.mesh.size > 1 else ""
    return (
        f"{several}{settings.model} on {settings.machine}, {setup.prices.formats.name}{split}: "
        f"{tokens:,} tokens of KV cache{below}, context {context}; {setup.about}"
    )


def _load(settings: Settings, setup: Setup, measured: Measured | None, say: Say) -> Load:
    """The run's own load, or what the options ask for; what does not fit the context is left out, and said."""
    if measured is not None and measured.load is not None:
        load = measured.load
    elif settings.chat:
        options = settings.dataset
        made = table_conversations(options.num_prompts, options.seed)
        paused = with_think_times(made, options.think_time, options.think_time_distribution, options.seed)
        load = Load(paused, np.zeros(len(paused)))
    else:
        load = build_load(settings.dataset)
    kept = load.within(setup.max_model_len)
    if (left := load.num_requests - kept.num_requests) > 0:
        say(
            f"{left:,} of {load.num_requests:,} requests do not fit a context of {setup.max_model_len:,} tokens and "
            "are left out."
        )
    return kept


def _paced(settings: Settings, load: Load, rate: float | None) -> Load:
    if rate is None:
        return load
    arrivals = gamma_arrivals(len(load.conversations), rate, settings.traffic.burstiness, settings.dataset.seed)
    return replace(load, arrivals=arrivals)


# -- the report ---------------------------------------------------------------------------------------


def load_report(run: SimulatedRun, settings: Settings, rate: float | None, bound: int | None) -> LoadReport:
    """The report of `cellar bench serve`, with a section about the engine."""
    labels = []
    if len(settings.traffic.rates) > 1:
        labels.append(f"rate {rate:g}")
    if len(settings.traffic.concurrencies) > 1:
        labels.append(f"concurrency {bound}")
    percentiles = settings.results.percentiles
    return LoadReport.of(
        timings(run),
        run.duration,
        metrics=settings.results.metrics,
        percentiles=percentiles,
        goodput=settings.results.bounds(),
        request_rate=rate,
        max_concurrency=bound,
        label=" ".join(labels),
        sections=(engine_section(run),),
    )


def timings(run: SimulatedRun) -> list[RequestTiming]:
    """The requests as the report wants them."""
    found = []
    for r in run.requests:
        about: dict[str, Any] = {"conversation": r.conversation, "turn": r.turn}
        if r.error is None:
            found.append(RequestTiming.from_token_times(r.arrival, r.token_times, r.num_prompt, **about))
        else:
            found.append(
                RequestTiming(r.arrival, math.nan, r.finish, r.num_prompt, len(r.token_times), error=r.error, **about)
            )
    return found


def engine_section(run: SimulatedRun) -> Section:
    """Lines about what users do not see."""
    kv = [1 - s.stats.free_chunks / s.stats.total_chunks for s in run.snapshots]
    waiting = [s.stats.waiting for s in run.snapshots]
    sizes = [step.num_tokens for step in run.steps]
    return Section(
        "Simulated engine",
        (
            ("Device busy (%)", "device_busy_percent", 100 * run.busy),
            ("Steps", "num_steps", len(run.steps)),
            ("Mean tokens of a step", "mean_step_tokens", float(np.mean(sizes)) if sizes else math.nan),
            ("Prompt tokens found in the cache (%)", "prefix_hit_percent", 100 * run.hit_rate),
            ("Mean KV cache in use or kept (%)", "mean_kv_percent", 100 * float(np.mean(kv)) if kv else math.nan),
            ("Most requests waiting", "max_waiting", max(waiting, default=0)),
            ("Preemptions", "preemptions", run.stats.preemptions),
            *_tier_lines(run),
            *_routing_lines(run),
        ),
    )


def _tier_lines(run: SimulatedRun) -> list[tuple[str, str, float]]:
    """What moved between the device and each slower tier."""
    found: list[tuple[str, str, float]] = []
    for stats in run.stats.tiers[1:]:
        name = stats.tier.name.lower()
        found.append((f"Chunks loaded from the {name}", f"{name}_loaded_chunks", stats.loaded))
        found.append((f"Chunks saved to the {name}", f"{name}_saved_chunks", stats.saved))
    return found


def _routing_lines(run: SimulatedRun) -> list[tuple[str, str, float]]:
    """What became of requests that a router sent to several replicas."""
    if len(run.replica_stats) == 1:
        return []
    queries = max(run.stats.prefix_queries, 1)
    found: list[tuple[str, str, float]] = [("Replicas", "num_replicas", len(run.replica_stats))]
    for stats in run.stats.tiers:
        name = stats.tier.name.lower()
        share = 100 * stats.hit_tokens / queries
        found.append((f"Prompt tokens found on the {name} (%)", f"{name}_hit_percent", share))
    busy = [sum(s.end - s.begin for s in steps) / run.duration for steps in run.replica_steps]
    found += [
        ("Busy, the least busy replica (%)", "least_busy_percent", 100 * min(busy)),
        ("Busy, the busiest replica (%)", "most_busy_percent", 100 * max(busy)),
    ]
    placed = run.placements
    found += [(f"Placed by {why.value}", f"placed_{why.value}", count) for why, count in sorted(placed.reasons.items())]
    if placed.reports:
        found.append(("Bytes of a report's digest", "digest_bytes", placed.digest_bytes / placed.reports))
    if placed.losses:
        judged = len(placed.losses)
        found += [
            ("Placements compared with the truth", "judged", judged),
            ("Wrong by a millisecond or more (%)", "wrong_percent", 100 * placed.wrong / judged),
            ("Seconds lost by a placement, mean", "mean_lost_seconds", float(np.mean(placed.losses))),
            ("Seconds lost by a placement, p99", "p99_lost_seconds", float(np.percentile(placed.losses, 99))),
        ]
    return found


def detailed(run: SimulatedRun) -> dict[str, Any]:
    """Every request, by the keys that `cellar bench serve --save-detailed` writes."""
    found = timings(run)
    return {
        "start_times": [t.arrival for t in found],
        "input_lens": [t.prompt_tokens for t in found],
        "output_lens": [t.output_tokens for t in found],
        "ttfts": [t.ttft if t.ok else None for t in found],
        "itls": [t.gaps.tolist() for t in found],
        "errors": [t.error or "" for t in found],
        "conversations": [t.conversation for t in found],
        "turns": [t.turn for t in found],
        "replicas": [r.replica for r in run.requests],
    }


# -- files --------------------------------------------------------------------------------------------


def _write(settings: Settings, found: Sequence[tuple[LoadReport, SimulatedRun]]) -> list[Path]:
    """The JSON and the plots that were asked for."""
    written = []
    if settings.output is not None:
        each = [{**report.to_dict(), **detailed(run)} for report, run in found]
        settings.output.parent.mkdir(parents=True, exist_ok=True)
        settings.output.write_text(json.dumps(each if len(each) > 1 else each[0]) + "\n", encoding="utf-8")
        written.append(settings.output)
    if settings.plots is not None:
        settings.plots.mkdir(parents=True, exist_ok=True)
        title = f"{settings.model} on {settings.machine}, simulated"
        named = {report.label or "all": report for report, _ in found}
        plot_cdfs(named, settings.plots / "latencies.png", title)
        written.append(settings.plots / "latencies.png")
        if len(found) > 1:
            plot_sweep({"": [report for report, _ in found]}, settings.plots / "sweep.png", title)
            written.append(settings.plots / "sweep.png")
        for report, run in found:
            name = f"queues-{report.label.replace(' ', '-')}.png" if report.label else "queues.png"
            plot_queues(run, settings.plots / name)
            written.append(settings.plots / name)
    return written


def plot_queues(run: SimulatedRun, path: Path) -> None:
    """Requests running and waiting, and the KV cache, over time. Raises ConfigError without matplotlib."""
    try:
        figures = import_module("matplotlib.figure")
        canvas = import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    except ImportError as error:
        raise ConfigError("plots need matplotlib; install it with `pip install matplotlib`.") from error
    figure = figures.Figure(figsize=(9, 5), layout="constrained")
    canvas(figure)
    moments: FloatArray = np.array([s.now for s in run.snapshots]) - run.start
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(moments, [s.stats.running for s in run.snapshots], label="running")
    upper.plot(moments, [s.stats.waiting for s in run.snapshots], label="waiting")
    upper.set_ylabel("requests")
    total = max(run.stats.total_chunks, 1)
    used = [100 * (total - s.stats.free_chunks - s.stats.cached_chunks) / total for s in run.snapshots]
    kept = [100 * s.stats.cached_chunks / total for s in run.snapshots]
    lower.stackplot(moments, used, kept, labels=["in use", "kept for later"])
    lower.set(ylabel="KV cache (%)", xlabel="simulated seconds", ylim=(0, 100))
    for axes in (upper, lower):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
