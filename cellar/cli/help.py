"""`--help` as plain text: every option with its whole name, however narrow the terminal is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

WIDEST = 100


class Command(TyperCommand):
    """A verb; its options stand under the titles of their groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, the verb's own options, then those of each group."""
        write_panels(self.get_params(ctx), ctx, formatter)


class Group(TyperGroup):
    """Verbs, in the order in which they were added."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Options, then the verbs."""
        write_panels(self.get_params(ctx), ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each with its first sentence, whole."""
        there = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(1000)) for name, verb in there if verb is not None])

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return list(self.commands)


def write_panels(parameters: Iterable[Any], ctx: Any, formatter: Any) -> None:
    """A section for each title, in the order in which the titles come."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is not None:
            fallback = "Arguments" if parameter.param_type_name == "argument" else "Options"
            title = getattr(parameter, "rich_help_panel", None) or fallback
            panels.setdefault(str(title), []).append(record)
    for title, rows in panels.items():
        with formatter.section(title):
            formatter.write_dl(rows)
