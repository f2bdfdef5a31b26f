"""Handshake: a connection from its first moment until it speaks TLS.

The loop's own server tells nobody of a connection before its handshake is over, so those that never begin one would
neither be counted nor make room, and take all descriptors there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ssl import SSLContext
from typing import Any

from uvicorn.protocols.utils import get_remote_addr

from cellar.server.config import LimitConfig
from cellar.server.doors import Doors


class Handshake(asyncio.Protocol):
    """What uvicorn makes for each connection; `make` gives the one that goes on over TLS, with uvicorn's arguments."""

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: Any,
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        make: Callable[..., asyncio.Protocol],
        context: SSLContext,
        doors: Doors,
        limits: LimitConfig,
    ) -> None:
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self._loop = _loop or asyncio.get_running_loop()
        self._connections: set[Any] = server_state.connections
        self._make: Callable[[], asyncio.Protocol] = lambda: make(config, server_state, app_state, _loop)
        self._context = context
        self._doors = doors
        self._seconds = limits.upload_timeout
        self._address = ""
        self._task: asyncio.Task[None] | None = None
        self._early = bytearray()  # what came before there was anybody who speaks TLS: some loops read at once

    @property
    def address(self) -> str:
        """Of the client."""
        return self._address

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody is there."""
        self.transport = transport
        client = get_remote_addr(transport)
        self._address = client[0] if client else ""
        if not self._doors.enter(self):
            transport.abort()  # it cannot be told why
            return
        self._connections.add(self)
        self._task = self._loop.create_task(self._speak())

    def data_received(self, data: bytes) -> None:
        """Its handshake has begun before ours."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """It left before its handshake began."""
        self._leave()
        if self._task is not None:
            self._task.cancel()

    def shutdown(self) -> None:
        """The server ends; nothing was asked yet."""
        self.transport.abort()

    async def _speak(self) -> None:
        first = _First()
        speaking = asyncio.ensure_future(
            self._loop.start_tls(
                self.transport, first, self._context, server_side=True, ssl_handshake_timeout=self._seconds
            )
        )
        try:
            tls: Any = self
            while tls is self and not speaking.done():
                await asyncio.sleep(0)
                tls = self.transport.get_protocol()
            if self._early and hasattr(tls, "get_buffer"):
                await asyncio.sleep(0)  # it is told of its connection
                _hand_over(self._early, tls)
            transport = await speaking
        except (OSError, RuntimeError):  # no TLS, not in time, or gone: nobody is there to be told
            self.transport.abort()
            return
        finally:
            speaking.cancel()
            self._leave()
        if transport is None or transport.is_closing():
            return
        connection = self._make()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if first.data:
            connection.data_received(bytes(first.data))

    def _leave(self) -> None:
        self._doors.leave(self)
        self._connections.discard(self)


def _hand_over(data: bytearray, to: Any) -> None:
    """Have a buffered protocol (asyncio.BufferedProtocol, or what uvloop has for it) receive data."""
    while data:
        room = memoryview(to.get_buffer(len(data)))
        count = min(len(room), len(data))
        room[:count] = data[:count]
        to.buffer_updated(count)
        del data[:count]


class _First(asyncio.Protocol):
    """Keeps what a client says with the end of its handshake until somebody is there to read it."""

    def __init__(self) -> None:
        self.data = bytearray()

    def data_received(self, data: bytes) -> None:
        self.data += data
