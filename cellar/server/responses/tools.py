"""Tools of a response, as chats have them.

A namespace groups functions. Templates know none, so its functions are shown to the model as `namespace__name`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cellar.server.errors import refused

_READ = ("name", "description", "parameters", "output_schema")
"""Fields of a function that the model is shown."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "strict": (True, False),  # whether the arguments fit the schema is up to the grammar of a forced call
    "defer_loading": (False,),
    "async": (False,),
    "allowed_callers": (["direct"],),
}

ToolChoice = str | dict[str, Any] | None


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools as those of a chat. Raises ApiError."""
    found: list[dict[str, Any]] = []
    for k, tool in enumerate(tools):
        where = f"tools[{k}]"
        found += _namespace(tool, where) if _is_namespace(tool) else [_function(tool, where)]
    names = Counter(tool["function"]["name"] for tool in found)
    twice = [name for name, count in names.items() if count > 1] if any(map(_is_namespace, tools)) else ()
    if twice:
        raise refused(
            f"two tools would have the name {min(twice)[:64]!r}; rename a function or its namespace.", "tools"
        )
    return found


def joined(namespace: str | None, name: str) -> str:
    """What the model calls a function."""
    return name if namespace is None else f"{namespace}__{name}"


def apart(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Namespace and name of each function that is in one, by what the model calls it. The tools have been read."""
    return {
        joined(tool["name"], inner["name"]): (tool["name"], inner["name"])
        for tool in filter(_is_namespace, tools)
        for inner in tool["tools"]
    }


def chosen(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]], ToolChoice]:
    """Tools and choice as a chat has them; of allowed tools only those are left. Raises ApiError."""
    known = chat_tools(tools)
    if choice is None or isinstance(choice, str):
        return known, choice
    match dict(choice):
        case {"type": "function", "name": str(name), **rest} if not rest:
            return known, {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed), **rest} if not rest:
            return _allowed(known, allowed), mode
    raise refused(
        'tool_choice must be none, auto, required, {"type": "function", "name": ...} or '
        '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [{"type": "function", "name": ...}]}.',
        "tool_choice",
    )


def echoed(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools as a response repeats them."""
    return [dict(tool) if _is_namespace(tool) else {"parameters": None, "strict": None, **tool} for tool in tools]


def _allowed(known: Sequence[dict[str, Any]], allowed: Sequence[Any]) -> list[dict[str, Any]]:
    names = {tool["function"]["name"] for tool in known}
    wanted = [
        one.get("name") if isinstance(one, Mapping) and one.get("type") == "function" else None for one in allowed
    ]
    for name in wanted:
        if not isinstance(name, str) or name not in names:
            raise refused("tool_choice allows a tool that is not among the functions of tools.", "tool_choice")
    if not wanted:
        raise refused("tool_choice allows no tool; name some, or set it to none.", "tool_choice")
    kept = frozenset(wanted)
    return [tool for tool in known if tool["function"]["name"] in kept]


def _is_namespace(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") == "namespace"


def _namespace(tool: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Its functions; what is said of all of them stands before what is said of the first."""
    name, about, inner = tool.get("name"), tool.get("description"), tool.get("tools")
    if not isinstance(name, str) or not isinstance(about, str | None) or not isinstance(inner, list) or not inner:
        raise refused(f"{where} is a namespace, which must have a name, a description and a list of tools.", "tools")
    for key in tool.keys() - {"type", "name", "description", "tools"}:
        raise refused(f"{where} has {key[:64]!r}, which this server does not read; leave it out.", "tools")
    found = []
    for k, one in enumerate(inner):
        if not isinstance(one, Mapping):
            raise refused(f"{where}.tools[{k}] must be an object.", "tools")
        found.append(_function(one, f"{where}.tools[{k}]"))
    for chat in found:
        chat["function"]["name"] = joined(name, chat["function"]["name"])
    first = found[0]["function"]
    first["description"] = "\n\n".join(filter(None, (about, first.get("description"))))
    return found


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise refused(
            f"{where} has the type {repr(kind)[:64]}, but this server has functions, and namespaces of them, "
            "only; leave it out.",
            "tools",
        )
    if not isinstance(tool.get("name"), str):
        raise refused(f"{where} has no name; give it one.", "tools")
    for name, value in tool.items():
        if value is None or name == "type" or name in _READ:
            continue
        if name not in _NEUTRAL:
            raise refused(f"{where} has {name[:64]!r}, which this server does not read; leave it out.", "tools")
        if not any(value == allowed and type(value) is type(allowed) for allowed in _NEUTRAL[name]):
            raise refused(f"{where}.{name} must be {_NEUTRAL[name][0]!r} here; leave it out.", "tools")
    return {"type": "function", "function": {name: tool[name] for name in _READ if tool.get(name) is not None}}
