"""`cellar bench`: measurements. Their last line is JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cellar.cli.bench_serve import serve
from cellar.cli.bench_step import step
from cellar.cli.help import Command, Group
from cellar.cli.verb import ENGINE, verb
from cellar.core.errors import ConfigError

bench = typer.Typer(
    help="Measure this machine with a model, or a server.", no_args_is_help=True, cls=Group, rich_markup_mode=None
)
bench.command(cls=Command)(serve)
bench.command(cls=Command)(step)

# A second run must not find the first one's prompts in the cache.
_ENGINE = replace(ENGINE, defaults={"enable_prefix_caching": False})


@bench.command(cls=Command)
@verb(engine=_ENGINE)
def offline(
    num_prompts: Annotated[int, typer.Option(help="Prompts in the batch.")] = 64,
    input_len: Annotated[str, typer.Option(help="Tokens per prompt: a length, or a range such as 16-512.")] = "16-512",
    output_len: Annotated[str, typer.Option(help="Tokens to generate per prompt: a length or a range.")] = "16-256",
    dataset: Annotated[Literal["random"], typer.Option(help="random: random tokens, uniform lengths.")] = "random",
    profile: Annotated[
        Path | None,
        typer.Option(help="Profile with the machine's limits; default: this machine's, else a quick probe."),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="transformers: also run the same work with transformers.generate, alternating.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Runs of each side of a comparison.")] = 3,
    time_limit: Annotated[
        float, typer.Option(help="Seconds after which a side of a comparison is cut, at what it has reached.")
    ] = 60.0,
    *,
    engine: dict[str, Any],
) -> None:
    """Throughput of a batch of prompts, with achieved bandwidth and FLOP/s beside the machine's limits."""
    if compare not in (None, "transformers"):
        raise ConfigError(f"compare is {compare!r}; the only peer known is transformers.")
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}; it must be at least 1.")
    if not time_limit > 0:
        raise ConfigError(f"time_limit is {time_limit:g}; it must be more than 0 seconds.")
    from cellar.bench.offline import Bench, compare_with_transformers, print_report
    from cellar.bench.workload import LengthRange
    from cellar.core.hardware import Profile

    limits = None if profile is None else Profile.load(profile)
    inputs = LengthRange.parse(input_len, "input_len")
    outputs = LengthRange.parse(output_len, "output_len")
    measured = Bench(engine)
    try:
        report = measured.report(measured.workload(num_prompts, inputs, outputs, engine["seed"]), limits)
        print_report(report)
    finally:
        measured.close()
    if compare is not None:
        comparison = compare_with_transformers(engine, rounds, engine["seed"], typer.echo, limit=time_limit)
        report = replace(report, comparison=comparison)
    typer.echo(report.to_json())
