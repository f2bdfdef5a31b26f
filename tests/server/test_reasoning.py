"""Reasoning by HTTP: told apart from the content, in whole answers and in streams, as vLLM and DeepSeek do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fake_front import TEMPLATE
from tests.server.served import TEXT, Served, serve
from tests.server.spoken import ALWAYS, HYBRID, says

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
THOUGHT, ANSWER = "Well, é: 1 < 2.\n\nSo </b>", "Hi there, é!"


@pytest.fixture(scope="module")
def hybrid() -> Iterator[Served]:
    """A template that lets reasoning be turned off; the model opens it."""
    with serve({"tool_call_parser": "hermes"}, template=HYBRID, max_model_len=512) as found:
        yield found
        found.settle()


@pytest.fixture(scope="module")
def always() -> Iterator[Served]:
    """A template that opens the reasoning."""
    with serve(template=ALWAYS, max_model_len=1024, num_slots=128) as found:
        yield found
        found.settle()


def answer(served: Served, stream: bool, **options: Any) -> tuple[str | None, str | None, Any, Any]:
    """-> reasoning, content, why it ended, usage."""
    options = {"model": "fake", "messages": MESSAGES, "max_tokens": 300, **options}
    if not stream:
        made = served.client().chat.completions.create(**options)
        message = made.choices[0].message
        extra = message.model_extra or {}
        assert extra.get("reasoning") == extra.get("reasoning_content")
        return extra.get("reasoning_content"), message.content, made.choices[0].finish_reason, made.usage
    chunks = list(
        served.client().chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [(delta.model_extra or {}).get("reasoning_content") for delta in deltas]
    assert thoughts == [(delta.model_extra or {}).get("reasoning") for delta in deltas]
    assert "" not in thoughts
    reason = next(c.choices[0].finish_reason for c in reversed(chunks) if c.choices)
    content = "".join(delta.content or "" for delta in deltas)
    return "".join(filter(None, thoughts)) or None, content, reason, chunks[-1].usage


@pytest.mark.parametrize("stream", [False, True])
def test_it_is_told_apart_and_counted(hybrid: Served, stream: bool) -> None:
    with says(hybrid, f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"):
        reasoning, content, reason, usage = answer(hybrid, stream)
    assert (reasoning, content, reason) == (THOUGHT, ANSWER, "stop")
    thought = len(TEXT.encode(f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}")) - len(TEXT.encode(f"\n\n{ANSWER}"))
    assert abs(usage.completion_tokens_details.reasoning_tokens - thought) <= 1  # a token may join both
    with says(hybrid, ANSWER):
        reasoning, content, _, usage = answer(hybrid, stream)
    assert (reasoning, content) == (None, ANSWER)
    assert usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_opens_it(always: Served, stream: bool) -> None:
    with says(always, f"{THOUGHT}</think>{ANSWER}"):
        assert answer(always, stream)[:3] == (THOUGHT, ANSWER, "stop")
    with says(always, THOUGHT):
        reasoning, content, reason, usage = answer(always, stream, max_tokens=len(TEXT.encode(THOUGHT)))
    assert (reasoning, content, reason) == (THOUGHT, "", "length")
    assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_switch_of_a_template(hybrid: Served, stream: bool) -> None:
    """Off, the prompt holds reasoning that is over; a mark in the answer is text like any other."""
    text = "<think>no</think>yes"
    with says(hybrid, text):
        for off in (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            {"reasoning_effort": "none"},
        ):
            assert answer(hybrid, stream, **off)[:2] == (None, text)
        for on in ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, {"reasoning_effort": "low"}):
            assert answer(hybrid, stream, **on)[:2] == ("no", "yes")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_looked_for_in_the_content(hybrid: Served, stream: bool) -> None:
    with says(hybrid, f"<think>{THOUGHT}</think>{ANSWER}"):
        assert answer(hybrid, stream, stop=["é", "<", "\n"])[:3] == (THOUGHT, "Hi there, ", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_looked_for_in_the_content(hybrid: Served, stream: bool) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    with says(hybrid, f"<think>Perhaps {call}?</think>Well."):
        assert answer(hybrid, stream, tools=TOOLS)[:3] == (f"Perhaps {call}?", "Well.", "stop")
    with says(hybrid, f"<think>Yes.</think>\n{call}"):
        reasoning, content, reason, _ = answer(hybrid, stream, tools=TOOLS)
    assert (reasoning, content or "", reason) == ("Yes.", "", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output_begins_behind_it(always: Served, stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"a": 1}]}}}
    with says(always, 'Hm {"b": 2}.</think>\n{"a": 1}'):
        reasoning, content, reason, _ = answer(always, stream, response_format=wanted)
        assert (reasoning, json.loads(content or ""), reason) == ('Hm {"b": 2}.', {"a": 1}, "stop")
    with says(always, "No end of it.</think>Nothing else"):
        reasoning, content, _, _ = answer(always, stream, response_format=wanted)
        assert (reasoning, json.loads(content or "")) == ("No end of it.", {"a": 1})


def test_several_answers_and_bare_ids(hybrid: Served) -> None:
    with says(hybrid, f"<think>{THOUGHT}</think>{ANSWER}"):
        made = hybrid.client().chat.completions.create(model="fake", messages=MESSAGES, max_tokens=300, n=2)
        assert made.usage is not None
        assert made.usage.completion_tokens_details is not None
        for choice in made.choices:
            assert (choice.message.content, (choice.message.model_extra or {})["reasoning"]) == (ANSWER, THOUGHT)
        ids = TEXT.encode("x")
        text = hybrid.client().completions.create(model="fake", prompt=ids, max_tokens=300).choices[0].text
        assert text == f"<think>{THOUGHT}</think>{ANSWER}"


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("plain", {"reasoning_effort": "low"}, "reasoning_effort", "does not think"),
    ("plain", {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "does not read"),
    ("always", {"reasoning_effort": "none"}, "reasoning_effort", "always thinks"),
    ("always", {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "does not read"),
    ("always", {"chat_template_kwargs": {"reasoning_effort": "low"}}, "chat_template_kwargs", "does not read"),
    ("always", {"reasoning_effort": "much"}, "reasoning_effort", "should be"),
]
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"reasoning_effort": "none"}),
    ("plain", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("always", {"reasoning_effort": "medium"}),
]


def test_what_the_template_cannot_do_is_refused(always: Served) -> None:
    with serve() as plain:
        servers = {"plain": plain, "always": always}
        for name, change, param, words in REFUSED:
            with servers[name].http() as http:
                refusal = http.post("/v1/chat/completions", json={"messages": MESSAGES, **change})
            assert refusal.status_code == 400, refusal.text
            assert refusal.json()["error"]["param"] == param
            assert words in refusal.json()["error"]["message"]
        for name, change in ACCEPTED:
            with servers[name].http() as http, says(servers[name], "Hm</think>Hi"):
                made = http.post("/v1/chat/completions", json={"messages": MESSAGES, **change})
            assert made.status_code == 200, made.text


def test_effort_reaches_a_template_that_reads_it() -> None:
    with serve(template=TEMPLATE + "({{ reasoning_effort }})") as served:
        made = served.client().chat.completions.create(
            model="fake",
            messages=MESSAGES,
            reasoning_effort="high",
            max_tokens=1,
            extra_body={"return_token_ids": True},
        )
        assert "(high)" in TEXT.decode((made.model_extra or {})["prompt_token_ids"])


def test_the_option_overrides_the_template() -> None:
    for name, expected in (("none", (None, "Hm</think>Hi")), ("deepseek_r1", ("Hm", "Hi"))):
        with serve({"reasoning_parser": name}, template=HYBRID) as served, says(served, "Hm</think>Hi"):
            assert answer(served, False)[:2] == expected
            assert answer(served, True)[:2] == expected


TEMPLATES = Path(__file__).parent.parent.parent.parent / "shared" / "data" / "chat_templates" / "llamacpp"


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="../shared/data/chat_templates is not there")
def test_qwens_own_template_takes_its_reasoning_back() -> None:
    """A loop with a tool: the reasoning of the turn at hand goes back with the call that it led to."""
    template = (TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    with serve(template=template, max_model_len=4096, num_slots=512) as served:
        client: openai.OpenAI = served.client()
        with says(served, f"<think>\nLet me look.\n</think>\n\n{call}"):
            made = client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, max_tokens=300)
        message = made.choices[0].message
        assert message.content is None
        (first,) = message.tool_calls or []
        messages = [*MESSAGES, message.model_dump(), {"role": "tool", "tool_call_id": first.id, "content": "18"}]
        rendered: Any = client.post("/../tokenize", body={"model": "fake", "messages": messages}, cast_to=object)
        assert "<think>\nLet me look.\n</think>\n\n<tool_call>" in TEXT.decode(rendered["tokens"])
        with says(served, "<think>\nWarm.\n</think>\n\n18 degrees."):
            made = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, max_tokens=300)
        assert made.choices[0].message.content == "18 degrees."


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_of_reasoning(hybrid: Served, stream: bool) -> None:
    with says(hybrid, f"<think>{'so ' * 200}"):
        reasoning, content, _, usage = answer(hybrid, stream, extra_body={"thinking_token_budget": 20})
    assert reasoning
    assert content
    assert set(reasoning + content) == set("so ")  # it goes on with what is content by now
    marks = len(TEXT.encode("<think>")) + len(TEXT.encode("</think>"))
    assert 20 <= usage.completion_tokens_details.reasoning_tokens <= 20 + marks
    with serve() as plain, plain.http() as http:
        refusal = http.post("/v1/chat/completions", json={"messages": MESSAGES, "thinking_token_budget": 5})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "thinking_token_budget")
