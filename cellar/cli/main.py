"""The command `cellar`: one file a verb, put together here. Verbs import what they need when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from cellar.cli.batch import batch
from cellar.cli.bench import bench
from cellar.cli.chat import chat
from cellar.cli.generate import generate
from cellar.cli.inspect import inspect
from cellar.cli.plan import plan
from cellar.cli.profile import profile
from cellar.cli.serve import serve
from cellar.cli.simulate import simulate
from cellar.version import __version__


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cellar {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run language models: text from a checkpoint, many requests at a time, on a laptop or a GPU."""


def build() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        name="cellar",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    app.command()(generate)
    app.command()(chat)
    app.command()(serve)
    app.command()(batch)
    app.command()(inspect)
    app.command()(plan)
    app.command()(simulate)
    app.add_typer(bench, name="bench")
    app.command()(profile)
    return app


def main() -> None:
    """Entry point of the installed command."""
    build()()
