"""A conversation goes on from its own ids."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellar.text.continuation import PromptText, answer_ids, new_ids
from cellar.text.tokenizer import Tokenizer
from tests.text.conftest import load

Messages = list[tuple[str, str]]


def chatml(messages: Messages, trim: bool = False) -> str:
    """As most models have it; many trim what was said."""
    said = "".join(f"<|im_start|>{role}\n{text.strip() if trim else text}<|im_end|>\n" for role, text in messages)
    return said + "<|im_start|>assistant\n"


def llama2(messages: Messages) -> str:
    """Blanks around what was said, that nobody wrote."""
    return "".join(
        f"<s>[INST] {text.strip()} [/INST]" if role == "user" else f" {text.strip()} </s>" for role, text in messages
    )


@pytest.fixture(scope="module", params=["gpt-tiny", "llama-tiny"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load(request.param)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


WORDS = st.text("ab cdé\n.日", min_size=1, max_size=12)


@given(turns=st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=5), trim=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_conversation_keeps_its_ids(tokenizer: Tokenizer, turns: list[tuple[str, str, bool]], trim: bool) -> None:
    """Answers in ids that no tokenizer would choose stay as they are, and the text of all ids is the rendered one."""
    (end,) = tokenizer.eos_token_ids[:1]
    messages: Messages = []
    context: list[int] = []
    mark, answer = PromptText.of(""), context
    for asked, said, ended in turns:
        messages.append(("user", asked))
        rendered = chatml(messages, trim)
        new = new_ids(tokenizer, mark, answer, rendered)
        assert new is not None
        before = list(context)
        context += new.tolist()
        made = [id for character in said for id in tokenizer.encode_inside(character)]  # letter by letter
        kept = answer_ids(tokenizer, [*made, end] if ended else made, tokenizer.decode(made, False))
        assert kept is not None
        assert kept.tolist() == made, "the end symbol is the template's"
        assert context[: len(before)] == before
        mark, answer = PromptText.of(rendered), kept.tolist()
        context += answer
        messages.append(("assistant", tokenizer.decode(made, False)))
    if not trim and end == 2 and tokenizer.piece_to_id("<|im_end|>") == 2:  # byte-level: ids are the text, exactly
        assert tokenizer.decode(context, False) == chatml(messages)[: -len("<|im_end|>\n<|im_start|>assistant\n")]


def test_only_what_is_new_is_tokenized() -> None:
    tokenizer = load("gpt-tiny")
    first = chatml([("user", "Hello")])
    answer = encode(tokenizer, "Hi there")
    rendered = chatml([("user", "Hello"), ("assistant", "Hi there"), ("user", "Wine?")])
    new = new_ids(tokenizer, PromptText.of(first), answer, rendered)
    assert new is not None
    assert new.tolist() == encode(tokenizer, "<|im_end|>\n<|im_start|>user\nWine?<|im_end|>\n<|im_start|>assistant\n")
    assert encode(tokenizer, first) + answer + new.tolist() == encode(tokenizer, rendered)


def test_blanks_that_a_template_puts_around_an_answer_do_no_harm() -> None:
    tokenizer = load("llama-tiny")
    mark = PromptText.of(llama2([("user", "Hello")]))
    for said in ("Hi", " Hi", "Hi \n", "  "):
        answer = tokenizer.encode_inside(said)
        new = new_ids(tokenizer, mark, answer, llama2([("user", "Hello"), ("assistant", said), ("user", "Wine?")]))
        assert new is not None
        assert tokenizer.decode(new.tolist(), False).strip().endswith("</s><s> [INST] Wine? [/INST]"), said
        assert new.tolist().count(2) == 1


@pytest.mark.parametrize(
    "rendered",
    [
        chatml([("user", "Hallo"), ("assistant", "Hi there"), ("user", "x")]),
        chatml([("system", "It is now 10:05."), ("user", "Hello"), ("assistant", "Hi there"), ("user", "x")]),
        chatml([("user", "Hello"), ("assistant", "Hi"), ("user", "x")]),
        chatml([("user", "Hello")])[:-3],
        "",
    ],
)
def test_turns_that_were_rewritten_are_noticed(rendered: str) -> None:
    tokenizer = load("gpt-tiny")
    mark = PromptText.of(chatml([("user", "Hello")]))
    assert new_ids(tokenizer, mark, encode(tokenizer, "Hi there"), rendered) is None


def test_ids_beyond_a_stop_string_are_cut() -> None:
    tokenizer = load("gpt-tiny")
    ids = encode(tokenizer, "The cellar was cold.STOP")
    kept = answer_ids(tokenizer, ids, "The cellar was cold.")
    assert kept is not None
    assert tokenizer.decode(kept.tolist(), False) == "The cellar was cold."
    assert ids[: len(kept) - 2] == kept.tolist()[:-2], "but for a token across the border they are the model's own"
    across = encode(tokenizer, " house")
    assert len(across) == 1
    kept = answer_ids(tokenizer, [*encode(tokenizer, "The"), *across], "The ho")
    assert kept is not None
    assert kept.tolist() == encode(tokenizer, "The") + tokenizer.encode_inside(" ho")
    empty = answer_ids(tokenizer, across, "")
    assert empty is not None
    assert empty.tolist() == []


def test_ids_that_do_not_stand_for_the_text_are_not_kept() -> None:
    tokenizer = load("gpt-tiny")
    ids = [*encode(tokenizer, "a"), 1, *encode(tokenizer, "b")]
    assert answer_ids(tokenizer, ids, "ab") is None
    kept = answer_ids(tokenizer, ids, "a<|im_start|>b")
    assert kept is not None
    assert kept.tolist() == ids
    (wine,) = encode(tokenizer, " w")[:1]
    assert answer_ids(tokenizer, [wine], "something else") is None
