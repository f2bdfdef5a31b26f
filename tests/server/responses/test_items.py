"""Items: what comes in is checked and completed, and told as the messages that a template knows."""

from __future__ import annotations

from typing import Any

import pytest

from cellar.server.errors import ApiError
from cellar.server.responses.items import check_calls, messages_of, read_input, referred


def nothing_sealed(_: str) -> str:
    raise AssertionError


def said(*items: dict[str, Any] | str) -> list[dict[str, Any]]:
    (one, *more) = items
    return messages_of(read_input(one if isinstance(one, str) else [one, *more]), nothing_sealed)  # type: ignore[list-item]


def test_a_string_is_what_the_user_says() -> None:
    (item,) = read_input("Hi")
    assert item["id"].startswith("msg_")
    assert item | {"id": ""} == {
        "id": "",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "Hi"}],
    }
    assert said("Hi") == [{"role": "user", "content": "Hi"}]


def test_an_assistants_turn_is_one_message() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "Let me see."},
        call,
        {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "message", "role": "assistant", "id": "msg_x", "content": [{"type": "output_text", "text": "Three."}]},
        {"role": "assistant", "content": "And four."},
    ]
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in ("a", "b")]
    assert said(*items) == [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "assistant", "content": "Three."},
        {"role": "assistant", "content": "And four."},
    ]


def test_reasoning_begins_a_message_and_may_stay_alone() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    assert said({"role": "assistant", "content": "a"}, thought, call, thought) == [
        {"role": "assistant", "content": "a"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "x",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "assistant", "content": None, "reasoning_content": "x"},
    ]
    empty = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "of nothing"}]}
    assert said({"role": "user", "content": "u"}, empty) == [{"role": "user", "content": "u"}]


def test_sealed_reasoning_is_opened() -> None:
    items = read_input([{"type": "reasoning", "summary": [], "encrypted_content": "abc", "content": None}])
    assert messages_of(items, str.upper) == [{"role": "assistant", "content": None, "reasoning_content": "ABC"}]


def test_references_stand_for_items() -> None:
    reference, other = read_input([{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": ""}])
    assert referred(reference) == "msg_1"
    assert referred(other) is None


def test_an_output_needs_its_call() -> None:
    call, output = read_input(
        [
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": ""},
            {"type": "function_call_output", "call_id": "a", "output": ""},
        ]
    )
    check_calls([call], [output])
    check_calls([], [call, output])
    with pytest.raises(ApiError, match="call_id a"):
        check_calls([], [output, call])


@pytest.mark.parametrize(
    ("item", "word"),
    [
        ({"type": "computer_call"}, "computer_call"),
        ({}, "None"),
        ({"role": "wizard", "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": 3}, "content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, r"content\[0\]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, r"content\[0\]"),
        ({"role": "user", "content": [{"type": "input_text", "text": "\ud800"}]}, "surrogate"),
        ({"role": "user", "content": "x", "phase": "commentary"}, "phase"),
        ({"role": "user", "content": "x", "name": "Ann"}, "name"),
        ({"role": "user", "content": "x", "status": "lost"}, "status"),
        ({"role": "user", "content": "x", "id": 7}, "id"),
        ({"role": "user", "content": "x", "id": "7" * 129}, "id"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "text only"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "call_id"),
        ({"type": "function_call", "name": "f", "call_id": "a", "arguments": {}}, "arguments"),
        ({"type": "function_call_output", "call_id": "a"}, "output"),
        ({"type": "function_call_output", "call_id": "a", "output": [{"type": "input_file"}]}, r"output\[0\]"),
        ({"type": "reasoning", "summary": "x"}, "summary"),
        ({"type": "reasoning", "summary": [], "encrypted_content": 1}, "encrypted_content"),
        ({"type": "item_reference"}, "id"),
        ({"type": ["message"]}, "type"),
    ],
)
def test_what_is_not_an_item_is_named(item: dict[str, Any], word: str) -> None:
    with pytest.raises(ApiError, match=word) as found:
        read_input([{"role": "user", "content": "x"}, item])
    assert found.value.status == 400
    if word != "surrogate":
        assert found.value.parameter == "input"
        assert "input[1]" in str(found.value)
