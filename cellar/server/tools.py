"""Tools of a chat request: what the answer must be, and how its calls are told."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cellar.core.sampling import StructuredOutputsParams
from cellar.server.errors import refused
from cellar.server.requests import ChatRequest
from cellar.text.tools.call import CallPiece, Parsed, ToolParser
from cellar.text.tools.custom import CustomTool, text_of, with_functions
from cellar.text.tools.registry import PARSERS, SPECIAL_TAGS
from cellar.text.tools.required import ListParser, functions, required_schema

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolUse:
    """How one request uses tools. `forced` is the function that must be called, `required` says that some must be.

    `structured` is what the output must be for that. `single` allows one call at most. `custom` are the names of tools
    that are given text.
    """

    tools: list[dict[str, Any]] | None = None
    parser: str | None = None
    forced: str | None = None
    required: bool = False
    single: bool = False
    structured: StructuredOutputsParams | None = None
    custom: frozenset[str] = frozenset()

    def reader(self) -> ToolParser:
        """Reads one answer."""
        if self.forced is not None:
            return _Forced(self.forced)
        if self.required:
            return ListParser()
        return PARSERS[self.parser]() if self.parser is not None else _Plain()

    @property
    def active(self) -> bool:
        """True if the answer may hold calls."""
        return self.forced is not None or self.required or self.parser is not None

    @property
    def needs_special_tokens(self) -> bool:
        """True if calls are found by tags that are special tokens."""
        return self.parser in SPECIAL_TAGS


def tool_use(request: ChatRequest, parser: str | None) -> ToolUse:
    """What a request asks for. `parser` is the server's for tool_choice auto. Raises ApiError."""
    choice = request.tool_choice
    single = request.parallel_tool_calls is False
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice names a tool, but there are no tools; give some.", "tool_choice")
        return ToolUse()
    try:
        tools, custom = with_functions(request.tools)
        known = functions(tools)
    except ValueError as error:
        raise refused(f"tools are not as they should be: {error}.", "tools") from error
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, custom, choice)
    names = frozenset(custom)
    if choice == "none":
        return ToolUse(tools, custom=names)
    able = [tool["function"]["name"] for tool in tools]
    bound = [name for name in able if name in custom and custom[name].grammar is not None]
    forced = _named(choice, known, custom) if isinstance(choice, dict) else None
    if choice == "required" and able == bound:
        forced = bound[0] if len(bound) == 1 else None
    if forced is not None:
        structured = custom[forced].grammar if forced in custom else StructuredOutputsParams(json=known[forced])
        return ToolUse(tools, forced=forced, structured=structured, custom=names)
    if bound:
        raise refused(
            f"the custom tool {bound[0][:64]} has a grammar, which can be kept only where nothing else may be said; "
            "name it in tool_choice, or leave its format out.",
            "tools",
        )
    if choice == "required":
        schema = StructuredOutputsParams(json=required_schema(tools, not single))
        return ToolUse(tools, required=True, structured=schema, custom=names)
    if parser is None:
        raise refused(
            "the model's chat template does not show how it writes tool calls, which tool_choice auto needs; "
            "start the server with --tool-call-parser, name a function, or set tool_choice to required or none.",
            "tools",
        )
    return ToolUse(tools, parser, single=single, custom=names)


def _named(choice: Mapping[str, Any], known: Collection[str], custom: Collection[str]) -> str:
    """The tool that a choice forces. Raises ApiError."""
    kind = choice.get("type")
    named = choice.get(kind) if kind in ("function", "custom") else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or name not in known or (name in custom) != (kind == "custom"):
        raise refused("tool_choice must name one of the tools, as a function or as a custom tool.", "tool_choice")
    return name


def _allowed(
    tools: list[dict[str, Any]], custom: Mapping[str, CustomTool], choice: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], Literal["auto", "required"]]:
    """The tools that a choice allows, and its mode. Raises ApiError."""
    match dict(choice):
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed, **rest},
            **more,
        } if not rest and not more:
            known = {tool["function"]["name"] for tool in tools}
            wanted = {_named(one if isinstance(one, dict) else {}, known, custom) for one in allowed}
            left = [tool for tool in tools if tool["function"]["name"] in wanted]
            return left, "required" if mode == "required" else "auto"
    raise refused(
        'an allowed_tools choice must be {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", '
        '"tools": [{"type": "function", "function": {"name": ...}}]}}.',
        "tool_choice",
    )


class Calls:
    """The calls of one choice, as deltas and as a whole."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._reader = use.reader()
        self.calls: list[dict[str, Any]] = []
        self._arguments: list[str] | None = None  # those of a custom tool's call, which are its text when all are there

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """-> content, and entries of a delta's tool_calls."""
        return self._told(self._reader.push(text))

    def flush(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of both."""
        content, entries = self._told(self._reader.flush())
        self._give_text(entries)
        return content, entries

    def _told(self, parsed: Parsed) -> tuple[str, list[dict[str, Any]]]:
        entries: list[dict[str, Any]] = []
        for piece in parsed.calls:
            if self._use.single and piece.index > 0:
                continue
            if piece.name is not None:
                self._give_text(entries)
            if (piece.name or self._custom_name) in self._use.custom:
                self._tell_custom(piece, entries)
                continue
            if piece.name is None:
                self.calls[piece.index]["function"]["arguments"] += piece.arguments
                entries.append({"index": piece.index, "function": {"arguments": piece.arguments}})
                continue
            function = {"name": piece.name, "arguments": piece.arguments}
            entry: dict[str, Any] = {"id": _call_id(), "type": "function"}
            self.calls.append({**entry, "function": function})
            entries.append({"index": piece.index, **entry, "function": function.copy()})
        return parsed.content, entries

    @property
    def _custom_name(self) -> str | None:
        """The custom tool that is being called, if one is."""
        name = self.calls[-1]["custom"]["name"] if self.calls and "custom" in self.calls[-1] else None
        return str(name) if name is not None else None

    def _tell_custom(self, piece: CallPiece, entries: list[dict[str, Any]]) -> None:
        """More of a custom tool's call. A forced one is text as it comes; others are JSON, whose end is awaited."""
        forced = self._use.forced is not None
        text = piece.arguments if forced else ""
        if piece.name is not None:
            custom, entry = {"name": piece.name, "input": text}, {"id": _call_id(), "type": "custom"}
            self.calls.append({**entry, "custom": custom})
            entries.append({"index": piece.index, **entry, "custom": custom.copy()})
        elif forced:
            self.calls[-1]["custom"]["input"] += text
            entries.append({"index": piece.index, "custom": {"input": text}})
        if not forced:
            self._arguments = self._arguments or []
            self._arguments.append(piece.arguments)

    def _give_text(self, entries: list[dict[str, Any]]) -> None:
        """The text of a custom tool's call that has ended."""
        if self._arguments is None:
            return
        text, self._arguments = text_of("".join(self._arguments)), None
        self.calls[-1]["custom"]["input"] = text
        entries.append({"index": len(self.calls) - 1, "custom": {"input": text}})


def _call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other id, and all others take any."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class _Plain:
    """No calls."""

    def push(self, text: str) -> Parsed:
        return Parsed(text)

    def flush(self) -> Parsed:
        return Parsed()


class _Forced:
    """All text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> Parsed:
        if not text:
            return Parsed()
        name, self._name = self._name, None
        return Parsed(calls=[CallPiece(0, name, text)])

    def flush(self) -> Parsed:
        return Parsed()
