"""Routes of /v1/conversations."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from cellar.conversations import conversations, items, search
from cellar.conversations.records import Conversation
from cellar.conversations.records import Item as Record
from cellar.conversations.session import Session
from cellar.conversations.store import AsyncStore
from cellar.server.desk import Desk
from cellar.server.errors import refused
from cellar.server.keys import owner_of
from cellar.server.pieces import respond
from cellar.server.responses.items import Item, read_input, referred, with_own_ids
from cellar.server.responses.paging import After, Include, Limit, Order, Words, shown_list
from cellar.server.responses.records import records_of, shown_conversation
from cellar.server.responses.requests import ConversationRequest, ConversationUpdate, ItemsRequest, check_include

PATH = "/v1/conversations"


class ConversationRoutes:
    """Each a few lines over the store. A list of items shows `most` characters of them, about."""

    def __init__(self, store: AsyncStore, desk: Desk, most: int) -> None:
        self._store = store
        self._desk = desk
        self._most = most

    async def create(self, request: Request, body: ConversationRequest | None = None) -> Response:
        """Begin a conversation."""
        body = body or ConversationRequest()
        body.check()
        new = await asyncio.to_thread(lambda: records_of(_own(read_input(body.items, "items"))))
        id, owner = f"conv_{uuid.uuid4().hex}", owner_of(request.scope)
        made = await self._store.write(conversations.create, owner, id, dict(body.metadata or {}), new)
        return JSONResponse(shown_conversation(made))

    async def list(
        self, request: Request, limit: Limit = 20, order: Order = "desc", after: After = None, query: Words = None
    ) -> Response:
        """The client's conversations, by their last activity; with `query` those that say all its words.

        Then `last_id` is the last that was looked at: with `has_more`, the search goes on behind it.
        """
        owner = owner_of(request.scope)
        if query is None:
            page = await self._store.read(conversations.page, owner, after, limit, order == "asc")
            return JSONResponse(shown_list([_dated(one) for one in page.records], page.more))
        if order == "asc":
            raise refused("a search begins with the last active; leave order out.", "order")
        found = await self._store.read_long(search.find, owner, query, after, limit)
        shown = shown_list([_dated(one) for one in found.records], found.more)
        return JSONResponse({**shown, "last_id": found.last})

    async def get(self, conversation_id: str, request: Request) -> Response:
        """One conversation."""
        found = await self._store.read(conversations.get, owner_of(request.scope), conversation_id)
        return JSONResponse(shown_conversation(found))

    async def update(self, conversation_id: str, body: ConversationUpdate, request: Request) -> Response:
        """Give it other metadata."""
        body.check()
        metadata = dict(body.metadata or {})
        made = await self._store.write(conversations.update, owner_of(request.scope), conversation_id, metadata)
        return JSONResponse(shown_conversation(made))

    async def delete(self, conversation_id: str, request: Request) -> Response:
        """Forget it, with all that was said in it, and its KV in every tier."""
        owner = owner_of(request.scope)
        await self._store.read(conversations.get, owner, conversation_id)
        # First, so that nothing is deleted while no engine can forget; then again, for what a turn has left since.
        await self._desk.memory(owner, [conversation_id], forget=True)
        await self._store.write(conversations.remove, owner, conversation_id)
        await self._desk.memory(owner, [conversation_id], forget=True)
        return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def add_items(
        self, conversation_id: str, body: ItemsRequest, request: Request, include: Include = None
    ) -> Response:
        """Add items behind its last."""
        body.check()
        check_include(include)
        new = await asyncio.to_thread(lambda: _own(read_input(body.items, "items")))
        await self._store.write(items.add, owner_of(request.scope), conversation_id, records_of(new))
        return respond(shown_list(new, False))

    async def list_items(
        self,
        conversation_id: str,
        request: Request,
        limit: Limit = 20,
        order: Order = "desc",
        after: After = None,
        include: Include = None,
    ) -> Response:
        """What was said in it."""
        check_include(include)
        owner = owner_of(request.scope)
        page = await self._store.read(items.page, owner, conversation_id, after, limit, order == "asc", self._most)
        return respond(shown_list([item.body for item in page.records], page.more))

    async def get_item(self, conversation_id: str, item_id: str, request: Request, include: Include = None) -> Response:
        """One item."""
        check_include(include)
        found: Record = await self._store.read(items.get, owner_of(request.scope), conversation_id, item_id)
        return respond(found.body)

    async def delete_item(self, conversation_id: str, item_id: str, request: Request) -> Response:
        """Take an item out, and the conversation's KV of every tier; -> the conversation."""
        owner = owner_of(request.scope)
        await self._store.read(items.get, owner, conversation_id, item_id)
        await self._desk.memory(owner, [conversation_id], forget=True)
        found = await self._store.write(_remove_item, owner, conversation_id, item_id)
        await self._desk.memory(owner, [conversation_id], forget=True)
        return JSONResponse(shown_conversation(found))


def _own(given: Sequence[Item]) -> list[Item]:
    for k, item in enumerate(given):
        if referred(item) is not None:
            raise refused(f"items[{k}] refers to an item; give the item itself.", "items")
    return with_own_ids(given)


def _dated(conversation: Conversation) -> dict[str, Any]:
    return {**shown_conversation(conversation), "updated_at": int(conversation.updated_at)}


def _remove_item(session: Session, owner: str, conversation: str, id: str) -> Conversation:
    items.remove(session, owner, conversation, id)
    return conversations.get(session, owner, conversation)


def answers_of(routes: ConversationRoutes) -> dict[tuple[str, str], Any]:
    """What is served where: (method, path) to endpoint."""
    one = f"{PATH}/{{conversation_id}}"
    item = f"{one}/items/{{item_id}}"
    return {
        ("POST", PATH): routes.create,
        ("GET", PATH): routes.list,
        ("GET", one): routes.get,
        ("POST", one): routes.update,
        ("DELETE", one): routes.delete,
        ("POST", f"{one}/items"): routes.add_items,
        ("GET", f"{one}/items"): routes.list_items,
        ("GET", item): routes.get_item,
        ("DELETE", item): routes.delete_item,
    }
