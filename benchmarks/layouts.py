"""Layouts over several GPUs, each step measured beside the planner's price of the same step.

    python -m benchmarks.layouts --model llama-3-70b --layers 8 --ranks 4 --tokens 64,256,1024,4096,16384 --json a.json
    python -m benchmarks.layouts --heads-or-batch --model starcoder --ranks 4 --contexts 2048,8192,32768 --json b.json
    python -m benchmarks.layouts --plot a.json --output docs/performance/h100-layouts.png

The first times steps of prompts in 1D, 2D and weight-gathered layouts, and says where one begins to be faster than
another, measured and predicted. The second times decodes of a multi-query model with attention cut by heads and by
batch (Pope et al. §3.3), and says how many tokens of context fit. Weights and contexts are made up.

Steps of layouts are launched kernel by kernel: `wall` is what an engine waits for, `device` what the GPU needs if all
of a step is launched before it begins (above some 1,000 launches: most of it). A model of few layers is extrapolated:
table and head stay, all else is multiplied.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.laid_steps import Case, Fits, Job, LeftOut, News, Shape, Started, Timed, run_ranks
from cellar.core.config import CacheConfig, ScheduleConfig
from cellar.core.errors import CapacityError, CellarError, ConfigError
from cellar.core.layouts import Layout, Mesh
from cellar.models import registry
from cellar.planner.cost import Dimensions, dimensions
from cellar.planner.machines import LIBRARY, Machine
from cellar.planner.partition import Formats, distinct_layouts, formats_of, padded_heads
from cellar.planner.steps import StepPrices, kv_room
from cellar.planner.traffic import StepSizes, step_traffic
from cellar.reports.machines import open_machine
from cellar.runtime.device import resolve_device

LONGEST = 2048
"""Tokens of a prompt in a step at most; a step has at least one prompt for each rank."""

PER_OCTAVE = 4
"""Points of the predicted curves."""

_TIMES = ("predicted", "device", "wall")

Curve = Sequence[tuple[float, float]]
"""(tokens, seconds), tokens ascending."""


def prompts(tokens: int, ranks: int) -> Shape:
    """About `tokens` of them in equal prompts, so many that every rank has one."""
    count = -(-max(1, tokens // LONGEST) // ranks) * ranks
    length = max(1, tokens // count)
    return Shape(count, length, length)


def all_layouts(ranks: int, kv_heads: int, attention: str) -> dict[str, Layout]:
    """1D over z, and 2D and those that gather over the box that has two chips along x, by name.

    `attention`: heads, batch, or all that differ; where weights are gathered over all chips, it is by batch.
    """
    if ranks % 2:
        raise ConfigError(f"{ranks} ranks are no box of two along x; take an even number.")
    found: dict[str, Layout] = {}
    flat = [layout for layout in distinct_layouts(Mesh(1, 1, ranks), kv_heads) if not layout.gather]
    for layout in (*flat, *distinct_layouts(Mesh(2, 1, ranks // 2), kv_heads)):
        whole = layout.mesh.count(layout.gather) == ranks
        if whole or attention in ("all", layout.attention):
            # With two chips X gathers over all of them, too.
            name = "XYZ" if whole else layout.name
            found.setdefault(f"{name} {layout.attention}", layout)
    return found


@dataclass(frozen=True)
class Prices:
    """What the planner says of one layout: of the model as it is run, and with all its layers."""

    run: StepPrices
    whole: StepPrices

    @classmethod
    def of(cls, d: Dimensions, layers: int, machine: Machine, formats: Formats, case: Case) -> Prices:
        """`layers` of the model `d` are run."""

        def price(count: int) -> StepPrices:
            return StepPrices(replace(d, layers=count), machine, formats, case.layout, case.looped, laid=True)

        return cls(price(layers), price(d.layers))

    def figures(self, shape: Shape) -> dict[str, Any]:
        """Seconds of a step, launched in advance and (`predicted_wall`) by the host; what they are of; bytes sent."""
        prices = self.run
        stop = np.full(shape.sequences, shape.context)
        work = prices.decodes(stop) if shape.decodes else prices.work(stop - shape.new, stop, shape.sequences)
        ahead = replace(prices.cost, eager=0.0)
        head = ahead.seconds(work) - ahead.seconds(work._replace(sampled=0))
        item = 4 if prices.formats.compute == "float32" else 2
        sizes = StepSizes(shape.sequences, shape.new, item, prices.formats.weight_bytes)
        return {
            "predicted": ahead.seconds(work),
            "predicted_wall": prices.seconds(work._replace(prompts=True)),
            "predicted_whole": replace(self.whole.cost, eager=0.0).seconds(work),
            "predicted_head": head,
            "predicted_parts": {
                group.name: group.seconds for group in prices.timeline(work).groups if group.name != "launching"
            },
            "predicted_sent": sum(part.logical for part in step_traffic(prices.d, prices.layout, sizes)),
        }


class Findings:
    """What a job finds, printed and written as it comes."""

    def __init__(self, about: dict[str, Any], job: Job, d: Dimensions, layers: int, asked: str, out: Path | None):
        self.found = about | {"rows": [], "fits": [], "left_out": []}
        self._job, self._d, self._layers, self._asked, self._out = job, d, layers, asked, out
        self._cases = {case.name: case for case in job.cases}
        self._prices: dict[str, Prices] = {}

    def hear(self, news: News) -> None:
        """One more."""
        match news:
            case Started():
                self._begin(news)
            case Timed():
                self._row(news)
            case Fits():
                self._fits(news)
            case LeftOut():
                print(f"left out: {news.case}, {_words(news.shape)}: {news.why}", flush=True)
                self.found["left_out"].append(asdict(news))
        self.write()

    def write(self) -> None:
        """To the file, if there is one."""
        if self._out is not None:
            self._out.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def crossings(self) -> None:
        """Where one layout begins to be faster than another, in tokens of the step; the curves that were predicted."""
        rows = self.found["rows"]
        sizes = [row["tokens"] for row in rows]
        if not sizes or len(set(sizes)) < 2:
            return
        count = round(PER_OCTAVE * math.log2(4 * max(sizes) / min(sizes)))
        steps = [prompts(round(min(sizes) / 2 * 2 ** (k / PER_OCTAVE)), self._job.ranks) for k in range(count + 1)]
        shapes = sorted({shape.tokens: shape for shape in steps}.items())
        predicted = {
            name: [(float(tokens), prices.figures(shape)["predicted"]) for tokens, shape in shapes]
            for name, prices in self._prices.items()
        }
        measured = {which: curves_of(rows, which) for which in ("device", "wall")}
        pairs: list[dict[str, Any]] = []
        for a, b in combinations(predicted, 2):
            pair: dict[str, Any] = {"of": [a, b], "predicted": crossed(predicted[a], predicted[b])}
            for which, curves in measured.items():
                pair[which] = crossed(curves.get(a, ()), curves.get(b, ()))
            pairs.append(pair)
            if any(pair[which] for which in _TIMES):
                said = ", ".join(f"{which} {_counts(pair[which])}" for which in _TIMES)
                print(f"{a} and {b} cross at tokens: {said}")
        fastest = []
        for tokens in sorted(set(sizes)):
            there = [row for row in rows if row["tokens"] == tokens]
            best = {which: fastest_of(there, which) for which in _TIMES}
            fastest.append({"tokens": tokens, **best})
            said = ", ".join(f"{name or '-'} ({which})" for which, name in best.items())
            print(f"fastest at {tokens:,} tokens: {said}")
        self.found |= {"crossings": pairs, "fastest": fastest, "curves": predicted}
        self.write()

    def _begin(self, news: Started) -> None:
        name = self._asked
        if name == "auto":
            known = [library for library in LIBRARY if library in news.device.lower()]
            name = known[0] if known else "h100"
        machine = open_machine(name)
        if (ranks := self._job.ranks) != machine.num_devices:
            one = machine.name.removeprefix(f"{machine.num_devices}x")
            machine = replace(machine, name=one).with_devices(ranks)
        formats = formats_of(self._job.dtype)
        for case in self._job.cases:
            self._prices[case.name] = Prices.of(self._d, self._layers, machine, formats, case)
        self.found |= {"device": news.device, "machine": machine.name, "start_seconds": news.seconds}
        print(
            f"{self._job.ranks} x {news.device}, priced as {machine.name}; {self._layers} of {self._d.layers} layers, "
            f"{self._job.dtype}; met and stored after {news.seconds:.1f} s"
        )
        print(
            f"{'layout':18} {'step':>16} {'wall ms':>9} {'device ms':>10} {'predicted':>10} {'ratio':>6} "
            f"{'all layers':>11} {'predicted':>10} {'sent MB':>8} {'steps':>5}",
            flush=True,
        )

    def _row(self, news: Timed) -> None:
        case, shape = self._cases[news.case], news.shape
        prices = self._prices[news.case].figures(shape)
        best = news.wall if news.device is None else news.device
        scale, head = self._d.layers / self._layers, prices["predicted_head"]
        row = {
            "layout": news.case,
            "mesh": [case.layout.mesh.x, case.layout.mesh.y, case.layout.mesh.z],
            "looped": case.looped,
            "tokens": shape.tokens,
            **asdict(shape),
            "wall": news.wall,
            "device": news.device,
            "steps": news.steps,
            "sent": news.sent,
            "moved": news.moved,
            "whole": head + max(0.0, best - head) * scale,
            **prices,
        }
        self.found["rows"].append(row)
        device = "" if news.device is None else f"{1e3 * news.device:.3f}"
        print(
            f"{news.case:18} {_words(shape):>16} {1e3 * news.wall:9.3f} {device:>10} {1e3 * row['predicted']:10.3f} "
            f"{best / row['predicted']:6.2f} {1e3 * row['whole']:11.2f} {1e3 * row['predicted_whole']:10.2f} "
            f"{news.sent / 1e6:8.2f} {news.steps:5}",
            flush=True,
        )

    def _fits(self, news: Fits) -> None:
        case, prices = self._cases[news.case], self._prices[news.case]
        schedule = ScheduleConfig(max_num_seqs=case.rows)
        try:
            utilization = CacheConfig().gpu_memory_utilization
            planned = kv_room(prices.run, utilization, case.rows, schedule.max_num_batched_tokens or 8192)
        except CapacityError:
            planned = 0
        contexts = sorted({shape.context for shape in case.shapes})
        self.found["fits"].append(
            {
                "layout": news.case,
                "tokens": news.tokens,
                "predicted_tokens": planned,
                "token_nbytes": news.token_nbytes,
                "sequences": {str(context): news.tokens // context for context in contexts},
            }
        )
        each = ", ".join(f"{news.tokens // context:,} of {context:,}" for context in contexts)
        print(f"{news.case}: {news.tokens:,} tokens of context fit ({planned:,} predicted): {each}", flush=True)


def curves_of(rows: Sequence[Mapping[str, Any]], which: str) -> dict[str, Curve]:
    """Measured (tokens, seconds) of each layout, where they were measured."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row[which] is not None:
            found.setdefault(row["layout"], []).append((float(row["tokens"]), row[which]))
    return {name: sorted(points) for name, points in found.items()}


def fastest_of(rows: Sequence[Mapping[str, Any]], which: str) -> str | None:
    """The layout with the fewest seconds."""
    known = [row for row in rows if row[which] is not None]
    return str(min(known, key=lambda row: float(row[which]))["layout"]) if known else None


def crossed(a: Curve, b: Curve) -> list[float]:
    """Tokens at which one of two curves begins to be the faster, on lines between points both of whose axes are
    logarithmic.
    """
    other = dict(b)
    both = [(tokens, math.log(seconds / other[tokens])) for tokens, seconds in a if tokens in other]
    found = []
    for (left, before), (right, after) in pairwise(both):
        if before * after < 0:
            share = before / (before - after)
            found.append(float(left * (right / left) ** share))
    return found


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Steps over their tokens: milliseconds, and times those of the first layout. Raises ConfigError for other files,
    or without matplotlib.
    """
    if "curves" not in found:
        raise ConfigError("this file has no curves; give one that --json wrote of several --tokens.")
    try:
        agg, drawing = import_module("matplotlib.backends.backend_agg"), import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("plots need matplotlib; install it with `pip install matplotlib`.") from error
    figure = drawing.Figure(figsize=(12, 5.2), layout="constrained")
    agg.FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    devices, walls = (curves_of(found["rows"], which) for which in ("device", "wall"))
    predicted: dict[str, Curve] = found["curves"]
    drawn = [("--", "predicted", predicted), (":", "wall, launched by the host", walls)]
    drawn.append(("o-", "measured on the device", devices) if devices else ("o-", "measured, wall", walls))
    first = next(iter(predicted))
    for number, name in enumerate(predicted):
        for style, _, curves in drawn:
            base = dict(curves.get(first, ()))
            points = curves.get(name, ())
            look: dict[str, Any] = {"color": f"C{number}", "linewidth": 1.8 if style == "o-" else 1.1, "markersize": 4}
            label = name if style == "o-" else None
            left.plot([t for t, _ in points], [1e3 * s for _, s in points], style, label=label, **look)
            both = [(t, s / base[t]) for t, s in points if t in base]
            right.plot([t for t, _ in both], [ratio for _, ratio in both], style, **look)
    for style, label, _ in drawn:
        left.plot([], [], style, color="0.4", markersize=4, label=label)
    for pair in found["crossings"]:
        if first in pair["of"]:
            for which, style in (("predicted", "--"), ("device" if devices else "wall", "-")):
                for tokens in pair[which]:
                    right.axvline(tokens, color="0.75", linestyle=style, linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="tokens in the step", ylabel=f"ms, {found['layers']} layers")
    right.set(xscale="log", yscale="log", xlabel="tokens in the step", ylabel=f"times {first}")
    right.set_title(f"grey: crossings with {first}, measured and (dashed) predicted", fontsize="medium")
    what = f"{found['model']}, {found['layers']} of {found['of_layers']} layers, {found['dtype']}"
    left.set_title(f"{what}; {found['ranks']} x {found['device']}", fontsize="medium")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _words(shape: Shape) -> str:
    return f"{shape.sequences}x1 at {shape.context}" if shape.decodes else f"{shape.sequences}x{shape.new}"


def _counts(found: Sequence[float]) -> str:
    return " and ".join(f"{tokens:,.0f}" for tokens in found) or "none"


def _config(name: str, layers: int | None, longest: int) -> tuple[dict[str, Any], int]:
    """A config.json with so many layers and positions for so many tokens, and how many layers the model has."""
    raw = registry.shipped_config(name) or registry.read_config(Path(name))
    raw = dict(raw)
    depth = next(key for key in ("num_hidden_layers", "n_layer", "num_layers") if key in raw)
    positions = next((k for k in ("n_positions", "max_position_embeddings", "seq_length") if k in raw), "n_positions")
    whole = int(raw[depth])
    raw[depth] = min(layers or whole, whole)
    raw[positions] = max(int(raw.get(positions, 0)), longest)
    return raw, whole


def parser() -> argparse.ArgumentParser:
    """The options of this module."""
    made = argparse.ArgumentParser(description="Steps of layouts over several GPUs, beside what the planner says.")
    made.add_argument("--model", default="llama-3-70b", help="a shipped config's name, or a directory with config.json")
    made.add_argument("--layers", type=int, help="so many layers of it; default: all")
    made.add_argument("--ranks", type=int, default=4)
    made.add_argument("--device", default="auto", help="auto, cuda or cpu")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--machine", default="auto", help="of the library, or a profile's file; auto: by the GPU's name")
    made.add_argument("--tokens", default="64,256,1024,2048,4096,8192,16384", help="of steps of prompts")
    made.add_argument("--attention", choices=("heads", "batch", "all"), default="heads")
    made.add_argument("--looped", action="store_true", help="cut long steps where weights stay, as well")
    made.add_argument("--heads-or-batch", action="store_true", help="decodes with attention by heads, and by batch")
    made.add_argument("--contexts", default="2048,8192,32768", help="of these decodes")
    made.add_argument("--batch", type=int, default=64, help="sequences of these decodes")
    made.add_argument("--budget", type=float, default=100.0, help="seconds after which no step is begun")
    made.add_argument("--patience", type=float, default=240.0, help="seconds after which the ranks are killed")
    made.add_argument("--json", type=Path, help="file for what is found, written as it comes")
    made.add_argument("--plot", type=Path, help="draw what --json wrote, and run nothing")
    made.add_argument("--output", type=Path, default=Path("layouts.png"), help="of --plot")
    return made


def job_of(options: argparse.Namespace, meeting: str) -> tuple[Job, Dimensions, int]:
    """What the ranks do, the whole model, and how many layers of it they run. Raises ConfigError."""
    ranks = options.ranks
    device = "cpu" if options.device == "cpu" else resolve_device(options.device).type
    if ranks < 2 or (device != "cpu" and torch.cuda.device_count() < ranks):
        raise ConfigError(f"{ranks} ranks are not 2 to {torch.cuda.device_count()}, one for each GPU; set --ranks.")
    sizes, contexts = (list(map(int, text.split(","))) for text in (options.tokens, options.contexts))
    steps = [prompts(size, ranks) for size in sizes]
    longest = max(contexts) if options.heads_or_batch else max(step.context for step in steps)
    raw, layers = _config(options.model, options.layers, longest)
    dtype = registry.auto_dtype(raw, device) if options.dtype == "auto" else options.dtype
    spec = registry.open_model(raw, dtype).spec
    d = dimensions(spec)
    padded = padded_heads(d, ranks)
    if padded is None:
        raise ConfigError(f"{d.heads} heads cannot be cut over {ranks} ranks; take a number that divides them.")
    cases = []
    if options.heads_or_batch:
        if options.batch % ranks:
            raise ConfigError(f"batch is {options.batch}; it must be a multiple of the {ranks} ranks.")
        decodes = tuple(Shape(options.batch, 1, context) for context in contexts)
        for axes in ("zyx", ""):
            layout = Layout(Mesh(1, 1, ranks), "", axes)
            cases.append(Case(f"1D {layout.attention}", layout, decodes, rows=options.batch))
    else:
        for name, layout in all_layouts(ranks, padded.kv_heads, options.attention).items():
            cases.append(Case(name, layout, tuple(steps)))
            if options.looped and not layout.gather:
                long = tuple(step for step in steps if step.tokens > LONGEST)
                cases.append(Case(f"{name} looped", layout, long, looped=True))
    job = Job(raw, dtype, device, ranks, tuple(cases), meeting, options.budget, spec.kv.chunk_size)
    return job, replace(d, layers=layers), spec.num_layers


def run(options: argparse.Namespace) -> None:
    """Do what the options ask for."""
    if options.plot is not None:
        draw(json.loads(options.plot.read_text(encoding="utf-8")), options.output)
        print(options.output)
        return
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cellar-layouts-") as folder:
        job, whole, layers = job_of(options, f"{folder}/ranks")
        about = {"model": options.model, "layers": layers, "of_layers": whole.layers, "dtype": job.dtype}
        about |= {"ranks": job.ranks, "heads_or_batch": options.heads_or_batch}
        findings = Findings(about, job, whole, layers, options.machine, options.json)
        try:
            run_ranks(job, findings.hear, options.patience)
        finally:
            if not options.heads_or_batch:
                findings.crossings()
    print(f"{time.monotonic() - begin:.1f} s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    try:
        run(parser().parse_args(arguments))
    except CellarError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
