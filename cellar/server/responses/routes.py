"""Routes of /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response

from cellar.conversations import remains, responses
from cellar.conversations.records import Response as Record
from cellar.conversations.store import AsyncStore
from cellar.core.errors import RequestError
from cellar.server.desk import Desk
from cellar.server.errors import ApiError, refused
from cellar.server.keys import owner_of
from cellar.server.pieces import answered, respond
from cellar.server.prepare import Preparer
from cellar.server.request_id import name_of, take_id
from cellar.server.requests import conversation_name
from cellar.server.responses.answer import Answer, Event
from cellar.server.responses.background import Background
from cellar.server.responses.making import Maker
from cellar.server.responses.paging import After, Include, Limit, Order, part_of
from cellar.server.responses.records import shown_response
from cellar.server.responses.requests import CountRequest, ResponseRequest, check_include
from cellar.server.responses.turns import Turn, TurnReader, renamed
from cellar.server.stream import RESPONSES, EventStream, named_event

Id = str


class ResponseRoutes:
    """Each a few lines over the reader, the makers and the store."""

    def __init__(
        self,
        prepare: Preparer,
        reader: TurnReader,
        maker: Maker,
        background: Background,
        store: AsyncStore,
        desk: Desk,
    ) -> None:
        self._prepare = prepare
        self._reader = reader
        self._maker = maker
        self._background = background
        self._store = store
        self._desk = desk

    async def create(self, body: ResponseRequest, request: Request) -> Response:
        """Answer: at once, as a stream of events, or in the background."""
        body.check()
        self._prepare.check(body.model, body.priority)
        called = conversation_name(body.prompt_cache_key, request.headers.get("x-session-id"))
        turn = await self._reader.read(body, owner_of(request.scope), called)
        take_id(turn.id, request)
        name = name_of(request.scope)
        answer = self._maker.answer(turn, self._prepare.name(body.model), self._prepare.tokenizer)
        try:
            if body.background:
                return await self._begun(turn, answer, name)
            if body.stream:
                return EventStream(_framed(self._maker.told(turn, answer, name)))
            return await answered(request, self._maker.whole(turn, answer, name), None)
        except RequestError as error:
            raise renamed(error) from error

    async def get(
        self,
        response_id: Id,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
        include: Include = None,
        include_obfuscation: bool = False,
    ) -> Response:
        """One response as it is now; with `stream` the events of one that is made in the background."""
        check_include(include)
        if include_obfuscation:
            raise refused(
                "this server does not obfuscate streams; leave include_obfuscation out.", "include_obfuscation"
            )
        if not stream and starting_after is not None:
            raise refused("starting_after is for streams; set stream to true or leave it out.", "starting_after")
        owner = owner_of(request.scope)
        found = await self._store.read(responses.get, owner, response_id)
        if not stream:
            return respond(shown_response(found))
        if not await self._background.streams(owner, response_id):
            raise refused(
                f"response {found.id!r} has no stream to go on with; only those that were created with background and "
                "stream set to true have one.",
                "stream",
            )
        after = -1 if starting_after is None else starting_after
        return EventStream(self._background.follow(owner, response_id, after))

    async def delete(self, response_id: Id, request: Request) -> Response:
        """Forget a response, and its KV in every tier. One that is being made is made no further."""
        owner = owner_of(request.scope)
        left = await self._store.read(remains.of_response, owner, response_id)
        # First, so that nothing is deleted while no engine can forget; then again, for what it has left since.
        await self._forget(owner, left)
        await self._store.write(responses.remove, owner, response_id)
        await self._forget(owner, left)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: Id, request: Request) -> Response:
        """Make a background response no further."""
        owner = owner_of(request.scope)
        found: Record = await self._store.read(responses.get, owner, response_id)
        if not found.background:
            raise refused(
                "only a response that is made in the background can be cancelled; hang up to end another one.",
                "response_id",
            )
        return JSONResponse(shown_response(await self._background.cancel(owner, response_id)))

    async def input_items(
        self,
        response_id: Id,
        request: Request,
        limit: Limit = 20,
        order: Order = "desc",
        after: After = None,
        include: Include = None,
    ) -> Response:
        """What went into a response."""
        check_include(include)
        found = await self._store.read(responses.get, owner_of(request.scope), response_id)
        return respond(part_of([item.body for item in found.input], after, limit, order))

    async def input_tokens(self, body: CountRequest, request: Request) -> Response:
        """How many tokens the prompt of a response would have."""
        body.check()
        self._prepare.name(body.model)
        count = await self._reader.count(body, owner_of(request.scope))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def compact(self) -> Response:
        """Refused: there is no model here that shortens conversations by itself."""
        raise ApiError(
            400,
            "this server does not compact conversations; set truncation to auto, or shorten the input yourself.",
            code="unsupported_endpoint",
        )

    async def _forget(self, owner: str, left: remains.Remains) -> None:
        if left.thread is not None:
            await self._desk.memory(owner, [left.thread], forget=True, keep=left.contexts)

    async def _begun(self, turn: Turn, answer: Answer, name: str) -> Response:
        await self._background.start(turn, answer, name)
        if turn.request.stream:
            return EventStream(self._background.follow(turn.owner, turn.id, -1))
        return JSONResponse(answer.body)


async def _framed(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield named_event(event)


def answers_of(routes: ResponseRoutes) -> dict[tuple[str, str], Any]:
    """What is served where: (method, path) to endpoint. Names before ids."""
    one = f"{RESPONSES}/{{response_id}}"
    return {
        ("POST", RESPONSES): routes.create,
        ("POST", f"{RESPONSES}/input_tokens"): routes.input_tokens,
        ("POST", f"{RESPONSES}/compact"): routes.compact,
        ("GET", one): routes.get,
        ("DELETE", one): routes.delete,
        ("POST", f"{one}/cancel"): routes.cancel,
        ("GET", f"{one}/input_items"): routes.input_items,
    }
