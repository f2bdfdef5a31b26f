"""Tool calls found in text, however it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.text.tools.call import Parsed
from cellar.text.tools.deepseek import CALL, CALL_END, CALLS, CALLS_END, SEPARATOR
from cellar.text.tools.hermes import HermesParser
from cellar.text.tools.registry import PARSERS, parser_of
from cellar.text.tools.required import ListParser, functions, required_schema

SHARED = Path(__file__).parent.parent.parent.parent / "shared" / "data" / "chat_templates" / "llamacpp"
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


def deepseek(*calls: str) -> str:
    return CALLS + "\n".join(CALL + call + CALL_END for call in calls) + CALLS_END


V3 = f'function{SEPARATOR}f\n```json\n{{"a": 1}}\n```'
V31 = f'g{SEPARATOR}{{"b": "<tool_call>"}}'
CASES = [
    ("mistral", "Hello", "Hello", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', "", [ONE]),
    (
        "mistral",
        'Hi [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "<tool_call>"}}] ',
        "Hi ",
        [ONE, TWO],
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{"b": "<tool_call>"}', "", [ONE, TWO]),
    ("mistral", '[TOOL_CALLS]f{"a": 1} on', " on", [ONE]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL', "", [("f", '{"a": "[TOOL')]),
    ("mistral", "[TOOL_CALLS] what now", "[TOOL_CALLS] what now", []),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", '[TOOL_CALLS][{"name": 3}]', '[TOOL_CALLS][{"name": 3}]', []),
    ("mistral", "[TOOL_CALLS] a b {c}", "[TOOL_CALLS] a b {c}", []),
    ("mistral", "[TOOL_", "[TOOL_", []),
    ("deepseek_v3", deepseek(V3), "", [ONE]),
    ("deepseek_v3", "Hm. " + deepseek(V3, V31), "Hm. ", [ONE, TWO]),
    ("deepseek_v31", deepseek(V31) + " on", " on", [TWO]),
    ("deepseek_v31", CALLS + CALL + f'f{SEPARATOR}{{"a": [', "", [("f", '{"a": [')]),
    ("deepseek_v31", CALLS + " none", CALLS + " none", []),
    ("deepseek_v31", CALLS + CALLS_END, CALLS + CALLS_END, []),
    ("deepseek_v31", CALLS + CALL + "no name{", CALLS + CALL + "no name{", []),
    ("llama4_pythonic", "Hello [", "Hello [", []),
    ("llama4_pythonic", "[f(a=1)]", "", [ONE]),
    ("llama4_pythonic", "<|python_start|>[f(a=1), g(b='<tool_call>')]<|python_end|>", "", [ONE, TWO]),
    ("pythonic", " [f(a=1),]\n", "", [ONE]),
    (
        "pythonic",
        "[f(x=[1, -2.5, (3,)], y={'k': None, 'l': true}, z='a, \\'b)')]",
        "",
        [("f", '{"x": [1, -2.5, [3]], "y": {"k": null, "l": true}, "z": "a, \'b)"}')],
    ),
    ("pythonic", "[a.b()]", "", [("a.b", "{}")]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=g())]", "[f(a=g())]", []),
    ("pythonic", "[f(**{'a': 1})]", "[f(**{'a': 1})]", []),
    ("pythonic", "[f(a=1e999)]", "[f(a=1e999)]", []),
    ("pythonic", "[f(a=1), g(b=", " g(b=", [ONE]),
    ("pythonic", "[f(a=1)] and so on", " and so on", [ONE]),
    ("pythonic", "[]", "[]", []),
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
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": ', "}]"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
        ("deepseek_v3", CALLS + CALL + f"function{SEPARATOR}f\n```json\n", "\n```" + CALL_END + CALLS_END),
        ("deepseek_v31", CALLS + CALL + "f" + SEPARATOR, CALL_END + CALLS_END),
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
@given(text=st.text(st.sampled_from("{}[](),='\":\\ ;ntf1<>/_|aeglmoprsu"), max_size=60), data=st.data())
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
                    "[TOOL_CALLS]",
                    '[TOOL_CALLS][{"name": "f", "arguments": {}},',
                    "[TOOL_CALLS]f[ARGS]{}",
                    CALLS + CALL + "f" + SEPARATOR,
                    CALLS + CALL + "f" + SEPARATOR + "{}" + CALL_END,
                    "[f(a=1)",
                    "<|python_start|>[f(",
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


def test_the_template_chooses_the_parser() -> None:
    assert parser_of({}) is None
    assert parser_of({"default": "{{ messages }}"}) is None
    assert parser_of({"default": "plain", "tool_use": "<tool_call>"}) == "hermes"
    assert parser_of({"default": "<tool_call>\n<function=f>"}) is None  # XML inside of the tag: no parser reads it
    assert parser_of({"default": "<|python_start|>[f()]"}) == "llama4_pythonic"


CHOSEN = {
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "llama-cpp-deepseek-r1": "deepseek_v3",
    "meetkai-functionary-medium-v3.1": None,
    "google-gemma-2-2b-it": None,
    "microsoft-Phi-3.5-mini-instruct": None,
}


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/chat_templates is not there")
@pytest.mark.parametrize("name", CHOSEN)
def test_templates_of_real_models_choose_their_parser(name: str) -> None:
    assert parser_of({"default": (SHARED / f"{name}.jinja").read_text(encoding="utf-8")}) == CHOSEN[name]
