"""The application: routes, each a few lines over the desk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response

from cellar.core.errors import RequestError
from cellar.core.sampling import SamplingParams, StructuredOutputsParams
from cellar.engine.prompts import Prompt
from cellar.server import errors, page
from cellar.server.chat import Chat
from cellar.server.completions import Completions
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.desk import Desk
from cellar.server.errors import ApiError, as_api_error, refused, whole_characters
from cellar.server.fields import unknown
from cellar.server.guard import AnswerCount, ApiKeys, BodyLimit, LastWords, read_keys
from cellar.server.host import EngineHost, ServedModel
from cellar.server.metrics import CONTENT_TYPE, Metrics
from cellar.server.request_id import HEADER, RequestIds, name_of, new_id
from cellar.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from cellar.server.shared import Shared
from cellar.server.status import PATH as STATUS
from cellar.server.status import EngineStatus
from cellar.server.stream import ClientGone, EventStream, until_gone
from cellar.server.tools import tool_use
from cellar.text.expendable import Budget
from cellar.text.grammar import GrammarCheck
from cellar.text.rendering import Rendering
from cellar.text.tokenizer import Tokenizer
from cellar.text.tools.registry import parser_of
from cellar.version import __version__

logger = logging.getLogger(__name__)

GONE = Response(status_code=499)
"""Nobody reads it; it is what the log shows for a client that hung up."""

HEALTH_SECONDS = 30.0

LONG_TEXT = 4096
"""Characters, or ids, from which on a request's text is worked on beside the event loop, not in it."""

T = TypeVar("T")


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
        self.metrics = Metrics(model.names[0], host.stats, shared)
        waiting = None if shared is None else shared.waiting()
        self.desk = Desk(host, limits, self.metrics, server.enable_log_requests, waiting)
        budget = Budget(limits.prepare_timeout)
        self.templates = None if model.templates is None else Rendering(model.templates, budget)
        self._grammars = GrammarCheck(budget)
        sources = {} if model.templates is None else model.templates.sources
        self._tool_call_parser = server.tool_call_parser or parser_of(sources)
        self._started = int(time.time())

    def close(self) -> None:
        """End the processes that render templates and try grammars."""
        if self.templates is not None:
            self.templates.close()
        self._grammars.close()

    # -- /v1 --------------------------------------------------------------------------------------

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue each prompt."""
        body.check()
        self._check_shared(body.model, body.priority)
        conversation = body.conversation(request.headers.get("x-session-id"))
        structured = await self._grammar(body.structured(), body.response_format is not None)
        params = body.params(structured, self.model.generation)
        prompts = await self._prompts(body)
        id = new_id("cmpl", body.request_id, request)
        answer = Completions(id, self._name(body.model), body, prompts, self.model.tokenizer)
        name = name_of(request.scope)
        session = self.desk.open(id, prompts, params, body.priority or 0, conversation, body.salt, name)
        if body.stream:
            return EventStream(answer.events(session), None, self.limits.request_timeout)
        return await self._whole(request, answer.whole(session))

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer the conversation."""
        body.check()
        self._check_shared(body.model, body.priority)
        conversation = body.conversation(request.headers.get("x-session-id"))
        try:
            tools = tool_use(body, self._tool_call_parser)
            structured = await self._grammar(body.structured(), body.response_format is not None)
            if tools.structured is not None:
                if structured is not None:
                    raise refused("a forced tool call leaves no room for response_format.", "response_format")
                structured = await self._grammar(tools.structured, False, "tools")
            params = body.params(structured, self.model.generation)
            if tools.needs_special_tokens:
                params = replace(params, skip_special_tokens=False)
            prompt = await self._conversation(
                body, tools.tools, lambda text: self._read_text(text, bool(body.add_special_tokens))
            )
            id = new_id("chatcmpl", body.request_id, request)
            answer = Chat(id, self._name(body.model), body, prompt, self._tokenizer(), tools)
            name = name_of(request.scope)
            session = self.desk.open(id, [prompt], params, body.priority or 0, conversation, body.salt, name)
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
        return JSONResponse(self._card(self._name(model)))

    # -- text -------------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Ids of a text, or of a conversation as the model would see it."""
        _no_extra(body.model_extra)
        self._name(body.model)
        tokenizer = self._tokenizer()
        if (body.prompt is None) == (body.messages is None):
            raise refused("give either prompt or messages.", "prompt")
        if body.prompt is not None:
            ids = await _beside(len(body.prompt), lambda: _encode(tokenizer, body.prompt, body.add_special_tokens))
        else:
            special = bool(body.add_special_tokens)
            ids = await self._conversation(body, body.tools, lambda text: _encode(tokenizer, text, special))
        found: dict[str, Any] = {"count": len(ids), "max_model_len": self.model.max_model_len, "tokens": ids}
        found["token_strs"] = [tokenizer.id_to_piece(id) for id in ids] if body.return_token_strs else None
        return JSONResponse(found)

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """Text of ids."""
        _no_extra(body.model_extra)
        self._name(body.model)
        tokenizer = self._tokenizer()
        if max(body.tokens, default=0) >= self.model.vocab_size:
            raise refused(f"tokens has ids that the model lacks; it knows 0 to {self.model.vocab_size - 1}.", "tokens")
        text = await _beside(len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
        return JSONResponse({"prompt": text})

    # -- for operators ----------------------------------------------------------------------------

    async def health(self) -> Response:
        """200 while the engine runs."""
        self.desk.engine()
        return Response(status_code=200)

    async def health_generate(self, request: Request) -> Response:
        """200 if the engine makes a token now."""
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        prompt = self.desk.read([0])
        id = new_id("health", None, request)

        async def one_token() -> Response:
            async with asyncio.timeout(HEALTH_SECONDS), self.desk.open(id, [prompt], params) as session:
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
        async def in_time() -> dict[str, Any]:
            async with asyncio.timeout(self.limits.request_timeout):
                return await body

        try:
            return JSONResponse(await until_gone(request, in_time()))
        except ClientGone:
            return GONE

    async def _prompts(self, body: CompletionRequest) -> list[Prompt]:
        prompts, most = body.prompts(), self.limits.max_queued_requests
        if len(prompts) > most:
            raise refused(f"there are {len(prompts)} prompts, but a request may have {most}; send several.", "prompt")

        def read(prompt: str | list[int]) -> Prompt:
            if isinstance(prompt, str) and body.add_special_tokens is False:
                return self._read_text(prompt, False)
            return self.desk.read(prompt)

        return await _beside(sum(map(len, prompts)), lambda: [read(prompt) for prompt in prompts])

    def _read_text(self, text: str, add_special_tokens: bool) -> Prompt:
        """A prompt with or without special tokens around it."""
        ids = _encode(self._tokenizer(), self.desk.check_length(text), add_special_tokens)
        return self.desk.read({"prompt": text, "prompt_token_ids": ids})

    async def _conversation(
        self,
        body: ChatRequest | TokenizeRequest,
        tools: list[dict[str, Any]] | None,
        then: Callable[[str], T],
    ) -> T:
        """`then` of a conversation as the model sees it."""
        templates, messages, variables = self.templates, body.messages or [], body.chat_template_kwargs or {}
        if templates is None:
            raise refused("messages need a chat template, but this server has no tokenizer.", "messages")
        taken = {"self", "messages", "tools", "add_generation_prompt", "now"} & set(variables)
        if taken:
            raise refused(f"chat_template_kwargs cannot set {sorted(taken)[0]}.", "chat_template_kwargs")

        def rendered() -> T:
            text = templates.render(
                messages,
                tools,
                add_generation_prompt=body.add_generation_prompt is not False,
                now=datetime.now(),
                **variables,
            )
            return then(text)

        return await asyncio.to_thread(rendered)

    async def _grammar(
        self, wanted: StructuredOutputsParams | None, by_format: bool, parameter: str | None = None
    ) -> StructuredOutputsParams | None:
        """What is wanted, if it can be had. Raises ApiError with the field that asked for it."""
        if wanted is None:
            return None
        parameter = parameter or ("response_format" if by_format else "structured_outputs")
        size = len(wanted.text.encode(errors="replace"))
        if size > self.limits.max_grammar_bytes:
            raise refused(
                f"the schema or grammar has {size} bytes, but this server takes {self.limits.max_grammar_bytes}; "
                "make it smaller.",
                parameter,
            )
        whole_characters(wanted.text)
        try:
            await asyncio.to_thread(self._grammars.check, wanted)
        except RequestError as error:
            raise as_api_error(error, {"structured_outputs": parameter}) from error
        return wanted

    def _check_shared(self, model: str | None, priority: int | None) -> None:
        self._name(model)
        if priority and not self.model.has_priorities:
            raise refused(
                "priority has an effect only with --scheduling-policy priority; leave it out, or 0.", "priority"
            )

    def _name(self, model: str | None) -> str:
        """The name to answer with. Raises ApiError (404) for another model."""
        if model is None:
            return self.model.names[0]
        if model not in self.model.names:
            raise ApiError(
                404,
                f"the model {model[:128]!r} does not exist; this server has {self.model.names[0]!r}.",
                "model",
                "model_not_found",
            )
        return model

    def _tokenizer(self) -> Tokenizer:
        if self.model.tokenizer is None:
            raise refused("this server was started without a tokenizer and knows token ids only.")
        return self.model.tokenizer

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
    api = Api(host, model, server, limits, shared)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        api.close()
        await host.close()

    app = FastAPI(title="Cellar", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.api = api
    if defaults := model.generation.sampling:
        said = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        logger.info("the model's own defaults hold: %s (--generation-config vllm leaves them out)", said)
    errors.install(app)
    page.install(app)
    keys = read_keys(server.api_key, server.api_key_file)
    engine_status = EngineStatus(host, model, bool(keys), api.templates)

    async def engine_now() -> Response:
        """The engine at this moment, in figures; the page draws them."""
        return JSONResponse(engine_status.now(), headers={"cache-control": "no-store"})

    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": text}
        for status, text in (
            (400, "the request is not allowed; the error object names the parameter"),
            (401, "no valid API key"),
            (404, "no such model"),
            (413, "the body is too large"),
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
        "/health_generate": api.health_generate,
        "/version": api.version,
        "/metrics": api.metrics_text,
        STATUS: engine_now,
    }
    for method, routes in (("POST", post), ("GET", get)):
        for path, endpoint in routes.items():
            app.add_api_route(path, endpoint, methods=[method], response_model=None, responses=answers)
    # The last added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes)
    if keys:
        app.add_middleware(ApiKeys, keys=keys)
    if server.allowed_origins:
        origins = [origin.strip() for origin in server.allowed_origins.split(",")]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=[HEADER]
        )
    app.add_middleware(AnswerCount, count=api.metrics.answered)
    app.add_middleware(LastWords)
    app.add_middleware(RequestIds)
    return app


async def _beside(size: int, work: Callable[[], T]) -> T:
    """Do something in a thread if it is long, so that streams go on meanwhile."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


def _encode(tokenizer: Tokenizer, text: str | None, add_special_tokens: bool | None) -> list[int]:
    return tokenizer.encode(whole_characters(text or ""), add_special_tokens=add_special_tokens is not False)


def _no_extra(extra: dict[str, Any] | None) -> None:
    for name in extra or {}:
        raise unknown(name)
