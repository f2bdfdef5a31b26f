"""A text that is tokenized bit by bit has the ids of the whole."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

import cellar.demo
from cellar.core.errors import RequestError
from cellar.text.cuts import cuts, safe_tokens
from cellar.text.incremental import IncrementalTokenizer
from cellar.text.tokenizer import PART, Tokenizer
from tests.limits import SECONDS
from tests.text.conftest import load

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _made(pre_tokenizer: object, *added: AddedToken, normalizer: object = None) -> Tokenizer:
    """GPT-2's tiny vocabulary behind other steps."""
    backend = tokenizers.Tokenizer.from_str(load("gpt-tiny")._backend.to_str())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    return Tokenizer(backend)


def _shipped() -> Tokenizer:
    """The one of the model that ships with the package."""
    return Tokenizer.load(Path(cellar.demo.__file__).parent / "story-11m")


def _metaspace() -> Tokenizer:
    """SentencePiece as newer checkpoints have it: a blank before the first section alone."""
    backend = tokenizers.Tokenizer.from_str(load("llama-tiny")._backend.to_str())
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def _lower() -> Tokenizer:
    names = ["<s>", "</s>", "a", "b", "ab", "the", "cellar", " ", "[UNK]"]
    backend = tokenizers.Tokenizer(models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLIT = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
MADE: dict[str, Callable[[], Tokenizer]] = {
    "gpt-tiny": lambda: load("gpt-tiny"),
    "opt-tiny": lambda: load("opt-tiny"),
    "llama-tiny": lambda: load("llama-tiny"),
    "gpt2": lambda: load("gpt2"),
    "demo": lambda: Tokenizer.load(cellar.demo.path()),
    "metaspace": _metaspace,
    "bert": _lower,
    "llama3": lambda: _made(SPLIT),
    "prefix-space": lambda: _made(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits": lambda: _made(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTES])),
    "blanks-taken": lambda: _made(BYTES, AddedToken("<m>", lstrip=True, rstrip=True), AddedToken("a b")),
    "word-alone": lambda: _made(BYTES, AddedToken("the", single_word=True), AddedToken("END", special=True)),
    "overlapping": lambda: _made(BYTES, AddedToken("<|im_end|><", special=True), AddedToken("|><|", special=True)),
    "composed": lambda: _made(BYTES, AddedToken("É"), normalizer=normalizers.NFC()),
}
PIECES = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<m>", "END", "a b", "the", "É", "e\u0301"),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        " the",
        "cellar",
        " wine",
        "don't",
        " 's",
        "123",
        " 4",
        ".",
        " ...",
        "'",
        "<|",
        "|>",
    ),
    *("theEND", " the<|im_end|>", "日本", "\u0301", "\U0001f600", "\u200d", "A b c", "word word word ", "\r\n"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@pytest.fixture(scope="module", params=MADE)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return MADE[request.param]()


@given(turns=st.lists(TEXTS, min_size=1, max_size=6), other=TEXTS, small=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_are_those_of_the_whole(tokenizer: Tokenizer, turns: list[str], other: str, small: bool) -> None:
    made = IncrementalTokenizer(tokenizer, 2000 if small else 2**20, block=16)
    text = ""
    for turn in turns:
        text += turn
        for one in (text, text + other, other + text, text):
            assert made.encode(one).tolist() == tokenizer.encode(one, add_special_tokens=False), repr(one)


def _conversation(count: int, template: str, seed: int = 0) -> list[str]:
    """The text of each turn, the ones before included."""
    draw, text, found = random.Random(seed), "", []
    for k in range(count):
        words = " ".join(
            draw.choice(["cellar", "wine", "house", "said", "old", "the"]) for _ in range(draw.randrange(80))
        )
        text += template.format(role="user" if k % 2 == 0 else "assistant", words=words)
        found.append(text)
    return found


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("gpt-tiny", "<|im_start|>{role}\n{words}<|im_end|>\n"),
        ("llama-tiny", "<s>[INST] {words} [/INST]</s>"),
        ("metaspace", "<s>[INST] {words} [/INST]</s>"),
        ("llama3", "<|im_start|>{words}\n"),
        ("demo", "{words}\n\n"),
        ("gpt2", "{role}: {words}\n"),
    ],
)
def test_a_turn_costs_what_is_new(name: str, template: str) -> None:
    tokenizer = MADE[name]()
    made = IncrementalTokenizer(tokenizer)
    before = ""
    for k, text in enumerate(_conversation(120, template)):
        tokenized = made.stats.tokenized
        assert made.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False)
        assert made.stats.tokenized - tokenized <= len(text) - len(before) + 2 * 2048 + 600, k
        before = text
    assert len(before) > 20_000
    assert made.stats.tokenized < made.stats.characters / 3


def test_an_equal_beginning_is_tokenized_once() -> None:
    made = IncrementalTokenizer(MADE["gpt-tiny"]())
    system = "<|im_start|>system\n" + "You keep a cellar. " * 1000 + "<|im_end|>\n"
    made.encode(system + "<|im_start|>user\nfirst")
    first = made.stats.tokenized
    made.encode(system + "<|im_start|>user\nsecond")
    assert made.stats.tokenized - first < 5000


def test_memory_is_bounded() -> None:
    tokenizer = MADE["gpt-tiny"]()
    made = IncrementalTokenizer(tokenizer, max_bytes=100_000)
    for seed in range(30):
        for text in _conversation(10, "<|im_start|>{words}" * 8, seed):
            assert made.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False)
            assert made.num_bytes <= 100_000
    assert made.num_bytes > 50_000


def test_what_may_be_cut() -> None:
    assert set(safe_tokens(MADE["gpt-tiny"]()._backend)) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert set(safe_tokens(MADE["overlapping"]()._backend)) == set(), "each may lose characters to another"
    assert "END" not in safe_tokens(MADE["word-alone"]()._backend)
    for name, divides in (
        ("llama3", True),
        ("demo", True),
        ("gpt2", True),
        ("prefix-space", False),
        ("metaspace", False),
    ):
        pattern = cuts(MADE[name]()._backend)
        assert pattern is not None
        assert bool(pattern.search("of words")) is divides, name


def test_what_is_remembered_is_found_under_its_salt_only() -> None:
    tokenizer = load("gpt-tiny")
    incremental = IncrementalTokenizer(tokenizer)
    text = "once upon a time there was a fox. " * 400
    alone = tokenizer.encode(text, add_special_tokens=False)
    tokenized = []
    for salt in (b"", b"", b"a", b"a", b"b"):
        assert incremental.encode(text, salt).tolist() == alone
        tokenized.append(incremental.take_stats().tokenized)
    assert tokenized[0] == tokenized[2] == tokenized[4] == len(text)
    assert tokenized[1] == tokenized[3] < len(text) / 2


@pytest.mark.parametrize("special", [False, True])
def test_a_long_text_is_tokenized_in_parts(special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the ids of the whole, and never more at once than a part and what follows until the next cut."""
    rng = random.Random(0)
    words = ["once", "upon", " ", "  ", "\n", "a", "é", "1", "time.", "<|endoftext|>", "日本"]
    sizes: list[int] = []
    encoded = Tokenizer._encoded

    def noted(tokenizer: Tokenizer, some: list[str], around: bool) -> list[list[int]]:
        sizes.append(sum(map(len, some)))
        return encoded(tokenizer, some, around)

    shipped = _shipped()
    for tokenizer in (shipped, load("gpt-tiny"), load("llama-tiny"), _metaspace()):
        texts = [" ".join(rng.choices(words, k=300)) for _ in range(4)]
        expected = [tokenizer.encode(text, special) for text in texts]
        with monkeypatch.context() as patch:
            patch.setattr("cellar.text.tokenizer.PART", 100)
            patch.setattr(Tokenizer, "_encoded", noted)
            for text, ids in zip(texts, expected, strict=True):
                sizes.clear()
                assert tokenizer.encode_array(text, special).tolist() == ids
                assert tokenizer.encode(text, special) == ids
                assert tokenizer is not shipped or max(sizes) < 300


def test_what_cannot_be_divided_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellar.text.tokenizer.MOST", 1000)
    monkeypatch.setattr("cellar.text.tokenizer.PART", 100)
    tokenizer = _shipped()
    assert len(tokenizer.encode_array("once upon " * 1000)) > 1000
    with pytest.raises(
        RequestError, match="more than 1000 characters of the text has no place where it can be divided"
    ):
        tokenizer.encode_array("1" * 1001)


@pytest.mark.parametrize("part", [1, 7, 40])
def test_a_text_is_cut_where_one_search_would_cut_it(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a match lies across the end of what is searched in one go."""
    monkeypatch.setattr("cellar.text.tokenizer.PART", part)
    tokenizer, rng = _shipped(), random.Random(part)
    assert tokenizer.cuts is not None
    for _ in range(300):
        text = "".join(rng.choices(["a", "b ", " ", "1", "<|endof", "text|>", "<|endoftext|>"], k=rng.randrange(60)))
        expected, begin = [], 0
        while (match := tokenizer.cuts.search(text, begin + part)) is not None:
            expected.append(text[begin : match.start()])
            begin = match.start()
        assert list(tokenizer._parts(text)) == [*expected, text[begin:]]


def test_others_have_the_interpreter_while_a_text_without_a_cut_is_looked_through() -> None:
    """8 MB of digits: one search took half a second, in which nobody else had a turn."""
    tokenizer, text = _shipped(), "1" * 8_000_000
    assert tokenizer.cuts is not None
    begun = time.perf_counter()
    assert tokenizer.cuts.search(text) is None
    in_one_go = time.perf_counter() - begun
    turns, ended = [time.perf_counter()], threading.Event()

    def take_turns() -> None:
        while not ended.wait(0.001):
            turns.append(time.perf_counter())

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        for _ in range(4):
            with pytest.raises(RequestError):
                tokenizer.encode_array(text)
    finally:
        ended.set()
        thread.join()
    longest = max(later - earlier for earlier, later in pairwise(turns))
    assert longest < in_one_go / 2, f"nobody else had a turn for {longest:.3f} s, one search takes {in_one_go:.3f}"


def test_one_thread_tokenizes_a_long_texts_part() -> None:
    """Eight at once took twice as long, and the heap's lock kept all others of the process waiting. Short texts go
    beside them."""
    short = "once upon a time"
    inside, most = {True: 0, False: 0}, {True: 0, False: 0}
    guard, together, tokenizer = threading.Lock(), threading.Barrier(4), _shipped()
    backend = tokenizer._backend

    class Watched:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
            is_long = len(texts[0]) >= PART
            with guard:
                inside[is_long] += 1
                most[is_long] = max(most[is_long], inside[is_long])
            if is_long:
                time.sleep(0.02)
            elif texts[0] == short:
                together.wait(SECONDS)
            found: list[tokenizers.Encoding] = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            with guard:
                inside[is_long] -= 1
            return found

    for text, is_long in (("once upon a time " * 12000, True), (short, False)):
        tokenizer._backend = backend
        alone = tokenizer.encode(text, add_special_tokens=False)
        tokenizer._backend = Watched()  # type: ignore[assignment]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda text: tokenizer.encode(text, False), [text] * 4)) == [alone] * 4
        assert (most[is_long] == 1) is is_long
