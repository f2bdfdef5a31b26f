"""Tokens that an answer may not take: all but some, and those that would complete a forbidden word."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np

from cellar.text.reasoning.deferred import Inner, Mask
from cellar.text.tokenizer import Tokenizer

Word = tuple[int, ...]


class WordsMatcher:
    """Implements `Matcher` over another one. `words` are ids of forbidden sequences; `allowed` is a mask, None: all."""

    def __init__(self, inner: Inner, allowed: Mask | None, words: Sequence[Word]) -> None:
        self._inner = inner
        self._allowed = allowed
        self._words = words
        self._tail: deque[int] = deque(maxlen=max((len(word) for word in words), default=1) - 1)

    def mask(self) -> Mask:
        """The tokens that may come next."""
        mask = self._inner.mask()
        mask = mask.copy() if self._allowed is None else mask & self._allowed
        bits, tail = mask.view(np.uint32), tuple(self._tail)
        for *before, last in self._words:
            if not before or tail[-len(before) :] == tuple(before):
                bits[last // 32] &= ~np.uint32(1 << (last % 32))
        return mask

    def consume(self, token: int) -> None:
        """A token came."""
        self._inner.consume(token)
        self._tail.append(token)

    def copy(self) -> WordsMatcher:
        """Another matcher in the same state."""
        other = copy(self)
        other._inner, other._tail = self._inner.copy(), copy(self._tail)
        return other


def forbidden_words(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int) -> list[Word]:
    """Ids of each text as an answer may write it: at its beginning, and after a blank."""
    found: dict[Word, None] = {}
    for text in texts:
        for form in (text, f" {text.lstrip()}"):
            ids = tuple(tokenizer.encode(form, add_special_tokens=False))
            if ids and max(ids) < vocab_size:
                found[ids] = None
    return list(found)


def mask_of(tokens: Iterable[int], words: int) -> Mask:
    """A mask of so many int32 that allows these tokens."""
    bits = np.zeros(32 * words, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
