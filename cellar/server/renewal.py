"""Renewal: engines of one server end and start anew, one after another, while the others serve.

What an engine streams goes on at another one; what it remembers is written to tiers that outlive it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from cellar.server.supervisor import EngineKeeper

logger = logging.getLogger(__name__)


class Renewal:
    """`move_out` has all fronts take their streams away from engine k, and returns when they have."""

    def __init__(self, keepers: Sequence[EngineKeeper], move_out: Callable[[int], None]) -> None:
        self._keepers = keepers
        self._move_out = move_out
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Renew all engines, from now on. While one renewal is under way there is no other."""
        if len(self._keepers) < 2:
            logger.error("a single engine cannot be renewed while it serves; use --replicas, or restart the server")
        elif self._thread is not None and self._thread.is_alive():
            logger.warning("the engines are being renewed already")
        else:
            self._thread = threading.Thread(target=self._renew, name="cellar-renewal", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Begin with no further engine."""
        self._closing.set()

    def _renew(self) -> None:
        for k, keeper in enumerate(self._keepers):
            if self._closing.is_set():
                return
            if not any(other.process.process.is_alive() for other in self._keepers if other is not keeper):
                logger.error("no other engine runs; engine %d and those after it are not renewed", k)
                return
            logger.warning("engine %d is renewed; its streams go on elsewhere", k)
            self._move_out(k)
            if not keeper.renew():
                logger.error("engine %d did not start again; those after it are not renewed", k)
                return
        logger.warning("all %d engines have been renewed", len(self._keepers))
