"""The Jinja environment of chat templates: sandboxed, without a clock, with the helpers that they are written for."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the helpers of chat templates; a product or format can make no huge string."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self, max_characters: int) -> None:
        # What a template says of constants would be computed while it is read, where nothing bounds it.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_only_now,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self._max_characters = max_characters
        self.filters["tojson"] = _tojson
        kept = {name: self.globals[name] for name in ("range", "cycler", "joiner")}
        self.globals.clear()
        self.globals.update(kept, dict=_dict, namespace=_Namespace, raise_exception=_raise_exception)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sized = isinstance(left, (str, list, tuple)), isinstance(right, (str, list, tuple))
        if operator == "%" and sized[0] and re.search(r"\d{5}|\*", str(left)):
            raise SecurityError("the width is too large")
        if operator == "**" and not (abs(left) <= 2**32 and abs(right) <= 32):
            raise SecurityError("the power is too large")
        if operator == "*" and any(sized):
            things, count = (left, right) if sized[0] else (right, left)
            if isinstance(count, int) and len(things) * count > self._max_characters:
                raise SecurityError("the repetition is too long")
        return super().call_binop(context, operator, left, right)


@jinja2.pass_context
def _only_now(context: Any, value: Any) -> Any:
    """Printed as it is; that it wants the context keeps Jinja from printing constants beforehand."""
    return value


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model writes (for training); here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (a class attribute that Jinja reads)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in (*dict(*args[1:]), *kwargs):
            _public(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
