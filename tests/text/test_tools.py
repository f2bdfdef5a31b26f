"""Tool calls found in text, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.text.tools import PARSERS, HermesParser, ListParser, Parsed, functions, required_schema

ONE = ("f", '{"a": 1}')
TWO = ("g", '{"b": "<tool_call>"}')
READERS = {**PARSERS, "required": ListParser}


def joined(found: list[Parsed]) -> list[tuple[str, str]]:
    """The calls that the pieces make; each has its name in its first piece, and they come one after another."""
    calls: list[tuple[str, str]] = []
    for piece in (piece for one in found for piece in one.calls):
        if piece.name is not None:
            assert piece.index == len(calls)
            calls.append((piece.name, piece.arguments))
        else:
            assert piece.index == len(calls) - 1
            assert piece.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return calls


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
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, "', "", [("f", '{"a": [1, "')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> on', " on", [("f", '{"a": 1')]),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "id": [3, {}], "name": "f"}</tool_call>',
        "",
        [ONE],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "\\"} </tool_call>"}}</tool_call>x',
        "x",
        [("f", '{"a": "\\"} </tool_call>"}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null, "x": 1.5e3}</tool_call>', "", [("f", "null")]),
    (
        "hermes",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        [],
    ),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}} and so on', " and so on", [ONE]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"b": 2}', '; {"b": 2}', [ONE]),
    ("llama3_json", '  {"name": "f"', '  {"name": "f"', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("required", '[{"name": "f", "arguments": {"a": 1}}]', "", [ONE]),
    (
        "required",
        '[ {"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "<tool_call>"}} ]',
        "",
        [ONE, TWO],
    ),
    ("required", '[{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
    ("required", '[{"na', '[{"na', []),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES, ids=range(len(CASES)))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_calls_are_found_however_the_text_is_cut(
    parser: str, text: str, content: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = READERS[parser]()
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = [*(reader.push(piece) for piece in pieces), reader.flush()]
    assert "".join(one.content for one in found) == content
    assert joined(found) == calls


def test_text_before_a_call_is_not_held_back() -> None:
    reader = PARSERS["hermes"]()
    assert reader.push("Let me look <").content == "Let me look "
    assert reader.push("b>").content == "<b>"


@pytest.mark.parametrize(
    ("parser", "before", "after"),
    [
        ("hermes", 'Hm. <tool_call>{"name": "f", "arguments": ', "}</tool_call>"),
        ("llama3_json", '{"name": "f", "parameters": ', "}"),
        ("required", '[{"name": "f", "arguments": ', "}]"),
    ],
)
def test_arguments_are_told_while_they_are_written(parser: str, before: str, after: str) -> None:
    reader = READERS[parser]()
    arguments = '{"city": "Rome", "days": [1, 2]}'
    reader.push(before)
    told = [[(piece.name, piece.arguments) for piece in reader.push(c).calls] for c in arguments]
    assert told == [[("f", "{")], *([(None, c)] for c in arguments[1:])]
    assert not any((reader.push(after).calls, reader.flush().calls))


@pytest.mark.parametrize("parser", READERS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from('{}[]",:\\ ;ntf1<>/_|aeglmoprsu'), max_size=60), data=st.data())
def test_nothing_breaks_a_reader(parser: str, text: str, data: st.DataObject) -> None:
    """However wild the text, and however it is cut, it is told the same."""
    text = (
        data.draw(
            st.sampled_from(
                [
                    "",
                    "<tool_call>",
                    '<tool_call>{"name": "f", "arguments": 1}</tool_call> ',
                    '{"name": "f", "arguments": ',
                    "<|python_tag|>",
                ]
            )
        )
        + text
    )
    whole, parts = READERS[parser](), READERS[parser]()
    once = [whole.push(text), whole.flush()]
    pieces = [*(parts.push(character) for character in text), parts.flush()]
    assert "".join(one.content for one in pieces) == "".join(one.content for one in once)
    assert joined(pieces) == joined(once)


def test_blanks_behind_a_call_are_told_alike_however_the_text_is_cut() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call> done \n'
    whole, parts = HermesParser(), HermesParser()
    once = whole.push(text).content + whole.flush().content
    assert once == " done"
    assert "".join(parts.push(character).content for character in text) + parts.flush().content == once


def test_the_schema_of_required_calls() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert required_schema(tools, False)["maxItems"] == 1
    for wrong in (
        {"type": "web_search"},
        {"type": "function", "function": {}},
        {"function": {"name": "f", "parameters": 3}},
    ):
        with pytest.raises(ValueError, match="must be"):
            functions([wrong])
