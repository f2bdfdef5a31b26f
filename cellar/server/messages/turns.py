"""Anthropic's turns and tools as those of a chat: what the model's own template is made for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cellar.server.errors import refused
from cellar.server.fields import Accepts
from cellar.server.messages.body import CACHE_CONTROL, equal, of, only

_TEXT: Mapping[str, Accepts] = {
    "type": of(str),
    "text": of(str),
    "cache_control": CACHE_CONTROL[0],
    "citations": equal([]),
}
_THINKING: Mapping[str, Accepts] = {"type": of(str), "thinking": of(str), "signature": of(str)}
_TOOL_USE: Mapping[str, Accepts] = {
    "type": of(str),
    "id": of(str),
    "name": of(str),
    "input": of(dict),
    "cache_control": CACHE_CONTROL[0],
    "caller": equal({"type": "direct"}),
}
_TOOL_RESULT: Mapping[str, Accepts] = {
    "type": of(str),
    "tool_use_id": of(str),
    "content": of(str, list),
    "is_error": of(bool),
    "cache_control": CACHE_CONTROL[0],
}
_TOOL: Mapping[str, Accepts] = {
    "type": equal("custom"),
    "name": of(str),
    "description": of(str),
    "input_schema": of(dict),
    "cache_control": CACHE_CONTROL[0],
    "eager_input_streaming": of(bool),  # inputs are always told while they are written
    "defer_loading": equal(False),
    "allowed_callers": equal(["direct"]),
    "strict": of(bool),
    "input_examples": equal([]),
}


def chat_messages(system: str | Sequence[Any] | None, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chats have them. Turns of one role that follow each other are one. Raises ApiError."""
    turns = _Turns()
    if system is not None:
        turns.say("system", _texts(system, "system"))
    for k, message in enumerate(messages):
        turns.add(message, f"messages[{k}]")
    if turns.found[-1]["role"] == "assistant":
        raise refused(
            "the last message is the assistant's, and this server does not go on with it; end with a user's.",
            "messages",
        )
    return [_plain(turn) for turn in turns.found]


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as functions. Raises ApiError for those of other kinds: the client is to call them itself."""
    found = []
    for k, tool in enumerate(tools):
        where = f"tools[{k}]"
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise refused(f"{where} is of the type {str(kind)[:64]!r}; this server knows custom tools only.", "tools")
        only(tool, _TOOL, where)
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
            raise refused(f"{where} must have a name and an input_schema.", "tools")
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        found.append({"type": "function", "function": function})
    return found


class _Turns:
    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self._tools: dict[str, str] = {}  # id of a call -> the tool's name

    def add(self, message: Mapping[str, Any], where: str) -> None:
        role, content = message.get("role"), message.get("content")
        only(message, {"role": of(str), "content": of(str, list)}, where)
        if role not in ("user", "assistant", "system") or content is None:
            raise refused(f"{where} must have content, and the role user, assistant or system.", "messages")
        if isinstance(content, str):
            self.say(role, [content])
            return
        if not content:
            self.say(role, [])
        for k, block in enumerate(content):
            place = f"{where}.content[{k}]"
            kind = block.get("type") if isinstance(block, dict) else None
            match role, kind:
                case _, "text":
                    self.say(role, [_text(block, place)])
                case "user", "tool_result":
                    self._result(block, place)
                case "assistant", "tool_use":
                    self._call(block, place)
                case "assistant", "thinking":
                    self._think(block, place)
                case _:
                    what = f"of the type {kind[:64]!r}" if isinstance(kind, str) else "no block with a type"
                    raise refused(
                        f"{place} is {what}, which this server does not read in a message of the {role}; "
                        "it reads text, and tool_result of users, tool_use and thinking of assistants.",
                        "messages",
                    )

    def say(self, role: str, texts: list[str]) -> None:
        """More text of a role."""
        self._turn(role)["content"] += texts

    def _turn(self, role: str) -> dict[str, Any]:
        if not self.found or self.found[-1]["role"] != role:
            self.found.append({"role": role, "content": []})
        return self.found[-1]

    def _think(self, block: Mapping[str, Any], where: str) -> None:
        only(block, _THINKING, where)
        text, turn = block.get("thinking"), self._turn("assistant")
        if text:
            turn.setdefault("reasoning_content", []).append(text)

    def _call(self, block: Mapping[str, Any], where: str) -> None:
        only(block, _TOOL_USE, where)
        id, name, given = block.get("id"), block.get("name"), block.get("input")
        if id is None or name is None or given is None:
            raise refused(f"{where} must have an id, a name and an input.", "messages")
        self._tools[id] = name
        function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
        self._turn("assistant").setdefault("tool_calls", []).append(
            {"id": id, "type": "function", "function": function}
        )

    def _result(self, block: Mapping[str, Any], where: str) -> None:
        only(block, _TOOL_RESULT, where)
        id = block.get("tool_use_id")
        if id not in self._tools:
            raise refused(f"{where} has a tool_use_id that no tool_use before it has.", "messages")
        text = "\n".join(_texts(block.get("content") or "", f"{where}.content"))
        if block.get("is_error"):
            text = f"Error: {text}"  # chats have no field for it
        self.found.append({"role": "tool", "tool_call_id": id, "name": self._tools[id], "content": [text]})


def _plain(turn: dict[str, Any]) -> dict[str, Any]:
    """One text as a string; several as parts, which each template joins in its own way."""
    if "reasoning_content" in turn:
        turn["reasoning_content"] = "\n".join(turn["reasoning_content"])
    texts = turn["content"]
    if len(texts) < 2:
        silent = not texts and "tool_calls" in turn
        return {**turn, "content": None if silent else "".join(texts)}
    return {**turn, "content": [{"type": "text", "text": text} for text in texts]}


def _texts(content: str | Sequence[Any], where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, f"{where}[{k}]") for k, block in enumerate(content)]


def _text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text" or not isinstance(block.get("text"), str):
        said = f"of the type {kind[:64]!r}" if isinstance(kind, str) and kind != "text" else "no text block"
        raise refused(f"{where} is {said}; this server reads text there.", where.partition("[")[0])
    only(block, _TEXT, where)
    text: str = block["text"]
    return text
