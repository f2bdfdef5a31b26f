"""`cellar serve`: the OpenAI HTTP API over a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from cellar.cli.verb import ENGINE, OptionGroup, verb
from cellar.core.config import EngineConfig
from cellar.core.errors import ConfigError
from cellar.server.config import LimitConfig, ServerConfig

_SERVER = OptionGroup("Server", (ServerConfig,))
_LIMITS = OptionGroup("Limits", (LimitConfig,))


@verb(engine=replace(ENGINE, skip=frozenset({"model"})), server=_SERVER, limits=_LIMITS)
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Directory, hub name, or a shipped config; default: the demo model.")
    ] = None,
    *,
    engine: dict[str, Any],
    server: dict[str, Any],
    limits: dict[str, Any],
) -> None:
    """Serve a model to OpenAI clients."""
    config = EngineConfig.of(model=model, **engine)
    options, bounds = ServerConfig(**server), LimitConfig(**limits)
    try:
        from cellar.server.run import serve as run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serving needs the package {error.name}, which is not installed; pip install 'cellar-llm[server]'."
        ) from error

    run(config, options, bounds, typer.echo)
