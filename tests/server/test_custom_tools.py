"""Tools that are given text, bound by a grammar or not, and choices that allow some of the tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from cellar.server import prepare
from cellar.server.requests import ChatRequest
from cellar.server.tools import ToolUse, tool_use
from cellar.text.chat import ChatTemplate
from tests.server.served import MODEL, Served, serve
from tests.server.spoken import says, says_in_turn

MESSAGES: list[Any] = [{"role": "user", "content": "How much is it?"}]
LARK = 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/'
SUM: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "sum",
        "description": "Adds.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK}},
    },
}
NOTE: dict[str, Any] = {"type": "custom", "custom": {"name": "note"}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
THE_SUM = {"type": "custom", "custom": {"name": "sum"}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    named = [{"type": tool["type"], tool["type"]: {"name": tool[tool["type"]]["name"]}} for tool in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"tool_call_parser": "hermes"}, max_model_len=4096, num_slots=1024) as served:
        yield served
        served.settle()


def called(served: Served, stream: bool, **wishes: Any) -> tuple[list[dict[str, Any]], str]:
    """-> the calls as clients put them together, and why the answer ended."""
    client = served.client()
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, **wishes}
    if not stream:
        (choice,) = client.chat.completions.create(**body).choices
        return [call.model_dump() for call in choice.message.tool_calls or []], choice.finish_reason
    calls: list[dict[str, Any]] = []
    reason = ""
    for chunk in client.chat.completions.create(**body, stream=True):
        reason = chunk.choices[0].finish_reason or reason
        for entry in chunk.choices[0].delta.model_dump()["tool_calls"] or []:
            if entry["index"] == len(calls):
                calls.append({key: entry[key] for key in ("id", "type")})
            call = calls[entry["index"]]
            for kind, field in (("custom", "input"), ("function", "arguments")):
                if (part := entry.get(kind)) is not None:
                    told = call.setdefault(kind, {"name": part.get("name"), field: ""})
                    told[field] += part.get(field) or ""
    return calls, reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [THE_SUM, allowed("required", SUM)], ids=["named", "the only one allowed"])
def test_a_grammar_bounds_the_text(served: Served, stream: bool, choice: dict[str, Any]) -> None:
    with says(served, "twelve, or 12+7 "):  # as far as the grammar lets it
        (call,), reason = called(served, stream, tools=[WEATHER, SUM], tool_choice=choice, max_tokens=60)
    assert (call["type"], call["custom"]["name"]) == ("custom", "sum")
    numbers = call["custom"]["input"].split("+")
    assert all(number.isdigit() and len(number) <= 3 for number in numbers)
    assert reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_regular_expression_bounds_it(served: Served, stream: bool) -> None:
    code = {"name": "code", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-c]{4}"}}}
    tool = {"type": "custom", "custom": code}
    (call,), _ = called(served, stream, tools=[tool], tool_choice="required", max_tokens=60)
    assert len(call["custom"]["input"]) == 4
    assert set(call["custom"]["input"]) <= set("abc")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_text_beside_a_function(served: Served, stream: bool, choice: str) -> None:
    text = 'He said: "{Rome}",\nand left.'
    both = [{"name": "note", "arguments": {"input": text}}, {"name": "weather", "arguments": {"city": "Rome"}}]
    lines = [json.dumps(call) for call in both]
    written = "".join(f"<tool_call>\n{line}\n</tool_call>" for line in lines) if choice == "auto" else json.dumps(both)
    with says(served, written):
        (note, weather), reason = called(served, stream, tools=[WEATHER, NOTE], tool_choice=choice, max_tokens=400)
    assert note["custom"] == {"name": "note", "input": text}
    assert json.loads(weather["function"]["arguments"]) == {"city": "Rome"}
    assert reason == "tool_calls"


def test_a_call_and_its_answer_come_back(served: Served) -> None:
    call = '<tool_call>\n{"name": "note", "arguments": {"input": "bread"}}\n</tool_call>'
    client = served.client()
    with says_in_turn(served, call, "Noted."):
        first: Any = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[NOTE])  # type: ignore[list-item]
        said = first.choices[0].message
        told = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "done"}
        again: Any = [*MESSAGES, said, told]
        second: Any = client.chat.completions.create(model=MODEL, messages=again, tools=[NOTE])  # type: ignore[list-item]
    assert second.choices[0].message.content == "Noted."


def test_a_template_sees_functions() -> None:
    source = "{{ tools[0].function.parameters.required[0] }} {{ messages[0].tool_calls[0].function.arguments.input }}"
    message = {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "n", "input": "x"}}],
    }
    assert ChatTemplate(source, {}).render([message], tools=[NOTE]) == "input x"


@pytest.mark.parametrize("stream", [False, True])
def test_only_what_is_allowed_is_called(served: Served, stream: bool) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": CITY}}
    wishes = {"tools": [other, WEATHER], "tool_choice": allowed("required", WEATHER), "max_tokens": 200}
    with says(served, '[{"name": "weather", "arguments": {"city": "Rome"}}]'):
        (call,), _ = called(served, stream, **wishes)
    assert call["function"]["name"] == "weather"
    with says(served, "None is needed."):
        assert called(served, stream, **{**wishes, "tool_choice": allowed("auto", WEATHER)}) == ([], "stop")


@pytest.mark.parametrize(
    ("wishes", "param", "words"),
    [
        ({"tools": [SUM, NOTE]}, "tools", "sum has a grammar"),
        ({"tools": [SUM, NOTE], "tool_choice": "required"}, "tools", "sum has a grammar"),
        ({"tools": [NOTE], "tool_choice": THE_SUM}, "tool_choice", "must name one of the tools"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto")}, "tool_choice", "allowed_tools"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto", NOTE)}, "tool_choice", "must name one of the tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "x"}}}]}, "tools", "format"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "strict": True}}]}, "tools", "'strict'"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "tools", "custom tool must be"),
    ],
)
def test_refusals_name_the_field(served: Served, wishes: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refusal:
        called(served, False, **wishes)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "f" * 10**6, "parameters": 3}},
        {"type": "custom", "custom": {"name": "f" * 10**6, "more": 3}},
        {"type": "custom", "custom": {"name": "f" * 10**6, "format": {"type": "grammar", "grammar": 3}}},
    ],
)
def test_a_refusal_does_not_repeat_a_long_name(served: Served, tool: dict[str, Any]) -> None:
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "tools": [tool]})
    assert answer.status_code == 400
    assert len(answer.text) < 1000


class Counted(str):
    """A name that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str(self) == other

    __hash__ = str.__hash__


def test_many_allowed_tools_are_looked_up_and_not_searched_for() -> None:
    count = 400
    tools = [{"type": "function", "function": {"name": Counted(k)}} for k in range(count)]
    choice = allowed("auto", *[{"type": "function", "function": {"name": Counted(k)}} for k in range(count)])
    body = ChatRequest.model_validate({"model": MODEL, "messages": MESSAGES, "tools": tools, "tool_choice": choice})
    Counted.compared = 0
    assert len(tool_use(body, "hermes").tools or ()) == count
    assert 0 < Counted.compared < 10 * count


@pytest.mark.parametrize("count", [2, 2000])
def test_tools_are_read_beside_the_loop(served: Served, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_loop: list[bool] = []

    def noted(body: ChatRequest, parser: str | None) -> ToolUse:
        try:
            in_loop.append(asyncio.get_running_loop().is_running())
        except RuntimeError:
            in_loop.append(False)
        return tool_use(body, parser)

    monkeypatch.setattr(prepare, "tool_use", noted)
    tools = [{"type": "function", "function": {"name": f"f{k}"}} for k in range(count)]
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "tools": tools, "max_tokens": 1})
    assert answer.status_code in (200, 400), answer.text
    assert in_loop == [False]
