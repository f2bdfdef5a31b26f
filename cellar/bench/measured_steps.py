"""Measured steps of a model on this machine, for the cost model to be fitted to; kept in the machine's profile.

    cellar profile --output profile.json
    python -m cellar.bench.measured_steps --profile profile.json [--model DIRECTORY] [--num-threads 2]

`cellar simulate --machine profile.json` then uses them for this model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cellar.bench.offline import Bench
from cellar.bench.workload import LengthRange
from cellar.core.dtypes import dtype_name
from cellar.core.hardware import Profile, Table
from cellar.planner.calibration import STEP_COLUMNS, table_name

RUNS = (
    (1, "32", "48"),
    (1, "1800", "48"),
    (6, "32", "48"),
    (6, "900-1500", "40"),
    (40, "16-48", "40"),
    (32, "16-512", "48"),
)
"""Prompts, tokens of each, tokens of each answer. Few rows and many, each with short contexts and with long ones: else
what a row costs could not be told from what its context costs."""


def measure_steps(bench: Bench, runs: Sequence[tuple[int, str, str]] = RUNS, seed: int = 0) -> Table:
    """All steps of some offline runs."""
    bench.run(bench.workload(2, LengthRange(8, 8), LengthRange(4, 4), seed + 1))
    rows: list[tuple[float | int | str, ...]] = []
    for count, inputs, outputs in runs:
        bench.records.clear()
        answers = _at_most(LengthRange.parse(outputs, "outputs"), bench.llm.max_model_len // 2)
        prompts = _at_most(LengthRange.parse(inputs, "inputs"), bench.llm.max_model_len - answers.high)
        bench.run(bench.workload(count, prompts, answers, seed))
        for r in bench.records:
            has_prompts = int(r.phase != "decode")
            seconds = float(f"{r.seconds:.4g}")
            rows.append((r.num_tokens, r.num_sampled, r.context, r.resident, has_prompts, seconds))
    return Table(STEP_COLUMNS, tuple(rows))


def _at_most(lengths: LengthRange, room: int) -> LengthRange:
    return LengthRange(min(lengths.low, room), min(lengths.high, room))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m cellar.bench.measured_steps", description=__doc__)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-threads", type=int, default=None)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(argv)
    profile = Profile.load(options.profile)
    engine: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "num_threads": options.num_threads,
        "device": options.device,
        "enable_prefix_caching": False,
    }
    bench = Bench(engine)
    try:
        table = measure_steps(bench)
        name = table_name(options.model or "demo", dtype_name(bench.llm.spec.dtype))
    finally:
        bench.close()
    replace(profile.merged(tables={name: table}), model=options.model or "demo").save(options.profile)
    print(f"{len(table.rows)} steps: {name} in {options.profile}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
