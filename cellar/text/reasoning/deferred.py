"""A grammar for what comes after reasoning: until then an answer is free."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellar.core.sampling import Thinking
from cellar.text.tokenizer import Tokenizer

Mask = NDArray[np.int32]

_MOST_BLANKS = 2
_BLANKS = ("\n\n", "\n", " ")


class Inner(Protocol):
    """The content's own matcher; see `text/grammar.py`."""

    def mask(self) -> Mask:
        """The tokens that may come next."""

    def consume(self, token: int) -> None:
        """A token came."""

    def copy(self) -> Inner:
        """Another one in the same state."""


class FreeTokens:
    """What a vocabulary allows where no grammar holds: everything but the end. int32 masks as of `Matcher`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[: min(vocab_size, tokenizer.vocab_size)] = 1
        bits[list(eos_token_ids)] = 0
        self.mask: Mask = np.packbits(bits, bitorder="little").view(np.int32)
        ids = (tokenizer.encode(text, add_special_tokens=False) for text in _BLANKS)
        self.blanks = frozenset(one[0] for one in ids if len(one) == 1)

    def ids_of(self, marks: Sequence[str]) -> frozenset[int]:
        """Marks that are one token each."""
        ids = (self.tokenizer.piece_to_id(mark) for mark in marks)
        return frozenset(id for id in ids if id is not None)


class _Place(Enum):
    BEFORE = auto()
    INSIDE = auto()
    BETWEEN = auto()
    CONTENT = auto()


class DeferredMatcher:
    """Implements `Matcher`. An answer that has not begun to think may do so only by a mark that is one token.

    Reasoning cannot end the answer: the content is still to come. Behind it two blank tokens at most are nobody's.
    """

    def __init__(self, inner: Inner, thinking: Thinking, free: FreeTokens) -> None:
        self._inner = inner
        self._free = free
        self._opens = free.ids_of(thinking.opens)
        self._closes = tuple(mark.encode() for mark in thinking.closes)
        self._keep = max(map(len, self._closes)) - 1
        self._place = _Place.INSIDE if thinking.begun else _Place.BEFORE
        self._tail = b""
        self._blanks = 0

    def mask(self) -> Mask:
        """The tokens that may come next."""
        if self._place is _Place.INSIDE:
            return self._free.mask
        mask = self._inner.mask()
        if self._place is _Place.BEFORE and self._opens:
            return _with(mask, self._opens)
        if self._place is _Place.BETWEEN and self._blanks < _MOST_BLANKS:
            return _with(mask, self._free.blanks)
        return mask

    def consume(self, token: int) -> None:
        """A token came."""
        if self._place is _Place.INSIDE:
            self._think(token)
        elif self._place is _Place.BEFORE and token in self._opens:
            self._place = _Place.INSIDE
        elif self._place is _Place.BETWEEN and self._blanks < _MOST_BLANKS and token in self._free.blanks:
            self._blanks += 1
        else:
            self._place = _Place.CONTENT
            self._inner.consume(token)

    def copy(self) -> DeferredMatcher:
        """Another matcher in the same state."""
        other = object.__new__(DeferredMatcher)
        other.__dict__ |= self.__dict__
        other._inner = self._inner.copy()
        return other

    def _think(self, token: int) -> None:
        seen = self._tail + self._free.tokenizer.id_to_bytes(token)
        ends = [seen.find(close) + len(close) for close in self._closes if close in seen]
        if not ends:
            self._tail = seen[len(seen) - self._keep :] if self._keep < len(seen) else seen
            return
        self._place = _Place.BETWEEN
        rest = seen[min(ends) :].strip()
        if rest:  # one token ended the reasoning and began the content
            self._place = _Place.CONTENT
            for more in self._free.tokenizer.encode(rest.decode(errors="replace"), add_special_tokens=False):
                self._inner.consume(more)


def _with(mask: Mask, tokens: frozenset[int]) -> Mask:
    mask = mask.copy()
    words = mask.view(np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return mask
