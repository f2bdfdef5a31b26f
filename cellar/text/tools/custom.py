"""Custom tools: what they are given is text, which a grammar may bound, and no JSON.

Templates and models know functions alone, so a custom tool is shown as a function of one string, `input`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cellar.core.sampling import StructuredOutputsParams

INPUT = "input"
_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class CustomTool:
    """One custom tool. `grammar` says what its text must be; None allows any text."""

    name: str
    grammar: StructuredOutputsParams | None


def with_functions(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, CustomTool]]:
    """-> the tools with each custom one as a function, and the custom ones by name. Raises ValueError."""
    shown, found = [], {}
    for tool in tools:
        if tool.get("type") != "custom":
            shown.append(dict(tool))
            continue
        custom = tool.get("custom")
        name = custom.get("name") if isinstance(custom, Mapping) else None
        if not isinstance(custom, Mapping) or not isinstance(name, str):
            raise ValueError('a custom tool must be {"type": "custom", "custom": {"name": ...}}')
        short, unknown = name[:64], custom.keys() - {"name", "description", "format"}
        if unknown:
            raise ValueError(f"the custom tool {short} has {min(unknown)[:64]!r}, which this server does not read")
        function = {"name": name, "description": custom.get("description"), "parameters": _PARAMETERS}
        about = {key: value for key, value in function.items() if value is not None}
        shown.append({"type": "function", "function": about})
        found[name] = CustomTool(name, _grammar(short, custom.get("format")))
    return shown, found


def as_function_call(call: Any) -> Any:
    """A call of a custom tool in a message as the call of a function; anything else as it is."""
    custom = call.get("custom") if isinstance(call, Mapping) and call.get("type") == "custom" else None
    if not isinstance(custom, Mapping):
        return call
    arguments = json.dumps({INPUT: custom.get("input")}, ensure_ascii=False)
    rest = {key: value for key, value in call.items() if key != "custom"}
    return {**rest, "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}


def text_of(arguments: str) -> str:
    """The text that a call gives a custom tool; the arguments themselves if they were broken off."""
    try:
        text = json.loads(arguments)[INPUT]
    except (ValueError, RecursionError, LookupError, TypeError):
        return arguments
    return text if isinstance(text, str) else arguments


def _grammar(name: str, wanted: Any) -> StructuredOutputsParams | None:
    match wanted:
        case None | {"type": "text"}:
            return None
        case {"type": "grammar", "grammar": {"syntax": "lark", "definition": str(text)}}:
            return StructuredOutputsParams(grammar=text)
        case {"type": "grammar", "grammar": {"syntax": "regex", "definition": str(text)}}:
            return StructuredOutputsParams(regex=text)
    raise ValueError(
        f'the format of the custom tool {name} must be {{"type": "text"}} or {{"type": "grammar", "grammar": '
        '{"syntax": "lark" or "regex", "definition": ...}}'
    )
