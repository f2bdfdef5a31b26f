"""Pace: how much of a step long prompts may take while others decode, so that it does not last much longer for them.

Whoever decodes waits for the step that computes somebody's prompt. Short prompts go as they come: a step full of them
costs less than the same prompts one after another. The long ones share what fits into the time, as steps were lately:
a few times what the decodes take by themselves, so that prompts keep most of the machine and an answer stays a stream.
"""

from __future__ import annotations

import math
from collections import deque

NEWEST = 0.5
"""Weight of the newest step in the pace of prompts."""

LATEST = 32
"""Steps of about as many decodes of which the fastest says what they take. One that shares its cores takes many times
as long, and those of few decodes come last just when a crowd arrives: none follows that would put it right."""

STRETCH = 3.0
"""Long prompts beside decodes may take so many times what these take alone: 3/4 of the machine, while others decode."""

WHOLE = 32
"""Steps of prompts by themselves that stand before somebody's first token may take as many times what few decodes take,
together: reading the weights is a tenth of it at most."""

BEFORE = 3
"""Steps before the first token of somebody who comes: one that runs, one behind it, and the one that has its prompt."""

PRICE = 1 / 4
"""Rows that take turns, so that steps are short for others, may take longer by this share for as many tokens."""

FEW_EACH = 2
"""Tokens of a step for each of its rows, at most, with which it takes about as long as one of as many decodes."""


class Fastest:
    """Of the latest steps of about as many tokens, as many bits, the fastest: seconds and tokens, by bits."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[float, int]] = {}
        self._latest: dict[int, deque[tuple[float, int]]] = {}

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step was measured."""
        bits = num_tokens.bit_length()
        latest = self._latest.setdefault(bits, deque(maxlen=LATEST))
        latest.append((seconds, num_tokens))
        self.of[bits] = min(latest)

    def like(self, num_tokens: int) -> int:
        """The bits of those that were seen which are most like this; 0 if there are none."""
        bits = num_tokens.bit_length()
        return min(self.of, key=lambda seen: (abs(seen - bits), -seen), default=0)


class Pace:
    """`seconds` that long prompts may take of a step in which others decode, at most; None: no limit.

    Of an owner's prompts those are long that make more than `short` tokens in one step. They get at least `least`
    tokens, however slow steps are: fewer cost nearly as much, and steps of fewer tell nothing.
    """

    def __init__(self, seconds: float | None, short: int = 256, least: int = 32) -> None:
        self.short = short
        self._least = least
        self._limit = seconds
        self._each: float | None = None  # seconds of one token of a step
        self._decodes = Fastest()  # steps of nothing else
        self._rows = Fastest()  # those with prompts, of which each row had a token or two

    def decoded(self, num_decodes: int, seconds: float) -> None:
        """A step without prompts took so long for so many decodes. Times of 0 are no measurement."""
        if seconds > 0:
            self._decodes.add(num_decodes, seconds)

    @property
    def is_limited(self) -> bool:
        """True if somebody waits for single tokens."""
        return self._limit is not None and not math.isinf(self._limit)

    def measured(self, num_tokens: int, seconds: float, num_rows: int = 1) -> None:
        """A step with prompts took so long for so many tokens of so many rows, by their cost. Times of 0 are no
        measurement.
        """
        if num_tokens <= FEW_EACH * num_rows and seconds > 0:
            self._rows.add(num_tokens, seconds)
        if num_tokens >= self._least and seconds > 0:
            each = seconds / num_tokens
            self._each = each if self._each is None else (1 - NEWEST) * self._each + NEWEST * each

    def room(self, num_decodes: int) -> int | None:
        """Tokens of long prompts in a step beside so many decodes; None: as many as it has."""
        if self._limit is None or not self.is_limited:
            return None
        if self._each is None:
            return self.short
        limit = min(self._limit, STRETCH * self._at(num_decodes)) if self._decodes.of else self._limit
        return max(self._least, int(limit / self._each) - num_decodes)

    def whole(self) -> int | None:
        """Tokens of prompts in a step of nothing else, while somebody who decoded may come back; None: as many as it
        has. Of a first one, which will be measured, as many as are short.
        """
        if self._limit is None or not self.is_limited:
            return None
        if self._each is None:
            return self.short
        if not self._decodes.of:
            return None
        seconds = max(self._limit, WHOLE * self._decodes.of[min(self._decodes.of)][0])
        return max(self._least, int(seconds / BEFORE / self._each))

    def enough(self, num_decodes: int, arriving: bool = False) -> int:
        """How many of so many rows a step needs, if others wait for it: with that many a round of turns takes
        longer by PRICE at most. All of them where steps of about as many, and of far fewer, were not seen yet, or where
        nobody waits for single tokens.

        While rows are `arriving` no step is one of decodes alone, and what so many take cannot be seen: then steps with
        the rows that arrive say it, and of these as many as there have been.

        A step of n rows takes a + b n seconds; with m of them, all n have been in one after a n / m + b n.
        """
        few, seen = min(self._decodes.of, default=0), self._decodes
        many = seen.like(num_decodes)
        is_seen = abs(many - num_decodes.bit_length()) <= 1
        if arriving and not is_seen:
            seen, is_seen = self._rows, True
            many = seen.like(num_decodes)
        if not self.is_limited or many < few + 2 or not is_seen or not few:
            return num_decodes
        (least, low), (longest, high) = self._decodes.of[few], seen.of[many]
        row = max(0.0, (longest - least) / (high - low))
        step = max(0.0, least - low * row)
        if not row:
            return num_decodes
        return min(num_decodes, math.ceil(step / ((1 + PRICE) * step / num_decodes + PRICE * row)) or 1)

    def is_long(self, num_tokens: int) -> bool:
        """True if a step of so many may last more than twice the limit: who comes now waits long enough for it, and
        not for another one planned behind it. Before the first measurement each may, unless there is no limit.
        """
        if self._limit is None or math.isinf(self._limit):
            return False
        return num_tokens > self.short if self._each is None else num_tokens * self._each > 2 * self._limit

    def _at(self, num_decodes: int) -> float:
        """Seconds that so many decodes take alone, at most: more of them than were measured cost no more each."""
        seconds, count = self._decodes.of[self._decodes.like(num_decodes)]
        return seconds * max(1.0, num_decodes / count)
