"""The application: routes, each a few lines over the desk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from cellar.core.errors import RequestError
from cellar.core.sampling import SamplingParams
from cellar.server import errors, memory, page, reference
from cellar.server.bodies import large_bodies
from cellar.server.chat import Chat
from cellar.server.completions import Completions
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.desk import Desk
from cellar.server.doorway import guard
from cellar.server.errors import as_api_error, refused
from cellar.server.fields import unknown
from cellar.server.guard import LastWords
from cellar.server.host import EngineHost, ServedModel
from cellar.server.hosts import hosts_of
from cellar.server.keys import owner_of, read_keys
from cellar.server.messages import routes as messages
from cellar.server.messages.routes import MessagesApi
from cellar.server.metrics import CONTENT_TYPE, Metrics
from cellar.server.pieces import answered, lazily, respond
from cellar.server.pooling import routes as pooling
from cellar.server.pooling.routes import PoolingApi
from cellar.server.prepare import Preparer, beside
from cellar.server.request_id import RequestIds, name_of, new_id
from cellar.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from cellar.server.responses.service import Service
from cellar.server.shared import Shared
from cellar.server.status import PATH as STATUS
from cellar.server.status import EngineStatus
from cellar.server.stream import GONE, ClientGone, EventStream, until_gone
from cellar.server.tenants import Tenants
from cellar.server.threads import ready_loop, ready_threads
from cellar.version import __version__

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 30.0


class Api:
    """What the routes need. One event loop."""

    def __init__(
        self,
        host: EngineHost,
        model: ServedModel,
        server: ServerConfig,
        limits: LimitConfig,
        shared: Shared | None = None,
    ) -> None:
        self.host = host
        self.model = model
        self.limits = limits
        self.metrics = Metrics(model.names[0], host.stats, shared, model.cache, host.engines)
        host.count_by(self.metrics.routing)
        waiting = None if shared is None else shared.waiting()
        tenants = Tenants(server.share_prefixes)
        self.desk = Desk(host, limits, self.metrics, tenants, server.enable_log_requests, waiting)
        self.prepare = Preparer(
            model, self.desk, limits, self.metrics, server.tool_call_parser, server.reasoning_parser
        )
        self._started = int(time.time())

    def close(self) -> None:
        """End the processes that render templates and try grammars."""
        self.prepare.close()

    # -- /v1 --------------------------------------------------------------------------------------

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue each prompt."""
        body.check()
        self.prepare.check(body.model, body.priority)
        conversation = body.conversation(request.headers.get("x-session-id"))
        structured = await self.prepare.structured(body)
        params = body.params(structured, self.model.generation)
        prompts = await self.prepare.prompts(body, owner_of(request.scope))
        id = new_id("cmpl", body.request_id, request)
        answer = Completions(id, self.prepare.name(body.model), body, prompts, self.model.tokenizer)
        name, owner = name_of(request.scope), owner_of(request.scope)
        session = await self.desk.open(
            id, prompts, params, body.priority or 0, conversation, body.salt, name, owner=owner
        )
        if body.stream:
            return EventStream(answer.events(session), None, self.limits.request_timeout)
        return await self._whole(request, answer.whole(session))

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer the conversation."""
        body.check()
        self.prepare.check(body.model, body.priority)
        conversation = body.conversation(request.headers.get("x-session-id"))
        try:
            chat = await self.prepare.chat(body, owner_of(request.scope))
            id = new_id("chatcmpl", body.request_id, request)
            model, reasons = self.prepare.name(body.model), self.prepare.reasoning.known
            answer = Chat(id, model, body, chat.prompt, self.prepare.tokenizer, chat.tools, reasons)
            name, owner = name_of(request.scope), owner_of(request.scope)
            session = await self.desk.open(
                id, [chat.prompt], chat.params, body.priority or 0, conversation, body.salt, name, owner=owner
            )
        except RequestError as error:
            raise as_api_error(error, body.names) from error
        if body.stream:
            return EventStream(answer.events(session), body.names, self.limits.request_timeout)
        return await self._whole(request, answer.whole(session))

    async def models(self) -> Response:
        """The one model, under each of its names."""
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self.model.names]})

    async def one_model(self, model: str) -> Response:
        """One model by its name."""
        return JSONResponse(self._card(self.prepare.name(model)))

    # -- text -------------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """Ids of a text, or of a conversation as the model would see it."""
        _no_extra(body.model_extra)
        self.prepare.name(body.model)
        tokenizer = self.prepare.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise refused("give either prompt or messages.", "prompt")
        try:
            ids = await until_gone(request, self.prepare.ids(body))
        except ClientGone:
            return GONE
        found: dict[str, Any] = {"count": len(ids), "max_model_len": self.model.max_model_len, "tokens": ids}
        pieces = (tokenizer.id_to_piece(int(id)) for id in ids)
        found["token_strs"] = lazily(pieces, len(ids)) if body.return_token_strs else None
        return respond(found)

    async def tokenizer_info(self) -> Response:
        """What a client needs that renders chats itself: special tokens, the chat template, the context."""
        tokenizer, templates = self.prepare.tokenizer, self.model.templates
        sources = {} if templates is None else templates.sources
        found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
        found |= {"model_max_length": self.model.max_model_len, "vocab_size": tokenizer.vocab_size}
        found["chat_template"] = sources.get("default", next(iter(sources.values()), None))
        return JSONResponse(found)

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """Text of ids."""
        _no_extra(body.model_extra)
        self.prepare.name(body.model)
        tokenizer = self.prepare.tokenizer
        if max(body.tokens, default=0) >= self.model.vocab_size:
            raise refused(f"tokens has ids that the model lacks; it knows 0 to {self.model.vocab_size - 1}.", "tokens")
        text = await beside(len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
        return JSONResponse({"prompt": text})

    # -- for operators ----------------------------------------------------------------------------

    async def health(self) -> Response:
        """200 while the engine runs."""
        self.desk.engine()
        return Response(status_code=200)

    async def load(self) -> Response:
        """Sequences that run or wait, by the name that vLLM's routers read."""
        stats = self.host.stats()
        return JSONResponse({"server_load": 0 if stats is None else stats.running + stats.waiting})

    async def health_generate(self, request: Request) -> Response:
        """200 if the engine makes a token now."""
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        prompt = self.desk.read([0])
        id, owner = new_id("health", None, request), owner_of(request.scope)

        async def one_token() -> Response:
            async with asyncio.timeout(HEALTH_SECONDS):
                async with await self.desk.open(id, [prompt], params, owner=owner) as session:
                    await session.whole()
            return Response(status_code=200)

        try:
            return await until_gone(request, one_token())
        except ClientGone:
            return GONE
        except TimeoutError:
            raise errors.unavailable(f"the engine made no token in {HEALTH_SECONDS:.0f} s.") from None

    async def version(self) -> Response:
        """The version of this program."""
        return JSONResponse({"version": __version__})

    async def metrics_text(self) -> Response:
        """Everything that Prometheus scrapes."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    # -- how --------------------------------------------------------------------------------------

    async def _whole(self, request: Request, body: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        return await answered(request, body, self.limits.request_timeout)

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "cellar",
            "root": self.model.names[0],
            "parent": None,
            "max_model_len": self.model.max_model_len,
        }


def build_app(
    host: EngineHost,
    model: ServedModel,
    server: ServerConfig | None = None,
    limits: LimitConfig | None = None,
    shared: Shared | None = None,
) -> FastAPI:
    """The application over an engine that runs; it closes the host when it ends.

    `shared` is for one of several fronts.
    """
    server, limits = server or ServerConfig(), limits or LimitConfig()
    if server.chat_template is not None:
        model = model.with_template(server.chat_template)
    api = Api(host, model, server, limits, shared)
    service = Service(api.prepare, api.desk, api.metrics, model, server, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        ready_loop()
        ready_threads(reader, 1)
        service.start()
        yield
        await service.close()
        api.close()
        await host.close()
        reader.shutdown()

    app = FastAPI(title="Cellar", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    # One at a time, first come first served: two would only keep the interpreter from everybody else for longer.
    reader = ThreadPoolExecutor(1, thread_name_prefix="bodies")
    app.router.route_class = large_bodies(reader, limits.max_body_values)
    app.state.api = api
    app.state.conversations = service
    if defaults := model.generation.sampling:
        said = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        logger.info("the model's own defaults hold: %s (--generation-config vllm leaves them out)", said)
    errors.install(app)
    page.install(app)
    reference.install(app)
    keys = read_keys(server.api_key, server.api_key_file)
    hosts = hosts_of(server, bool(keys))
    engine_status = EngineStatus(host, model, bool(keys), api.prepare.templates)

    async def engine_now() -> Response:
        """The engine at this moment, in figures; the page draws them."""
        return JSONResponse(engine_status.now(), headers={"cache-control": "no-store"})

    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": text}
        for status, text in (
            (400, "the request is not allowed; the error object names the parameter"),
            (401, "no valid API key"),
            (403, "not for one key of several"),
            (404, "no such model"),
            (413, "the body is too large"),
            (429, "too much of this API key waits; Retry-After says when to come back"),
            (503, "too many wait, or the engine is down; Retry-After says when to come back"),
            (504, "the deadline has passed"),
        )
    }
    answers[422] = {"description": "never sent: a body that is not as it should be is a 400"}
    post: dict[str, Callable[..., Any]] = {
        "/v1/completions": api.completions,
        "/v1/chat/completions": api.chat,
        "/tokenize": api.tokenize,
        "/detokenize": api.detokenize,
    }
    get: dict[str, Callable[..., Any]] = {
        "/v1/models": api.models,
        "/v1/models/{model:path}": api.one_model,
        "/health": api.health,
        "/ping": api.health,
        "/load": api.load,
        "/health_generate": api.health_generate,
        "/version": api.version,
        "/tokenizer_info": api.tokenizer_info,
        "/metrics": api.metrics_text,
        STATUS: engine_now,
    }
    routes = {("POST", path): endpoint for path, endpoint in post.items()}
    routes |= {("GET", path): endpoint for path, endpoint in get.items()} | service.endpoints
    for (method, path), endpoint in routes.items():
        app.add_api_route(path, endpoint, methods=[method], response_model=None, responses=answers)
    memory.install(app, api.desk, answers, len(keys))
    messages.install(app, MessagesApi(api.prepare, api.desk, limits), answers)
    pooling.install(app, PoolingApi(api.prepare, api.desk, model, limits), answers)
    guard(app, server, limits, keys, hosts, api.metrics.answered)
    app.add_middleware(LastWords)
    app.add_middleware(RequestIds)
    return app


def _no_extra(extra: dict[str, Any] | None) -> None:
    for name in extra or {}:
        raise unknown(name)
