"""How a tokenizer turns ids into text, read off its decoder, as a table from token to piece.

Almost every decoder is one of two kinds. BYTES (byte-level BPE: GPT-2, OPT, Llama 3, Qwen): a token is a
string of bytes, the text is their UTF-8. FALLBACK (SentencePiece with byte fallback: Llama 2, Mistral, Gemma):
a token is text or a single byte; a run of byte tokens is its UTF-8 if the *whole* run is valid, else one U+FFFD
per byte. What is neither is WINDOW: decoded together with its left neighbours by the tokenizer itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Piece = str | bytes | int | None
"""str: whole text. bytes: part of a UTF-8 stream. int: one fallback byte. None: no text (skipped or unknown)."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderKind(Enum):
    """Which of the three ways above a tokenizer's ids become text."""

    BYTES = "bytes"
    FALLBACK = "fallback"
    WINDOW = "window"


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE, reversed: character -> byte.

    Bytes that print as themselves in Latin-1 do; the other 68 take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class PieceTable(dict[int, Piece]):
    """token -> piece, worked out when a token is first met; a hit costs one dict lookup."""

    def __init__(self, piece_of: Callable[[int], Piece]) -> None:
        super().__init__()
        self._piece_of = piece_of

    def __missing__(self, token: int) -> Piece:
        piece = self[token] = self._piece_of(token)
        return piece


class Decoding:
    """A tokenizer's decoder as data.

    `strip_left` is the character that the decoder drops once at the very start of a text ("" if none).
    `pieces` has every known token, `plain_pieces` has None for the special ones.
    """

    def __init__(self, decoder: str | None, token_of: Callable[[int], str | None], special_ids: frozenset[int]) -> None:
        """`decoder` is the JSON of tokenizer.json's `decoder`, `token_of` gives the vocabulary's string of an id."""
        self._token_of = token_of
        self._replaces: list[tuple[str, str]] = []
        self._alphabet = byte_alphabet()
        self._byte_tokens = False
        self.strip_left = ""
        self.kind = self._read(list(_steps(json.loads(decoder)) if decoder else ()))
        self.pieces = PieceTable(self._piece)
        self.plain_pieces = PieceTable(lambda token: None if token in special_ids else self.pieces[token])

    def _read(self, steps: list[dict[str, Any]]) -> DecoderKind:
        """Recognise [ByteLevel] and [Replace*, ByteFallback?, Fuse, Strip?]."""
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return DecoderKind.BYTES
        replaces: list[tuple[str, str]] = []
        while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
            step = steps.pop(0)
            replaces.append((step["pattern"]["String"], step["content"]))
        byte_tokens = bool(steps) and steps[0]["type"] == "ByteFallback"
        if byte_tokens:
            steps.pop(0)
        if not steps or steps.pop(0)["type"] != "Fuse":
            return DecoderKind.WINDOW
        strip_left = ""
        if steps and steps[0]["type"] == "Strip" and steps[0]["start"] <= 1 and steps[0]["stop"] == 0:
            step = steps.pop(0)
            strip_left = step["content"] if step["start"] else ""
        if steps:
            return DecoderKind.WINDOW
        self._replaces, self._byte_tokens, self.strip_left = replaces, byte_tokens, strip_left
        return DecoderKind.FALLBACK

    def _piece(self, token: int) -> Piece:
        name = self._token_of(token)
        if name is None or self.kind is DecoderKind.WINDOW:
            return name
        if self.kind is DecoderKind.BYTES:
            return _text_if_whole(self._bytes(name))
        for old, new in self._replaces:
            name = name.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(name) if self._byte_tokens else None
        return int(match[1], 16) if match else name

    def _bytes(self, name: str) -> bytes:
        # An added token may hold characters outside the alphabet; then all of it is plain text.
        codes = [self._alphabet.get(character) for character in name]
        return name.encode() if None in codes else bytes(code for code in codes if code is not None)


def _text_if_whole(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The decoder's elementary steps; sequences may be nested."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    inner: Iterable[dict[str, Any]] = decoder["decoders"]
    for step in inner:
        yield from _steps(step)
