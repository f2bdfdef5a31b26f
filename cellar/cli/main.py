"""The command `cellar`: one file a verb, put together here. Verbs import what they need when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from cellar.cli.batch import batch
from cellar.cli.bench import bench
from cellar.cli.chat import chat
from cellar.cli.generate import generate
from cellar.cli.help import WIDEST, Command, Group
from cellar.cli.inspect import inspect
from cellar.cli.plan import plan
from cellar.cli.profile import profile
from cellar.cli.serve import serve
from cellar.cli.simulate import simulate
from cellar.version import __version__


def _show_version(show: bool) -> None:
    if show:
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
        rich_markup_mode=None,
        cls=Group,
        context_settings={"max_content_width": WIDEST},
    )
    app.callback()(_root)
    app.command(cls=Command)(generate)
    app.command(cls=Command)(chat)
    app.command(cls=Command)(serve)
    app.command(cls=Command)(batch)
    app.command(cls=Command)(inspect)
    app.command(cls=Command)(plan)
    app.command(cls=Command)(simulate)
    app.add_typer(bench, name="bench")
    app.command(cls=Command)(profile)
    return app


def main() -> None:
    """Entry point of the installed command."""
    build()()
