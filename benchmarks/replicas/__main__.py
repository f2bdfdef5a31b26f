"""Servers of one machine compared under the same load of conversations, one server after the other.

    python -m benchmarks.replicas --model llama-3-8b --replicas 1,2,4 --rate 24 --seconds 60 --json FILE
    python -m benchmarks.replicas --model llama-2-70b --tensor-parallel-size 4 --kv-cache-memory-bytes 5368709120 \\
        --kv-offloading-size 64 --compare-without-tiers --rate 8 --think 15 --seconds 60

Options that are not listed here are those of `cellar serve`. Rates, fronts and client processes are for each replica.
Printed are a table, and each server against the first; "found" are prompt tokens that came from a cache, of those that
had been computed before. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.replicas.load import Load, Turns, measure
from benchmarks.replicas.servers import running
from cellar.bench.workloads import read_lengths
from cellar.core.errors import CellarError, ConfigError

HEAD = (
    "| server | requests/s | tokens/s | ms a token p50 / p90 | first token p50 / p90, ms | found of what could be "
    "| prompt tokens from | choices |\n|---|---|---|---|---|---|---|---|"
)
RATIOS = {
    "load": "offered_per_second",
    "requests": "requests_per_second",
    "tokens": "tokens_per_second",
    "ms a token p90": "ms_per_token_p90",
    "first token p90": "first_token_ms_p90",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """A server: the arguments of `cellar serve`. Its load is as many times the options' as it has replicas."""

    label: str
    replicas: int
    serve: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="name of a shipped config, or a directory; default: the demo model")
    parser.add_argument("--load-format", choices=("auto", "dummy"), help="default: dummy, but auto for the demo model")
    parser.add_argument("--replicas", type=_numbers, default=(1,), help="of one server after the other: 1,2,4")
    parser.add_argument("--kv-offloading-size", help="GiB of host memory for KV")
    parser.add_argument("--compare-without-tiers", action="store_true", help="serve without --kv-offloading-size first")
    parser.add_argument("--rate", type=float, default=24.0, help="requests/s")
    parser.add_argument("--think", type=float, default=1.5, help="seconds before a further turn, on average")
    parser.add_argument("--warm", type=int, default=5, help="seconds that are not counted")
    parser.add_argument("--seconds", type=int, default=60, help="seconds that are")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds between a server's start and its load")
    parser.add_argument("--lengths", type=Path, help="JSON of conversations' lengths; default: drawn, lognormal")
    parser.add_argument("--vocab-size", type=int, default=32000, help="prompts have random ids below")
    parser.add_argument("--fronts", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options, others = parser.parse_known_args(arguments)
    try:
        results = compare(options, others)
    except CellarError as error:
        sys.exit(f"cellar: {error}")
    print("\n".join([*table(results), *ratios(results)]))
    print(json.dumps(results))


def compare(options: argparse.Namespace, others: Sequence[str]) -> list[dict[str, Any]]:
    """The figures of each server; `--json` has them as soon as they are there."""
    lengths = drawn(options.seed) if options.lengths is None else read_lengths(options.lengths)
    results: list[dict[str, Any]] = []
    for trial in trials(options, others):
        print(f"$ {shlex.join(['cellar', 'serve', *trial.serve])}", flush=True)
        load = Load(
            lengths=lengths,
            rate=options.rate * trial.replicas,
            think=options.think,
            warm=options.warm,
            seconds=options.seconds,
            vocab_size=options.vocab_size,
            seed=str(options.seed),
            clients=options.clients * trial.replicas,
        )
        with running(trial.serve) as server:
            time.sleep(options.settle)
            found = measure(server.root, server.model, load.within(server.max_model_len))
        offered = {"offered_per_second": load.rate, "think": load.think, "seconds": load.seconds, "seed": options.seed}
        results.append({"server": trial.label, "command": trial.serve, **offered, **found})
        print(remarks(results[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def trials(options: argparse.Namespace, others: Sequence[str]) -> list[Trial]:
    """The servers in their order. Raises ConfigError if there are no tiers to compare without."""
    tiers = () if options.kv_offloading_size is None else ("--kv-offloading-size", options.kv_offloading_size)
    if options.compare_without_tiers and not tiers:
        raise ConfigError("compare_without_tiers has no tiers to leave out; give --kv-offloading-size, too.")
    format = options.load_format or ("auto" if options.model is None else "dummy")
    common = [] if options.model is None else [options.model]
    common += ["--load-format", format, "--skip-tokenizer-init", "--log-level", "warning", *others]
    found = []
    for replicas in options.replicas:
        fronts = str(replicas * options.fronts)
        serve = (*common, "--replicas", str(replicas), "--api-server-count", fronts)
        label = f"{replicas} replica{'s' if replicas > 1 else ''}"
        if options.compare_without_tiers:
            found.append(Trial(f"{label} without tiers", replicas, serve))
            label += " with tiers"
        found.append(Trial(label, replicas, (*serve, *tiers)))
    return found


def drawn(seed: int, count: int = 500) -> list[Turns]:
    """Lengths as those of the 55 ShareGPT conversations are on the whole: turns, tokens added, tokens of answers."""
    rng = random.Random(seed)

    def draw(mu: float, sigma: float, low: int) -> int:
        return min(2048, max(low, round(rng.lognormvariate(mu, sigma))))

    return [[(draw(4.0, 1.2, 4), draw(5.2, 0.9, 2)) for _ in range(draw(1.7, 0.3, 2))] for _ in range(count)]


# -- what is printed --------------------------------------------------------------------------------


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown, as docs/log/hosts.md has it."""
    found = [HEAD]
    for result in results:
        share = result["found_share"]
        cells = (
            result["server"],
            f"{result['requests_per_second']:.1f}",
            f"{result['tokens_per_second']:,.0f}",
            _pair(result, "ms_per_token", 1),
            _pair(result, "first_token_ms", 0),
            "-" if share is None else f"{100 * share:.0f} %",
            _counted(result["counters"], "prompt_tokens_by_source_total", "source"),
            _counted(result["counters"], "router_choices_total", "reason"),
        )
        found.append(f"| {' | '.join(cells)} |")
    return found


def ratios(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each server against the first."""
    found = []
    for result in results[1:]:
        parts = [f"{name} x{result[key] / results[0][key]:.2f}" for name, key in RATIOS.items()]
        found.append(f"{result['server']} against {results[0]['server']}: {', '.join(parts)}")
    return found


def remarks(result: Mapping[str, Any]) -> str:
    """A line by which the figures can be believed, or not."""
    return (
        f"{result['server']}: {result['requests']} requests, {result['errors']} errors {result['first_errors'] or ''}, "
        f"{result['in_flight_at_end']} in flight at the end for at most {result['oldest_in_flight_seconds']:.1f} s, "
        f"clients at {result['client_busy_max']:.2f} of a core"
    )


def _pair(result: Mapping[str, Any], name: str, digits: int) -> str:
    return f"{result[f'{name}_p50']:,.{digits}f} / {result[f'{name}_p90']:,.{digits}f}"


def _counted(counters: Mapping[str, float], name: str, label: str) -> str:
    """Sums of a counter by one of its labels, largest first."""
    sums: dict[str, float] = {}
    for key, value in counters.items():
        if key.startswith(name + "{") and (match := re.search(rf"\b{label}=(\w+)", key)):
            sums[match[1]] = sums.get(match[1], 0.0) + value
    return ", ".join(f"{of} {value:,.0f}" for of, value in sorted(sums.items(), key=lambda pair: -pair[1]))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
    main()
