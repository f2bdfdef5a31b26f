"""Who keeps the processes of several engines alive, all of one machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cellar.server.engine_start import Opener
from cellar.server.supervisor import EngineKeeper, nothing


class EngineKeepers:
    """An `EngineKeeper` for each address, with the opener of the same place. They start at the same time.

    Raises CellarError if one does not start the first time; then none runs. `on_restart` is called by one thread at a
    time.
    """

    def __init__(
        self,
        openers: Sequence[Opener],
        addresses: Sequence[str],
        log_level: str = "warning",
        first_pause: float = 0.5,
        on_restart: Callable[[], None] = nothing,
        persist_seconds: float = 0.0,
    ) -> None:
        lock = threading.Lock()

        def restarted() -> None:
            with lock:
                on_restart()

        def start(opener: Opener, address: str) -> EngineKeeper:
            return EngineKeeper(opener, address, log_level, first_pause, restarted, persist_seconds)

        with ThreadPoolExecutor(len(openers), "cellar-start") as threads:
            starts = [threads.submit(start, *each) for each in zip(openers, addresses, strict=True)]
        self.keepers = [one.result() for one in starts if one.exception() is None]
        for one in starts:
            if (error := one.exception()) is not None:
                self.close()
                raise error

    def close(self) -> None:
        """End all processes, at the same time, and start them no more."""
        if self.keepers:
            with ThreadPoolExecutor(len(self.keepers), "cellar-end") as threads:
                list(threads.map(EngineKeeper.close, self.keepers))
