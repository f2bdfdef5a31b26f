from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.text.decoding import DecoderKind
from cellar.text.detokenizer import Detokenizer, make_detokenizer
from cellar.text.tokenizer import Tokenizer

TEXT = "Once upon a time — naïve 日本語 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f600!\n\nThe end."


def run(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def _ids(tokenizer: Tokenizer, data: st.DataObject) -> list[int]:
    """Random ids, some outside the vocabulary; runs of byte tokens and cut characters are made likely."""
    size = tokenizer.vocab_size
    anything = st.lists(st.integers(0, size + 3), max_size=12)
    low = st.lists(st.integers(0, min(size, 300)), max_size=12)
    text = st.text(max_size=6).map(lambda t: tokenizer.encode(t, False))
    cut = st.tuples(text, st.integers(0, 3)).map(lambda pair: pair[0][: -pair[1] or None])
    return [token for ids in data.draw(st.lists(st.one_of(anything, low, cut), max_size=4)) for token in ids]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_together_are_the_whole(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    if tokenizer.decoding.kind is DecoderKind.WINDOW:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    else:
        ids = _ids(tokenizer, data)
    pieces = run(make_detokenizer(tokenizer, (), skip), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), cut=st.integers(0, 30))
def test_after_a_prompt(tokenizer: Tokenizer, data: st.DataObject, cut: int) -> None:
    """What follows a prompt is what the whole decodes to, less the prompt, wherever the prompt ends in whole text."""
    if tokenizer.vocab_size > 100:
        ids = tokenizer.encode(data.draw(st.text(max_size=20)) + TEXT)
    else:
        ids = data.draw(st.lists(st.integers(1, tokenizer.vocab_size - 1), max_size=30))
    prompt, output = ids[:cut], ids[cut:]
    text = "".join(run(make_detokenizer(tokenizer, prompt), output))
    before = tokenizer.decode(prompt)
    if "\ufffd" not in before:
        assert before + text == tokenizer.decode(ids)


def test_no_half_characters(tokenizer: Tokenizer) -> None:
    ids = [7, 9, 2] if tokenizer.vocab_size < 100 else tokenizer.encode(TEXT)
    pieces = run(make_detokenizer(tokenizer), ids)
    assert not any("\ufffd" in piece for piece in pieces)
    # An emoji of several tokens comes whole, with the token that completes it or the one that proves it.
    assert pieces[-1] == ""


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_character_begun_in_the_prompt_is_completed(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode("x\U0001f600", add_special_tokens=False)
    assert "".join(run(make_detokenizer(tokenizer, ids[:-2]), ids[-2:])) == "\U0001f600"
    detokenizer = make_detokenizer(tokenizer, ids[:-2])
    assert detokenizer.flush() == "\ufffd" * (1 if name == "gpt" else 2)


def test_leading_space(llama: Tokenizer) -> None:
    the = llama.piece_to_id("▁the")
    assert the is not None
    assert make_detokenizer(llama).push(the) == "the"
    assert make_detokenizer(llama, [1]).push(the) == "the", "a prompt of special tokens is no text"
    assert make_detokenizer(llama, [1, the]).push(the) == " the"
    assert make_detokenizer(llama, [1], skip_special_tokens=False).push(the) == " the"


def test_unfinished_tails_are_flushed_as_decode_does(gpt: Tokenizer, llama: Tokenizer) -> None:
    for tokenizer in (gpt, llama):
        ids = tokenizer.encode("a\U0001f600", add_special_tokens=False)[:-1]
        pieces = run(make_detokenizer(tokenizer), ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert "\ufffd" in pieces[-1]
        assert "\ufffd" not in "".join(pieces[:-1])


def test_byte_runs_are_announced_before_they_are_certain(llama: Tokenizer) -> None:
    """Llama 2's newline is a byte token: held, as a bad byte after it would spoil it, but visible ahead."""
    newline, bad = llama.piece_to_id("<0x0A>"), llama.piece_to_id("<0xFF>")
    word = llama.piece_to_id("▁the")
    assert newline is not None
    assert bad is not None
    assert word is not None
    detokenizer = make_detokenizer(llama, [word])
    assert (detokenizer.push(newline), detokenizer.ahead) == ("", "\n")
    assert (detokenizer.push(word), detokenizer.ahead) == ("\n the", "")
    assert (detokenizer.push(newline), detokenizer.push(bad), detokenizer.ahead) == ("", "", "")
    assert detokenizer.flush() == "\ufffd\ufffd"


class _Counted:
    """Counts the characters and tokens that a function is asked to work on."""

    def __init__(self, function: Callable[..., str]) -> None:
        self.function = function
        self.work = 0

    def __call__(self, tokens: Sequence[int], *args: object, **kwargs: object) -> str:
        self.work += len(tokens)
        return self.function(tokens, *args, **kwargs)


def test_work_per_token_does_not_grow(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted, not timed: tokens decoded by the tokenizer per token pushed."""
    counted = _Counted(tokenizer.decode)
    monkeypatch.setattr(tokenizer, "decode", counted)
    detokenizer = make_detokenizer(tokenizer)
    work = []
    for n in range(4000):
        before = counted.work
        detokenizer.push(1 + n * 7 % (min(tokenizer.vocab_size, 300) - 1))
        work.append(counted.work - before)
    if tokenizer.decoding.kind is DecoderKind.WINDOW:
        assert max(work) <= 16
        assert sum(work[2000:]) <= 1.1 * sum(work[:2000])
    else:
        assert max(work) == 0, "the fast paths never decode through the tokenizer"


def test_held_bytes_are_bounded(gpt: Tokenizer) -> None:
    """Byte-level: however long the rubbish, at most three bytes wait."""
    detokenizer = make_detokenizer(gpt)
    high = [t for t in range(gpt.vocab_size) if gpt.id_to_bytes(t)[:1] >= b"\x80"]
    for n in range(3000):
        detokenizer.push(high[n * 31 % len(high)])
    assert len(detokenizer.flush()) <= 3
