"""An `EngineHost` over a pool: calls engines as it hears of them, and keeps one front over all of them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping

from cellar.core.errors import CellarError
from cellar.core.messages import SchedulerStats
from cellar.engine.opened import Opened
from cellar.engine.stream import AsyncLLM
from cellar.server.endpoint import Address
from cellar.server.pool.affinity import Affinity
from cellar.server.pool.pool import Chooser, Pool
from cellar.server.remote import RemoteEngine
from cellar.server.routing_figures import RoutingFigures
from cellar.server.supervisor import KNOCK_SECONDS, Attach, FrontMaker, nothing
from cellar.server.wire import Ready

logger = logging.getLogger(__name__)


class PoolHost:
    """`add` and `drain` engines at any time, from any thread; `wait` for the first before `opened` is asked for.

    All engines serve the same model: one that serves another than the first is not let in. `begin` is done first by the
    front's thread.
    """

    def __init__(
        self, attach: Attach | None = None, chooser: Chooser | None = None, begin: Callable[[], None] = nothing
    ) -> None:
        self._figures: RoutingFigures | None = None
        self._pool = Pool(chooser or Affinity(self._chosen), migrated=self._migrated)
        self._attach = attach or FrontMaker()
        self._begin = begin
        self._lock = threading.Lock()
        self._known: set[Address] = set()  # connected, or about to be
        self._kept: dict[str, Address] = {}
        self._first: Ready | None = None
        self._llm: AsyncLLM | None = None
        self._opened: Opened | None = None
        self._there = threading.Event()
        self._closing = threading.Event()

    @property
    def opened(self) -> Opened:
        """What the first engine said. Raises CellarError while there was none."""
        if self._opened is None:
            raise CellarError("no engine has come yet; wait for one.")
        return self._opened

    @property
    def llm(self) -> AsyncLLM | None:
        """The engines, if there is one now."""
        llm = self._llm
        return llm if llm is not None and llm.running and self._pool.places else None

    def stats(self) -> SchedulerStats | None:
        """The sum of their snapshots; None while there is no engine."""
        return None if self.llm is None else self._pool.stats()

    def engines(self) -> Mapping[str, SchedulerStats | None]:
        """Of those that are kept, by name: the last snapshot, None while one does not run."""
        return {name: self._pool.stats_at(address) for name, address in self._kept.items()}

    def count_by(self, figures: RoutingFigures) -> None:
        """Count choices, and what goes on elsewhere."""
        self._figures = figures

    def addresses(self) -> frozenset[Address]:
        """Where engines are that are connected."""
        return frozenset(place.address for place in self._pool.places)

    def wait(self, seconds: float | None) -> None:
        """Until the first engine is there. Raises CellarError if none comes in time (None: for ever)."""
        if not self._there.wait(seconds):
            raise CellarError(f"no engine has come in {seconds:.0f} s; see the engines' logs.")

    def add(self, address: Address) -> None:
        """Call an engine, unless it is connected already; one that cannot be reached may be added again."""
        if self._new(address):
            threading.Thread(target=self._call, args=(address,), name="cellar-caller", daemon=True).start()

    def keep(self, address: Address, name: str) -> None:
        """Call an engine that always comes back at the same address, now and whenever it does; before any request."""
        self._kept[name] = address
        threading.Thread(target=self._keep, args=(address,), name="cellar-caller", daemon=True).start()

    def drain(self, address: Address, then: Callable[[], None] = nothing) -> None:
        """Have an engine's requests go on elsewhere; it gets no new ones. `then` is called, by another thread, when
        they have been sent there.
        """

        def drain() -> None:
            self._pool.drain(address)
            then()

        self._pool.post(drain)

    async def close(self) -> None:
        """Leave all engines."""
        await asyncio.to_thread(self.leave)

    def leave(self) -> None:
        """Leave all engines."""
        with self._lock:
            self._closing.set()
        if self._llm is not None:
            self._llm.close()
        else:
            self._pool.close()

    def _chosen(self, why: str, seconds: float) -> None:
        if self._figures is not None:
            self._figures.chosen(why, seconds)

    def _migrated(self, count: int) -> None:
        if self._figures is not None:
            self._figures.migrated(count)

    def _new(self, address: Address) -> bool:
        """Whether it is to be called: nobody has yet."""
        with self._lock:
            if address in self._known or self._closing.is_set():
                return False
            self._known.add(address)
            return True

    def _call(self, address: Address) -> None:
        try:
            engine = RemoteEngine(address)
        except (CellarError, OSError) as error:
            logger.info("an engine at %s cannot be reached (%s)", address, error)
            with self._lock:
                self._known.discard(address)
            return
        self._stay(address, engine)

    def _keep(self, address: Address) -> None:
        pause, longest = KNOCK_SECONDS
        while not self._closing.is_set():
            try:
                engine = RemoteEngine(address)
            except (CellarError, OSError):
                self._closing.wait(pause)
                pause = min(2 * pause, longest)
                continue
            pause = KNOCK_SECONDS[0] if self._stay(address, engine) else longest
            self._closing.wait(pause)

    def _stay(self, address: Address, engine: RemoteEngine) -> bool:
        """Until the engine is lost; False if it was of no use."""
        try:
            with self._lock:
                self._let_in(address, engine)
        except Exception as error:
            logger.error("an engine at %s is of no use (%s)", address, error)
            engine.close()
            return False
        engine.ended.wait()
        with self._lock:
            self._known.discard(address)
        return True

    def _let_in(self, address: Address, engine: RemoteEngine) -> None:
        """Under the lock."""
        if self._closing.is_set():
            engine.close()
            return
        if self._first is None:
            self._opened = self._attach(engine.ready, self._pool)
            self._first = engine.ready
            self._llm = AsyncLLM.over(self._opened, self._begin)
        elif (engine.ready.spec, engine.ready.max_model_len) != (self._first.spec, self._first.max_model_len):
            raise CellarError("it serves another model than the engines before it")
        self._pool.post(lambda: self._joined(address, engine))

    def _joined(self, address: Address, engine: RemoteEngine) -> None:
        self._pool.join(address, engine)
        self._there.set()
