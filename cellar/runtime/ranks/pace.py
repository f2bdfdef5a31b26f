"""Whether one rank keeps the others waiting, by what each says of itself with its pulse."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

SPAN_SECONDS = 10.0
"""Over which waiting is counted, at least."""

MUCH = 0.5
"""Of the time: what the others wait that have a slow rank among them."""

LITTLE = 0.25
"""Of what the others wait: the most that a slow rank itself does."""

AGAIN_SECONDS = 60.0
"""A rank that stays slow is said so often."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """At `moment` (seconds, of any clock) a rank had waited for others for so many seconds; None: it cannot say, as on
    an accelerator, where the host waits for no collective.
    """

    moment: float
    waited: float | None


class Paced(Protocol):
    """What is looked at."""

    @property
    def pulse(self) -> Pulse | None:
        """Its last one."""


class Pace:
    """Compares how long ranks wait. `slow`: the one for which all others wait; None: there is none."""

    def __init__(self) -> None:
        self.slow: int | None = None
        self._before: list[Pulse] = []
        self._said = 0.0

    def look(self, ranks: Sequence[Paced]) -> None:
        """Warns of a rank that has become slow, or still is."""
        pulses = [rank.pulse for rank in ranks]
        now = [pulse for pulse in pulses if pulse is not None and pulse.waited is not None]
        if len(now) < len(ranks) or len(now) < 2:
            return
        before = self._before
        if len(before) < len(now):
            self._before = now
            return
        spans = [new.moment - old.moment for new, old in zip(now, before, strict=True)]
        if min(spans) < SPAN_SECONDS:
            return
        self._before = now
        shares = [
            ((new.waited or 0.0) - (old.waited or 0.0)) / span
            for new, old, span in zip(now, before, spans, strict=True)
        ]
        slow = min(range(len(shares)), key=lambda rank: shares[rank])
        others = min(share for rank, share in enumerate(shares) if rank != slow)
        if others < MUCH or shares[slow] > LITTLE * others:
            self.slow = None
            return
        moment = now[slow].moment
        if self.slow != slow or moment >= self._said + AGAIN_SECONDS:
            self._said = moment
            logger.warning(
                "rank %d is slow: the others waited for it for %.0f %% of %.0f s, it for them for %.0f %%; look for "
                "what else runs on its processor.",
                slow,
                100 * others,
                min(spans),
                100 * shares[slow],
            )
        self.slow = slow
