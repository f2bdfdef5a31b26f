"""Reasoning told apart from the content, however the answer is cut; grammars that begin behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.core.errors import RequestError
from cellar.core.sampling import SamplingParams, StructuredOutputsParams, Thinking
from cellar.text.chat import ChatTemplate
from cellar.text.grammar import GrammarCompiler, Matcher
from cellar.text.reasoning.reader import ReasoningReader
from cellar.text.reasoning.registry import STYLES, style_of, thinking_after
from cellar.text.tokenizer import Tokenizer

SHARED = Path(__file__).parent.parent.parent.parent / "shared" / "data" / "chat_templates" / "llamacpp"
QWEN, R1, MISTRAL, GRANITE = (STYLES[name] for name in ("qwen3", "deepseek_r1", "mistral", "granite"))

CASES = [
    (QWEN, "Hello", "", "Hello"),
    (QWEN, "\n Hello\n", "", "\n Hello\n"),
    (QWEN, "<think>\nHm, é.\n\nSo.\n</think>\n\nHi </think> <think>\n", "Hm, é.\n\nSo.", "Hi </think> <think>\n"),
    (QWEN, " \n<think>Hm</think>Hi", "Hm", "Hi"),
    (QWEN, "<think>\n\n</think>\n\nHi", "", "Hi"),
    (QWEN, "<think>a < b </thin </think>x", "a < b </thin", "x"),
    (QWEN, "<think>cut off \n", "cut off", ""),
    (QWEN, "<think>cut in </thi", "cut in </thi", ""),
    (QWEN, "<think> \n", "", ""),
    (QWEN, "<think> \n</th", "</th", ""),
    (QWEN, "<thi", "", "<thi"),
    (QWEN, "<this>", "", "<this>"),
    (QWEN, "Hi <think>no</think>", "", "Hi <think>no</think>"),
    (R1, "Hm.\n</think>\nHi", "Hm.", "Hi"),
    (R1, "<think>\nHm.</think>Hi", "Hm.", "Hi"),
    (R1, "</think>Hi", "", "Hi"),
    (R1, "never ends", "never ends", ""),
    (R1, "<thi", "<thi", ""),
    (R1, "", "", ""),
    (MISTRAL, "[THINK]Hm[/THI[/THINK]Hi", "Hm[/THI", "Hi"),
    (GRANITE, "Here is my thought process:\nHm.\n\nHere's my response: Hi", "Hm.", "Hi"),
    (GRANITE, "Here's my thought process: Here is Hm. Here is my response:\nHi", "Here is Hm.", "Hi"),
    (GRANITE, "Here it is", "", "Here it is"),
]


@pytest.mark.parametrize(("style", "text", "reasoning", "content"), CASES, ids=range(len(CASES)))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_it_is_told_apart_however_the_text_is_cut(
    style: Thinking, text: str, reasoning: str, content: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = ReasoningReader(style)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = [*(reader.push(piece) for piece in pieces), reader.flush()]
    assert "".join(one.reasoning for one in found) == reasoning
    assert "".join(one.content for one in found) == content


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_wild_texts_are_told_alike(name: str, data: st.DataObject) -> None:
    style = STYLES[name]
    parts = st.sampled_from([*style.opens, *style.closes, "\n", " ", "a", "<", "</", "[/TH", "Here", "é"])
    text = "".join(data.draw(st.lists(parts, max_size=12)))
    whole, cut = ReasoningReader(style), ReasoningReader(style)
    once = [whole.push(text), whole.flush()]
    pieces = [*(cut.push(character) for character in text), cut.flush()]
    for field in ("reasoning", "content"):
        assert "".join(getattr(one, field) for one in pieces) == "".join(getattr(one, field) for one in once)
    assert (whole.began, whole.over) == (cut.began, cut.over)


def test_what_can_be_no_mark_is_not_held_back() -> None:
    reader = ReasoningReader(QWEN)
    assert reader.push("<think>Let me") == ("Let me", "")
    assert reader.push(" see. ") == (" see.", "")
    assert reader.push("</b") == (" </b", "")
    assert reader.push("</think>") == ("", "")
    assert reader.push("\nHi ") == ("", "Hi ")


def test_the_prompt_says_whether_it_has_begun() -> None:
    begun = replace(QWEN, begun=True)
    assert thinking_after(QWEN, "[user] a <think>\n[assistant]") == QWEN
    assert thinking_after(QWEN, "[assistant]<think>\n") == begun
    assert thinking_after(QWEN, "[assistant]<think>\n\n</think>\n\n") is None
    assert thinking_after(R1, "[assistant]") == R1 == begun


def test_the_template_chooses_the_style() -> None:
    assert style_of({}) is None
    assert style_of({"default": "{{ messages }}"}) is None
    assert style_of({"default": "plain", "tool_use": "'</think>' in content"}) == "qwen3"
    assert style_of({"default": "[THINK]{{ m }}[/THINK]"}) == "mistral"


PROMPTS: dict[str, tuple[dict[str, bool], bool | None]] = {
    "Qwen-Qwen3-0.6B": ({}, False),
    "Qwen-QwQ-32B": ({}, True),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ({}, True),
    "llama-cpp-deepseek-r1": ({}, True),
    "Qwen-Qwen3-0.6B off": ({"enable_thinking": False}, None),
}


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/chat_templates is not there")
@pytest.mark.parametrize("name", PROMPTS)
def test_templates_of_real_models(name: str) -> None:
    variables, begun = PROMPTS[name]
    templates = ChatTemplate((SHARED / f"{name.partition(' ')[0]}.jinja").read_text(encoding="utf-8"))
    style = style_of(templates.sources)
    assert style == "qwen3"
    prompt = templates.render([{"role": "user", "content": "Why <think>?"}], **variables)
    thinking = thinking_after(STYLES[style], prompt)
    assert (None if thinking is None else thinking.begun) == begun
    assert templates.reads("enable_thinking") == name.startswith("Qwen-Qwen3")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_of_earlier_answers_reaches_the_template(key: str) -> None:
    templates = ChatTemplate("{% for m in messages %}({{ m.reasoning_content }}){{ m.content }}{% endfor %}")
    assert templates.render([{"role": "assistant", "content": "Hi", key: "Hm"}]) == "(Hm)Hi"


def test_marks_are_checked() -> None:
    with pytest.raises(RequestError, match="closes"):
        Thinking(opens=("<think>",), closes=())
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(thinking=QWEN, detokenize=False)


def allowed(matcher: Matcher, tokenizer: Tokenizer) -> set[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return {token for token in range(tokenizer.vocab_size) if bits[token]}


def test_a_grammar_begins_behind_the_reasoning(gpt: Tokenizer) -> None:
    compiler = GrammarCompiler(gpt, gpt.vocab_size, (2,))
    inner = compiler.compile(StructuredOutputsParams(choice=["yes"]))
    first, everything = allowed(inner, gpt), set(range(gpt.vocab_size))
    assert (
        allowed(compiler.with_reasoning(inner.copy(), QWEN), gpt) == first
    )  # its mark is no token here: it cannot begin
    marked = Thinking(opens=("<|im_start|>",), closes=("</think>",))
    matcher = compiler.with_reasoning(inner.copy(), marked)
    assert allowed(matcher, gpt) == first | {1}
    matcher.consume(1)
    blank = gpt.encode("\n", add_special_tokens=False)
    for text in ("Well, no", "</thi", "</think"):
        for token in gpt.encode(text, add_special_tokens=False):
            assert allowed(matcher, gpt) == everything - {2}  # it cannot end before the content
            matcher.consume(token)
    twin = matcher.copy()
    matcher.consume(gpt.encode(">", add_special_tokens=False)[0])
    assert allowed(twin, gpt) == everything - {2}
    for _ in range(2):
        assert allowed(matcher, gpt) == first | set(blank) | allowed(matcher, gpt) & {gpt.encode(" ")[0]}
        matcher.consume(blank[0])
    assert allowed(matcher, gpt) == first
    for token in gpt.encode("yes", add_special_tokens=False):
        assert token in allowed(matcher, gpt)
        matcher.consume(token)
    assert allowed(matcher, gpt) == {2}


def test_a_token_may_end_the_reasoning_and_begin_the_content(gpt: Tokenizer) -> None:
    compiler = GrammarCompiler(gpt, gpt.vocab_size, (2,))
    mark = gpt.encode(" the", add_special_tokens=False)[0]
    text = gpt.id_to_text(mark)
    assert len(text) > 1
    inner = compiler.compile(StructuredOutputsParams(regex=f"{text[1:]}[x-z]"))
    matcher = compiler.with_reasoning(inner, Thinking(opens=("<think>",), closes=(text[:1],), begun=True))
    matcher.consume(mark)
    assert {gpt.id_to_text(token)[0] for token in allowed(matcher, gpt)} == set("xyz")


def test_a_budget_ends_the_reasoning_by_its_mark(gpt: Tokenizer) -> None:
    compiler, everything = GrammarCompiler(gpt, gpt.vocab_size, (2,)), set(range(gpt.vocab_size))
    close = gpt.encode("</think>", add_special_tokens=False)
    for begun in (False, True):
        matcher = compiler.with_reasoning(None, replace(QWEN, begun=begun, budget=3))
        if not begun:
            for token in gpt.encode("<think>", add_special_tokens=False):
                assert allowed(matcher, gpt) == everything
                matcher.consume(token)
        for token in gpt.encode("abc", add_special_tokens=False)[:3]:
            assert allowed(matcher, gpt) == everything
            matcher.consume(token)
        twin = matcher.copy()
        for token in close:
            assert allowed(matcher, gpt) == {token}
            matcher.consume(token)
        assert allowed(matcher, gpt) == everything
        assert allowed(twin, gpt) == {close[0]}
    content = compiler.with_reasoning(None, replace(QWEN, budget=0))
    for token in gpt.encode("Hi <think>", add_special_tokens=False):  # a mark inside of the content
        content.consume(token)
    assert allowed(content, gpt) == everything
    grammar = compiler.compile(StructuredOutputsParams(choice=["yes"]))
    first = allowed(grammar, gpt)
    matcher = compiler.with_reasoning(grammar, replace(R1, budget=0))
    for token in close:
        assert allowed(matcher, gpt) == {token}
        matcher.consume(token)
    assert first <= allowed(matcher, gpt) < everything
