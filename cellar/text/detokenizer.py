"""Incremental detokenization: token in, new text out; all pieces together are what decoding all ids at once gives.

Every detokenizer does O(1) work per token, amortised, and emits whole characters only. The tail of a prompt
decides how the first output token begins: with a leading space or not, and inside a character that the
prompt left unfinished.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from cellar.text.decoding import REPLACEMENT, DecoderKind, Decoding, PieceTable
from cellar.text.tokenizer import Tokenizer

_CHARACTER_BYTES = 4
_TAIL_TOKENS = 16  # prompt tokens looked at to find an unfinished character of at most 3 bytes
_WINDOW_TOKENS = 8


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text.

    `ahead` is what the last push completed but cannot be emitted yet, because a later token may still change
    it; it is certain if the sequence ends here. A stop string may be looked for in it.
    """

    @property
    def ahead(self) -> str:
        """Characters that the last `push` completed without emitting; "" nearly always."""

    def push(self, token: int) -> str:
        """The text that `token` adds; "" if it adds none yet."""

    def flush(self) -> str:
        """The rest: held characters, and U+FFFD for what never became one. The detokenizer is done then."""


def make_detokenizer(tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
    """A detokenizer for the tokens that follow `prompt`. Reads O(1) tokens of the prompt's end."""
    decoding = tokenizer.decoding
    pieces = decoding.plain_pieces if skip_special_tokens else decoding.pieces
    if decoding.kind is DecoderKind.BYTES:
        return ByteDetokenizer(pieces, prompt)
    if decoding.kind is DecoderKind.FALLBACK:
        return FallbackDetokenizer(decoding, pieces, prompt)
    return WindowDetokenizer(tokenizer, pieces, prompt)


class ByteDetokenizer:
    """Byte-level BPE: the pieces' bytes are one UTF-8 stream. `pending` is an unfinished character, at most 3 bytes."""

    __slots__ = ("_pending", "_pieces")

    ahead = ""

    def __init__(self, pieces: PieceTable, prompt: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._pending = _unfinished(_tail_bytes(pieces, prompt))

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if piece.__class__ is str and not self._pending:
            return piece
        if not piece:
            return ""
        data = self._pending + (piece.encode() if isinstance(piece, str) else piece)  # type: ignore[operator]
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text, self._pending = self._pending.decode(errors="replace"), b""
        return text


class FallbackDetokenizer:
    """Text pieces and runs of byte tokens. A run is held until it ends: one bad byte makes all of it U+FFFD.

    The run's state: `run` counts its bytes, `whole` are its finished characters, `pending` the bytes of an
    unfinished one, `broken` says that it is no valid UTF-8.
    """

    __slots__ = ("_broken", "_pending", "_pieces", "_run", "_strip", "_whole", "ahead")

    def __init__(self, decoding: Decoding, pieces: PieceTable, prompt: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._run = 0
        self._whole: list[str] = []
        self._pending = b""
        self._broken = False
        self.ahead = ""
        begun = any(pieces[int(token)] not in (None, "") for token in prompt)
        self._strip = "" if begun else decoding.strip_left
        for byte in _unfinished(_tail_bytes(pieces, prompt)):
            self._push_byte(byte)

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if piece.__class__ is str:
            text: str = piece
            if self._run:
                text = self._end_run() + text
            return self._stripped(text) if self._strip else text
        self.ahead = ""
        if piece is not None:
            self._push_byte(piece)  # type: ignore[arg-type]
        return ""

    def flush(self) -> str:
        text = self._end_run()
        return self._stripped(text) if self._strip else text

    def _push_byte(self, byte: int) -> None:
        self._run += 1
        if self._broken:
            return
        data = self._pending + bytes((byte,))
        try:
            text, used = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self._broken = True
            self._whole.clear()
            return
        self._pending = data[used:]
        if text:
            self.ahead = text[1:] if self._strip and not self._whole and text == self._strip else text
            self._whole.append(text)

    def _end_run(self) -> str:
        ok = not (self._broken or self._pending)
        text = "".join(self._whole) if ok else REPLACEMENT * self._run
        self._run, self._pending, self._broken, self.ahead = 0, b"", False, ""
        self._whole.clear()
        return text

    def _stripped(self, text: str) -> str:
        if not text:
            return ""
        strip, self._strip = self._strip, ""
        return text.removeprefix(strip)


class WindowDetokenizer:
    """Any other decoder: the tokens since the last emitted ones are decoded together with those before them.

    Correct where a token's text depends on its left neighbour and on being first, as in WordPiece, Metaspace and
    BPE with word endings. `window[:shown_tokens]` decodes to `shown`, which has been emitted.
    """

    __slots__ = ("_pieces", "_shown", "_shown_tokens", "_tokenizer", "_window")

    ahead = ""

    def __init__(self, tokenizer: Tokenizer, pieces: PieceTable, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        tail = islice((t for t in _backwards(prompt) if pieces[t] is not None), _WINDOW_TOKENS)
        self._window = list(tail)[::-1]
        self._shown_tokens = len(self._window)
        self._shown = self._decode(self._window).rstrip(REPLACEMENT)

    def push(self, token: int) -> str:
        if self._pieces[token] is None:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        unfinished = text.endswith(REPLACEMENT) and len(self._window) - self._shown_tokens < _WINDOW_TOKENS
        if unfinished or (len(text) <= len(self._shown) and len(self._window) < 2 * _WINDOW_TOKENS):
            return ""
        new = text[len(self._shown) :]
        del self._window[: self._shown_tokens]
        self._shown_tokens = len(self._window)
        self._shown = self._decode(self._window)
        return new

    def flush(self) -> str:
        text = self._decode(self._window)[len(self._shown) :]
        self._window, self._shown, self._shown_tokens = [], "", 0
        return text

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _backwards(tokens: Sequence[int]) -> Iterator[int]:
    return (int(tokens[i]) for i in range(len(tokens) - 1, -1, -1))


def _tail_bytes(pieces: PieceTable, prompt: Sequence[int]) -> bytes:
    """The last bytes of a prompt, at least one character's worth, or back to the last piece that is whole text."""
    tail = b""
    for token in islice(_backwards(prompt), _TAIL_TOKENS):
        piece = pieces[token]
        if isinstance(piece, str) or len(tail) >= _CHARACTER_BYTES:
            break
        if piece is not None:
            tail = (bytes((piece,)) if isinstance(piece, int) else piece) + tail
    return tail


def _unfinished(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character and do not end it."""
    _, used = codecs.utf_8_decode(data, "replace", False)
    return data[used:]
