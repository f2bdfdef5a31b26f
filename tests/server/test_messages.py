"""/v1/messages, driven by Anthropic's own client, over a device that says what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.fake_front import TEMPLATE
from tests.limits import SECONDS
from tests.server.served import TEXT, Served, raw, serve
from tests.server.spoken import ALWAYS, HYBRID, paced, says

USER: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
THINKING: Any = {"type": "enabled", "budget_tokens": 200}
SHOWING = (
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }}:{{ c.function.name }} {{ c.function.arguments.city }}>{% endfor %}"
    "{% endfor %}{{ tools }}[assistant]{% if enable_thinking %}on{% endif %}"
)
"""A template that shows all there is."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"tool_call_parser": "hermes"}, template=HYBRID, max_model_len=1024, num_slots=256) as found:
        yield found
        found.settle()


def client(served: Served, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, **options)


def create(served: Served, **options: Any) -> Any:
    fields: dict[str, Any] = {"model": "fake", "max_tokens": 400, "messages": USER, **options}
    return client(served).messages.create(**fields)


def shapes(message: Any) -> list[tuple[str, Any]]:
    """Blocks without ids and signatures."""
    values = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, values[block.type])) for block in message.content]


def streamed(served: Served, **options: Any) -> tuple[Any, list[Any]]:
    """The message that the client's own helper puts together, and the events that it had."""
    fields: dict[str, Any] = {"model": "fake", "max_tokens": 400, "messages": USER, **options}
    with client(served).messages.stream(**fields) as stream:
        events = list(stream)
        return stream.get_final_message(), events


@pytest.mark.parametrize("stream", [False, True])
def test_text(served: Served, stream: bool) -> None:
    with says(served, "Hello é!\n"):
        made = streamed(served)[0] if stream else create(served)
    assert (made.type, made.role, made.model, made.id[:4]) == ("message", "assistant", "fake", "msg-")
    assert shapes(made) == [("text", "Hello é!\n")]
    assert (made.stop_reason, made.stop_sequence) == ("end_turn", None)
    prompt = len(TEXT.encode("[user] Hi\n[assistant]<think>\n\n</think>\n\n", add_special_tokens=False))
    usage = made.usage
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == prompt
    assert usage.output_tokens == len(TEXT.encode("Hello é!\n")) + 1


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_text_and_tools(served: Served, stream: bool) -> None:
    options = {"tools": TOOLS, "thinking": THINKING}
    with says(served, f"<think>\nRome é?\n</think>\n\nLet me look.\n{CALL}\n{CALL}"):
        made = streamed(served, **options)[0] if stream else create(served, **options)
    blocks = shapes(made)
    assert [kind for kind, _ in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert [value for _, value in blocks[::2]] == ["Rome é?", {"city": "Rome"}]
    assert blocks[1][1].strip() == "Let me look."
    assert made.content[0].signature
    assert made.stop_reason == "tool_use"
    assert made.content[2].name == "weather"
    assert made.content[2].id != made.content[3].id
    assert 0 < made.usage.output_tokens_details.thinking_tokens < made.usage.output_tokens


def test_the_events_of_a_stream(served: Served) -> None:
    with paced(served), says(served, f"<think>So.</think>\n\n{CALL}"):
        _, events = streamed(served, tools=TOOLS, thinking=THINKING)
        own = [event for event in events if event.type.startswith(("message_", "content_block_"))]
        fields: dict[str, Any] = {"model": "fake", "max_tokens": 400, "messages": USER, "stream": True}
        with served.http() as http:
            text = http.post("/v1/messages", json={**fields, "tools": TOOLS, "thinking": THINKING}).text
    kinds = [event.type for event in own if event.type != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert own[0].message.content == []
    assert own[0].message.usage.output_tokens == 0
    deltas = [event.delta for event in own if event.type == "content_block_delta"]
    assert "".join(d.thinking for d in deltas if d.type == "thinking_delta") == "So."
    assert [d.type for d in deltas].count("signature_delta") == 1
    pieces = [d.partial_json for d in deltas if d.type == "input_json_delta"]
    assert json.loads("".join(pieces)) == {"city": "Rome"}
    assert len(pieces) > 1  # told while it is written
    lines = text.splitlines()
    named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert named == [body["type"] for body in bodies]
    assert named[:2] == ["message_start", "ping"]
    assert "[DONE]" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_why_it_stopped(served: Served, stream: bool) -> None:
    def ended(**options: Any) -> tuple[str, str | None, str]:
        made = streamed(served, **options)[0] if stream else create(served, **options)
        return made.stop_reason, made.stop_sequence, "".join(value for kind, value in shapes(made) if kind == "text")

    with says(served, "One, two, three " * 100):
        assert ended(stop_sequences=["two", "x"]) == ("stop_sequence", "two", "One, ")
        assert ended(max_tokens=3)[:2] == ("max_tokens", None)
        assert ended(max_tokens=5000)[:2] == ("model_context_window_exceeded", None)
    with says(served, "two"):
        assert ended() == ("end_turn", None, "two")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_choice(served: Served, stream: bool) -> None:
    def made(text: str, choice: dict[str, Any]) -> Any:
        options = {"tools": TOOLS, "tool_choice": choice}
        with says(served, text):
            return streamed(served, **options)[0] if stream else create(served, **options)

    other = '{"name": "weather", "input_schema": {"type": "object"}}'
    assert shapes(made(other, {"type": "tool", "name": "weather"}))[0][1].keys() == {"city"}
    forced = made("[", {"type": "any", "disable_parallel_tool_use": True})
    assert [kind for kind, _ in shapes(forced)] == ["tool_use"]
    assert forced.stop_reason == "tool_use"
    assert shapes(made(CALL + CALL, {"type": "auto", "disable_parallel_tool_use": True})) == [
        ("tool_use", {"city": "Rome"})
    ]
    assert shapes(made(CALL, {"type": "none"})) == [("text", CALL)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off(served: Served, stream: bool) -> None:
    cut = CALL[: CALL.index("Rome") + 2]
    options = {"tools": TOOLS, "max_tokens": len(TEXT.encode(cut))}
    with says(served, CALL):
        if stream:
            _, events = streamed(served, **options)
            assert "".join(e.partial_json for e in events if e.type == "input_json").startswith('{"city": "Ro')
            assert events[-1].message.stop_reason == "max_tokens"
        else:
            made = create(served, **options)
            assert made.stop_reason == "max_tokens"
            assert made.content[0].input["INVALID_JSON"].startswith('{"city": "Ro')


def test_json_and_a_budget() -> None:
    with serve(template=ALWAYS, max_model_len=1024, num_slots=128) as served:
        wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
        with says(served, 'Hm.</think>{"city": "Rome"}'):
            assert shapes(create(served, output_config=wanted)) == [("thinking", "Hm."), ("text", '{"city": "Rome"}')]
        with says(served, "so " * 300):
            made = create(served, thinking={"type": "enabled", "budget_tokens": 10})
        assert [kind for kind, _ in shapes(made)] == ["thinking", "text"]
        marks = len(TEXT.encode("</think>"))
        assert 10 <= made.usage.output_tokens_details.thinking_tokens <= 10 + marks
        for thinking in ({"type": "disabled"}, {"type": "enabled"}, {"type": "enabled", "budget_tokens": 400}):
            with pytest.raises(anthropic.BadRequestError, match="thinking"):
                create(served, thinking=thinking)


def test_what_the_template_is_given() -> None:
    """Blocks of every kind that is read, in the turns that a chat has; whatever the client got goes back as it is."""
    with serve(
        {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}, template=SHOWING, max_model_len=2048, num_slots=512
    ) as served:
        with says(served, f"<think>Hm.</think>See.{CALL}"):
            first = create(served, tools=TOOLS, thinking=THINKING)
        ephemeral = {"type": "ephemeral"}
        (call,) = (block for block in first.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id}
        messages = [
            {"role": "user", "content": "A"},
            {"role": "user", "content": [{"type": "text", "text": "B", "cache_control": ephemeral}]},
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [{**result, "content": [{"type": "text", "text": "18"}]}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "weather", "input": {}}]},
            {"role": "user", "content": [{**result, "tool_use_id": "x", "content": "no", "is_error": True}]},
            {"role": "user", "content": "C"},
        ]
        system = [{"type": "text", "text": "S", "cache_control": ephemeral}]
        counted = client(served).messages.count_tokens(model="fake", messages=messages, system=system, tools=TOOLS)  # type: ignore[arg-type]
        prompts = []
        ordinary = served.app.state.api.prepare.read_text
        served.app.state.api.prepare.read_text = lambda text, *rest: prompts.append(text) or ordinary(text, *rest)
        with says(served, "Hi"):
            made = create(served, messages=messages, system=system, tools=TOOLS, cache_control=ephemeral)
        shown = prompts[0]
        expected = (
            f"[system]S[user]A\nB[assistant](Hm.)See.<{call.id}:weather Rome>[tool weather]18"
            "[assistant]<x:weather >[tool weather]Error: no[user]C[{"
        )
        assert shown.startswith(expected)
        assert shown.endswith("[assistant]")
        usage = made.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        with says(served, "Hi"):
            again = create(served, messages=messages, system=system, tools=TOOLS)
        assert again.usage.cache_read_input_tokens > 0


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document'"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]}, "redacted"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "content.0..x"),
    ({"messages": [{"role": "user", "content": [3]}]}, "no block"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "the role"),
    ({"messages": [*USER, {"role": "assistant", "content": "I am"}]}, "go on with it"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "no"}]}]}, "tool_use_id"),
    ({"messages": []}, "messages"),
    ({"system": [IMAGE]}, "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "custom tools only"),
    ({"tools": [{**TOOLS[0], "strict": True}]}, "strict"),
    ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "defer_loading"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nobody"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"}}, "thinking"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking"),
    ({"output_config": {"effort": "low"}}, "effort"),
    ({"output_config": {"format": {"type": "regex"}}}, "json_schema"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"fantasy": 1}, "fantasy"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": ["x" * 9000]}, "stop"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_implemented_is_refused_by_name(served: Served, change: dict[str, Any], words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as refusal:
        client(served).post("/v1/messages", body={"messages": USER, "max_tokens": 9, **change}, cast_to=object)
    assert refusal.value.body is not None
    assert refusal.value.body["type"] == "error"  # type: ignore[index]
    assert refusal.value.type == "invalid_request_error"


def test_neutral_fields_are_accepted(served: Served) -> None:
    with says(served, "Hi"):
        extra = {"service_tier": "auto", "temperature": 0.5, "top_p": 0.9, "top_k": 5, "speed": None, "cache_salt": "a"}
        made = create(served, metadata={"user_id": "x"}, extra_body=extra, thinking={"type": "disabled"})
    assert shapes(made) == [("text", "Hi")]


def test_errors_have_anthropics_form(served: Served) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude") as missing:
        create(served, model="claude-none")
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="the context holds") as long:
        create(served, messages=[{"role": "user", "content": "x y " * 3000}])
    assert long.value.type == "invalid_request_error"
    with served.http() as http:
        assert http.get("/v1/messages").json()["type"] == "error"
        broken = http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
        assert (broken.status_code, broken.json()["type"]) == (400, "error")
        assert "error" in http.post("/v1/completions", json={}).json()  # others as before
    with serve({"api_key": ["k1", "k2"]}, {"max_body_bytes": 1000}, template=TEMPLATE) as locked:
        with pytest.raises(anthropic.AuthenticationError) as refusal:
            create(locked)
        assert refusal.value.type == "authentication_error"
        key = anthropic.Anthropic(base_url=locked.url, api_key="k2", max_retries=0)
        token = anthropic.Anthropic(base_url=locked.url, auth_token="k1", max_retries=0)
        for allowed in (key, token):
            with says(locked, "Hi"):
                made = allowed.messages.create(model="fake", max_tokens=5, messages=USER)
            assert shapes(made) == [("text", "Hi")]
        with pytest.raises(anthropic.RequestTooLargeError) as large:
            key.messages.create(model="fake", max_tokens=5, messages=[{"role": "user", "content": "x" * 2000}])
        assert large.value.type == "request_too_large"


def test_an_error_within_a_stream_and_a_client_that_leaves() -> None:
    with serve(
        limits={"request_timeout": 0.5}, template=TEMPLATE, latency=0.01, max_model_len=8192, num_slots=1024
    ) as slow:
        with says(slow, "so " * 6000), pytest.raises(anthropic.APIStatusError) as late:
            streamed(slow, max_tokens=5000)
        assert late.value.type == "timeout_error"
        slow.settle()
    body = {"model": "fake", "max_tokens": 5000, "messages": USER, "stream": True}
    with (
        serve(template=TEMPLATE, latency=0.005, max_model_len=8192, num_slots=1024) as served,
        says(served, "so " * 6000),
    ):
        with raw(served.url, body, "/v1/messages") as sock:
            sock.settimeout(SECONDS)
            assert sock.recv(100)
        served.settle()


def test_async_and_other_apis_beside_it(served: Served) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
            fields: dict[str, Any] = {"model": "fake", "max_tokens": 300, "messages": USER, "thinking": THINKING}
            made = await client.messages.create(**fields)
            assert shapes(made) == [("thinking", "Hm."), ("text", "Hi")]
            async with client.messages.stream(**fields) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert (text, shapes(final)) == ("Hi", shapes(made))
            events = [event.type async for event in await client.messages.create(**fields, stream=True)]
            assert (events[0], events[-1]) == ("message_start", "message_stop")
            counted = await client.messages.count_tokens(model="fake", messages=USER)
            assert counted.input_tokens > 0
            several = await asyncio.gather(*(client.messages.create(**fields) for _ in range(5)))
            assert all(shapes(one) == shapes(made) for one in several)

    with says(served, "<think>Hm.</think>Hi"):
        asyncio.run(run())
        other: openai.OpenAI = served.client()
        assert (
            other.chat.completions.create(model="fake", messages=USER, max_tokens=300).choices[0].message.content
            == "Hi"
        )
