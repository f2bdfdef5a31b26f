"""The most text that a token can stand for: a bound that holds for every text, or none."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Regex as Pattern
from tokenizers import Tokenizer as Backend

from cellar.text.reach import COMPOSED, reach
from cellar.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "tokenizers"
NAMES = ("gpt-tiny", "llama-tiny")


def backend(name: str) -> Backend:
    return Backend.from_str((DATA / name / "tokenizer.json").read_text(encoding="utf-8"))


def normalized(*steps: Any, name: str = "gpt-tiny") -> Backend:
    made = backend(name)
    made.normalizer = normalizers.Sequence(list(steps))
    return made


BOUNDED: dict[str, Callable[[], Backend]] = {
    "byte level": lambda: backend("gpt-tiny"),
    "byte fallback": lambda: backend("llama-tiny"),
    "NFC": lambda: normalized(normalizers.NFC()),
    "NFKC, lower": lambda: normalized(normalizers.NFKC(), normalizers.Lowercase()),
    "replace": lambda: normalized(normalizers.Replace("abc", "z"), normalizers.NFD()),
}
ODD = "aâ\u0302\u0345\u03b1\u0313\u0300 \n\u1f82\ufdfa\uff21\ud55c\u1112\u1161\u11ab\U0001d400abcthe<|>/s"
"""What normalizers compose, decompose and widen, among other letters."""

TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(st.sampled_from(ODD), max_size=120),
    st.lists(st.sampled_from(["abc", "the ", "  ", "</s>", "<|endoftext|>", "<s>", " time"]), max_size=30).map("".join),
)


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_text_has_fewer_tokens(kind: str) -> None:
    tokenizer = Tokenizer(BOUNDED[kind]())
    assert tokenizer.least_tokens("x" * 10**6) > 1000

    @settings(max_examples=150, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        for special in (False, True):
            assert len(tokenizer.encode(text, add_special_tokens=special)) >= tokenizer.least_tokens(text)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_the_longest_token_reaches_its_bound(name: str) -> None:
    """So a smaller bound would be wrong."""
    made = backend(name)
    longest = max(made.get_vocab(), key=len)
    tokenizer = Tokenizer(made)
    text = tokenizer.decode([made.token_to_id(longest)] * 50, skip_special_tokens=False)
    assert reach(made) == len(longest)
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)) <= 51


def test_an_added_token_counts_by_its_normalized_text() -> None:
    made = normalized(normalizers.NFKD())
    made.add_tokens([AddedToken("\ufdfa", normalized=True)])
    text = unicodedata.normalize("NFKD", "\ufdfa") * 40
    tokenizer = Tokenizer(made)
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text)) == 40


def test_how_many_code_points_become_one() -> None:
    every = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    assert max(len(unicodedata.normalize("NFD", c)) for c in every) == COMPOSED


def test_composed_characters_count_as_what_they_were_made_of() -> None:
    """The bound is reached: every four code points of this text are one token."""
    made = Backend(models.BPE({"?": 0}, [], unk_token="?"))
    made.normalizer = normalizers.NFC()
    text = unicodedata.normalize("NFD", "\u1f82") * 40
    tokenizer = Tokenizer(made)
    assert len(text) == 160
    assert tokenizer.least_tokens(text) == len(tokenizer.encode(text)) == 40


def split(step: Any) -> Backend:
    made = backend("gpt-tiny")
    made.pre_tokenizer = pre_tokenizers.Sequence([step, pre_tokenizers.ByteLevel(use_regex=False)])
    return made


def greedy_token() -> Backend:
    made = backend("gpt-tiny")
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return made


def without(piece: str, **model: Any) -> Backend:
    """llama-tiny without one of its byte tokens."""
    state = json.loads(backend("llama-tiny").to_str())
    state["model"]["vocab"].pop(piece)
    state["model"] |= model
    return Backend.from_str(json.dumps(state))


UNBOUNDED: dict[str, Callable[[], Backend]] = {
    "words": lambda: Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    "pieces of words": lambda: Backend(models.WordPiece({"<unk>": 0}, unk_token="<unk>")),
    "unigram": lambda: Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
    "blanks are dropped": lambda: split(pre_tokenizers.WhitespaceSplit()),
    "matches are dropped": lambda: split(pre_tokenizers.Split(Pattern(r"\s+"), "removed")),
    "blanks are joined": lambda: normalized(normalizers.Replace(Pattern(" +"), " ")),
    "ends are cut": lambda: normalized(normalizers.Strip()),
    "accents are cut": lambda: normalized(normalizers.NFD(), normalizers.StripAccents()),
    "a text is deleted": lambda: normalized(normalizers.Replace("a", "")),
    "a token takes blanks": greedy_token,
    "unknown bytes are joined": lambda: without("<0x41>"),
    "unknown characters are dropped": lambda: Backend(models.BPE({"a": 0}, [])),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_where_there_is_no_bound_there_is_none(kind: str) -> None:
    made = UNBOUNDED[kind]()
    assert reach(made) is None
    assert Tokenizer(made).least_tokens("x" * 10**6) == 0


def test_each_unknown_character_may_have_a_token() -> None:
    assert reach(without("<0x41>", fuse_unk=False)) == reach(backend("llama-tiny"))
