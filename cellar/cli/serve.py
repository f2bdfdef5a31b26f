"""`cellar serve`: the OpenAI HTTP API over a model, or with --cells an endpoint for each of a user's own models."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cellar.cli.verb import ENGINE, OptionGroup, unread, verb
from cellar.core.collector import collector_rests
from cellar.core.config import EngineConfig
from cellar.core.errors import ConfigError
from cellar.core.extras import missing
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.engine_start import EngineStart

# A server has clients who wait for one another; what is a matter of experiments is none of its operator's.
_ENGINE = replace(ENGINE, skip=frozenset({"model", "machine_profile", "decode_reserve", "run_ahead"}))
_SERVER = OptionGroup("Server", (ServerConfig,))
LIMITS = OptionGroup(
    "Limits",
    (LimitConfig,),
    # Bounds that no honest client meets; who builds the server in Python can set them.
    skip=frozenset(
        {
            *("max_head_bytes", "upload_timeout", "max_grammar_bytes", "prepare_timeout"),
            *("max_listed_tokens", "max_request_logprobs"),
        }
    ),
)


@verb(engine=_ENGINE, server=_SERVER, limits=LIMITS)
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Directory, hub name, or a shipped config; default: the demo model.")
    ] = None,
    cells: Annotated[
        Path | None, typer.Option(help="Python file whose CellModels are served instead, at /v1/cells/MODEL.")
    ] = None,
    *,
    engine: dict[str, Any],
    server: dict[str, Any],
    limits: dict[str, Any],
) -> None:
    """Serve a model to OpenAI clients, or recurrent models of your own."""
    config = EngineConfig.of(model=model, **engine)
    options, bounds = ServerConfig(**server), LimitConfig(**limits)
    if cells is not None:
        _serve_cells(cells, config, options, bounds)
        return
    from cellar.engine.plan import with_plan

    config, _ = with_plan(config)  # what is wrong with it is found before anything is started
    with ExitStack() as stack:
        start: EngineStart | None = None
        if options.has_one_engine_beside:
            # It opens the model while this process imports.
            start = stack.enter_context(EngineStart.of(config, options.log_level, bounds.shutdown_timeout))
        try:
            with collector_rests():
                from cellar.server.run import serve as run
        except ModuleNotFoundError as error:
            raise missing("serving needs", error.name, "server") from error

        run(config, options, bounds, _say, start)


def _serve_cells(file: Path, config: EngineConfig, server: ServerConfig, limits: LimitConfig) -> None:
    _check_unused(config)
    from cellar.cli.cells_file import load_models
    from cellar.engine.cells import CellEngine

    try:
        from cellar.server.cells.run import serve_cells
    except ModuleNotFoundError as error:
        raise missing("serving needs", error.name, "server") from error

    def opened() -> CellEngine:
        place = config.device
        return CellEngine.open(
            load_models(file), (place.device,), num_threads=place.num_threads, enforce_eager=place.enforce_eager
        )

    serve_cells(opened, server, limits, _say)


def _say(line: str) -> None:
    """A server serves on when nobody reads what it says."""
    try:
        typer.echo(line)
    except OSError:
        unread()


def _check_unused(config: EngineConfig) -> None:
    """Options of language models are refused with --cells."""
    defaults = EngineConfig()
    for part in ("model", "cache", "schedule", "offload"):
        given: Mapping[str, Any] = vars(getattr(config, part))
        for name, value in given.items():
            if value != getattr(getattr(defaults, part), name):
                raise ConfigError(f"{name} has no effect with --cells; leave it out.")
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(config.device, name) > 1:
            raise ConfigError(f"{name} shares language models only, not cells; leave it out.")
