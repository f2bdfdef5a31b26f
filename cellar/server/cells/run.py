"""The server of cells as a program: listen, say where, drain on SIGTERM, exit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields

from cellar.core.errors import ConfigError
from cellar.engine.cells import CellEngine
from cellar.server.cells.app import PATH, build_cells_app
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.keys import check_quota, with_keys
from cellar.server.serving import listen, run
from cellar.server.tls import check_certificate, scheme_of

UNUSED = frozenset(
    {
        *("served_model_name", "api_server_count", "replicas", "disable_frontend_multiprocessing", "tool_call_parser"),
        *("max_prompt_len", "max_grammar_bytes", "enable_log_requests", "share_prefixes"),
    }
)
"""Options of the LLM server that mean nothing here."""


def serve_cells(
    opener: Callable[[], CellEngine],
    server: ServerConfig,
    limits: LimitConfig,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Serve until a signal comes. Raises CellarError if it cannot start."""
    check_options(server, limits)
    check_certificate(server)
    server = with_keys(server)
    check_quota(server, limits)
    logging.basicConfig(level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listener = listen(server.host, server.port)  # before models are read: a port in use is found at once
    engine = opener()
    try:
        app = build_cells_app(engine, server, limits)
        address = f"{scheme_of(server)}://{server.host}:{listener.getsockname()[1]}{PATH}"
        run(app, listener, server, limits, lambda: say(f"{', '.join(engine.models)} served at {address}/MODEL"))
    finally:
        engine.close()


def check_options(server: ServerConfig, limits: LimitConfig) -> None:
    """Raises ConfigError for options that have no effect with cells."""
    for config in (server, limits):
        for option in fields(config):
            if option.name in UNUSED and getattr(config, option.name) != option.default:
                raise ConfigError(f"{option.name} has no effect with --cells; leave it out.")
