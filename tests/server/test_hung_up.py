"""Who hangs up is not worked for: a text of megabytes takes seconds, and nobody would stop sending the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from cellar.server import prepare
from cellar.text.tokenizer import PART, IntArray, Tokenizer
from tests.limits import SECONDS
from tests.server.served import raw, serve

TEXT = "once upon a time " * (20 * PART // 17)
SAY = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": TEXT, "add_special_tokens": False}),
        ("/tokenize", {"messages": SAY}),
        ("/v1/messages/count_tokens", {"model": "fake", "messages": SAY}),
    ],
)
def test_a_long_text_is_not_read_to_its_end_for_nobody(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, left, over = threading.Event(), threading.Event(), threading.Event()
    sizes: list[int] = []
    encode, encode_all, until_left = Tokenizer._encoded, Tokenizer.encode_all, prepare._until_left

    def slowly(self: Tokenizer, texts: Sequence[str], special: bool) -> list[list[int]]:
        if (size := sum(map(len, texts))) >= PART:
            sizes.append(size)
            begun.set()
            assert left.wait(SECONDS)
        return encode(self, texts, special)

    def told(self: Tokenizer, texts: Sequence[str], gone: threading.Event | None = None) -> list[IntArray]:
        try:
            return encode_all(self, texts, gone)
        finally:
            over.set()

    @contextmanager
    def noticing() -> Iterator[threading.Event]:
        try:
            with until_left() as gone:
                yield gone
        finally:
            left.set()

    with serve() as served:
        monkeypatch.setattr(Tokenizer, "_encoded", slowly)
        monkeypatch.setattr(Tokenizer, "encode_all", told)
        monkeypatch.setattr(prepare, "_until_left", noticing)
        with raw(served.url, body, path):
            assert begun.wait(SECONDS)
        assert over.wait(SECONDS)
    assert sum(sizes) < 4 * PART
