"""Items: what a conversation consists of, checked as they come in, and told as the messages of a chat.

An item is a JSON object as OpenAI has it: a message, a function call, its output, or reasoning. What comes in gets
what is missing (its type, an id, a status), so that what is stored and listed has one form.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cellar.server.errors import ApiError, refused, whole_characters
from cellar.server.responses.tools import joined

Item = dict[str, Any]

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

_ROLES = ("user", "assistant", "system", "developer")
_STATUS = ("in_progress", "completed", "incomplete")
MAX_ID = 128


def new_item_id(kind: str) -> str:
    """An id for an item of a type."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def read_input(given: str | Sequence[Mapping[str, Any]] | None, parameter: str = "input") -> list[Item]:
    """Items of a request, references among them still unresolved. Raises ApiError that names the place."""
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_read(one, f"{parameter}[{k}]", parameter) for k, one in enumerate(given)]


def referred(item: Item) -> str | None:
    """The id that stands for an item; None if it is one itself."""
    return item["id"] if item["type"] == "item_reference" else None


def with_own_ids(items: Iterable[Item]) -> list[Item]:
    """The same under new ids: those that they came with may stand for items elsewhere."""
    return [{**item, "id": new_item_id(item["type"])} for item in items]


def check_calls(before: Iterable[Item], new: Sequence[Item]) -> None:
    """Refuse outputs of calls that nobody made. Raises ApiError."""
    known = {item["call_id"] for item in before if item["type"] == "function_call"}
    for item in new:
        if item["type"] == "function_call":
            known.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in known:
            raise refused(
                f"no tool call was found for the function call output with call_id {item['call_id'][:MAX_ID]}.", "input"
            )


def messages_of(items: Iterable[Item], unseal: Callable[[str], str]) -> list[dict[str, Any]]:
    """The messages of a chat that say the same. `unseal` gives the text of encrypted reasoning.

    What the assistant did in one go (thought, said, called) is one message, as templates expect it.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message that may still grow
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            text = _reasoning(item, unseal)
            if turn is None or len(turn) > 2 or turn["content"] is not None:
                messages.append(turn := {"role": "assistant", "content": None})
            if text:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        elif kind == "message" and item["role"] == "assistant":
            if turn is None or turn["content"] is not None or "tool_calls" in turn:
                messages.append(turn := {"role": "assistant", "content": None})
            turn["content"] = _text(item["content"])
        elif kind == "function_call":
            if turn is None:
                messages.append(turn := {"role": "assistant", "content": None})
            function = {"name": joined(item.get("namespace"), item["name"]), "arguments": item["arguments"]}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        else:
            turn = None
            messages.append(_other(item))
    return [m for m in messages if m["content"] is not None or len(m) > 2]


def _other(item: Item) -> dict[str, Any]:
    if item["type"] == "function_call_output":
        output = item["output"]
        text = output if isinstance(output, str) else _text(output)
        return {"role": "tool", "tool_call_id": item["call_id"], "content": text}
    return {"role": item["role"], "content": _text(item["content"])}


def _reasoning(item: Item, unseal: Callable[[str], str]) -> str:
    parts = item.get("content")
    if parts:
        return "".join(part["text"] for part in parts)
    sealed = item.get("encrypted_content")
    return unseal(sealed) if sealed else ""


def _text(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)


# -- reading --------------------------------------------------------------------------------------


def _read(given: Mapping[str, Any], where: str, parameter: str) -> Item:
    kind = given.get("type", "message" if "role" in given else None)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise refused(
            f"{where} has the type {_shown(kind)}, but this server knows {', '.join(_READERS)}; leave it out.",
            parameter,
        )
    item = {key: value for key, value in given.items() if value is not None}
    item["type"] = kind
    id = item.get("id", "")
    if not isinstance(id, str) or len(id) > MAX_ID:
        raise _wrong(where, f"an id of at most {MAX_ID} characters", parameter)
    if item.get("status", "completed") not in _STATUS:
        raise _wrong(where, f"one of {', '.join(_STATUS)} as its status", parameter)
    return read(item, where, parameter)


def _message(item: Item, where: str, parameter: str) -> Item:
    _only(item, ("role", "content", "phase"), where, parameter)
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise _wrong(where, f"one of {', '.join(_ROLES)} as its role", parameter)
    said = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        content = [{"type": said, "text": content}]
    if not isinstance(content, list):
        raise _wrong(where, "a string or a list of parts as its content", parameter)
    if item.get("phase", "final_answer") not in ("commentary", "final_answer") or ("phase" in item and said[0] == "i"):
        raise _wrong(where, "commentary or final_answer as its phase, which assistants' messages alone have", parameter)
    allowed = ("output_text", "refusal") if role == "assistant" else ("input_text",)
    parts = [_part(part, allowed, f"{where}.content[{k}]", parameter) for k, part in enumerate(content)]
    return _whole(item, role=role, content=parts)


def _part(part: Any, allowed: Sequence[str], where: str, parameter: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    # clients repeat what assistants said as input_text, too, and what users said as text
    kind = {"text": allowed[0], "input_text": allowed[0], "output_text": allowed[0]}.get(str(kind), kind)
    field = "refusal" if kind == "refusal" else "text"
    if kind not in allowed or not isinstance(part.get(field), str):
        raise refused(
            f"{where} has the type {_shown(kind)}, but this server reads text only: "
            f'{{"type": "{allowed[0]}", "text": ...}}.',
            parameter,
        )
    found: dict[str, Any] = {"type": kind, field: whole_characters(part[field])}
    if kind == "output_text":
        # annotations are told again; the log-probabilities of what was said are of no use any more
        annotations = part.get("annotations")
        found["annotations"] = annotations if isinstance(annotations, list) else []
        _only(part, ("text", "annotations", "logprobs"), where, parameter)
    else:
        _only(part, (field,), where, parameter)
    return found


def _function_call(item: Item, where: str, parameter: str) -> Item:
    _only(item, ("call_id", "name", "arguments", "namespace"), where, parameter)
    given = ("namespace",) if "namespace" in item else ()
    _strings(item, ("call_id", "name", "arguments", *given), where, parameter)
    return _whole(item)


def _function_call_output(item: Item, where: str, parameter: str) -> Item:
    _only(item, ("call_id", "output", "name"), where, parameter)
    _strings(item, ("call_id",), where, parameter)
    output = item.get("output")
    if isinstance(output, list):
        output = [_part(part, ("input_text",), f"{where}.output[{k}]", parameter) for k, part in enumerate(output)]
    elif not isinstance(output, str):
        raise _wrong(where, "a string or a list of parts as its output", parameter)
    else:
        whole_characters(output)
    return _whole(item, output=output)


def _reasoning_item(item: Item, where: str, parameter: str) -> Item:
    _only(item, ("summary", "content", "encrypted_content"), where, parameter)
    parts: dict[str, list[dict[str, Any]]] = {}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        given = item.get(name, [])
        if not isinstance(given, list):
            raise _wrong(where, f"a list of parts as its {name}", parameter)
        parts[name] = [_part(part, (kind,), f"{where}.{name}[{k}]", parameter) for k, part in enumerate(given)]
    if not isinstance(item.get("encrypted_content", ""), str):
        raise _wrong(where, "a string as its encrypted_content", parameter)
    return _whole(item, **parts)


def _reference(item: Item, where: str, parameter: str) -> Item:
    _only(item, (), where, parameter)
    _strings(item, ("id",), where, parameter)
    return {"type": "item_reference", "id": item["id"]}


_READERS: Mapping[str, Callable[[Item, str, str], Item]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning_item,
    "item_reference": _reference,
}


def _whole(item: Item, **changed: Any) -> Item:
    """With an id and a status, and nothing twice."""
    id = item.get("id") or new_item_id(item["type"])
    return {**item, "id": id, "status": item.get("status", "completed"), **changed}


def _only(item: Mapping[str, Any], names: Sequence[str], where: str, parameter: str) -> None:
    for name, value in item.items():
        if value is not None and name not in ("type", "id", "status", *names):
            raise refused(
                f"{where} has {name[:64]!r}, which this server does not read; leave it out.",
                parameter,
                "unknown_parameter",
            )


def _strings(item: Item, names: Sequence[str], where: str, parameter: str) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            raise _wrong(where, f"a string as its {name}", parameter)
        whole_characters(item[name])


def _wrong(where: str, what: str, parameter: str) -> ApiError:
    return refused(f"{where} must have {what}.", parameter)


def _shown(kind: Any) -> str:
    return repr(kind)[:64]
