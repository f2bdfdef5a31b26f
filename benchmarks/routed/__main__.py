"""Routings compared with real engines of the demo model, by turns, on the same conversations.

    python -m benchmarks.routed --trace mooncake_conversation.jsonl --prompts 1200 --speedup 2
    python -m benchmarks.routed --sharegpt sharegpt55_lengths.json --scale 16 --prompts 60 --rate 0.5

Each routing has engines of its own, whose caches stay. The load is cut into slices; each routing serves the first one,
then each the second one, and so on: a machine that others use is as busy for one as for the other. Lengths are divided
by `--scale`. What the affinity router goes by is measured at the start. Of as many placements as `--judged` says all
replicas are asked at once what they hold: seconds are *lost* by what the router did not know. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.routed.fleet import Fleet
from benchmarks.routed.replica import Setting, prices, shape
from cellar.bench.workloads import (
    Conversation,
    Load,
    Piece,
    Vocabulary,
    gamma_arrivals,
    read_lengths,
    read_trace,
    sharegpt_lengths,
    with_think_times,
)
from cellar.routing.baselines import least_loaded, round_robin
from cellar.routing.prices import RoutePrices
from cellar.routing.router import AffinityRouter, Router

CONTEXT = 2047
ROUTINGS = ("affinity", "least-loaded", "round-robin")
WRONG = 1e-3
"""Seconds: a placement that costs so much more than the best one was wrong."""


def scaled(load: Load, by: float) -> Load:
    """All lengths divided, no less than 1; equal beginnings stay equal."""

    def shrunk(talk: Conversation) -> Conversation:
        turns = (
            replace(
                turn,
                pieces=tuple(Piece(key, math.ceil(length / by)) for key, length in turn.pieces),
                output_tokens=math.ceil(turn.output_tokens / by),
            )
            for turn in talk.turns
        )
        return Conversation(tuple(turns))

    return Load(tuple(map(shrunk, load.conversations)), load.arrivals)


def slices(load: Load, count: int) -> list[tuple[int, Load]]:
    """Equally many conversations each, by arrival, and the number of the first of each."""
    bounds = np.linspace(0, len(load.arrivals), count + 1).astype(int).tolist()
    return [
        (a, Load(load.conversations[a:b], load.arrivals[a:b] - load.arrivals[a])) for a, b in pairwise(bounds) if a < b
    ]


def figures(fleet: Fleet) -> dict[str, object]:
    """Of all turns so far; seconds, but for ms a token."""
    first = np.array([turn.first for turn in fleet.done])
    each = np.array([1e3 * turn.seconds / len(turn.tokens) for turn in fleet.done])
    lost = np.array(fleet.losses or [0.0])
    return {
        "turns": len(fleet.done),
        "prompt_tokens": sum(turn.prompt for turn in fleet.done),
        "found": round(sum(turn.cached for turn in fleet.done) / sum(turn.prompt for turn in fleet.done), 4),
        "first_p50": round(float(np.quantile(first, 0.5)), 4),
        "first_p90": round(float(np.quantile(first, 0.9)), 4),
        "ms_token_p50": round(float(np.quantile(each, 0.5)), 1),
        "ms_token_p90": round(float(np.quantile(each, 0.9)), 1),
        "judged": len(fleet.losses),
        "wrong": round(float((lost >= WRONG).mean()), 3),
        "lost_mean": round(float(lost.mean()), 5),
        "lost_p99": round(float(np.quantile(lost, 0.99)), 5),
        "reasons": dict(fleet.reasons),
    }


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--sharegpt", type=Path)
    parser.add_argument("--scale", type=float, default=64.0)
    parser.add_argument("--prompts", type=int, default=1200, help="of a trace; of ShareGPT conversations")
    parser.add_argument("--speedup", type=float, default=1.0, help="of a trace")
    parser.add_argument("--rate", type=float, default=1.0, help="of ShareGPT: conversations a second")
    parser.add_argument("--think", type=float, default=10.0, help="of ShareGPT: seconds before a turn")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kv-tokens", type=int, default=42_579, help="of each replica")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two reports of a replica")
    parser.add_argument("--judged", type=int, default=40)
    parser.add_argument("--slices", type=int, default=6)
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=ROUTINGS)
    options = parser.parse_args()
    load = read(options)
    setting = Setting(options.kv_tokens, options.interval)
    make: dict[str, Callable[[RoutePrices], Router]] = {
        "affinity": lambda found: AffinityRouter(found, shape(setting)),
        "least-loaded": lambda found: least_loaded(),
        "round-robin": lambda found: round_robin(),
    }
    every = max(1, load.num_requests // options.judged) if options.judged else 0
    vocabulary = Vocabulary(1, 4000)
    with ExitStack() as stack:
        fleets = {}
        for name in options.routings:
            fleets[name] = Fleet(name, options.replicas, setting)
            stack.callback(fleets[name].close)
        measured = [fleet.measure() for fleet in fleets.values()]  # one after the other, as they serve later
        found = prices([each for several in measured for each in several])
        print(json.dumps({"chunk_seconds": found.compute, "step": [found.step.fixed, found.step.per_row]}), flush=True)
        for name, fleet in fleets.items():
            fleet.begin(make[name], found, every)
        for number, (first, part) in enumerate(slices(load, options.slices)):
            for name, fleet in fleets.items():
                fleet.hold(part, vocabulary, first)
                print(json.dumps({"slice": number, "routing": name, **figures(fleet)}), flush=True)
        print(json.dumps({name: figures(fleet) for name, fleet in fleets.items()}))


def read(options: argparse.Namespace) -> Load:
    """The load, as small as it is to be."""
    if options.trace is not None:
        load = read_trace(options.trace).load(options.prompts, options.speedup)
    elif options.sharegpt is not None:
        talks = sharegpt_lengths(read_lengths(options.sharegpt), options.prompts, multi_turn=True)
        load = Load(with_think_times(talks, options.think), gamma_arrivals(options.prompts, options.rate))
    else:
        raise SystemExit("give --trace or --sharegpt.")
    return scaled(load, options.scale).within(CONTEXT)


if __name__ == "__main__":
    main()
