"""A real run beside its simulation: the load is read from the run's own file, then both are reported alike."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cellar.bench.workload import LengthRange, random_workload
from cellar.bench.workloads import Conversation, Load, Piece, Turn
from cellar.core.errors import ConfigError
from cellar.reports.load import LoadReport, RequestTiming
from cellar.simulate.simulator import SimulatedRun


@dataclass(frozen=True, eq=False)
class Measured:
    """A real run: its load as it came to the engine and the dtype it ran in, if the file tells, and its figures."""

    load: Load | None
    figures: Mapping[str, float]
    dtype: str | None = None


def read_measured(path: Path, inputs: str, outputs: str, seed: int) -> Measured:
    """The JSON of `cellar bench serve` (best with --save-detailed) or of `cellar bench offline`, also as its last line.

    Of an offline run lengths are drawn again from the options that it had; their sums must be the run's.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
        data = json.loads(text.splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(
            f"the run {path} cannot be read ({error}); give the JSON that `cellar bench serve --save-detailed` or "
            "`cellar bench offline` writes."
        ) from error
    if isinstance(data, list):
        raise ConfigError(f"{path} has {len(data)} runs of a sweep; give a file with one run.")
    if "output_rate" in data:
        return _offline(data, path, inputs, outputs, seed)
    if "output_throughput" not in data:
        raise ConfigError(
            f"{path} is not a report of a run; give one of `cellar bench serve` or `cellar bench offline`."
        )
    load = None
    if "start_times" in data:
        seen = _timings(data)
        load, data = _load(seen), LoadReport.of(seen, _span(seen), percentiles=(50.0, 99.0)).to_dict()
    return Measured(load, {key: float(v) for key, v in data.items() if isinstance(v, int | float)})


def _offline(data: Mapping[str, Any], path: Path, inputs: str, outputs: str, seed: int) -> Measured:
    lengths = LengthRange.parse(inputs, "input_len"), LengthRange.parse(outputs, "output_len")
    work = random_workload(int(data["num_prompts"]), *lengths, 2, 1 << 30, seed)
    if (work.num_prompt_tokens, work.num_output_tokens) != (data["prompt_tokens"], data["output_tokens"]):
        raise ConfigError(
            f"{path} had {data['prompt_tokens']:,} tokens in and {data['output_tokens']:,} out, but {inputs} and "
            f"{outputs} with seed {seed} give {work.num_prompt_tokens:,} and {work.num_output_tokens:,}; give the "
            "run's --input-len, --output-len and --seed."
        )
    turns = [Turn((Piece(_OWN + k, len(prompt)),), n) for k, (prompt, n) in enumerate(zip(*_parts(work), strict=True))]
    load = Load(tuple(Conversation((turn,)) for turn in turns), np.zeros(len(turns)))
    figures = {
        "duration": float(data["seconds"]),
        "output_throughput": float(data["output_rate"]),
        "total_token_throughput": float(data["total_rate"]),
    }
    for phase in data["phases"]:
        figures[f"{phase['phase']}_steps"] = float(phase["num_steps"])
        figures[f"{phase['phase']}_seconds"] = float(phase["seconds"])
    return Measured(load, figures, data.get("dtype"))


def _parts(work: Any) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    return work.prompts, work.output_lengths


_OWN = 1 << 40  # keys of pieces that nobody shares


def _timings(data: Mapping[str, Any]) -> list[RequestTiming]:
    """What --save-detailed kept."""
    found = []
    count = len(data["start_times"])
    numbers = data.get("conversations") or [-1] * count
    turns = data.get("turns") or [0] * count
    for k in range(count):
        start, ttft, gaps = float(data["start_times"][k]), data["ttfts"][k], np.array(data["itls"][k], np.float64)
        failed = ttft is None
        first = math.nan if failed else start + float(ttft)
        finish = start if failed else first + float(gaps.sum())
        found.append(
            RequestTiming(
                start,
                first,
                finish,
                int(data["input_lens"][k]),
                int(data["output_lens"][k]),
                gaps=gaps,
                error=data["errors"][k] or ("failed" if failed else None),
                conversation=k if numbers[k] < 0 else int(numbers[k]),
                turn=int(turns[k]),
            )
        )
    return found


def _load(seen: Sequence[RequestTiming]) -> Load:
    """The load that a run's requests make: what each turn added, and how long after the answer it came."""
    by_number: dict[int, list[RequestTiming]] = {}
    for timing in seen:
        if timing.ok:
            by_number.setdefault(timing.conversation, []).append(timing)
    arrivals, found = [], []
    for number, turns in sorted(by_number.items(), key=lambda item: min(t.arrival for t in item[1])):
        turns.sort(key=lambda t: t.turn)
        arrivals.append(turns[0].arrival)
        said, before, ended = [], 0, turns[0].arrival
        for t in turns:
            added = max(1, t.prompt_tokens - before)
            piece = Piece(_OWN + (number << 12) + t.turn, added)
            said.append(Turn((piece,), t.output_tokens, max(0.0, t.arrival - ended)))
            before, ended = t.prompt_tokens + t.output_tokens, t.finish
        found.append(Conversation(tuple(said)))
    origin = min(arrivals, default=0.0)
    return Load(tuple(found), np.array(arrivals) - origin)


def _span(seen: Sequence[RequestTiming]) -> float:
    """Seconds from the first arrival to the last token."""
    return max(t.finish for t in seen) - min(t.arrival for t in seen)


def phases(run: SimulatedRun) -> dict[str, float]:
    """Steps and seconds by phase, as `cellar bench offline` sums them."""
    found: dict[str, float] = {}
    for step in run.steps:
        phase = "decode" if step.num_decodes == step.num_tokens else "mixed" if step.num_decodes else "prefill"
        found[f"{phase}_steps"] = found.get(f"{phase}_steps", 0.0) + 1
        found[f"{phase}_seconds"] = found.get(f"{phase}_seconds", 0.0) + step.end - step.begin
    return found


COMPARED = (
    "duration",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "max_concurrent_requests",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
    "median_e2el_ms",
    "p99_e2el_ms",
    "prefill_steps",
    "prefill_seconds",
    "mixed_steps",
    "mixed_seconds",
    "decode_steps",
    "decode_seconds",
)


def beside(simulated: Mapping[str, Any], measured: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Key, simulated, measured: what both have."""
    found = []
    for key in COMPARED:
        one, other = simulated.get(key), measured.get(key)
        if one is not None and other is not None:
            found.append((key, float(one), float(other)))
    return found


def compared_lines(rows: Sequence[tuple[str, float, float]]) -> list[str]:
    """A table for people."""
    lines = [f"{'':<28} {'simulated':>12} {'measured':>12} {'ratio':>8}"]
    for key, one, other in rows:
        ratio = f"{one / other:8.2f}" if other else f"{'-':>8}"
        lines.append(f"{key:<28} {one:12,.2f} {other:12,.2f} {ratio}")
    return lines
