"""`cellar bench offline`: how fast a batch of prompts is done, beside what the machine could do at best."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cellar.bench.forecast import Forecast, ForecastReport
from cellar.bench.meter import MeteredRuntime, PhaseTotal, StepRecord, record, totals
from cellar.bench.transformers_peer import ORDERS, Reached, TransformersPeer
from cellar.bench.workload import LengthRange, Workload, random_workload
from cellar.core.config import EngineConfig
from cellar.core.errors import ConfigError
from cellar.core.hardware import Profile
from cellar.core.messages import StepPlan, StepResult
from cellar.core.sampling import SamplingParams
from cellar.engine.llm import LLM
from cellar.engine.measured_price import measured_price
from cellar.engine.opened import open_front
from cellar.reports.forecast import predict
from cellar.reports.limits import Limits, limits_of
from cellar.runtime.protocol import Runtime

BATCH_SIZES = (8, 16, 32, 64)

SETTLE_SECONDS = 4.0
"""An accelerator's engine is ready before each size of steps has its graph (decision 0084): beside the recording of the
others, which takes it about two seconds of idleness, a run would be that of a start."""


@dataclass(frozen=True)
class OfflineReport:
    """Figures of one run. Tokens are those asked for; rates are per second of the whole run."""

    model: str
    device: str
    dtype: str
    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_rate: float
    total_rate: float
    limits: Limits
    phases: tuple[PhaseTotal, ...]
    comparison: Mapping[str, Any] = field(default_factory=dict)
    forecast: ForecastReport | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({**asdict(self), "forecast": self.forecast.to_dict() if self.forecast else None})


class Bench:
    """An engine under measurement."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.records: list[StepRecord] = []  # steps that have finished; clear it before a run
        self.forecast = Forecast()
        config = EngineConfig.of(**options)
        self._price = measured_price(config)
        self._opened = open_front(config, wrap=self._metered)
        self._llm = LLM.over(self._opened)

    @property
    def llm(self) -> LLM:
        """The engine."""
        return self._llm

    def workload(self, num_prompts: int, inputs: LengthRange, outputs: LengthRange, seed: int) -> Workload:
        """Random prompts that fit the model."""
        llm = self._llm
        return random_workload(num_prompts, inputs, outputs, llm.spec.vocab_size, llm.max_model_len, seed)

    def renewed(self, workload: Workload, seed: int) -> Workload:
        """The same lengths, other tokens: prompts that came before would be found in the prefix cache."""
        random = np.random.default_rng(seed)
        vocab_size = self._llm.spec.vocab_size
        prompts = tuple(random.integers(0, vocab_size, len(prompt)).tolist() for prompt in workload.prompts)
        return Workload(prompts, workload.output_lengths)

    def run(self, workload: Workload) -> float:
        """Do a workload greedily, past end symbols; -> seconds."""
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in workload.output_lengths
        ]
        started = time.perf_counter()
        results = self._llm.generate(list(workload.prompts), params, use_tqdm=False)
        seconds = time.perf_counter() - started
        made = sum(len(result.outputs[0].token_ids) for result in results)
        if made != workload.num_output_tokens:
            raise RuntimeError(f"{made} tokens were made, but {workload.num_output_tokens} asked for")
        return seconds

    def report(self, workload: Workload, profile: Profile | None) -> OfflineReport:
        """Warm up with other prompts, run once, and put the figures beside the limits."""
        llm = self._llm
        self.run(self.workload(2, LengthRange(8, 8), LengthRange(4, 4), seed=-1 & 0xFFFF))
        if llm.config.device.device != "cpu":
            time.sleep(SETTLE_SECONDS)
        self.records.clear()
        predict(self.forecast, self._opened, profile, self._price)
        seconds = self.run(workload)
        forecast = self.forecast.report(workload.num_output_tokens, seconds)
        return OfflineReport(
            model=str(llm.config.model.model or "demo"),
            device=llm.config.device.device,
            dtype=llm.spec.dtype,
            num_prompts=len(workload.prompts),
            prompt_tokens=workload.num_prompt_tokens,
            output_tokens=workload.num_output_tokens,
            seconds=seconds,
            output_rate=workload.num_output_tokens / seconds,
            total_rate=(workload.num_prompt_tokens + workload.num_output_tokens) / seconds,
            limits=limits_of(llm.config.device.device, llm.spec.dtype, profile),
            phases=tuple(totals(self.records, llm.spec)),
            forecast=forecast,
        )

    def close(self) -> None:
        """Free the engine."""
        self._llm.close()

    def _metered(self, runtime: Runtime[StepPlan]) -> Runtime[StepPlan]:
        return MeteredRuntime(runtime, self._observe)

    def _observe(self, plan: StepPlan, result: StepResult) -> None:
        self.records.append(record(plan, result))
        self.forecast.observe(plan, result)


def compare_with_transformers(
    options: Mapping[str, Any],
    rounds: int,
    seed: int,
    say: Callable[[str], None],
    one: tuple[int, int] = (128, 256),
    many: tuple[int, LengthRange, LengthRange] = (64, LengthRange(16, 512), LengthRange(16, 256)),
    limit: float = math.inf,
) -> dict[str, Any]:
    """Both engines on the same work in this process, by turns; ratios are of medians of requested tokens per second.

    `limit` bounds the seconds of each side in each of the two comparisons, and of the search for the best batch. When
    it is used up, transformers stops within a batch and its rate is of what it has reached; our side begins no
    further run. `say` hears of every run, and of all that was cut.

    `options` open ours, anew for every turn: while it is open its idle threads would slow the other side down, and so
    would the other side's ours (docs/log/cpu-engine.md). `one` is a single prompt's input and output length; `many` is
    a batch, against the best of transformers' static batches: 8, 16, 32 or 64 sequences, in the given order or sorted.
    """
    with closing(Bench(options)) as bench:
        llm = bench.llm
        if llm.checkpoint is None or llm.config.model.load_format == "dummy":
            raise ConfigError(
                "comparing needs a checkpoint that both sides read; give a directory, and load_format auto."
            )
        checkpoint, dtype, device = llm.checkpoint, llm.spec.dtype, llm.config.device.device
        single = bench.workload(1, LengthRange(one[0], one[0]), LengthRange(one[1], one[1]), seed)
        batch = bench.workload(*many, seed)
    peer = TransformersPeer(checkpoint, dtype, device)
    found: dict[str, Any] = {}
    say("transformers, one prompt: warming up")
    peer.run(single, 1, "given", limit)
    other = partial(peer.run, single, 1, "given")
    found["one_prompt"] = _by_turns(options, single, other, rounds, seed, say, limit)
    say(_line(f"one prompt, {one[0]} -> {one[1]}", found["one_prompt"]))
    sizes = sorted({min(size, len(batch.prompts)) for size in BATCH_SIZES})
    ways = [(size, order) for size in sizes for order in (ORDERS if size < len(batch.prompts) else ORDERS[:1])]
    tried: dict[tuple[int, str], Reached] = {}
    for size, order in ways:
        tried[size, order] = peer.run(batch, size, order, limit / len(ways))
        say(f"transformers, batch {size}, order {order}: {_reached(tried[size, order])}")
    # What a part of sorted work shows is not the whole: a way that was cut stands behind those that were not.
    size, order = max(tried, key=lambda way: (tried[way].complete, tried[way].rate))
    # Trying the batches has warmed the other side up, too.
    found["batch"] = _by_turns(options, batch, partial(peer.run, batch, size, order), rounds, seed, say, limit)
    found["batch"] |= {"static_batch": size, "order": order, "search_complete": all(r.complete for r in tried.values())}
    title = f"{many[0]} prompts, {many[1]} -> {many[2]}, against batch {size}, order {order}"
    say(_line(title, found["batch"]))
    return found


def _by_turns(
    options: Mapping[str, Any],
    work: Workload,
    other: Callable[[float], Reached],
    rounds: int,
    seed: int,
    say: Callable[[str], None],
    limit: float,
) -> dict[str, Any]:
    """Each of our turns is an engine that has done the work once before, with other prompts.

    `other` gets the seconds that its side has left. The first round is always run.
    """
    ours: list[float] = []
    theirs: list[Reached] = []
    spent = 0.0
    for turn in range(rounds):
        left = limit - sum(reached.seconds for reached in theirs)
        if turn and (spent >= limit or left <= 0):
            say(f"the time limit of {limit:g} s ends the comparison after round {turn} of {rounds}")
            break
        with closing(Bench(options)) as bench:
            warm = bench.run(bench.renewed(work, seed + 1 + 2 * turn))
            # A second run of more than the limit says nothing that the first has not said.
            seconds = warm if warm >= limit else bench.run(bench.renewed(work, seed + 2 + 2 * turn))
        spent += warm + seconds
        ours.append(work.num_output_tokens / seconds)
        say(f"round {turn + 1} of {rounds}: cellar {ours[-1]:.0f} tok/s, {seconds:.1f} s")
        theirs.append(other(left))
        say(f"round {turn + 1} of {rounds}: transformers {_reached(theirs[-1])}")
    a, b = statistics.median(ours), statistics.median(reached.rate for reached in theirs)
    return {
        "cellar": a,
        "transformers": b,
        "ratio": a / b,
        "cellar_runs": ours,
        "transformers_runs": [reached.rate for reached in theirs],
        "rounds": len(ours),
        "complete": len(ours) == rounds and all(reached.complete for reached in theirs),
    }


def _reached(run: Reached) -> str:
    cut = "" if run.complete else f", cut after {run.num_tokens:,} tokens"
    return f"{run.rate:.0f} tok/s, {run.seconds:.1f} s{cut}"


def _line(title: str, result: Mapping[str, Any]) -> str:
    return (
        f"{title}: cellar {result['cellar']:.0f} tok/s, transformers {result['transformers']:.0f} tok/s, "
        f"ratio {result['ratio']:.2f}"
    )


def print_report(report: OfflineReport) -> None:
    """Tables for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"{report.num_prompts} prompts, {report.prompt_tokens:,} tokens in, {report.output_tokens:,} out, in "
        f"{report.seconds:.2f} s: {report.output_rate:,.1f} output tok/s, {report.total_rate:,.1f} total tok/s",
        soft_wrap=True,
    )
    limits = report.limits
    table = Table(title=f"{report.model}, {report.dtype} on {limits.device}", title_justify="left")
    table.add_column("phase", no_wrap=True)
    for column in ("steps", "tokens", "seconds", "tok/s", "GB/s", "GFLOP/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for phase in report.phases:
        table.add_row(phase.phase, *_rates(phase, limits))
    outside = report.seconds - sum(phase.seconds for phase in report.phases)
    table.add_row("outside steps", "", "", f"{outside:.2f}")
    table.add_row("limit", "", "", "", "", f"{limits.bandwidth / 1e9:,.1f}", f"{limits.flops / 1e9:,.0f}")
    console.print(table)
    console.print(
        f"Bytes and FLOPs are the fewest that the work needs; the limit is from a {limits.source}.", soft_wrap=True
    )
    if report.forecast is not None:
        for line in report.forecast.lines():
            console.print(line, soft_wrap=True)
    else:
        console.print("Nothing was predicted: no profile of this machine is known; `cellar profile` makes one.")


def _rates(phase: PhaseTotal, limits: Limits) -> Sequence[str]:
    bandwidth, flops = phase.nbytes / phase.seconds, phase.flops / phase.seconds
    return (
        f"{phase.num_steps:,}",
        f"{phase.num_tokens:,}",
        f"{phase.seconds:.2f}",
        f"{phase.num_tokens / phase.seconds:,.0f}",
        f"{bandwidth / 1e9:,.1f} ({bandwidth / limits.bandwidth:.0%})",
        f"{flops / 1e9:,.0f} ({flops / limits.flops:.0%})",
    )
