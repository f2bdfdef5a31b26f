"""uvicorn as Cellar runs it: sockets, signals, and an end that lets running requests finish."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from cellar.core.errors import ConfigError
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.connection import connections
from cellar.server.tls import tls_of

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection is kept: longer than clients and proxies keep theirs (60 s is usual), so that none of
them sends a request on a connection that the server is about to close."""


TURNS = 4
"""Of the loop, in which it accepts who waits to be accepted, and begins to listen to them."""


class Server(uvicorn.Server):
    """uvicorn's server that resets nobody when it ends. `started_serving` is called when it accepts connections."""

    def __init__(self, config: uvicorn.Config, started_serving: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._started_serving = started_serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        if self.started:
            self._started_serving()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept those who are connected by the kernel alone: a socket that is closed resets them."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
        await super().shutdown(sockets)


class DrainingServer(Server):
    """Ends by SIGTERM or SIGINT when running requests have finished, with exit code 0; a second one ends it at once."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving; the caller's handlers are back afterwards, and get nothing of it."""
        before = {number: signal.signal(number, self._drain) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _drain(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        else:
            logger.warning("%s: no new requests; running ones have time to finish", signal.Signals(number).name)
        self.should_exit = True


class FrontServer(Server):
    """One of several fronts: told by its keeper when to end. SIGTERM, however often, means the same as a drain."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM while serving."""
        before = signal.signal(signal.SIGTERM, self._drain)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _drain(self, number: int, frame: FrameType | None) -> None:
        self.should_exit = True


MAX_PATH = 512
"""Characters of a path in a line of the access log."""


def server_config(app: FastAPI, server: ServerConfig, limits: LimitConfig) -> uvicorn.Config:
    """uvicorn's options."""
    logging.getLogger("uvicorn.access").addFilter(_shortened)
    return uvicorn.Config(
        app,
        http=connections(limits, tls_of(server)),
        ws="none",  # there are no routes for them, and their connections would know no limits
        log_level=server.log_level,
        access_log=server.log_level in ("info", "debug"),
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(limits.shutdown_timeout)),
        server_header=False,
    )


def run(
    app: FastAPI,
    listener: socket.socket,
    server: ServerConfig,
    limits: LimitConfig,
    started_serving: Callable[[], None] = lambda: None,
) -> None:
    """Run an application on a socket until a signal comes."""
    keep_what_is_here()
    DrainingServer(server_config(app, server, limits), started_serving).run([listener])


def keep_what_is_here() -> None:
    """Have collections pass over all that exists now: walking over it holds up every stream, and comes too seldom
    to free what requests leave behind."""
    gc.collect()
    gc.freeze()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address cannot be had."""
    try:
        return socket.create_server((host, port), family=_family(host), backlog=2048)
    except OSError as error:
        raise _taken(host, port, error) from error


def listen_beside(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet; other processes may bind the same address in this way.

    Connections are dealt out to those that listen. Raises ConfigError if the address cannot be had.
    """
    made = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise _taken(host, port, error) from error
    return made


def _shortened(record: logging.LogRecord) -> bool:
    """Bounds the path in a line of the access log; a head may be much longer."""
    if isinstance(record.args, tuple) and len(record.args) > 2 and len(str(record.args[2])) > MAX_PATH:
        before, path, after = record.args[:2], str(record.args[2]), record.args[3:]
        record.args = (*before, f"{path[:MAX_PATH]}...", *after)
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _taken(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another host or port.")
