"""Structured output and tools by HTTP: what comes matches what was asked for."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.limits import SECONDS, join_all
from tests.server.served import TEXT, Served, plain, serve
from tests.server.spoken import paced, says

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"tool_call_parser": "hermes"}, max_model_len=1024, num_slots=512) as found:
        yield found
        found.settle()


def check(text: str) -> None:
    value = json.loads(text)
    assert value["city"] in ("Paris", "Rome")
    assert 1 <= value["days"] <= 9
    assert set(value) == {"city", "days"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema(served: Served, stream: bool) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    made: Any = served.client().chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=600, response_format=wanted, stream=stream, n=2
    )
    chunks = list(made) if stream else []
    for index in (0, 1):
        if stream:
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == index)
        else:
            text = made.choices[index].message.content
            assert made.choices[index].finish_reason == "stop"
        check(text)


def test_regex_choice_grammar(served: Served) -> None:
    client = served.client()
    for wanted, pattern in (
        ({"regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
        ({"choice": ["yes", "no\n"]}, r"yes|no\n"),
        ({"grammar": 'start: "a" ("b" | "c") "d"'}, r"a[bc]d"),
    ):
        body = {"structured_outputs": wanted}
        for prompt in ([5, 6], [9, 7, 8]):
            made = client.completions.create(model="fake", prompt=prompt, max_tokens=60, extra_body=body)
            assert re.fullmatch(pattern, made.choices[0].text), made
            assert made.choices[0].finish_reason == "stop"


def test_plain_requests_beside_structured_ones_are_untouched(served: Served) -> None:
    with served.http() as http:
        body = {"structured_outputs": {"regex": "[a-z]{60}"}, "prompt": [3], "max_tokens": 80}
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        plain_body = {"prompt": [4, 5], "max_tokens": 60, "ignore_eos": True}
        made = http.post("/v1/completions", json=plain_body).json()
        join_all(threads)
    assert made["choices"][0]["text"] == TEXT.decode(plain([4, 5], 60))
    assert all(re.fullmatch("[a-z]{60}", a.json()["choices"][0]["text"]) for a in answers)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, "response_format"),
    ({"structured_outputs": {"regex": "(a|"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": 5}}, "structured_outputs"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
    ({"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "lax": True}}},
        "response_format.json_schema.lax",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
    ({"structured_outputs": {"fantasy": 1}}, "structured_outputs.fantasy"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "x" * 300_000}}, "structured_outputs"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 3_000_000]}}}},
        "response_format",
    ),
    ({"tools": [{"type": "nonsense"}]}, "tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_enforced_is_refused(served: Served, change: dict[str, Any], param: str) -> None:
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(answer.text) < 2000


def test_bombs_end_soon_and_harm_nobody(served: Served) -> None:
    bombs: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"}},
        {"structured_outputs": {"regex": "(a|b|ab|ba)*" * 2000}},
        {"structured_outputs": {"regex": "(x+x+)+y" * 50}},
        {"structured_outputs": {"json": {"$ref": "#"}}},
        {"structured_outputs": {"json": {"$ref": "http://127.0.0.1:1/x.json"}}},
    ]
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    bombs.append({"structured_outputs": {"json": deep}})
    with served.http() as http:
        for bomb in bombs:
            began = time.monotonic()
            answer = http.post("/v1/completions", json={"prompt": [3], "max_tokens": 20, **bomb})
            assert answer.status_code in (200, 400), answer.text
            assert time.monotonic() - began < SECONDS / 2
            assert http.get("/health_generate").status_code == 200


def test_a_named_tool(served: Served) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    client = served.client()
    made = client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=600
    )
    (call,) = made.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    check(call.function.arguments)
    assert made.choices[0].finish_reason == "tool_calls"
    assert made.choices[0].message.content is None
    with paced(served):
        chunks = list(
            client.chat.completions.create(
                model="fake", messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=600, stream=True
            )
        )
    entries = [entry for chunk in chunks for entry in chunk.choices[0].delta.tool_calls or []]
    assert [e.function.name for e in entries if e.function and e.function.name] == ["weather"]
    assert {entry.index for entry in entries} == {0}
    assert len(entries) > 2  # the name, and the arguments bit by bit
    check("".join(entry.function.arguments or "" for entry in entries if entry.function))


def told(chunks: list[Any]) -> list[tuple[str, str]]:
    """The calls of a stream: each has its id and name in its first entry only, and comes in several."""
    calls: list[tuple[str, str]] = []
    for entry in (entry for chunk in chunks for entry in chunk.choices[0].delta.tool_calls or []):
        if entry.id is not None:
            assert entry.index == len(calls)
            calls.append((entry.function.name, entry.function.arguments))
        else:
            assert (entry.index, entry.type, entry.function.name) == (len(calls) - 1, None, None)
            calls[-1] = (calls[-1][0], calls[-1][1] + entry.function.arguments)
    return calls


@pytest.mark.parametrize("stream", [False, True])
def test_required_tools(served: Served, stream: bool) -> None:
    wishes: Any = {"tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 900, "parallel_tool_calls": False}
    with paced(served):
        made: Any = served.client().chat.completions.create(model="fake", messages=MESSAGES, stream=stream, **wishes)
        chunks = list(made) if stream else []
    if stream:
        calls = told(chunks)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 2  # told bit by bit
    else:
        calls = [(call.function.name, call.function.arguments) for call in made.choices[0].message.tool_calls]
    assert [name for name, _ in calls] == ["weather"]
    check(calls[0][1])


def test_tool_choice_auto_and_none(served: Served) -> None:
    client = served.client()
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    # A model that calls a tool, as far as the server can see.
    body = {"structured_outputs": {"choice": [text]}}
    made = client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, max_tokens=200, extra_body=body)
    (call,) = made.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    with paced(served):
        chunks = client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=TOOLS, max_tokens=200, extra_body=body, stream=True
        )
        found = list(chunks)
    assert told(found) == [("weather", '{"city": "Rome"}')]
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in found) > 2
    deltas = [chunk.choices[0] for chunk in found]
    assert deltas[-1].finish_reason == "tool_calls"
    assert not any(d.delta.content for d in deltas)
    none = client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=TOOLS, tool_choice="none", max_tokens=200, extra_body=body
    )
    assert none.choices[0].message.content == text
    assert none.choices[0].finish_reason == "stop"


class Trip(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def test_the_clients_own_helpers(served: Served) -> None:
    """`parse` sends the schema of a class and makes one of the answer; `stream` puts deltas together."""
    client = served.client()
    parsed = client.chat.completions.parse(model="fake", messages=MESSAGES, max_tokens=600, response_format=Trip)
    assert isinstance(parsed.choices[0].message.parsed, Trip)
    choice: Any = {"type": "function", "function": {"name": "trip"}}
    tools: Any = [openai.pydantic_function_tool(Trip, name="trip")]
    with client.chat.completions.stream(
        model="fake", messages=MESSAGES, max_tokens=600, tools=tools, tool_choice=choice
    ) as stream:
        kinds = {event.type for event in stream}
        made = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = made.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Trip)

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="fake", messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=900, stream=True
            )
            calls = told([chunk async for chunk in stream])
            assert {name for name, _ in calls} <= {"weather", "stop"}
            parsed = await client.chat.completions.parse(
                model="fake", messages=MESSAGES, max_tokens=600, response_format=Trip
            )
            assert isinstance(parsed.choices[0].message.parsed, Trip)
            assert [model.id async for model in client.models.list()] == ["fake", "alias"]

    asyncio.run(run())


def test_auto_needs_a_parser() -> None:
    with serve() as served, pytest.raises(openai.BadRequestError, match="tool-call-parser"):
        served.client().chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with serve({"tool_call_parser": "hermes"}, template=template) as served:
        for choice in ("auto", "required"):
            with pytest.raises(openai.BadRequestError, match="does not show tools") as refusal:
                served.client().chat.completions.create(
                    model="fake", messages=MESSAGES, tools=TOOLS, tool_choice=choice
                )
            assert refusal.value.param == "tools"


TEMPLATES = Path(__file__).parent.parent.parent.parent / "shared" / "data" / "chat_templates" / "llamacpp"
LOOPS = {  # what each model writes to call weather(city=Rome)
    "Qwen-Qwen3-0.6B": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "Qwen-QwQ-32B": 'Hm.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "meta-llama-Llama-3.1-8B-Instruct": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "mistralai-Mistral-Nemo-Instruct-2407": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
}


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="../shared/data/chat_templates is not there")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_three_steps(name: str) -> None:
    """Each answer, as the client has it, goes back with its result; no option names the parser."""
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    with serve(template=template, max_model_len=8192, num_slots=1024) as served:
        client, messages = served.client(), list(MESSAGES)
        for step in range(3):
            with says(served, LOOPS[name]):
                made = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS[:1], max_tokens=200)
            message = made.choices[0].message
            assert made.choices[0].finish_reason == "tool_calls"
            assert message.content is None
            (call,) = message.tool_calls or []
            assert call.type == "function"
            assert json.loads(call.function.arguments) == {"city": "Rome"}
            messages += [
                message.model_dump(),  # with every field that is null
                {"role": "tool", "tool_call_id": call.id, "content": f"result {step}"},
            ]
        rendered = client.post("/../tokenize", body={"model": "fake", "messages": messages}, cast_to=object)
        shown = TEXT.decode(rendered["tokens"], skip_special_tokens=False)  # type: ignore[index]
        assert all(f"result {step}" in shown for step in range(3))
        assert shown.count('"city"') == 3
