"""Patience: how long a step waits for its masks.

While all rows are masked, nobody but the rows that need them is held up: a step waits for as long as a mask that is not
slow may take. While others come and go, its masks have as long as the step takes by itself, from when it begins: they
wait for none, or for a moment. What a step takes, the fastest of the latest ones says: masks are computed beside steps
and make them slower, and a step that is thought slow would wait for more masks, which are computed beside the next one.

A decision: no clock is read here.
"""

from __future__ import annotations

from collections import deque

STEP_SECONDS = 0.05
"""How long a step waits for a mask at most, from when it can be computed."""

LEAST_PATIENCE = STEP_SECONDS / 4
"""How long a step waits for masks, however short it is: threads take a moment to wake up."""

LATEST = 32
"""Steps of about as many tokens of which the fastest counts; and for so many steps it is remembered that others were
there: who comes back, or next, waits for the steps that are on their way."""


class Patience:
    """`of` a step of so many tokens, after what `measured` has heard and of what else it was asked."""

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}  # seconds, by bits of the tokens
        self._alone = LATEST  # steps in a row that had masked rows alone

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long, without waiting for masks. Times of 0 are no measurement."""
        if seconds > 0:
            self._latest.setdefault(num_tokens.bit_length(), deque(maxlen=LATEST)).append(seconds)

    def planned(self, others: bool) -> None:
        """A step with masked rows is on its way; `others`: it has rows without masks, too."""
        self._alone = 0 if others else self._alone + 1

    def of(self, num_tokens: int) -> float:
        """Seconds that a step waits from when its masks can be computed."""
        bits = num_tokens.bit_length()
        if self._alone >= LATEST or not self._latest:
            return STEP_SECONDS
        likest = min(self._latest, key=lambda seen: (abs(seen - bits), -seen))
        return min(STEP_SECONDS, max(LEAST_PATIENCE, min(self._latest[likest])))
