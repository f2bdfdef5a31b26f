"""Tokenizers for the tests of text/: three tiny ones from tests/data, GPT-2's, and odd ones made here."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from cellar.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "tokenizers"
SHARED = Path(__file__).parent.parent.parent.parent / "shared" / "data"


def _odd(name: str) -> Tokenizer:
    """Decoders that are neither byte-level nor byte-fallback: they go through the window."""
    names = ["<s>", "a", "b", "##c", "##de", "▁", "▁▁", "▁a", "bc", "é", ".", "n't", "d</w>", "e</w>", "f"]
    backend = tokenizers.Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<s>"))
    backend.decoder = {
        "wordpiece": decoders.WordPiece(),
        "metaspace": decoders.Metaspace(),
        "bpe-suffix": decoders.BPEDecoder("</w>"),
        "joined": None,
    }[name]
    return Tokenizer(backend, {"bos_token": "<s>"})


TOKENIZERS = ["gpt-tiny", "opt-tiny", "llama-tiny", "gpt2", "wordpiece", "metaspace", "bpe-suffix", "joined"]


@pytest.fixture(scope="session", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load(request.param)


def load(name: str) -> Tokenizer:
    if name == "gpt2":
        if not (SHARED / "tokenizers" / "gpt2").is_dir():
            pytest.skip("../shared/data/tokenizers/gpt2 is not there")
        return Tokenizer.load(SHARED / "tokenizers" / "gpt2")
    return Tokenizer.load(DATA / name) if (DATA / name).is_dir() else _odd(name)


@pytest.fixture(scope="session")
def gpt() -> Tokenizer:
    return load("gpt-tiny")


@pytest.fixture(scope="session")
def llama() -> Tokenizer:
    return load("llama-tiny")
