"""`python -m benchmarks.cells`: the benchmark for machines that have torch but not the command line's packages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cells.run import CellsOptions, parse_rates, run
from benchmarks.cells.setup import MODELS, Setup
from benchmarks.cells.sweep import Schedule
from cellar.core.errors import CellarError


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print. 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cells", description="Recurrent models under load.")
    add = parser.add_argument
    defaults, times = Setup(), Schedule()
    add("--model", choices=MODELS, default=defaults.model)
    add("--hidden", type=int, default=defaults.hidden)
    add("--vocab", type=int)
    add("--data", help="wmt, wmt-50, fixed-24, treebank, fixed-16, or a file of sentences or trees")
    add("--device", default=defaults.device)
    add("--dtype", default=defaults.dtype)
    add("--threads", type=int)
    add("--max-batch", type=int)
    add("--decoder-batch", type=int)
    add("--tree-batch", type=int, help="most nodes of a task of our trees' cells; default: 4 x max-batch, GPU 8 x")
    add("--max-tasks", type=int, help="tasks of a decision; default: 5 on a CPU and where chains grow, else 16")
    add(
        "--systems", default="", help="cellar first, then merging, padding-10, library-10, ideal; default: all that fit"
    )
    add("--run-ahead", type=int, help="decisions on their way to the device; default: 1 on a CPU, else 2")
    add("--answer-tasks", type=int, default=defaults.answer_tasks, help="tasks whose results a GPU gives at once")
    add("--ahead", action="store_true", help="unfold the pool's requests before the clock starts")
    add("--load", choices=("sweep", "max"), default="sweep")
    add("--rates", default="", help="requests/s, comma-separated; default: from the saturated throughput")
    add("--seconds", type=float, default=times.seconds)
    add("--rounds", type=int, default=times.rounds)
    add("--refinements", type=int, default=times.refinements)
    add("--requests", type=int, default=times.saturating_requests, help="requests of a saturated run")
    add("--clock", choices=("wall", "work"), default=defaults.clock, help="work: CPU time of one thread per system")
    add("--seed", type=int, default=0)
    add("--json", type=Path)
    add("--png", type=Path)
    given = parser.parse_args(arguments)
    try:
        run(
            CellsOptions(
                setup=Setup(
                    model=given.model,
                    hidden=given.hidden,
                    vocab=given.vocab,
                    data=given.data,
                    device=given.device,
                    dtype=given.dtype,
                    threads=given.threads,
                    max_batch=given.max_batch,
                    decoder_batch=given.decoder_batch,
                    tree_batch=given.tree_batch,
                    max_tasks=given.max_tasks,
                    run_ahead=given.run_ahead,
                    answer_tasks=given.answer_tasks,
                    ahead=given.ahead,
                    clock=given.clock,
                    seed=given.seed,
                ),
                schedule=Schedule(
                    seconds=given.seconds,
                    rounds=given.rounds,
                    rates=parse_rates(given.rates),
                    refinements=given.refinements,
                    saturating_requests=given.requests,
                    seed=given.seed,
                ),
                systems=tuple(filter(None, given.systems.split(","))),
                load=given.load,
                json=given.json,
                png=given.png,
            ),
            say=lambda line: print(line, flush=True),
        )
    except CellarError as error:
        print(f"cells: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
