"""The server as a program: listen, say where, drain on SIGTERM, exit."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from cellar.core.config import EngineConfig
from cellar.core.errors import ConfigError
from cellar.front import open_front
from cellar.server.app import build_app
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.host import EngineHost, SameProcess, ServedModel
from cellar.server.supervisor import Supervisor, open_config
from cellar.stream import AsyncLLM

logger = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
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


def serve(
    engine: EngineConfig, server: ServerConfig, limits: LimitConfig, say: Callable[[str], None] = lambda line: None
) -> None:
    """Serve until a signal comes. Raises CellarError if it cannot start."""
    logging.basicConfig(level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listener = listen(server.host, server.port)  # before the model is read: a port in use is found at once
    names = model_names(engine, server)
    host: EngineHost
    if server.disable_frontend_multiprocessing:
        opened = open_front(engine)
        host = SameProcess(AsyncLLM.over(opened))
        app = build_app(host, ServedModel.of(opened, names), server, limits)
    else:
        host = Supervisor(partial(open_config, engine), log_level=server.log_level)
        app = build_app(host, ServedModel.of(host.opened, names), server, limits)
        host.on_restart(app.state.api.metrics.restarted)
    address = f"http://{server.host}:{listener.getsockname()[1]}"
    say(f"{names[0]} is served at {address}/v1")
    run(app, listener, server, limits)


def run(app: FastAPI, listener: socket.socket, server: ServerConfig, limits: LimitConfig) -> None:
    """Run an application on a socket until a signal comes."""
    config = uvicorn.Config(
        app,
        log_level=server.log_level,
        access_log=server.log_level in ("info", "debug"),
        timeout_graceful_shutdown=max(1, round(limits.shutdown_timeout)),
        server_header=False,
    )
    DrainingServer(config).run([listener])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another host or port.") from error


def model_names(engine: EngineConfig, server: ServerConfig) -> tuple[str, ...]:
    """What the model is called: by option, else as it was given."""
    if server.served_model_name is None:
        return (engine.model.model or "cellar-demo",)
    names = tuple(name.strip() for name in server.served_model_name.split(",") if name.strip())
    if not names:
        raise ConfigError("served_model_name is empty; give a name, or leave the option out.")
    return names
