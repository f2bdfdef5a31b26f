"""`cellar bench serve`: load against a server with OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cellar.bench.serve.options import DatasetOptions, ResultOptions, TargetOptions, TrafficOptions
from cellar.cli.verb import OptionGroup, verb
from cellar.core.errors import ConfigError
from cellar.core.extras import missing


@verb(
    target=OptionGroup("Server", (TargetOptions,)),
    dataset=OptionGroup("Dataset", (DatasetOptions,)),
    traffic=OptionGroup("Traffic", (TrafficOptions,)),
    results=OptionGroup("Results", (ResultOptions,)),
)
def serve(
    bounds: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    *,
    target: dict[str, Any],
    dataset: dict[str, Any],
    traffic: dict[str, Any],
    results: dict[str, Any],
) -> None:
    """Latency, throughput and goodput of any server with OpenAI's API, as its users would see them."""
    # As vLLM has it, one --goodput may be followed by several bounds.
    if bounds and not results["goodput"]:
        raise ConfigError(f"{bounds[0]!r} belongs to no option; bounds such as ttft:200 follow --goodput.")
    results["goodput"] = [*(results["goodput"] or ()), *(bounds or ())]
    options = TargetOptions(**target), DatasetOptions(**dataset), TrafficOptions(**traffic), ResultOptions(**results)
    try:
        from cellar.bench.serve.command import ServeBench
    except ModuleNotFoundError as error:
        raise missing("load tests need", error.name, "bench") from error

    ServeBench(*options).run(typer.echo, lambda line: typer.echo(f"cellar: {line}", err=True))
