"""The layers in front of every application's routes: who may come in, by which names, from which pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.guard import AnswerCount, ApiKeys, BodyLimit
from cellar.server.hosts import AllowedHosts
from cellar.server.request_id import HEADER


def guard(
    app: Starlette,
    server: ServerConfig,
    limits: LimitConfig,
    keys: Sequence[str],
    hosts: Sequence[str] | None,
    count: Callable[[str, int], None],
) -> None:
    """Put the layers in front of `app`; `hosts`: see `hosts_of`; `count` hears of every answer its route and status."""
    # The last added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes)
    if keys:
        app.add_middleware(ApiKeys, keys=keys)
    if hosts is not None:
        app.add_middleware(AllowedHosts, hosts=hosts)
    if server.allowed_origins:
        origins = [origin.strip() for origin in server.allowed_origins.split(",")]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=[HEADER]
        )
    app.add_middleware(AnswerCount, count=count)
