from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cellar.core.errors import CheckpointError
from cellar.text.tokenizer import Tokenizer
from tests.limits import join_all

DATA = Path(__file__).parent.parent / "data" / "tokenizers"
TEXTS = [
    "The cellar under the old house",
    " leading, trailing ",
    "",
    "café 日本語 \U0001f600\u200d\U0001f525 \n\n\ttab",
    "</s>in the text<|im_end|><s>",
    "don't 1234 \x00 \r\n",
]


def _copy(tmp_path: Path, name: str, **changes: dict[str, Any] | str | None) -> Path:
    """A copy of a tiny tokenizer's directory; a dict updates a JSON file, a string replaces a file, None removes it."""
    target = tmp_path / name
    shutil.copytree(DATA / name, target)
    for key, change in changes.items():
        file = target / key.replace("__", ".")
        if change is None:
            file.unlink()
        elif isinstance(change, str):
            file.write_text(change, encoding="utf-8")
        else:
            old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            file.write_text(json.dumps({**old, **change}), encoding="utf-8")
    return target


@pytest.mark.parametrize("name", ["gpt-tiny", "opt-tiny", "llama-tiny"])
@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_transformers(name: str, special: bool) -> None:
    ours, theirs = Tokenizer.load(DATA / name), AutoTokenizer.from_pretrained(DATA / name)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs(text, add_special_tokens=special)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_a_long_text_leaves_the_interpreter_to_other_threads() -> None:
    tokenizer = Tokenizer.load(DATA / "gpt-tiny")

    def turns_meanwhile() -> int:
        ended, turns = threading.Event(), 0

        def encode() -> None:
            tokenizer.encode("word " * 100_000)
            ended.set()

        thread = threading.Thread(target=encode)
        thread.start()
        while not ended.wait(0.001):
            turns += 1
        join_all([thread])
        return turns

    # This thread may be stopped meanwhile, but not every time.
    assert any(turns_meanwhile() > 10 for _ in range(20))


@pytest.mark.parametrize(
    "change",
    [{"add_bos_token": False}, {"add_eos_token": True}, {"add_bos_token": False, "add_prefix_space": True}],
    ids=str,
)
def test_options_of_vocab_and_merges(change: dict[str, Any], tmp_path: Path) -> None:
    path = _copy(tmp_path, "opt-tiny", tokenizer_config__json=change)
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    assert [ours.encode(text) for text in TEXTS] == [theirs(text)["input_ids"] for text in TEXTS]


def test_opt_puts_its_end_symbol_before_every_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(DATA / "opt-tiny")
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 2
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 2
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_tokens["pad_token"] == "<pad>"
    assert tokenizer.pad_token_id == 1
    bare = _copy(
        tmp_path,
        "opt-tiny",
        tokenizer_config__json=None,
        special_tokens_map__json=None,
        config__json={"model_type": "opt"},
    )
    assert Tokenizer.load(bare).encode("a") == tokenizer.encode("a")


def test_end_symbols_come_from_all_files(tmp_path: Path) -> None:
    assert Tokenizer.load(DATA / "gpt-tiny").eos_token_ids == (2, 0)
    one = _copy(tmp_path, "gpt-tiny", generation_config__json={"eos_token_id": 7})
    assert Tokenizer.load(one).eos_token_ids == (2, 7)
    none = _copy(
        tmp_path,
        "llama-tiny",
        tokenizer_config__json={"eos_token": None},
        generation_config__json=None,
        config__json={"eos_token_id": [2, 5]},
    )
    assert Tokenizer.load(none).eos_token_ids == (2, 5)


def test_listed_tokens_are_added_under_their_ids(tmp_path: Path) -> None:
    listed = {"420": {"content": "<a ☃>", "special": False}, "421": {"content": "<|end|>", "special": True}}
    path = _copy(tmp_path, "gpt-tiny", tokenizer_config__json={"added_tokens_decoder": listed})
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("<a ☃>x<|end|>")[::2] == [420, 421]
    assert tokenizer.id_to_text(420) == tokenizer.decode([420]) == "<a ☃>", "no bytes in disguise, but plain text"
    assert tokenizer.vocab_size == 422
    assert 421 in tokenizer.special_ids
    assert 420 not in tokenizer.special_ids
    wrong = _copy(tmp_path / "b", "gpt-tiny", tokenizer_config__json={"added_tokens_decoder": {"999": listed["420"]}})
    with pytest.raises(CheckpointError, match="999"):
        Tokenizer.load(wrong)


def test_a_named_token_outside_the_vocabulary_gets_no_id(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_copy(tmp_path, "gpt-tiny", tokenizer_config__json={"pad_token": "[NOT THERE]"}))
    assert tokenizer.pad_token_id is None
    assert max(tokenizer.encode("[NOT THERE]")) < tokenizer.vocab_size == 420


def test_pieces_and_bytes(gpt: Tokenizer, llama: Tokenizer) -> None:
    the = gpt.encode(" the", False)
    assert [gpt.id_to_piece(t) for t in the] == ["Ġthe"]
    assert gpt.piece_to_id("Ġthe") == the[0]
    assert gpt.id_to_bytes(the[0]) == b" the"
    euro = gpt.encode("€", False)
    assert b"".join(gpt.id_to_bytes(t) for t in euro) == "€".encode()
    assert gpt.id_to_text(euro[-1]) == "\ufffd"
    assert gpt.id_to_bytes(10**6) == b""
    assert gpt.id_to_piece(10**6) is None
    token = llama.piece_to_id("▁the")
    assert token is not None
    assert llama.id_to_bytes(token) == b" the"
    newline = llama.piece_to_id("<0x0A>")
    assert newline is not None
    assert llama.id_to_bytes(newline) == b"\n"
    assert llama.id_to_text(1) == "<s>"


def test_bytes_of_a_text_join_to_it(tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size < 100:
        ids = [5, 1, 1]
        first = tokenizer.decode(ids[:1], False)
        assert first + "".join(tokenizer.id_to_text(t) for t in ids[1:]) == tokenizer.decode(ids, False)
        return
    ids = tokenizer.encode("The wine — 日本 \U0001f600", add_special_tokens=False)
    assert b"".join(tokenizer.id_to_bytes(t) for t in ids).decode().lstrip() == "The wine — 日本 \U0001f600"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gpt-tiny", {"tokenizer__json": None}, "no tokenizer.json"),
        ("gpt-tiny", {"tokenizer__json": '{"model": {'}, "damaged"),
        ("gpt-tiny", {"tokenizer__json": '{"model": {"type": "Unheard"}}'}, "damaged"),
        ("gpt-tiny", {"tokenizer_config__json": "[1]"}, "object"),
        ("gpt-tiny", {"tokenizer_config__json": "{"}, "JSON"),
        ("gpt-tiny", {"tokenizer_config__json": '{"added_tokens_decoder": {"x": 1}}'}, "added_tokens_decoder"),
        ("gpt-tiny", {"generation_config__json": "nope"}, "generation_config"),
        ("opt-tiny", {"merges__txt": None}, "merges.txt"),
        ("opt-tiny", {"merges__txt": "#version: 0.2\nqqq zzz\n"}, "damaged"),
        ("opt-tiny", {"vocab__json": "{}"}, "damaged"),
        ("opt-tiny", {"tokenizer_config__json": {"bos_token": "<none>"}}, "<none>"),
    ],
)
def test_damaged_files_are_named_in_one_sentence(name: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        Tokenizer.load(_copy(tmp_path, name, **change))
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer directory"):
        Tokenizer.load(tmp_path / "nowhere")
