"""Everything behind /v1/responses and /v1/conversations: the store, who reads turns and who makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cellar.conversations.store import AsyncStore, default_directory, open_store
from cellar.conversations.sweep import StoreLimits
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.desk import Desk
from cellar.server.host import ServedModel
from cellar.server.metrics import Metrics
from cellar.server.prepare import Preparer
from cellar.server.responses import conversations, routes
from cellar.server.responses.background import Background
from cellar.server.responses.forgetting import Forgetting
from cellar.server.responses.making import Maker
from cellar.server.responses.sealing import Seal
from cellar.server.responses.turns import TurnReader


class Service:
    """Holds the store from its making on. Raises ConfigError, StoreUnavailable if that cannot be opened."""

    def __init__(
        self,
        prepare: Preparer,
        desk: Desk,
        metrics: Metrics,
        model: ServedModel,
        server: ServerConfig,
        limits: LimitConfig,
    ) -> None:
        directory = default_directory() if server.data_dir is None else Path(server.data_dir)
        bounds = StoreLimits(ttl=limits.conversation_ttl or None, max_bytes=limits.conversation_bytes)
        self._forgetting = Forgetting(desk)
        place = server.conversation_store or directory
        self.store = AsyncStore(open_store(place, bounds, deleted=self._forgetting.deleted))
        seal = Seal.of(directory)
        reader = TurnReader(prepare, self.store, seal, metrics, model.max_model_len, limits.max_body_bytes)
        maker = Maker(desk, self.store, seal, model.tokenizer, limits.request_timeout)
        self.background = Background(maker, self.store, limits.request_timeout)
        self._responses = routes.ResponseRoutes(prepare, reader, maker, self.background, self.store, desk)
        self._conversations = conversations.ConversationRoutes(self.store, desk, limits.max_body_bytes)

    @property
    def endpoints(self) -> dict[tuple[str, str], Any]:
        """What is served where: (method, path) to endpoint, names before ids."""
        return routes.answers_of(self._responses) | conversations.answers_of(self._conversations)

    def start(self) -> None:
        """Begin what goes on in the event loop by itself."""
        self._forgetting.start()

    async def close(self) -> None:
        """End what is made in the background, and leave the store."""
        await self.background.close()
        await self._forgetting.close()
        await self.store.close()
