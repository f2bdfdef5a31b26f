"""The server as a program: listen, say where, drain on SIGTERM, exit."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

from cellar.core.config import EngineConfig
from cellar.core.errors import ConfigError
from cellar.core.priority import yield_to_engine
from cellar.engine.opened import open_front
from cellar.engine.shares import shares_of
from cellar.engine.stream import AsyncLLM
from cellar.server.app import build_app
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.directory import PrivateDirectory
from cellar.server.engine_start import EngineStart, Opener, open_config
from cellar.server.fronts import FrontPlan, Fronts
from cellar.server.heap import one_heap, return_spare_memory
from cellar.server.host import EngineHost, SameProcess, ServedModel
from cellar.server.keepers import EngineKeepers
from cellar.server.keys import check_quota, owners_of, with_keys
from cellar.server.metrics import ENGINE_RESTARTS, FRONT_RESTARTS
from cellar.server.renewal import Renewal
from cellar.server.serving import listen, listen_beside, run
from cellar.server.shared import Shared
from cellar.server.supervisor import Attach, Supervisor
from cellar.server.tls import check_certificate, scheme_of

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


def serve(
    engine: EngineConfig,
    server: ServerConfig,
    limits: LimitConfig,
    say: Say = lambda line: None,
    start: EngineStart | None = None,
) -> None:
    """Serve until a signal comes. `start`: of the engine, if it is the only one and has a process of its own. Raises
    CellarError if it cannot start.
    """
    one_heap()
    logging.basicConfig(level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    engine = engine.serving()
    server = with_keys(server)
    check_certificate(server)
    check_quota(server, limits)
    names = model_names(engine, server)
    signal.signal(signal.SIGUSR1, _refuse_to_renew)  # until there are several engines
    if server.replicas > 1:
        openers: list[Opener] = [
            partial(share.open, limits.shutdown_timeout) for share in shares_of(engine, server.replicas)
        ]
        serve_by_several(openers, names, server, limits, say)
        return
    if server.api_server_count > 1:
        serve_by_several([partial(open_config, engine, limits.shutdown_timeout)], names, server, limits, say)
        return
    listener = listen(server.host, server.port)  # before the model is read: a port in use is found at once
    host: EngineHost
    if server.disable_frontend_multiprocessing:
        opened = open_front(engine, persist_seconds=limits.shutdown_timeout)
        host = SameProcess(AsyncLLM.over(opened))
        app = build_app(host, ServedModel.of(opened, names), server, limits)
    else:
        opener = partial(open_config, engine, limits.shutdown_timeout)
        host = Supervisor(opener, log_level=server.log_level, persist_seconds=limits.shutdown_timeout, start=start)
        app = build_app(host, ServedModel.of(host.opened, names), server, limits)
        host.on_restart(app.state.api.metrics.restarted)
        yield_to_engine()
        return_spare_memory()
    port = listener.getsockname()[1]
    run(app, listener, server, limits, lambda: say(served_at(names, server, port)))


def serve_by_several(
    openers: Sequence[Opener],
    names: tuple[str, ...],
    server: ServerConfig,
    limits: LimitConfig,
    say: Say,
    attach: Attach | None = None,
    first_pause: float = 0.5,
) -> None:
    """Serve by `server.api_server_count` front processes over an engine for each opener, until a signal comes."""
    with PrivateDirectory() as directory, listen_beside(server.host, server.port) as place:
        owners = owners_of(server)
        shared = Shared(directory, server.api_server_count, server.api_server_count, owners, len(openers))
        tally = shared.tally()
        tally.places((ENGINE_RESTARTS, FRONT_RESTARTS))  # now: several threads add to them
        restarted = partial(tally.add, ENGINE_RESTARTS)
        patience = limits.shutdown_timeout
        keepers = EngineKeepers(openers, shared.addresses, server.log_level, first_pause, restarted, patience)
        try:
            port = place.getsockname()[1]
            fronts = Fronts(FrontPlan(shared, names, port, server, limits, attach), tally)
            say(served_at(names, server, port))
            renewal = Renewal(keepers.keepers, fronts.leave)
            try:
                fronts.run(renewal.begin)
            finally:
                renewal.close()
        finally:
            keepers.close()


def _refuse_to_renew(number: int, frame: FrameType | None) -> None:
    logger.error("SIGUSR1 renews the engines of --replicas one after another; this server has none to renew now")


def served_at(names: tuple[str, ...], server: ServerConfig, port: int) -> str:
    """The lines that say so: the API's address, and the page's, which a browser on this machine can open."""
    nearby = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    scheme = scheme_of(server)
    api, page = (f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host in (server.host, nearby))
    return f"{names[0]} is served at {api}/v1\nOpen {page}/ in a browser to talk with it."


def model_names(engine: EngineConfig, server: ServerConfig) -> tuple[str, ...]:
    """What the model is called: by option, else as it was given."""
    if server.served_model_name is None:
        names: tuple[str, ...] = (engine.model.model or "cellar-demo",)
    else:
        given = server.served_model_name
        listed = ",".join([given] if isinstance(given, str) else given).split(",")
        names = tuple(dict.fromkeys(name.strip() for name in listed if name.strip()))
    if not names:
        raise ConfigError("served_model_name is empty; give a name, or leave the option out.")
    for name in names:
        if not name.isprintable():  # nor are bytes that are no UTF-8, and JSON cannot say them
            raise ConfigError(f"the model's name {name!a} cannot be printed; give another by served_model_name.")
    return names
