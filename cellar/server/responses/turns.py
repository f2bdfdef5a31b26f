"""From a request to a turn that the engine can answer: what came before, what is new, and the prompt of both."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cellar.conversations import references
from cellar.conversations.errors import TooLarge
from cellar.conversations.session import to_text
from cellar.conversations.store import AsyncStore
from cellar.core.errors import RequestError
from cellar.server.errors import ApiError, as_api_error, refused
from cellar.server.metrics import Metrics
from cellar.server.prepare import Known, PreparedChat, Preparer
from cellar.server.requests import ChatRequest
from cellar.server.responses.context import known_of
from cellar.server.responses.items import Item, check_calls, messages_of, read_input, referred, with_own_ids
from cellar.server.responses.past import Past, read_past
from cellar.server.responses.requests import InputRequest, ResponseRequest
from cellar.server.responses.sealing import Seal
from cellar.server.responses.tools import ToolChoice, chosen

_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
"""Fields of a chat by their names here."""


@dataclass(frozen=True)
class Turn:
    """One response to be made. `input` are the new items, `past` is what they follow.

    `thread` is what the engine calls the conversation.
    """

    id: str
    owner: str
    request: ResponseRequest
    created_at: int
    past: Past
    input: list[Item]
    chat: PreparedChat
    thread: str | None


class TurnReader:
    """Reads what came before, and renders it with what is new.

    What came before may have `most` characters, and what is referred to as many, however often it is: a few bytes of
    a body stand for megabytes there.
    """

    def __init__(
        self, prepare: Preparer, store: AsyncStore, seal: Seal, metrics: Metrics, max_model_len: int, most: int
    ) -> None:
        self._prepare = prepare
        self._metrics = metrics
        self._store = store
        self._seal = seal
        self._max_model_len = max_model_len
        self._most = most

    async def read(self, request: ResponseRequest, owner: str, called: str | None) -> Turn:
        """The turn of a response. `called` is the client's name for the conversation. Raises ApiError, StoreError."""
        past, items = await self._items(request, owner)
        try:
            chat = await self._fitting(request, past, items, owner)
        except (RequestError, ApiError) as error:
            raise renamed(error) from error
        if past.history is not None:
            self._metrics.turn(chat.continued)
        id = f"resp_{uuid.uuid4().hex}"
        thread = past.thread or (id if request.stored else called)
        return Turn(id, owner, request, int(time.time()), past, items, chat, thread)

    async def count(self, request: InputRequest, owner: str) -> int:
        """Tokens of the prompt that a request would have. Raises ApiError, StoreError."""
        past, items = await self._items(request, owner)
        try:
            chat = await self._fitting(request, past, items, owner)
        except (RequestError, ApiError) as error:
            raise renamed(error) from error
        return len(chat.prompt.token_ids)

    async def _items(self, request: InputRequest, owner: str) -> tuple[Past, list[Item]]:
        given = await asyncio.to_thread(read_input, request.input)
        past = await read_past(self._store, owner, request.previous_response_id, request.conversation_id, self._most)
        if past.history is not None and past.history.is_cut and request.truncation != "auto":
            raise refused(
                f"what came before has more than {self._most} characters (--max-body-bytes); set truncation to auto to "
                "leave out its beginning, or begin anew.",
                "previous_response_id" if request.conversation_id is None else "conversation",
            )
        known = {item["id"]: item for item in (*past.items, *given) if referred(item) is None}
        named = Counter(id for item in given if (id := referred(item)) is not None)
        elsewhere = [id for id in named if id not in known]
        if elsewhere:
            found = await self._store.read(references.find, owner, elsewhere, self._most)
            known |= {id: item.body for id, item in found.items()}
        for id in named:
            if id not in known:
                raise refused(f"item with id {id[:128]!r} was not found.", "input")
        new = await asyncio.to_thread(self._resolved, given, past.items, known, named)
        if not new and not past.items and not request.instructions:
            raise refused("there is nothing to answer; give input.", "input", "missing_required_parameter")
        return past, with_own_ids(new) if request.conversation_id is not None else new

    def _resolved(
        self, given: Sequence[Item], past: Sequence[Item], known: Mapping[str, Item], named: Mapping[str, int]
    ) -> list[Item]:
        """What is given, with the items that it refers to, so many times each. Raises ApiError, TooLarge."""
        length = sum(len(to_text(known[id])) * count for id, count in named.items())
        if length > self._most:
            raise TooLarge(length, self._most)
        items = [item if (id := referred(item)) is None else known[id] for item in given]
        check_calls(past, items)
        return items

    async def _fitting(self, request: InputRequest, past: Past, new: Sequence[Item], owner: str) -> PreparedChat:
        """The prompt. With truncation auto, what is too long loses whole turns from its beginning."""
        items, known = [*past.items, *new], known_of(past.history)
        if request.truncation != "auto":
            return await self._chat(request, items, owner, known)
        chat = await self._short_enough(request, items, owner, known)
        if chat is not None:
            return chat
        turns = [k for k, item in enumerate(items) if k and item.get("role") == "user"]
        # the first of them from which on all that follows fits; the last is tried as it is
        low, high = 0, len(turns) - 1
        while low < high:
            middle = (low + high) // 2
            chat = await self._short_enough(request, items[turns[middle] :], owner)
            low, high = (low, middle) if chat is not None else (middle + 1, high)
        return await self._chat(request, items[turns[low] :] if turns else items, owner)

    async def _short_enough(
        self, request: InputRequest, items: Sequence[Item], owner: str, known: Known | None = None
    ) -> PreparedChat | None:
        """The prompt, if it leaves room for the answer."""
        room = getattr(request, "max_output_tokens", None) or 1
        try:
            chat = await self._chat(request, items, owner, known)
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        return chat if len(chat.prompt.token_ids) + room <= self._max_model_len else None

    async def _chat(
        self, request: InputRequest, items: Sequence[Item], owner: str, known: Known | None = None
    ) -> PreparedChat:
        """Everything rendered, and made into ids: of what is known only the rest."""

        def chat() -> ChatRequest:
            messages = messages_of(items, lambda sealed: self._seal.open(sealed, owner))
            tools, choice = _tools(request)
            return request.chat(_with(request.instructions, messages), tools, choice)

        return await self._prepare.chat(await asyncio.to_thread(chat), owner, known)


def renamed(error: RequestError | ApiError) -> ApiError:
    """An error of a chat as one of a response."""
    found = as_api_error(error)
    name = found.parameter or ""
    new = _NAMES.get(name)
    if new is None:
        return found
    return ApiError(found.status, str(found).replace(name, new), new, found.code, found.retry_after)


def _tools(request: InputRequest) -> tuple[list[dict[str, Any]], ToolChoice]:
    return chosen(request.tools or (), request.tool_choice)


def _with(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions before all else; what the input itself says to the model's operator joins them, since many templates
    know one such message only."""
    if not instructions:
        return messages
    texts, rest = [instructions], list(messages)
    while rest and rest[0]["role"] in ("system", "developer"):
        texts.append(rest.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]
