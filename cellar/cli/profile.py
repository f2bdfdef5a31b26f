"""`cellar profile`: measure this machine; what the planner and the cache's policy rest on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cellar.cli.verb import verb


@verb()
def profile(
    output: Annotated[
        Path | None, typer.Option(help="File to write; default: ~/.cache/cellar/profile-MACHINE.json.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; cpu measures the host alone.")] = "auto",
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the host's figures; default: all cores.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Also measure this model's linear layers, and its attention scores if it has weights: directory, hub "
            "name, or a shipped config's name."
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Also measure collectives among so many ranks: a GPU for each, or a process of the CPU (gloo); plans "
            "for this profile are priced by them.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the file's path only.")] = False,
) -> None:
    """Measure memory, matrix products, links, disk and launches of this machine, and write them to a file."""
    from cellar.reports.profile import measure_machine, print_profile

    found, path = measure_machine(
        device, num_threads, output, lambda name: None if quiet else typer.echo(f"measuring {name}"), model, ranks
    )
    if not quiet:
        print_profile(found)
    typer.echo(str(path))
