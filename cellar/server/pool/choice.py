"""Who gets a request: the engine that had its conversation last, else the one with the fewest requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from cellar.core.messages import Request
from cellar.server.pool.pool import Place
from cellar.server.wire import Reported

MAX_CONVERSATIONS = 100_000
"""How many conversations are remembered; the ones that were heard of last."""

MAX_EXCESS = 8
"""A conversation goes elsewhere if its engine has so many requests more than another, and twice as many."""


class Sticky:
    """A `Chooser`. Who has no conversation, and whose engine is gone or crowded, goes where there are the fewest; of
    equal ones to whom nothing was sent for longest.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[bytes, str], Place] = OrderedDict()
        self._turns: dict[Place, int] = {}
        self._turn = 0

    def choose(self, request: Request, places: Sequence[Place]) -> Place:
        """One of `places`."""
        place = self._choose(request, places)
        self._turn += 1
        self._turns[place] = self._turn
        return place

    def joined(self, place: Place) -> None:
        """It has the fewest."""

    def gone(self, place: Place) -> None:
        """Forget it."""
        self._turns.pop(place, None)
        for name in [name for name, last in self._last.items() if last is place]:
            del self._last[name]

    def reported(self, place: Place, reported: Reported) -> None:
        """Nothing is asked."""

    def started(self, request_id: str) -> None:
        """Nothing is kept."""

    def ended(self, request_id: str, num_output: int) -> None:
        """Nothing is kept."""

    def _choose(self, request: Request, places: Sequence[Place]) -> Place:
        fewest = min(places, key=lambda place: (len(place.streams), self._turns.get(place, 0)))
        if request.conversation is None:
            return fewest
        name = request.salt, request.conversation
        last = self._last.get(name)
        if last is None or last not in places or _crowded(len(last.streams), len(fewest.streams)):
            last = fewest
        self._last[name] = last
        self._last.move_to_end(name)
        if len(self._last) > MAX_CONVERSATIONS:
            self._last.popitem(last=False)
        return last


def _crowded(count: int, fewest: int) -> bool:
    return count > fewest + MAX_EXCESS and count > 2 * fewest
