"""A bound on reasoning: when it is reached, the next tokens are those of the mark that closes it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from cellar.core.sampling import Thinking
from cellar.text.reasoning.deferred import FreeTokens, Inner, Mask
from cellar.text.reasoning.reader import ReasoningReader


class Unbound:
    """Implements `Matcher`: any token, at any time."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask

    def mask(self) -> Mask:
        """All tokens."""
        return self._mask

    def consume(self, token: int) -> None:
        """A token came."""

    def copy(self) -> Unbound:
        """It has no state."""
        return self


class BudgetMatcher:
    """Implements `Matcher` over another one. `budget` counts the tokens between the marks."""

    def __init__(self, inner: Inner, thinking: Thinking, budget: int, free: FreeTokens) -> None:
        self._inner = inner
        self._reader = ReasoningReader(thinking)
        self._left = budget
        self._free = free
        self._begun = thinking.begun
        self._closing: Sequence[int] = free.tokenizer.encode(thinking.closes[0], add_special_tokens=False)
        self._closed = 0  # tokens of the mark that have come since the budget was used up

    def mask(self) -> Mask:
        """The tokens that may come next."""
        if self._left > 0 or not self._thinks:
            return self._inner.mask()
        return _only(self._closing[min(self._closed, len(self._closing) - 1)], self._free.mask)

    def consume(self, token: int) -> None:
        """A token came."""
        self._inner.consume(token)
        if self._thinks and self._left > 0:
            self._left -= 1
        elif self._thinks:
            self._closed += 1
        self._reader.push(self._free.tokenizer.id_to_text(token))
        self._begun = self._begun or self._reader.began

    def copy(self) -> BudgetMatcher:
        """Another matcher in the same state."""
        other = copy(self)
        other._inner, other._reader = self._inner.copy(), copy(self._reader)
        return other

    @property
    def _thinks(self) -> bool:
        return self._begun and not self._reader.over


def _only(token: int, like: Mask) -> Mask:
    mask = np.zeros_like(like)
    mask.view(np.uint32)[token // 32] = np.uint32(1 << (token % 32))
    return mask
