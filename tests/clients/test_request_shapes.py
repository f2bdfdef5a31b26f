"""Requests as inspect-ai and Codex send them, over two turns with a tool, nothing stored.

inspect-ai 0.3.285 brings 180 MB of packages, and wants older ones than others here, so its requests stand for it: they
are what its `openai/` provider sent to this server. Codex CLI is a program in Rust; its requests have the fields of its
`ResponsesApiRequest`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.served import Served, serve
from tests.server.spoken import HYBRID, says_in_turn

ADDITION = {
    "type": "function",
    "name": "addition",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {
            "x": {"type": "integer", "description": "First number."},
            "y": {"type": "integer", "description": "Second number."},
        },
        "required": ["x", "y"],
        "additionalProperties": False,
    },
    "strict": False,
}
INSPECT = {
    "model": "fake",
    "tools": [ADDITION],
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 400,
    "temperature": 0.0,
}
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The command to execute"},
            "workdir": {"type": "string"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
CODEX = {
    "model": "fake",
    "instructions": "You are a coding agent.",
    "tools": [SHELL],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": None,
    "prompt_cache_key": "01890a5d-ac96-774b-bcce-b302099a8057",
    "text": None,
    "client_metadata": {"x-codex-installation-id": "0"},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with serve(options, max_model_len=4096, num_slots=1024, template=HYBRID) as served:
        yield served
        served.settle()


def call_of(name: str, arguments: dict[str, Any]) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n{written}\n</tool_call>"


def text(role: str, kind: str, said: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": said}]}


def done(answer: httpx.Response) -> list[dict[str, Any]]:
    """Items as Codex takes them from a stream: those of the `output_item.done` events; the last says the rest."""
    assert answer.status_code == 200, answer.text
    frames = [frame.split("\ndata: ") for frame in answer.text.strip().split("\n\n")]
    events = [json.loads(data) for _, data in frames]
    assert [f"event: {event['type']}" for event in events] == [name for name, _ in frames]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["usage"]["total_tokens"] > 0
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


@pytest.mark.long
def test_inspect(served: Served) -> None:
    asked = text("user", "input_text", "What is 1 + 2?")
    with served.http() as http, says_in_turn(served, call_of("addition", {"x": 1, "y": 2}), "It is 3."):
        first = http.post("/v1/responses", json={**INSPECT, "input": [asked]}).json()
        thought, said, call = first["output"]
        assert [thought["type"], said["type"], call["type"]] == ["reasoning", "message", "function_call"]
        repeated = [
            asked,
            {"type": "reasoning", "content": [], "summary": [], "id": thought["id"]}
            | {"encrypted_content": thought["encrypted_content"]},
            {name: said[name] for name in ("type", "role", "content", "status", "id")},
            {name: call[name] for name in ("arguments", "call_id", "name", "type", "id", "status")},
            {"type": "function_call_output", "call_id": call["call_id"], "output": "3"},
        ]
        second = http.post("/v1/responses", json={**INSPECT, "input": repeated}).json()
    assert [item["content"][0]["text"] for item in second["output"]] == ["It is 3."]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0


@pytest.mark.long
def test_inspect_learns_whether_the_model_reasons() -> None:
    """Its first request asks for a summary; a 400 tells it that there is none to be had."""
    body = {"model": "fake", "input": "Please say 'hello, world'", "reasoning": {"effort": "low", "summary": "auto"}}
    with serve() as served, served.http() as http:
        answer = http.post("/v1/responses", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "reasoning.effort"


@pytest.mark.long
def test_codex(served: Served) -> None:
    asked = [
        text("developer", "input_text", "Sandbox: read-only."),
        text("user", "input_text", "<environment_context>\n</environment_context>"),
        text("user", "input_text", "List the files."),
    ]
    with served.http() as http, says_in_turn(served, call_of("shell", {"command": ["ls"]}), "There are none."):
        thought, said, call = done(http.post("/v1/responses", json={**CODEX, "input": asked}))
        assert json.loads(call["arguments"]) == {"command": ["ls"]}
        repeated = [
            *asked,
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": thought["encrypted_content"]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see.\n"}]},
            {"type": "function_call", "name": "shell", "arguments": call["arguments"], "call_id": call["call_id"]},
            {"type": "function_call_output", "call_id": call["call_id"], "output": '{"output":"","metadata":{}}'},
        ]
        assert said["content"][0]["text"] == "Let me see.\n"
        (last,) = done(http.post("/v1/responses", json={**CODEX, "input": repeated}))
    assert last["content"][0]["text"] == "There are none."


NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Tools for sub-agents.",
    "tools": [
        {"type": "function", "name": "close", "description": "Close an agent.", "strict": False}
        | {"parameters": {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]}},
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object", "properties": {}}},
    ],
}


def test_codex_with_a_namespace(served: Served) -> None:
    """As Codex CLI 0.169 sends it by default: a call has its namespace apart, and comes back so."""
    body = {**CODEX, "tools": [SHELL, NAMESPACE], "input": [text("user", "input_text", "Close it.")]}
    with served.http() as http, says_in_turn(served, call_of("agents__close", {"target": "a"}), "Closed."):
        *_, call = done(http.post("/v1/responses", json=body))
        assert (call["namespace"], call["name"]) == ("agents", "close")
        repeated = {name: call[name] for name in ("type", "name", "namespace", "arguments", "call_id")}
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "{}"}
        body["input"] = [*body["input"], repeated, output]
        (last,) = done(http.post("/v1/responses", json=body))
        assert last["content"][0]["text"] == "Closed."
        for wrong in (
            {**NAMESPACE, "tools": []},
            {**NAMESPACE, "tools": [{"type": "custom", "name": "x"}]},
            {**NAMESPACE, "name": None},
            {**NAMESPACE, "max": 3},
        ):
            answer = http.post("/v1/responses", json={**body, "tools": [wrong]})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tools"
        twice = [NAMESPACE, {**SHELL, "name": "agents__shell"}]
        assert "agents__shell" in http.post("/v1/responses", json={**body, "tools": twice}).json()["error"]["message"]
