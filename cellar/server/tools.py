"""Tools of a chat request: what the answer must be, and how its calls are told."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from typing import Any

from cellar.core.sampling import StructuredOutputsParams
from cellar.server.errors import refused
from cellar.server.requests import ChatRequest
from cellar.text.tools.call import CallPiece, Parsed, ToolParser
from cellar.text.tools.registry import PARSERS, SPECIAL_TAGS
from cellar.text.tools.required import ListParser, functions, required_schema

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolUse:
    """How one request uses tools. `forced` is the function that must be called, `required` says that some must be.

    `structured` is what the output must be for that. `single` allows one call at most.
    """

    tools: list[dict[str, Any]] | None = None
    parser: str | None = None
    forced: str | None = None
    required: bool = False
    single: bool = False
    structured: StructuredOutputsParams | None = None

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
    tools, choice = request.tools or None, request.tool_choice
    single = request.parallel_tool_calls is False
    if tools is None:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice names a tool, but there are no tools; give some.", "tool_choice")
        return ToolUse()
    try:
        known = functions(tools)
    except ValueError as error:
        raise refused(f"tools are not as they should be: {error}.", "tools") from error
    if choice == "none":
        return ToolUse(tools)
    if choice == "required":
        schema = StructuredOutputsParams(json=required_schema(tools, not single))
        return ToolUse(tools, required=True, structured=schema)
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
        if not isinstance(name, str) or name not in known:
            raise refused("tool_choice must name one of the tools as a function.", "tool_choice")
        return ToolUse(tools, forced=name, structured=StructuredOutputsParams(json=known[name]))
    if parser is None:
        raise refused(
            "the model's chat template does not show how it writes tool calls, which tool_choice auto needs; "
            "start the server with --tool-call-parser, name a function, or set tool_choice to required or none.",
            "tools",
        )
    return ToolUse(tools, parser, single=single)


class Calls:
    """The calls of one choice, as deltas and as a whole."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._reader = use.reader()
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """-> content, and entries of a delta's tool_calls."""
        return self._told(self._reader.push(text))

    def flush(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of both."""
        return self._told(self._reader.flush())

    def _told(self, parsed: Parsed) -> tuple[str, list[dict[str, Any]]]:
        entries: list[dict[str, Any]] = []
        for piece in parsed.calls:
            if self._use.single and piece.index > 0:
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
