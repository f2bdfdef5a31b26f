"""Inboxes: where outputs lie of requests that one thread runs at a time, turn by turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cellar.core.messages import RequestOutput
from cellar.engine.front import Front

Inbox = deque[RequestOutput]


class Inboxes:
    """Whoever reads an inbox turns the front; what the turn brings for others lies in their inboxes until they read."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._inboxes: dict[str, Inbox] = {}

    @contextmanager
    def open(self, ids: Sequence[str]) -> Iterator[Inbox]:
        """One inbox for some requests, which are about to start; what of them still runs at the end is dropped."""
        inbox: Inbox = deque()
        self._inboxes |= dict.fromkeys(ids, inbox)
        try:
            yield inbox
        finally:
            for id in ids:
                self._front.abort(id)
                del self._inboxes[id]

    def read(self, inbox: Inbox) -> list[RequestOutput]:
        """What lies in an inbox, after a turn of the front if it is empty: perhaps nothing."""
        if not inbox:
            news = self._front.turn()
            ended = {output.request_id for output in news.finished}
            for id in {delta.request_id for delta in news.deltas} - ended:
                self._inboxes[id].append(self._front.output(id))
            for output in news.finished:
                self._inboxes[output.request_id].append(output)
        found = list(inbox)
        inbox.clear()
        return found
