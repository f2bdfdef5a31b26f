"""The address is told when the server answers, not before."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import AsyncIterator

from fastapi import FastAPI

from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.serving import run


def test_the_address_is_told_when_the_server_is_ready() -> None:
    events: list[str] = []

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        events.append("ready")
        yield

    def told() -> None:
        events.append("told")
        signal.raise_signal(signal.SIGTERM)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        run(FastAPI(lifespan=lifespan), listener, ServerConfig(log_level="error"), LimitConfig(), told)
    assert events == ["ready", "told"]
