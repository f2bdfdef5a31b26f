"""Pace: how much of a step long prompts may take while others decode, so that it does not last much longer for them.

Whoever decodes waits for the step that computes somebody's prompt. Short prompts go as they come: a step full of them
costs less than the same prompts one after another. The long ones share what fits into the time, as steps were lately.
"""

from __future__ import annotations

import math

NEWEST = 0.5
"""Weight of the newest step in the pace."""


class Pace:
    """`seconds` of a step with long prompts in which others decode; None: no limit.

    Of an owner's prompts those are long that make more than `short` tokens in one step. They get at least `least`
    tokens, however slow steps are: fewer cost nearly as much, and steps of fewer tell nothing.
    """

    def __init__(self, seconds: float | None, short: int = 256, least: int = 64) -> None:
        self.short = short
        self._least = least
        self._limit = seconds
        self._each: float | None = None  # seconds of one token of a step

    @property
    def is_limited(self) -> bool:
        """True if somebody waits for single tokens."""
        return self._limit is not None and not math.isinf(self._limit)

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A step with prompts took so long for so many tokens, by their cost. Times of 0 are no measurement."""
        if num_tokens >= self._least and seconds > 0:
            each = seconds / num_tokens
            self._each = each if self._each is None else (1 - NEWEST) * self._each + NEWEST * each

    def room(self, num_decodes: int) -> int | None:
        """Tokens of long prompts in a step beside so many decodes; None: as many as it has."""
        if self._limit is None or not self.is_limited:
            return None
        if self._each is None:
            return self.short
        return max(self._least, int(self._limit / self._each) - num_decodes)

    def is_long(self, num_tokens: int) -> bool:
        """True if a step of so many is expected to last more than twice the limit: who comes now waits long enough for
        it, and not for another one planned behind it.
        """
        return self._limit is not None and self._each is not None and num_tokens * self._each > 2 * self._limit
