"""The routes of Anthropic's API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from cellar.core.errors import RequestError
from cellar.server.config import LimitConfig
from cellar.server.desk import Desk
from cellar.server.errors import MESSAGES, as_api_error
from cellar.server.keys import owner_of
from cellar.server.messages.answer import Answer
from cellar.server.messages.body import MessagesBody, PromptBody
from cellar.server.messages.prompt import chat_request
from cellar.server.pieces import answered
from cellar.server.prepare import Preparer
from cellar.server.request_id import name_of, new_id
from cellar.server.stream import GONE, ClientGone, EventStream, until_gone

_NAMES = {"prompt": "messages", "stop": "stop_sequences", "tools": "tools", "request_id": "X-Request-Id"}


class MessagesApi:
    """Answers what comes in Anthropic's form, by the same prompts, tools and engine as chats."""

    def __init__(self, prepare: Preparer, desk: Desk, limits: LimitConfig) -> None:
        self._prepare = prepare
        self._desk = desk
        self._limits = limits

    async def create(self, body: MessagesBody, request: Request) -> Response:
        """Answer a conversation in Anthropic's form."""
        chat = await asyncio.to_thread(chat_request, body, self._prepare.reasoning)
        chat.check()
        self._prepare.check(chat.model, None)
        conversation = chat.conversation(request.headers.get("x-session-id"))
        try:
            prepared = await self._prepare.chat(chat, owner_of(request.scope))
            id, name = new_id("msg", None, request), name_of(request.scope)
            session = await self._desk.open(
                id,
                [prepared.prompt],
                prepared.params,
                0,
                conversation,
                chat.salt,
                name,
                owner=owner_of(request.scope),
            )
        except RequestError as error:
            raise as_api_error(error, _NAMES) from error
        model, reasons = self._prepare.name(body.model), self._prepare.reasoning.known
        answer = Answer(id, model, prepared.prompt, prepared.tools, body.max_tokens, reasons)
        if body.stream:
            return EventStream(answer.events(session), _NAMES, self._limits.request_timeout)
        return await answered(request, answer.whole(session), self._limits.request_timeout)

    async def count_tokens(self, body: PromptBody, request: Request) -> Response:
        """How many tokens the prompt of such a request has."""
        chat = await asyncio.to_thread(chat_request, body, self._prepare.reasoning)
        self._prepare.check(chat.model, None)
        try:
            return JSONResponse({"input_tokens": await until_gone(request, self._prepare.count(chat))})
        except ClientGone:
            return GONE


def install(app: FastAPI, api: MessagesApi, responses: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes. `responses` describes the errors that they may answer with."""
    routes: dict[str, Callable[..., Any]] = {MESSAGES: api.create, f"{MESSAGES}/count_tokens": api.count_tokens}
    for path, endpoint in routes.items():
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None, responses=responses)
