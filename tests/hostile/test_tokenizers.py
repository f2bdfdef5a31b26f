"""Tokenizers whose steps make gigabytes of a letter, fail in native code, or search for ever: one sentence each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cellar.core.errors import CheckpointError, RequestError
from cellar.text.tokenizer import Tokenizer
from tests.tiny_checkpoint import TOKENIZER

TENFOLD = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 10}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
AROUND = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "z", "type_id": 0}}] * 1000 + [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"z": {"id": "z", "ids": [1] * 1000, "tokens": ["z"] * 1000}},
}


def replaces(**pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": "x"}


def splits(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def nested(depth: int) -> dict[str, Any]:
    step: dict[str, Any] = {"type": "NFC"}
    for _ in range(depth):
        step = {"type": "Sequence", "normalizers": [step]}
    return step


def changed(folder: Path, **parts: Any) -> Path:
    shutil.copytree(TOKENIZER, folder)
    value = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**value, **parts}))
    return folder


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        # as found: these hung, or asked for all memory
        ({"normalizer": {"type": "Sequence", "normalizers": [TENFOLD] * 12}}, "up to 1e[+]12 bytes of one"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}}, "adds 1e[+]06 to every text"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 30}}, "bytes of one"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 30}}, "its pre_tokenizer"),
        ({"decoder": {"type": "Sequence", "decoders": [TENFOLD] * 12}}, "its decoder"),
        ({"post_processor": AROUND}, "1000000 tokens around every text"),
        ({"post_processor": {"type": "Sequence", "processors": [AROUND]}}, "1000000 tokens"),
        # these failed in native code
        ({"normalizer": replaces(String="")}, "bytes of one"),
        ({"normalizer": replaces(Regex="a*")}, "cannot be used"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "cannot be used"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAEAAAACAAAAYWI="}}, "cannot be used"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot be used"),
        ({"pre_tokenizer": splits("(" * 5000 + "a" + ")" * 5000)}, "damaged or of an unknown kind"),
        # and these never did any harm
        ({"normalizer": nested(100)}, "recursion"),
        ({"normalizer": nested(400)}, "damaged|nested"),
    ],
)
def test_it_is_refused_when_it_is_read(tmp_path: Path, parts: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        Tokenizer.load(changed(tmp_path / "t", **parts))
    assert len(str(caught.value)) < 500


def test_a_text_on_which_it_fails_is_refused_and_no_other(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(changed(tmp_path / "t", pre_tokenizer=splits("(a+)+$")))
    with pytest.raises(RequestError, match="cannot read this text") as caught:
        tokenizer.encode("a" * 40 + "b")
    assert caught.value.parameter == "prompt"
    assert tokenizer.encode("b")


def test_ids_on_which_it_fails_have_no_text(tmp_path: Path) -> None:
    step = {"type": "Strip", "content": " ", "start": 0, "stop": 0}
    tokenizer = Tokenizer.load(changed(tmp_path / "t", decoder=step))
    assert tokenizer.decode([5, 6])
    broken = Tokenizer.load(changed(tmp_path / "u", decoder={**step, "content": "Ġ", "stop": 2**63}))
    assert broken.decode(tokenizer.encode("the end")) in ("\ufffd", tokenizer.decode(tokenizer.encode("the end")))
