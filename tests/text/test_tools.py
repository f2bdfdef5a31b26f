"""Tool calls found in text, however it is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.text.tools import PARSERS, ToolCall, functions, required_calls, required_schema

ONE = ToolCall("f", '{"a": 1}')
TWO = ToolCall("g", '{"b": "<tool_call>"}')

CASES = [
    ("hermes", "Hello", "Hello", []),
    ("hermes", 'Hi <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Hi ", [ONE]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"b": "<tool_call>"}}</tool_call>\n',
        "",
        [ONE, TWO],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [ONE]),
    ("hermes", "<tool_call>{broken}</tool_call> on", "<tool_call>{broken}</tool_call> on", []),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", "1 < 2 <<tool_call>", "1 < 2 <<tool_call>", []),
    ("llama3_json", "Hello {", "Hello {", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [ONE]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [ONE]),
    (
        "llama3_json",
        ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "arguments": {"b": "<tool_call>"}}',
        "",
        [ONE, TWO],
    ),
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    ("llama3_json", "", "", []),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES, ids=range(len(CASES)))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_calls_are_found_however_the_text_is_cut(
    parser: str, text: str, content: str, calls: list[ToolCall], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = PARSERS[parser]()
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = [*(reader.push(piece) for piece in pieces), reader.flush()]
    assert "".join(one.content for one in found) == content
    assert [call for one in found for call in one.calls] == calls


def test_text_before_a_call_is_not_held_back() -> None:
    reader = PARSERS["hermes"]()
    assert reader.push("Let me look <").content == "Let me look "
    assert reader.push("b>").content == "<b>"


def test_the_schema_of_required_calls() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert required_schema(tools, False)["maxItems"] == 1
    text = json.dumps([{"name": "f", "arguments": {"a": 1}}])
    assert required_calls(text) == [ONE]
    assert required_calls(text[:-3]) is None
    for wrong in (
        {"type": "web_search"},
        {"type": "function", "function": {}},
        {"function": {"name": "f", "parameters": 3}},
    ):
        with pytest.raises(ValueError, match="must be"):
            functions([wrong])
