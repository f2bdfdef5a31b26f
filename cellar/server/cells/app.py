"""The application of a server of cells: an endpoint for every model of a user's file, typed by its unfold function."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from cellar.core.errors import ConfigError
from cellar.engine.cells import CellEngine
from cellar.server import errors
from cellar.server.admission import Admission, Ticket
from cellar.server.cells import body as cells_body
from cellar.server.cells.fields import grows, plain, read_body, request_type, response_schema
from cellar.server.cells.metrics import CellMetrics, CellTiming
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.doorway import guard
from cellar.server.errors import ApiError, refused, unavailable
from cellar.server.hosts import hosts_of
from cellar.server.keys import owner_of, read_keys
from cellar.server.metrics import CONTENT_TYPE
from cellar.server.request_id import RequestIds, new_id
from cellar.server.stream import ClientGone, EventStream, event, until_gone
from cellar.version import __version__

GONE = Response(status_code=499)
"""Nobody reads it; it is what the log shows for a client that hung up."""

PATH = "/v1/cells"

UNFOLDERS = 4
"""Threads in which users' unfold functions run, so that a slow one holds up neither the event loop nor the others."""

_NAME = re.compile(r"[\w.-]{1,64}")


@dataclass(frozen=True)
class Served:
    """One model at the API: the types of its bodies."""

    name: str
    body: type[BaseModel]
    grows: bool
    response: dict[str, Any]


class CellApi:
    """What the routes need. One event loop; the engine's thread runs already."""

    def __init__(self, engine: CellEngine, limits: LimitConfig) -> None:
        self.engine = engine
        self.limits = limits
        self.models = {name: _served(name, model) for name, model in engine.models.items()}
        self.metrics = CellMetrics(tuple(self.models), self.stats)
        self.admission = Admission(limits)
        self._unfolders = ThreadPoolExecutor(UNFOLDERS, thread_name_prefix="cellar-unfold")

    def stats(self) -> Any:
        """The engine's snapshot; None once it has stopped."""
        return self.engine.stats() if self.engine.running else None

    async def run(self, served: Served, request: Request) -> Response:
        """Compute one request."""
        body = await cells_body.read(request)
        fields, stream, named = read_body(served.body, body)
        if named not in (None, served.name):
            raise refused(f"this is the model {served.name!r}; send the request to {PATH}/{str(named)[:64]}.", "model")
        if stream and not served.grows:
            raise refused("nothing of this model's response grows, so there is nothing to stream.", "stream")
        id = new_id("cells", None, request)
        owner = owner_of(request.scope)
        if stream:
            return EventStream(self._events(served, id, fields, owner), None, self.limits.request_timeout)
        try:
            content = await until_gone(request, self._in_time(self._whole(served, id, fields, owner)))
        except ClientGone:
            return GONE
        return cells_body.answer(request, content)

    async def list(self) -> Response:
        """Every model with the schemas of its request and its response."""
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {
                        "id": served.name,
                        "object": "cells.model",
                        "path": f"{PATH}/{served.name}",
                        "streams": served.grows,
                        "request": served.body.model_json_schema(),
                        "response": served.response,
                    }
                    for served in self.models.values()
                ],
            }
        )

    async def absent(self, model: str) -> Response:
        """No such model."""
        raise ApiError(
            404,
            f"the model {model[:64]!r} does not exist; this server has {list(self.models)}.",
            "model",
            "model_not_found",
        )

    async def health(self) -> Response:
        """200 while the engine runs."""
        self._check_running()
        return Response(status_code=200)

    async def version(self) -> Response:
        """The version of this program."""
        return JSONResponse({"version": __version__})

    async def metrics_text(self) -> Response:
        """Everything that Prometheus scrapes."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def close(self) -> None:
        """End the engine."""
        self._unfolders.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.engine.close)

    # -- how --------------------------------------------------------------------------------------

    async def _whole(self, served: Served, id: str, fields: Mapping[str, Any], owner: str) -> dict[str, Any]:
        async with self._admitted(served, fields, owner) as (unfolded, _, timing):
            future = self.engine.submit_unfolded(served.name, unfolded, id=id)
            response = await asyncio.wrap_future(future)
            timing.end("stop")
            return _answer(served, id, "cells.result", plain(response))

    async def _events(
        self, served: Served, id: str, fields: Mapping[str, Any], owner: str
    ) -> AsyncGenerator[bytes, None]:
        """New values by name as they come, then the whole response."""
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()

        def on_step(name: str, value: Any) -> None:
            loop.call_soon_threadsafe(steps.put_nowait, (name, value))

        async with self._admitted(served, fields, owner) as (unfolded, ticket, timing):
            future = self.engine.submit_unfolded(served.name, unfolded, id=id, on_step=on_step)
            future.add_done_callback(lambda _: loop.call_soon_threadsafe(steps.put_nowait, None))
            try:
                while (step := await steps.get()) is not None:
                    new: dict[str, list[Any]] = {}
                    last = False
                    while True:  # what has come meanwhile is one event
                        name, value = step
                        new.setdefault(name or "output", []).append(plain(value))
                        if steps.empty():
                            break
                        following = steps.get_nowait()
                        if following is None:
                            last = True
                            break
                        step = following
                    ticket.served()
                    timing.step()
                    yield event(_answer(served, id, "cells.chunk", new))
                    if last:
                        break
                response = future.result()
                timing.end("stop")
                yield event(_answer(served, id, "cells.result", plain(response)))
            finally:
                future.cancel()

    @asynccontextmanager
    async def _admitted(
        self, served: Served, fields: Mapping[str, Any], owner: str
    ) -> AsyncIterator[tuple[Any, Ticket, CellTiming]]:
        """A request that waits until its first answer; unfolded. Raises ApiError (503, 429), RequestError."""
        self._check_running()
        (entry,) = self.admission.enter([0], owner=owner)
        unfolded_ticket: Ticket | None = None
        timing: CellTiming | None = None
        try:
            loop = asyncio.get_running_loop()
            unfolded = await loop.run_in_executor(self._unfolders, self.engine.unfold, served.name, fields)
            num_nodes = unfolded.graph.num_nodes
            entry.served()
            (unfolded_ticket,) = self.admission.enter([num_nodes], owner=owner)
            timing = self.metrics.arrived(served.name, num_nodes)
            yield unfolded, unfolded_ticket, timing
        except (asyncio.CancelledError, GeneratorExit):
            if timing is not None:
                timing.end("abort")
            raise
        except Exception:
            if timing is not None:
                timing.end("error")
            raise
        finally:
            entry.served()
            if unfolded_ticket is not None:
                unfolded_ticket.served()

    async def _in_time(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        async with asyncio.timeout(self.limits.request_timeout):
            return await work

    def _check_running(self) -> None:
        if not self.engine.running:
            raise unavailable("the engine has stopped; restart the server.", retry_after=30)


def build_cells_app(
    engine: CellEngine, server: ServerConfig | None = None, limits: LimitConfig | None = None
) -> FastAPI:
    """The application over an engine, whose loop it starts and, when it ends, closes. Raises ConfigError."""
    server, limits = server or ServerConfig(), limits or LimitConfig()
    api = CellApi(engine, limits)
    keys = read_keys(server.api_key, server.api_key_file)
    hosts = hosts_of(server, bool(keys))
    engine.start()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await api.close()

    app = FastAPI(title="Cellar", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.api = api
    errors.install(app)
    for served in api.models.values():
        _add_model(app, api, served)
    app.add_api_route(PATH, api.list, methods=["GET"], response_model=None)
    app.add_api_route(f"{PATH}/{{model}}", api.absent, methods=["POST"], response_model=None, include_in_schema=False)
    for path, endpoint in (("/health", api.health), ("/version", api.version), ("/metrics", api.metrics_text)):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    guard(app, server, limits, keys, hosts, api.metrics.answered)
    app.add_middleware(RequestIds)
    return app


def _add_model(app: FastAPI, api: CellApi, served: Served) -> None:
    """The route of one model, with its types in the OpenAPI document."""

    async def run(request: Request) -> Response:
        return await api.run(served, request)

    body = {"schema": served.body.model_json_schema()}
    app.add_api_route(
        f"{PATH}/{served.name}",
        run,
        methods=["POST"],
        response_model=None,
        operation_id=f"run_{served.name}",
        openapi_extra={"requestBody": {"required": True, "content": {cells_body.JSON: body, cells_body.MSGPACK: body}}},
        responses={
            200: {"description": "the response", "content": {cells_body.JSON: {"schema": _whole_schema(served)}}},
            400: {"description": "the request is not allowed, or its cells failed; the error object says why"},
            401: {"description": "no valid API key"},
            413: {"description": "the body is too large"},
            415: {"description": "a body that is neither JSON nor msgpack"},
            429: {"description": "too much of this API key waits; Retry-After says when to come back"},
            503: {"description": "too many wait, or the engine is down; Retry-After says when to come back"},
            504: {"description": "the deadline has passed"},
        },
    )


def _served(name: str, model: Any) -> Served:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"model {name!r} cannot be part of a URL; use letters, digits and . _ - only.")
    return Served(name, request_type(name, model.fields), grows(model.response), response_schema(model.response))


def _answer(served: Served, id: str, kind: str, output: Any) -> dict[str, Any]:
    return {"id": id, "object": kind, "model": served.name, "output": output}


def _whole_schema(served: Served) -> dict[str, Any]:
    text = {"type": "string"}
    properties = {"id": text, "object": text, "model": text, "output": served.response}
    return {"type": "object", "properties": properties, "required": list(properties)}
